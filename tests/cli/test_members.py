"""Deep ensembles from one command, and hyper-ensembles that are chosen among runs."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from lit_het.cli.main import main
from lit_het.configs import experiment, quickstart_lit_het_xl
from lit_het.eval.evaluation import read_records
from lit_het.eval.sets import recognition
from lit_het.models.opening import open_run
from lit_het.training import loop
from lit_het.weights.native import checksums
from tests import tiny
from tests.cli.conftest import last_line, refusal, run_command, write_config_file, write_splits


@pytest.fixture(scope="module")
def ensemble(data, tmp_path_factory):
    """Three members of a classifier, finished with their initial parameters; tests only read them."""
    folder = tmp_path_factory.mktemp("ensembles")
    config = classifier(data, folder / "ensemble")
    with tiny.untrained():
        assert main(["train", "--config", str(write_config_file(config, folder / "mine.py")), "--members", "3"]) == 0
    return config


def classifier(data, run_dir):
    """A classifier of the names, with the seeds 5 and 7."""
    config = tiny.classifier(quickstart_lit_het_xl.get_config(), data, run_dir)
    task = dataclasses.replace(config.task, num_classes=len(tiny.COLOURS) * len(tiny.SHAPES))
    labels = dataclasses.replace(config.data, labels=tiny.ClassIndex(), seed=7)
    return dataclasses.replace(config, task=task, data=labels, seed=5)


def run_of(ensemble, number):
    return ensemble.run_dir / f"member_{number}"


@pytest.fixture(scope="module")
def shapes(data, tmp_path_factory):
    """The shapes as a set with two splits, of the same 40 images."""
    return write_splits(data, tmp_path_factory.mktemp("sets") / "shapes", "val", "test")


@pytest.fixture
def command(ensemble, shapes):
    """Evaluates the ensemble; further flags follow."""
    return ["ensemble", "--checkpoint", str(ensemble.run_dir), "--data", str(shapes)]


@pytest.mark.slow
def test_members_differ_in_their_seeds_alone(ensemble, data, tmp_path):
    configs = [experiment.load(run_of(ensemble, number) / "config.json") for number in range(3)]
    assert [(config.seed, config.data.seed) for config in configs] == [(5, 7), (6, 8), (7, 9)]
    assert {*experiment.differences(configs[0], configs[2])} == {"run_dir", "seed", "data.seed"}
    alone = classifier(data, tmp_path / "alone")
    alone = dataclasses.replace(alone, seed=6, data=dataclasses.replace(alone.data, seed=8))
    tiny.finish_untrained(alone)
    sums = [checksums.digest(open_run(run_of(ensemble, number)).params) for number in range(3)]
    assert sums[1] == checksums.digest(open_run(alone.run_dir).params), "a member is the run of its seeds"
    assert len({*sums}) == 3


@pytest.mark.slow
def test_an_interrupted_ensemble_continues_where_it_was(data, tmp_path, monkeypatch, capsys):
    file = write_config_file(classifier(data, tmp_path / "run"), tmp_path / "mine.py")
    started = ["train", "--config", str(file), "--members", "2"]
    trained = []

    def recorded(*arguments, **how):
        trained.append(how["description"])
        if how["description"] == "member_1" and trained.count("member_1") == 1:
            raise KeyboardInterrupt
        return finish(*arguments, **how)

    with tiny.untrained(), monkeypatch.context() as patched:
        finish = loop.train
        patched.setattr("lit_het.training.train.loop.train", recorded)
        assert main(started) == 130
        assert "member_0 already holds a run; continue it with --resume" in refusal(capsys, *started)
        assert main([*started, "--resume"]) == 0
        assert main([*started, "--start-or-resume"]) == 0
        assert trained == ["member_0", "member_1", "member_1"]
        assert main([*started[:-1], "3", "--resume"]) == 0
    assert trained[3:] == ["member_2"], "more members may follow"
    assert f"member 3 of 3 in {tmp_path / 'run' / 'member_2'}" in capsys.readouterr().err


@pytest.mark.slow
def test_members_may_start_from_runs_of_their_own(lit_config, upstream, tmp_path, capsys):
    for number in (0, 1):
        shutil.copytree(upstream, tmp_path / f"upstream_{number}")
    file = write_config_file(lit_config, tmp_path / "mine.py")
    address = str(tmp_path / "upstream_{member}")
    command = ["train", "--config", str(file), "--members", "2", "--pretrained.run", address]
    with tiny.untrained():
        assert "upstream_2/config.json is missing" in refusal(capsys, *command[:-3], 3, *command[-2:])
        assert not lit_config.run_dir.exists(), "before the first member is trained"
        assert main(command) == 0
    for number in (0, 1):
        config = experiment.load(lit_config.run_dir / f"member_{number}" / "config.json")
        assert config.pretrained is not None
        assert config.pretrained.run == tmp_path / f"upstream_{number}"


def figures_of(command, tmp_path):
    run_command(*command, "--output", tmp_path / "figures.json")
    return json.loads((tmp_path / "figures.json").read_text())


def test_the_folder_of_the_members_is_an_ensemble(ensemble, command, tmp_path):
    each = [str(run_of(ensemble, number)) for number in range(3)]
    assert figures_of(command, tmp_path) == figures_of([*command[:2], *each, *command[3:]], tmp_path)
    [record] = read_records(run_of(ensemble, 0))
    assert record.settings["checkpoints"] == [f"{run} at step 2" for run in each]
    assert record.figures["joint_nll"] < record.figures["individual_nll"]


def test_a_selection_reports_the_weighted_mean_of_the_runs_that_it_prints(
    ensemble, command, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(ensemble.run_dir)  # so that paths fit into a line
    command[2:3] = ["."]
    capsys.readouterr()
    found = figures_of([*command, "--select", "2", "--select-split", "val"], tmp_path)
    said = capsys.readouterr()
    assert said.err.count("reading shapes (val): 40/40") == 3, "each run has a tower of its own"
    nll = re.search(r"(\d) picks among 3 runs by shapes \(val\): NLL ([\d.]+)", said.out)
    assert nll is not None
    chosen = re.findall(r"(member_\d) +(\d)/(\d) +[\d.]+", said.out)
    assert {total for *_, total in chosen} == {nll[1]} == {str(sum(int(weight) for _, weight, _ in chosen))}
    # Both splits have the same images, so that the loss by which runs were chosen is the reported one.
    assert found["deep_ensemble/shapes/joint_nll"] == pytest.approx(float(nll[2]), abs=1e-4)
    runs, weights, _ = zip(*chosen, strict=True)
    assert len(runs) == 2
    command[2:3] = runs
    assert figures_of([*command, "--weights", *weights], tmp_path) == found


@pytest.mark.slow
def test_portions_of_one_split_choose_and_report(command, capsys):
    main([*command, "--select", "3", "--portion", ":40%", "--select-split", "test", "--select-portion", "40%:"])
    assert "reading shapes (test): 24/24" in capsys.readouterr().err


def test_a_run_that_no_other_helps_is_no_ensemble(ensemble, command, tmp_path, capsys):
    run = str(run_of(ensemble, 0))
    command[2:3] = [run, str(shutil.copytree(run, tmp_path / "copy"))]
    capsys.readouterr()
    assert main([*command, "--select", "2", "--select-split", "val"]) == 1
    said = capsys.readouterr().err
    assert said.endswith(
        f"lit-het: no other run lowers the NLL of {run} on shapes (val); evaluate it alone, with lit-het zero-shot\n"
    )
    assert said.count("reading shapes (val): 40/40") == 1, "a tower is read once, whatever the number of its runs"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--select", "2"), "--select M and --select-split SPLIT belong together"),
        (("--select-split", "val"), "--select M and --select-split SPLIT belong together"),
        (("--select", "2", "--select-split", "test"), "chosen by test cannot be reported on the same images"),
        (("--select", "2", "--select-split", "val/../test/."), "cannot be reported on the same images"),
        (("--select", "4", "--select-split", "val"), "must be from 2 to the number of checkpoints, which is 3"),
        (("--select", "1", "--select-split", "val"), "--select 1 must be from 2"),
        (("--select", "2", "--select-split", "none"), "none"),
        (
            ("--select", "2", "--select-split", "val", "--select-portion", "98"),
            "--select-portion '98' is not a portion",
        ),
        (("--select", "2", "--select-split", "val", "--weights", "1"), "leave out --weights"),
        (("--select", "2", "--select-split", "val", "--output", "no/file"), "--output no/file must be a file"),
        (("--weights", "1", "2"), "there are 3 models and 2 --weights"),
        (("--weights", "1", "0", "2"), "must be whole numbers of at least 1"),
        (("other=.", "--select", "2", "--select-split", "val"), "give one --data"),
    ],
)
def test_a_wrong_selection_is_one_line(command, capsys, flags, expected):
    assert expected in refusal(capsys, *command, *flags)


def test_a_wrong_number_or_directory_of_members_is_one_line(ensemble, trained_lit, tmp_path, capsys):
    file = write_config_file(ensemble, tmp_path / "mine.py")
    command = ("train", "--config", file, "--members")
    assert "--members 1 must be at least 2" in refusal(capsys, *command, 1)
    assert "already holds a single run" in refusal(capsys, *command, 2, "--run-dir", trained_lit.run_dir)
    new = ("--run-dir", tmp_path / "new", "--resume")
    assert f"{tmp_path / 'new'} contains no members to resume" in refusal(capsys, *command, 2, *new)
    assert "cannot resume" in (line := refusal(capsys, *command, 3, "--resume", "--seed", 6))
    assert "member_0: seed was 5 and is now 6" in line


@pytest.fixture
def broken(ensemble, tmp_path):
    """A copy of the ensemble."""
    return shutil.copytree(ensemble.run_dir, tmp_path / "broken")


def test_a_member_that_is_not_finished_is_named(broken, command, capsys):
    command[2] = broken
    steps = broken / "member_1" / "checkpoints"
    (steps / "2").rename(steps / "1")
    line = refusal(capsys, *command)
    assert f"{broken / 'member_1'} is at step 1 and {broken / 'member_0'} at step 2; finish its training" in line
    shutil.rmtree(steps)
    assert f"no checkpoints in {steps}" in refusal(capsys, *command)
    (broken / "member_1" / "config.json").unlink()
    assert "member_1 holds no run; train it with --resume" in refusal(capsys, *command)


def test_a_run_that_diverged_is_named_by_the_selection(broken, command, capsys, monkeypatch):
    predict, calls = recognition.predict, []

    def diverged(predictor, features):
        calls.append(predictor)
        if len(calls) == 2:
            features = dataclasses.replace(features, values=np.full_like(features.values, np.nan))
        return predict(predictor, features)

    monkeypatch.setattr(recognition, "predict", diverged)
    command[2] = broken
    last = last_line(capsys, *command, "--select", "2", "--select-split", "val")
    assert last.startswith(f"lit-het: {broken / 'member_1'}: predictions of the model are not finite")


def test_classifiers_of_different_classes_are_no_ensemble(ensemble, command, upstream, capsys):
    command[2:3] = [run_of(ensemble, 0), upstream]
    for flags in ((), ("--select", 2, "--select-split", "val")):
        line = refusal(capsys, *command, *flags)
        assert f"{upstream} and {run_of(ensemble, 0)} are classifiers of 6 and of 8 classes" in line


def test_the_folder_of_the_members_is_one_model_of_a_benchmark(ensemble, shapes, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "lit_het.apps.uncertainty.benchmark.benchmark", lambda models, *_, **__: measured.append(models)
    )
    alone = f"alone={run_of(ensemble, 2)}"
    command = ["benchmark-uncertainty", str(ensemble.run_dir), alone, "--data", str(shapes), "--output", "page.html"]
    assert main(command) == 0
    members = [run_of(ensemble, number) for number in range(3)]
    assert measured == [{"ensemble": members, "alone": members[2:]}]
