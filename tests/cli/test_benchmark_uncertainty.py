"""`lit-het benchmark-uncertainty`: models side by side, by the figures of the other evaluations."""

import collections
import dataclasses
import json
import math
import re
import shutil
import tarfile

import numpy as np
import pytest

from lit_het.apps.uncertainty import measuring
from lit_het.apps.uncertainty.measuring import Benchmark
from lit_het.apps.uncertainty.page import advice, answer_table, detection_tables
from lit_het.cli.main import main
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import OutOfDistributionConfig, ZeroShotConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.models.evaluation import evaluate
from lit_het.models.opening import open_run
from lit_het.models.predictor import Model
from lit_het.tasks import quantities
from tests import tiny
from tests.cli.conftest import changed, last_line, refusal


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A labelled set with prompts, corrupted copies, pairs of which some captions are wrong, and other images."""
    root = tmp_path_factory.mktemp("images")
    test = tiny.write_data(root / "shapes", num_samples=160, seed=5, every_wrong=5) / "train"
    (test / "zeroshot_classification_templates.txt").write_text("{c}\na {c}\n")
    tiny.write_data(root / "other", num_samples=40, seed=6)
    few = ["--corruptions", "contrast", "--severities", "1", "5"]
    assert main(["data", "corrupt", str(test), str(root / "corrupted"), *few]) == 0
    members: dict[str, bytes] = {}
    for shard in sorted(test.glob("*.tar")):
        with tarfile.open(shard) as file:
            members |= {member.name: content.read() for member in file if (content := file.extractfile(member))}
    keys = sorted({name.partition(".")[0] for name in members})

    def pairs():
        for number, key in enumerate(keys):
            wrong = int(number % 3 == 0)
            caption = "red bar" if wrong else members[f"{key}.txt"].decode()
            yield {"__key__": key, "jpg": members[f"{key}.jpg"], "txt": caption, "json": {"is_wrong": wrong}}

    write_shards(root / "pairs", pairs())
    return root


def arguments(images, output, *models, **changes):
    given = {
        "--data": [f"shapes={images / 'shapes' / 'train'}"],
        "--outside": [f"other={images / 'other' / 'train'}"],
        "--corrupted": [images / "corrupted"],
        "--pairs": [images / "pairs"],
        "--training": [images / "other" / "train"],
        "--samples": [4],
        "--output": [output],
    }
    given |= {f"--{name}": value for name, value in changes.items()}
    flags = [part for flag, values in given.items() if values is not None for part in (flag, *values)]
    return ["benchmark-uncertainty", *map(str, [*models, *flags])]


@pytest.fixture(scope="module")
def run_dir(trained, tmp_path_factory):
    """A run of its own: evaluations are saved in it."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("run") / "noisy")


@pytest.fixture(scope="module")
def passes():
    """How often the images of each set were read."""
    return collections.Counter()


@pytest.fixture(scope="module")
def figures(images, run_dir, passes, tmp_path_factory):
    """Figures of a HET-XL run, of an ensemble with its copy, and of the baselines."""
    output = tmp_path_factory.mktemp("benchmark") / "page.html"
    copy = shutil.copytree(run_dir, output.with_name("copy"))
    with pytest.MonkeyPatch.context() as patched:
        epoch = Loader.epoch
        patched.setattr(
            Loader, "epoch", lambda self, *given: (passes.update(self.config.shards), epoch(self, *given))[1]
        )
        status = main([*arguments(images, output, f"noisy={run_dir}", f"twice={run_dir}+{copy}"), "--baselines"])
    assert status == 0
    assert output.read_text().count("<table") >= 5
    assert "| noisy |" in output.with_suffix(".md").read_text()
    return json.loads(output.with_suffix(".json").read_text())


@pytest.mark.slow
def test_figures_are_those_of_the_evaluations(figures, images, run_dir):
    data = ImageSet("shapes", str(images / "shapes" / "train"), split=".")
    outside = OutOfDistributionConfig(data, near=(f"other={images / 'other' / 'train'}",))
    found, found_outside = evaluate([run_dir], [ZeroShotConfig(data, samples=4), outside], calibrated=False)
    names = {"quiet/": "", "quiet/fitted_": "calibrated/", "sampled/": "noisy/"}
    for ours, theirs in names.items():
        for figure in ("top1", "nll", "ece", "aurc", "set_size90"):
            assert figures["noisy"][f"shapes/{ours}{figure}"] == pytest.approx(found.figures[f"{theirs}{figure}"])
    theirs = found_outside.figures["near/other/noise_norm/auroc"]
    assert figures["noisy"]["outside/other/noise_norm"] == pytest.approx(theirs)


