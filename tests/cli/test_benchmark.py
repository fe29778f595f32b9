"""`lit-het benchmark`: all sets of a suite below a folder, whatever state they are in."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lit_het.apps.benchmark.page import Page
from lit_het.apps.benchmark.results import Result
from lit_het.cli.main import main
from lit_het.eval.evaluation import read_records
from lit_het.eval.evaluators.zero_shot import ZeroShot
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.benchmarks import SUITES
from lit_het.eval.suite import ZeroShotConfig
from lit_het.models.evaluation import evaluate
from tests import tiny
from tests.cli.conftest import last_line, refusal, run_command


def write_set(folder: Path, name: str, *splits: str, seed: int = 0) -> Path:
    """Writes coloured shapes as clip_benchmark's export does."""
    for number, split in enumerate(splits or ("test",)):
        made = tiny.write_data(folder / "made", num_samples=40, seed=seed + number, every_wrong=7) / "train"
        (folder / name / split).mkdir(parents=True)
        shards = sorted(made.glob("*.tar"))
        for shard, path in enumerate(shards):
            shutil.move(path, folder / name / split / f"{shard}.tar")
        (folder / name / split / "nshards.txt").write_text(f"{len(shards)}\n")
        shutil.move(made / "classnames.txt", folder / name / "classnames.txt")
        shutil.rmtree(folder / "made")
    (folder / name / "zeroshot_classification_templates.txt").write_text("{c}\na {c}\n")
    return folder / name


@pytest.fixture
def folder(tmp_path):
    """Three sets in clip_benchmark's layout, and one that is in no suite."""
    for seed, name in enumerate(("wds_cifar10", "vtab/cifar100", "wds_imagenet-a", "wds_food101")):
        write_set(tmp_path / "wds", name, seed=seed)
    return tmp_path / "wds"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "runs" / "mine")


def command(run, folder, *flags, suite="clip_benchmark"):
    return ["benchmark", str(run), "--suite", suite, "--data", str(folder), *map(str, flags)]


def results_of(run, suite="clip_benchmark"):
    return json.loads((run / "benchmarks" / f"{suite}.json").read_text())


@pytest.fixture
def evaluated(monkeypatch):
    """The names of the sets that are evaluated, in turn; `stop` is the one at which the process is interrupted."""
    names, call = [], ZeroShot.__call__

    def count(self, model):
        names.append(self.opened.config.name)
        if self.opened.config.name == stop:
            raise KeyboardInterrupt
        return call(self, model)

    stop = None
    monkeypatch.setattr(ZeroShot, "__call__", count)

    def set_stop(name):
        nonlocal stop
        stop = name
        names.clear()

    return names, set_stop


def test_all_sets_are_in_one_table_with_their_means_times_and_published_figures(run, folder, capsys):
    assert main(command(run, folder)) == 0
    said, found = capsys.readouterr(), results_of(run)
    assert list(found["sets"]) == ["imagenet_a", "cifar10", "cifar100"]
    assert "missing: imagenet1k, imagenetv2, imagenet_r, objectnet, fer2013" in said.err
    assert f"not in the suite clip_benchmark: {folder / 'wds_food101'}" in said.err
    top1 = {name: fields["figures"]["top1"] for name, fields in found["sets"].items()}
    assert found["means"] == {
        "natural": {"mean": pytest.approx(sum(top1.values()) / 3)},
        "all 35 sets, top-1": {"mean": pytest.approx(sum(top1.values()) / 3)},
    }
    assert "mscoco_captions" in found["missing"]
    assert len(found["missing"]) == 39 - 3
    # They are the figures of the evaluation itself, saved as it saves them.
    records = {record.name: record for record in read_records(run)}
    assert {name: record.figures["top1"] for name, record in records.items()} == top1
    [alone] = evaluate([run], [ZeroShotConfig(ImageSet("cifar10", str(folder / "wds_cifar10")))])
    assert alone.figures == pytest.approx(found["sets"]["cifar10"]["figures"])
    table = (run / "benchmarks" / "clip_benchmark.md").read_text()
    for row in (
        f"| cifar10 | {top1['cifar10']:.1%} ± ",
        f"| mean, 3 of 20 sets | {np.mean(list(top1.values())):.1%} |",
        "| imagenet1k | – | 63.3% |",
        "- LiT G/14 HET-XL: zero-shot; HET-XL Table 6.",
    ):
        assert row in table.replace("\\_", "_")
    assert (run / "benchmarks" / "clip_benchmark.html").read_text().count("<table") == 2

    # The time of each set says what bounds it.
    for name, fields in found["sets"].items():
        assert fields["num_images"] == 40
        assert 0 < fields["decoding"] + fields["tower"] <= fields["seconds"]
        result = Result(**fields)
        assert sum(result.shares.values()) == pytest.approx(1)
        assert result.bound in ("reading and decoding", "image tower", "head and scoring")
        assert f"zero-shot {name}: top1" in said.err
    assert "images a second, most time for" in said.err


