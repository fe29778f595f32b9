"""`lit-het few-shot` on several sets: each of them, and the means over them."""

import json
import math
import shutil

import pytest

from lit_het.cli.main import main
from lit_het.eval.evaluation import read_records
from tests.cli.test_train import refusal

FIT = ("--shots", "1", "2", "--seeds", "0", "1", "--l2", "1.0")


@pytest.fixture
def halves(data, shapes, tmp_path):
    """Another set: its test images are half of the shapes'."""
    shutil.copytree(shapes, tmp_path / "halves")
    for shard in sorted((tmp_path / "halves" / "test").glob("*.tar"))[1:]:
        shard.unlink()
    return tmp_path / "halves"


@pytest.fixture
def runs(trained_lit, tmp_path):
    """The same run twice, without evaluations."""
    return [
        shutil.copytree(trained_lit.run_dir, tmp_path / name, ignore=shutil.ignore_patterns("evaluations"))
        for name in ("ours", "theirs")
    ]


def few_shot(run, *arguments):
    return main(["few-shot", "--checkpoint", str(run), *map(str, arguments), *FIT])


def saved(run, name):
    return next(record for record in read_records(run) if record.name == name)


def test_several_sets_are_followed_by_their_mean_which_is_printed_and_saved(runs, shapes, halves, tmp_path, capsys):
    ours, _ = runs
    output = tmp_path / "figures.json"
    assert few_shot(ours, "--data", f"a={shapes}", f"b={halves}", "--output", output) == 0
    figures = json.loads(output.read_text())
    for shots in ("1_shot", "2_shot"):
        mean = (figures[f"few_shot/a/{shots}"] + figures[f"few_shot/b/{shots}"]) / 2
        assert figures[f"few_shot/mean/{shots}"] == pytest.approx(mean)
        error = math.hypot(*(saved(ours, name).errors[shots] for name in ("a", "b"))) / 2
        assert saved(ours, "mean").errors[shots] == pytest.approx(error)
    assert saved(ours, "mean").settings["sets"] == ["a", "b"]
    assert "few-shot mean" in capsys.readouterr().out
    assert {record.name for record in read_records(ours)} == {"a", "b", "mean"}
    assert main(["report", str(ours)]) == 0


def test_one_set_has_no_mean(runs, shapes):
    assert few_shot(runs[0], "--data", f"a={shapes}") == 0
    assert {record.name for record in read_records(runs[0])} == {"a"}


def test_a_reference_gives_the_weighted_mean(runs, shapes, halves):
    ours, theirs = runs
    sets = ("--data", f"a={shapes}", f"b={halves}")
    assert few_shot(theirs, *sets) == 0
    path = theirs / "evaluations" / "few_shot_b.json"
    record = json.loads(path.read_text())
    record["figures"] = {name: value / 2 for name, value in record["figures"].items()}
    path.write_text(json.dumps(record))
    assert few_shot(ours, *sets, "--reference", theirs) == 0
    weighted = saved(ours, "weighted_mean")
    # The same model, whose accuracy on b we have halved.
    assert weighted.figures == {"1_shot": pytest.approx(1.5), "2_shot": pytest.approx(1.5)}
    assert weighted.settings["reference"] == str(theirs)
    assert "reference" not in saved(ours, "mean").settings


def test_a_reference_that_does_not_fit_is_refused_before_images_are_read(runs, shapes, halves, tmp_path, capsys):
    ours, theirs = runs
    command = ("few-shot", "--checkpoint", ours, "--data", f"a={shapes}", f"b={halves}", *FIT)
    assert "theirs has no few-shot evaluation of a; run lit-het few-shot" in refusal(
        capsys, *command, "--reference", theirs
    )
    assert main(["few-shot", "--checkpoint", str(theirs), *map(str, command[3:]), "--seeds", "3"]) == 0
    refused = refusal(capsys, *command, "--reference", theirs)
    assert "few-shot a: fit.seeds is [0, 1] in this command and [3] in" in refused
    assert "--reference" in refusal(capsys, *command[:4], f"a={shapes}", "--reference", theirs)
    assert "nowhere/config.json is missing" in refusal(capsys, *command, "--reference", tmp_path / "nowhere")
    assert not (ours / "evaluations").exists()


def test_a_set_with_the_name_of_a_mean_is_refused(runs, shapes, halves, capsys):
    command = ("few-shot", "--checkpoint", runs[0], "--data", f"mean={shapes}", f"b={halves}")
    assert "the set mean has the name of a mean over sets; give another with --data NAME=FOLDER" in refusal(
        capsys, *command
    )