def test_every_figure_of_a_model_is_there(figures):
    found = figures["noisy"]
    for score in ("max_probability", "entropy", "noise_norm", "mutual_information"):
        assert 0 <= found[f"errors/shapes/{score}"] <= 1
        assert 0 <= found[f"outside/other/{score}"] <= 1
        assert 0 <= found[f"captions/{score}"] <= 1
        assert -1 <= found[f"severity/contrast/{score}"] <= 1
        assert found[f"severity_rises/contrast/{score}"] in (0, 1)
    for place in ("outside/other", "errors/shapes", "severity/contrast"):
        assert -1 <= found[f"{place}/neighbour_distance"] <= 1
    # The model is right where the captions are, so that the loss finds the wrong ones.
    assert found["captions/loss"] > 0.7
    assert found["cost/head_megabytes"] > 0
    assert found["cost/quiet_microseconds"] > 0
    assert found["cost/sampled_megabytes"] > found["cost/quiet_megabytes"] > 0
    # The model is better than chance, 1/8.
    assert 0.2 < found["retrieval/shapes/map_at_r"] <= found["retrieval/shapes/r_precision"] <= 1


@pytest.mark.slow
def test_a_score_that_knows_the_answer_finds_all_that_scores_are_asked_for(monkeypatch, images, run_dir, tmp_path):
    whole = measuring.answers

    def knowing(method, opened, *given):
        found = whole(method, opened, *given)
        best, name = found.sampled or found.quiet, opened.config.name
        wrong = np.array([found["is_wrong"] for found in opened.texts("json", json.loads)]) if name == "pairs" else None
        if wrong is not None:
            known = wrong[best.positions].astype(float)
        elif name == "outside/other":
            known = np.full(len(best.labels), 9.0)
        elif " " in name:  # a corrupted copy
            known = np.full(len(best.labels), float(name.rpartition("/")[2]))
        else:
            known = (best.predicted != best.labels) / 2
        return dataclasses.replace(found, scores={"knows": known})

    monkeypatch.setattr(measuring, "answers", knowing)
    output = tmp_path / "page.html"
    assert main(arguments(images, output, f"noisy={run_dir}")) == 0
    found = json.loads(output.with_suffix(".json").read_text())["noisy"]
    for what in ("errors/shapes", "outside/other", "captions", "severity_rises/contrast"):
        assert found[f"{what}/knows"] == 1
    assert found["severity/contrast/knows"] > 0.8  # clean images have two values
    # Nearest are the images of the training set itself.
    assert found["outside/other/neighbour_distance"] < 0.5


def test_the_mutual_information_of_models_and_views_is_a_score_of_every_kind(figures):
    # Its prompts and views are measured without pairs, which are not read for each of them again.
    kinds = {"twice": ("errors", "outside", "severity", "captions")}
    kinds |= dict.fromkeys(list(figures)[1:3], ("errors", "outside", "severity"))
    for method, of_method in kinds.items():
        for kind in of_method:
            assert [
                name for name in figures[method] if name.startswith(f"{kind}/") and name.endswith("/mutual_information")
            ]


def test_the_tables_have_a_row_for_every_score_of_a_method():
    of_scores = {f"outside/near/{score}": Estimate(0.5, 0.1) for score in ("noise_norm", "mutual_information")}
    [table] = detection_tables({"m": of_scores})
    assert [row.label for row in table.rows] == ["m: noise norm", "m: mutual information"]


def test_an_ensemble_of_equal_models_answers_as_the_model(figures):
    for name, value in figures["noisy"].items():
        if name.startswith("shapes/quiet") and "vector" not in name:
            assert figures["twice"][name] == pytest.approx(value, abs=1e-5), name
    assert figures["twice"]["cost/sampled_megabytes"] == figures["noisy"]["cost/sampled_megabytes"]
    assert figures["twice"]["cost/head_megabytes"] == pytest.approx(2 * figures["noisy"]["cost/head_megabytes"])


def test_baselines_are_measured_around_the_first_model(figures):
    assert list(figures) == ["noisy", "noisy, test-time augmentation", "noisy, prompts as an ensemble", "twice"]
    assert figures["noisy, test-time augmentation"]["cost/tower_passes"] == 5
    assert figures["noisy, prompts as an ensemble"]["cost/tower_passes"] == 1
    assert "shapes/quiet/vector_nll" in figures["noisy"]
    assert "shapes/quiet/vector_nll" not in figures["twice"]