@pytest.mark.slow
def test_an_interrupted_benchmark_continues_and_gives_the_same_figures(run, folder, evaluated, tmp_path):
    names, stop_at = evaluated
    other = shutil.copytree(run, tmp_path / "runs" / "other")
    stop_at("cifar100")
    assert main(command(run, folder)) == 130
    assert names == ["imagenet_a", "cifar10", "cifar100"]
    assert list(results_of(run)["sets"]) == ["imagenet_a", "cifar10"]
    stop_at(None)
    assert main(command(run, folder)) == 0
    assert names == ["cifar100"]
    stop_at(None)
    assert main(command(other, folder)) == 0
    without = [{**fields, "seconds": 0, "decoding": 0, "tower": 0} for fields in results_of(run)["sets"].values()]
    assert without == [{**one, "seconds": 0, "decoding": 0, "tower": 0} for one in results_of(other)["sets"].values()]


@pytest.mark.slow
def test_a_set_is_evaluated_again_where_data_prompts_or_the_model_changed(run, folder, evaluated, capsys):
    names, stop_at = evaluated
    assert main(command(run, folder)) == 0
    stop_at(None)
    assert main(command(run, folder)) == 0
    assert names == []
    assert capsys.readouterr().err.count("evaluated before") == 3
    (folder / "wds_cifar10" / "zeroshot_classification_templates.txt").write_text("the {c}\n")
    assert main(command(run, folder)) == 0
    assert names == ["cifar10"]
    shutil.rmtree(folder / "vtab")
    write_set(folder, "vtab/cifar100", seed=9)
    stop_at(None)
    assert main(command(run, folder)) == 0
    assert names == ["cifar100"]
    shutil.rmtree(folder / "vtab")
    stop_at(None)
    mine = folder.parent / "mine.txt"
    mine.write_text("the {c}\n")
    assert main(command(run, folder, "--prompts", mine, "--samples", 4)) == 0
    assert names == ["imagenet_a", "cifar10"]
    assert "noisy/top1" in results_of(run)["sets"]["cifar10"]["figures"]
    config = run / "config.json"
    config.write_text(config.read_text().replace('"filter": "area"', '"filter": "bilinear"'))
    (run / "manifest.json").unlink()
    for template in ("the {c}", "a {c}"):
        mine.write_text(f"{template}\n")
        stop_at(None)
        assert main(command(run, folder, "--prompts", mine, "--samples", 4)) == 0
        assert names == ["imagenet_a", "cifar10"]


def test_a_broken_set_gives_one_line_and_the_others_are_evaluated(run, folder, capsys):
    (folder / "wds_imagenet-a" / "test" / "1.tar").unlink()
    (folder / "vtab" / "cifar100" / "test" / "0.tar").write_bytes(b"no tar")
    assert main(command(run, folder)) == 1
    said = capsys.readouterr().err.splitlines()
    broken = f"imagenet_a: {folder / 'wds_imagenet-a' / 'test' / 'nshards.txt'} says '2' shards, and there are 1"
    assert [line for line in said if broken in line] == [f"lit-het: {broken}; download the set again"]
    assert len([line for line in said if line.startswith("lit-het: cifar100: ")]) == 1
    assert said[-1] == (
        "lit-het: 2 sets could not be evaluated: imagenet_a, cifar100; the same command evaluates these again"
    )
    found = results_of(run)
    assert list(found["sets"]) == ["cifar10"]
    assert set(found["failed"]) == {"imagenet_a", "cifar100"}
    table = (run / "benchmarks" / "clip_benchmark.md").read_text().replace("\\_", "_")
    assert "| imagenet_a | failed | 31.4% |" in table


