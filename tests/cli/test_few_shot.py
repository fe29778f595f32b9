"""`lit-het few-shot` on several sets: each of them, and the means over them."""

import contextlib
import io
import json
import math
import shutil
from types import SimpleNamespace

import pytest

from lit_het.cli.main import main
from lit_het.eval.evaluation import read_records
from tests.cli.conftest import refusal, write_splits

FIT = ("--shots", "1", "2", "--seeds", "0", "1", "--l2", "1.0")


@pytest.fixture(scope="module")
def sets(data, tmp_path_factory):
    """The shapes as two sets: the test images of the second are half of those of the first."""
    folder = tmp_path_factory.mktemp("sets")
    halves = shutil.copytree(write_splits(data, folder / "shapes", "train", "test"), folder / "halves")
    for shard in sorted((halves / "test").glob("*.tar"))[1:]:
        shard.unlink()
    return ("--data", f"a={folder / 'shapes'}", f"b={halves}")


def copied(run_dir, folder):
    """The run, without evaluations."""
    return shutil.copytree(run_dir, folder, ignore=shutil.ignore_patterns("evaluations"))


def few_shot(run, *arguments):
    assert main(["few-shot", "--checkpoint", str(run), *FIT, *map(str, arguments)]) == 0


def saved(run, name):
    return next(record for record in read_records(run) if record.name == name)


@pytest.fixture(scope="module")
def evaluated(trained_lit, sets, tmp_path_factory):
    """A run with evaluations of both sets, their figures, and what was printed; tests only read it."""
    folder = tmp_path_factory.mktemp("evaluated")
    run = copied(trained_lit.run_dir, folder / "run")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        few_shot(run, *sets, "--output", folder / "figures.json")
    return SimpleNamespace(run=run, figures=json.loads((folder / "figures.json").read_text()), printed=printed)


def test_several_sets_are_followed_by_their_mean_which_is_printed_and_saved(evaluated, tmp_path):
    run, figures = evaluated.run, evaluated.figures
    for shots in ("1_shot", "2_shot"):
        mean = (figures[f"few_shot/a/{shots}"] + figures[f"few_shot/b/{shots}"]) / 2
        assert figures[f"few_shot/mean/{shots}"] == pytest.approx(mean)
        error = math.hypot(*(saved(run, name).errors[shots] for name in ("a", "b"))) / 2
        assert saved(run, "mean").errors[shots] == pytest.approx(error)
    assert saved(run, "mean").settings["sets"] == ["a", "b"]
    assert "few-shot mean" in evaluated.printed.getvalue()
    assert {record.name for record in read_records(run)} == {"a", "b", "mean"}
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0


def test_a_reference_gives_the_weighted_mean(evaluated, trained_lit, sets, tmp_path):
    ours, theirs = copied(trained_lit.run_dir, tmp_path / "ours"), shutil.copytree(evaluated.run, tmp_path / "theirs")
    path = theirs / "evaluations" / "few_shot_b.json"
    record = json.loads(path.read_text())
    record["figures"] = {name: value / 2 for name, value in record["figures"].items()}
    path.write_text(json.dumps(record))
    few_shot(ours, *sets, "--reference", theirs)
    weighted = saved(ours, "weighted_mean")
    # The same model, whose accuracy on b we have halved.
    assert weighted.figures == {"1_shot": pytest.approx(1.5), "2_shot": pytest.approx(1.5)}
    assert weighted.settings["reference"] == str(theirs)
    assert "reference" not in saved(ours, "mean").settings


def test_one_set_has_no_mean_and_is_no_reference_of_another_fit(trained_lit, sets, tmp_path, capsys):
    ours, theirs = (copied(trained_lit.run_dir, tmp_path / name) for name in ("ours", "theirs"))
    command = ("few-shot", "--checkpoint", ours, *FIT, *sets)
    assert "theirs has no few-shot evaluation of a; run lit-het few-shot" in refusal(
        capsys, *command, "--reference", theirs
    )
    few_shot(theirs, *sets[:2], "--seeds", "3")
    assert {record.name for record in read_records(theirs)} == {"a"}
    refused = refusal(capsys, *command, "--reference", theirs)
    assert "few-shot a: fit.seeds is [0, 1] in this command and [3] in" in refused
    assert "--reference" in refusal(capsys, *command[:-1], "--reference", theirs)
    assert "nowhere/config.json is missing" in refusal(capsys, *command, "--reference", tmp_path / "nowhere")
    assert not (ours / "evaluations").exists(), "refused before images are read"


def test_a_set_with_the_name_of_a_mean_is_refused(trained_lit, sets, capsys):
    renamed = [text.replace("a=", "mean=") if text.startswith("a=") else text for text in sets]
    assert "the set mean has the name of a mean over sets; give another with --data NAME=FOLDER" in refusal(
        capsys, "few-shot", "--checkpoint", trained_lit.run_dir, *renamed
    )