def test_the_memory_of_a_program_has_its_arguments_and_its_result(run_dir):
    model = open_run(run_dir).model()
    assert isinstance(model, Model)
    small, more_classes, more_images = (
        model.program_bytes(quantities.log_probabilities, images, 0, np.ones((classes, 64), np.float32))
        for images, classes in ((64, 5), (64, 1005), (128, 5))
    )
    # In float32, of every further class its embedding and 64 log-probabilities.
    assert more_classes - small >= 4 * 1000 * (64 + 64)
    assert more_images - small >= 4 * 64 * (64 + 5)


def test_images_are_read_once_by_themselves_and_once_for_all_moved_views(figures, images, passes):
    only_once = {str(images / "pairs")}
    assert len(passes) == 5
    assert passes == {shards: 1 if shards in only_once else 2 for shards in passes}


@pytest.mark.slow
def test_a_model_without_noise_is_measured_by_its_confidence(images, lit_config, tmp_path):
    config = changed(lit_config, task__head=DeterministicContrastiveConfig(), calibration=None)
    tiny.finish_untrained(config)
    output = tmp_path / "new" / "page.html"
    assert main(arguments(images, output, config.run_dir, pairs=None, training=None)) == 0
    [found] = json.loads(output.with_suffix(".json").read_text()).values()
    assert not [name for name in found if "noise_norm" in name or "sampled" in name or "mutual" in name]
    assert {"errors/shapes/max_probability", "severity/contrast/max_probability"} <= found.keys()


@pytest.mark.parametrize(
    ("page", "models", "changes", "message"),
    [
        ("page.html", ["{}"], {"data": ["missing"]}, "missing"),
        ("page.html", ["{}"], {"outside": ["missing"]}, "missing"),
        ("page.txt", ["{}"], {}, "ends in .html"),
        ("page.html", ["a={}", "a={}"], {}, "two models are called a"),
        ("page.html", ["={}"], {}, "give the model a name"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, images, run_dir, tmp_path, page, models, changes, message):
    named = [model.format(run_dir) for model in models]
    assert message in refusal(capsys, *arguments(images, tmp_path / page, *named, **changes))


def test_pairs_without_wrong_captions_are_refused(capsys, images, run_dir, tmp_path):
    line = last_line(capsys, *arguments(images, tmp_path / "page.html", run_dir, wrong=["is_right"]))
    assert "is_right must be 0 or 1 in every .json" in line


def test_an_interruption_keeps_the_figures_of_the_models_before(images, run_dir, tmp_path, monkeypatch):
    measure = Benchmark.measure

    def interrupted(self, name, runs, **options):
        if name == "second":
            raise KeyboardInterrupt
        return measure(self, name, runs, **options)

    monkeypatch.setattr(Benchmark, "measure", interrupted)
    few = dict.fromkeys(("outside", "corrupted", "pairs", "training"))
    line = arguments(images, tmp_path / "page.html", f"first={run_dir}", f"second={run_dir}", **few)
    assert main(line) != 0
    assert list(json.loads((tmp_path / "page.json").read_text())) == ["first"]


def test_models_are_close_only_where_there_are_standard_errors():
    def summary(error):
        nll = {name: {"a/quiet/fitted_nll": Estimate(value, error)} for name, value in {"m": 1.0, "n": 1.1}.items()}
        return advice(nll, "a")[0]

    assert "within two standard errors of it: n." in summary(0.1)
    assert "within" not in summary(0.01)
    assert "within" not in summary(math.nan)
    same = {name: {"a/quiet/fitted_nll": Estimate(1.0, math.nan)} for name in ("m", "n")}
    assert "within" not in advice(same, "a")[0]


def test_the_summary_names_the_set_that_a_score_finds():
    found = {"a/quiet/fitted_nll": Estimate(1.0, 0.1), "outside/near/entropy": Estimate(0.9, 0.1)}
    found |= {"outside/far/entropy": Estimate(0.6, 0.1)}
    said = advice({"m": found}, "a")[1]
    assert said.endswith("m by entropy of near has the highest AUROC, 0.900 ± 0.100.")
    close = advice({"m": found | {"outside/far/entropy": Estimate(0.8, 0.1)}}, "a")[1]
    assert close.endswith("0.900 ± 0.100; within two standard errors of it: m by entropy of far.")


@pytest.mark.parametrize(("error", "bold"), [(0.01, ["1.000 ± 0.010"]), (0.1, []), (math.nan, [])])
def test_the_best_of_a_column_is_bold_only_where_it_is_significantly_better(error, bold):
    nll = {name: {"a/quiet/nll": Estimate(value, error)} for name, value in {"m": 1.0, "n": 1.1}.items()}
    assert re.findall("<strong>(.*?)</strong>", answer_table(nll, "a").html()) == bold