@pytest.mark.slow
def test_few_images_per_class_are_a_suite_too(run, tmp_path):
    write_set(tmp_path / "sets", "pets", "train", "test")
    write_set(tmp_path / "sets", "imagenet", "train", "test", seed=4)
    assert main(command(run, tmp_path / "sets", suite="fewshot")) == 0
    found = results_of(run, "fewshot")
    pets, imagenet = (found["sets"][name]["figures"]["5_shot"] for name in ("pets", "imagenet1k"))
    assert found["means"]["5-shot"] == {
        "mean": pytest.approx((pets + imagenet) / 2),
        "mean without imagenet1k": pytest.approx(pets),
    }
    assert found["sets"]["pets"]["num_images"] == 80, "of both splits"


@pytest.mark.slow
def test_robustness_has_variants_and_corrupted_copies_of_imagenet(run, tmp_path):
    clean = write_set(tmp_path / "sets", "wds_imagenet1k")
    write_set(tmp_path / "sets", "wds_imagenet-r", seed=3)
    write_set(tmp_path / "sets", "objectnet", seed=5)
    few = ("--corruptions", "contrast", "--severities", "1", "5")
    run_command("data", "corrupt", clean / "test", clean / "corrupted", *few)
    assert main(command(run, tmp_path / "sets", suite="robustness")) == 0
    found = results_of(run, "robustness")
    figures = {name: fields["figures"] for name, fields in found["sets"].items()}
    copies = [figures["imagenet_c"][f"contrast/{severity}/top1"] for severity in (1, 5)]
    assert figures["imagenet_c"]["corrupted/top1"] == pytest.approx(sum(copies) / 2)
    mean = (figures["imagenet_r"]["top1"] + figures["objectnet"]["top1"]) / 2
    assert found["means"] == {"ImageNet variants": {"mean": pytest.approx(mean)}}


def result(**figures: float) -> Result:
    return Result("a key", figures, {}, 10, 1.0, 0.2, 0.5)


def lines_of(shown: Page, heading: str) -> dict[str, list[str]]:
    """The cells of the rows below a heading of the table of figures."""
    rows = iter(shown.tables()[0].rows)
    assert any(row.label == heading for row in rows)
    return {row.label: [cell.text for cell in row.cells] for row in itertools.takewhile(lambda row: row.cells, rows)}


def test_published_means_are_of_the_same_sets_as_ours_or_as_printed():
    suite = SUITES["fewshot"]
    shots = {f"{count}_shot": 0.5 for count in (1, 5, 10, 25)}
    some = Page(suite, "mine", dict.fromkeys(("pets", "dtd"), result(**shots)), {})
    lines = lines_of(some, "10-shot")
    # SoViT's 10-shot figures of pets and dtd are 97.6 % and 72.5 %; HET-XL prints a mean of nine sets alone.
    assert lines["mean, 2 of 9 sets"] == ["50.0%", "85.0%", "85.8%", "–", "–", "–", "–", "–"]
    whole = Page(suite, "mine", dict.fromkeys(suite.sets, result(**shots)), {})
    lines = lines_of(whole, "10-shot")
    assert lines["mean"] == ["50.0%", "88.2%", "87.9%", "81.7%", "82.7%", "–", "–", "–"]
    assert lines["mean without imagenet1k"][5:] == ["85.7%", "84.4%", "83.2%"]


def test_wrong_arguments_are_refused_before_anything_is_read(run, folder, tmp_path, capsys):
    assert "config.json is missing" in refusal(capsys, *command(tmp_path / "nowhere", folder))
    assert "name the folder above those of the sets" in refusal(capsys, *command(run, tmp_path / "nowhere"))
    assert "ends in .html" in refusal(capsys, *command(run, folder, "--output", tmp_path / "page.txt"))
    (tmp_path / "empty").mkdir()
    said = refusal(capsys, *command(run, tmp_path / "empty", suite="vtab"))
    assert "has no folder of a set of the suite vtab, such as caltech101, cifar100" in said
    output = tmp_path / "page.html"
    output.with_suffix(".json").write_text('{"sets": [1]}')
    assert "page.json holds no results of a benchmark" in last_line(capsys, *command(run, folder, "--output", output))
    assert "--prompts rhymes is neither a file" in refusal(capsys, *command(run, folder, "--prompts", "rhymes"))


def test_a_result_is_a_plain_record():
    one = result(top1=0.5)
    assert Result(**json.loads(json.dumps(dataclasses.asdict(one)))) == one
    assert one.shares == {
        "reading and decoding": pytest.approx(0.2),
        "image tower": pytest.approx(0.5),
        "head and scoring": pytest.approx(0.3),
    }
    assert one.bound == "image tower"
