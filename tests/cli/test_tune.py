"""``lit-het tune``: runs of a search are trained once, shared, resumed, given up, refused, and shown."""

import dataclasses
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from lit_het.cli.main import main
from lit_het.configs import experiment, glyph_classifier
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.errors import DoesNotFit, UserError
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.search import grid_runs, tuning
from lit_het.search.grid import Axis
from lit_het.search.grid_runs import Pruned
from lit_het.search.space import Range, Search
from lit_het.training import loop
from lit_het.training.cadence import Cadence
from lit_het.training.log import read_metrics
from lit_het.training.loop import NonFinite
from tests import tiny
from tests.cli.conftest import last_line, write_config_file

RATE, NLL = "schedule.learning-rate", "supervised/held_out/nll"
FIELDS = ["--field", f"{RATE}=1e-4..1e-1:log"]


@pytest.fixture(scope="module")
def config(data, held_out, tmp_path_factory):
    """The glyph classifier, shrunk, with an evaluation on other images."""
    shrunk = tiny.shrink(glyph_classifier.get_config(), data, tmp_path_factory.mktemp("run"))
    evaluation = ZeroShotConfig(ImageSet("held_out", str(held_out), split=".", batch_size=20))
    return dataclasses.replace(shrunk, evaluations=(evaluation,), cadence=Cadence(log_steps=2, evaluate_steps=2))


@pytest.fixture(scope="module")
def file(config, tmp_path_factory):
    return write_config_file(config, tmp_path_factory.mktemp("config") / "tiny.py")


def loss_of(config):
    return math.log10(config.schedule.learning_rate / 0.005) ** 2


def write_metrics(config, loss):
    config.run_dir.mkdir(parents=True, exist_ok=True)
    records = [{"step": 4, "train/loss": loss}, {"step": 4, NLL: loss, "supervised/held_out/top1": 1 - loss}]
    (config.run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def trained(monkeypatch):
    """The names of the runs that are trained, by a stub with a quadratic loss."""
    names = []

    def train(config, **_):
        names.append(config.run_dir.name)
        write_metrics(config, loss_of(config))

    monkeypatch.setattr(grid_runs, "train_unless_done", train)
    monkeypatch.setattr(grid_runs, "abstract_params", lambda _: {})  # it is traced anew for each run
    return names


@pytest.fixture
def uncomputed(monkeypatch):
    """Runs are trained by the loop, but their steps change nothing: to compile one takes seconds."""
    whole, metrics = loop.train, {name: jax.device_put(np.float32(1)) for name in loop.MUST_BE_FINITE}

    def step(state, *_):
        return dataclasses.replace(state, step=state.step + 1), metrics

    monkeypatch.setattr("lit_het.training.train.loop.train", lambda _step, *given, **how: whole(step, *given, **how))


def arguments(file, output, *more, budget=5, fields=FIELDS):
    flags = ["tune", "--config", file, *fields, "--metric", NLL, "--budget", budget, "--output", output, *more]
    return [str(flag) for flag in flags]


def trials_in(output):
    return json.loads((output / "trials.json").read_text())["trials"]


def search_of(config, output, *values, **options):
    """A search for a learning rate: in a range, or of all of the given values."""
    axis = Axis(RATE, values) if values else Range(RATE, 1e-4, 1e-1, True, False)
    return Search(config, (axis,), NLL, output, **({"method": "grid"} if values else {}), **options)


@pytest.mark.slow
def test_runs_are_trained_and_shown_and_a_larger_budget_adds_some(file, tmp_path, capsys, monkeypatch, uncomputed):
    heads = [*FIELDS, "--field", "task.head=deterministic,het_xl"]
    show = ("--show", "supervised/held_out/top1", "--length", "3")
    assert main(arguments(file, tmp_path, *show, budget=1, fields=heads)) == 0
    [first] = trials_in(tmp_path)
    assert (first["state"], first["number"]) == ("finished", 0)
    saved = experiment.load(Path(first["run"]) / "config.json")
    assert float(first["setting"][RATE]) == saved.schedule.learning_rate
    assert (str(saved.length), saved.seed, saved.data.seed) == ("3 steps", 0, 0)
    assert first["value"] == read_metrics(saved.run_dir / "metrics.jsonl")[-1][NLL]
    with monkeypatch.context() as patch:
        patch.setattr(grid_runs, "train_unless_done", lambda *_, **__: pytest.fail("nothing is left to train"))
        assert main(arguments(file, tmp_path, *show, budget=1, fields=heads)) == 0
    capsys.readouterr()
    # The second run is trained as the first one.
    monkeypatch.setattr(grid_runs, "train_unless_done", lambda config, **_: write_metrics(config, loss_of(config)))
    assert main(arguments(file, tmp_path, *show, budget=2, fields=heads)) == 0
    both = trials_in(tmp_path)
    assert both[0] == first
    table = capsys.readouterr().out
    assert f"| trial | {RATE} | task.head | {NLL} | supervised/held_out/top1 | state |" in table
    best = min(both, key=lambda trial: trial["value"])
    assert table.splitlines()[2].startswith(f"| {best['number']} | {best['setting'][RATE]} | ")
    assert json.loads((tmp_path / "trials.json").read_text())["best"] == best["setting"]
    page = (tmp_path / "page.html").read_text()
    assert page.count('<svg role="img"') == 3, "progress, and two fields"
    assert f"{RATE} = {best['setting'][RATE]}" in page


@pytest.mark.slow
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(config, tmp_path, trained, monkeypatch):
    whole = tuning.tune(search_of(config, tmp_path / "whole"), 5)
    trained.clear()
    stub = grid_runs.train_unless_done

    def interrupted(config, **_):
        stub(config)
        if trained in (["trial0000_seed0", "trial0001_seed0"], ["trial0001_seed0", "trial0002_seed0"]):
            raise KeyboardInterrupt

    monkeypatch.setattr(grid_runs, "train_unless_done", interrupted)
    for _ in range(2):
        trained.clear()
        with pytest.raises(KeyboardInterrupt):
            tuning.tune(search_of(config, tmp_path / "parts"), 5)
    parts = tuning.tune(search_of(config, tmp_path / "parts"), 5)
    assert [(trial.setting, trial.value) for trial in parts] == [(trial.setting, trial.value) for trial in whole]
    assert len({trial.setting[RATE] for trial in whole}) == 5


@pytest.mark.slow
def test_two_processes_share_the_budget_and_train_each_run_once(config, tmp_path, trained, monkeypatch):
    """Threads stand for them: a file is locked for whoever has opened it."""
    stub, both, begun = grid_runs.train_unless_done, threading.Barrier(2), set()

    def together(config, **_):
        if (worker := threading.get_ident()) not in begun:
            begun.add(worker)
            both.wait(timeout=120)  # until the other one trains its first run too
        stub(config)

    monkeypatch.setattr(grid_runs, "train_unless_done", together)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(tuning.tune, [search_of(config, tmp_path)] * 2, [5] * 2))
    assert sorted(trained) == [f"trial{number:04d}_seed0" for number in range(5)]
    assert ["finished"] * 5 in [[trial.state for trial in trials] for trials in found], "the last process has all"
    assert len({trial["setting"][RATE] for trial in trials_in(tmp_path)}) == 5


def test_a_run_of_another_process_is_left_to_it(config, tmp_path, trained, capsys):
    search = search_of(config, tmp_path)
    tuning.tune(search, 1)
    (tmp_path / "results" / "trial0000_seed0.json").unlink()
    with grid_runs._claim(tmp_path, "trial0000_seed0"):
        trials = tuning.tune(search, 2)
    assert [trial.state for trial in trials] == ["running", "finished"]
    assert trained == ["trial0000_seed0", "trial0001_seed0"]
    assert "1 run in progress in other processes" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_that_are_not_finite_or_do_not_fit_have_failed_and_are_not_repeated(
    config, tmp_path, trained, monkeypatch
):
    stub = grid_runs.train_unless_done
    failures = {0.1: NonFinite("the loss is nan at step 2", 2), 0.05: DoesNotFit("a step does not fit")}

    def fails(config, **_):
        stub(config)
        if config.schedule.learning_rate in failures:
            raise failures[config.schedule.learning_rate]
        if config.schedule.learning_rate < 0.001:
            write_metrics(config, math.inf)

    monkeypatch.setattr(grid_runs, "train_unless_done", fails)
    search = search_of(config, tmp_path, "0.1", "0.05", "0.005", "0.0001")
    notes = {trial.setting[RATE]: (trial.state, trial.note) for trial in tuning.tune(search, 5)}
    assert notes == {
        "0.1": ("failed", "the loss is not finite"),
        "0.05": ("failed", "a step does not fit"),
        "0.005": ("finished", ""),
        "0.0001": ("failed", f"{NLL} is inf"),
    }
    assert len(tuning.tune(search, 5)) == len(trained) == 4
    assert "| 0.005 |" in (tmp_path / "table.md").read_text().splitlines()[2]
    assert all(math.isfinite(trial["value"] or 0.0) for trial in trials_in(tmp_path))


def test_a_trial_is_watched_by_its_name_where_two_have_the_same_setting(config, tmp_path, trained):
    search = search_of(config, tmp_path, prune=True)
    first, *_ = tuning.tune(search, 1)
    tuning._write_setting(search, 1, first.setting, "")
    planned = tuning._next(search, 2)
    assert planned is not None
    assert planned.name == "trial0001_seed0"
    tuning._watch(search, planned)(2, {NLL: 1.0})


def test_a_combination_that_is_invalid_has_failed(config, tmp_path, trained):
    fields = (Axis("data.portion", (":50%", "50%:")), Axis("calibration", ("None", "98%:")))
    search = Search(config, fields, NLL, tmp_path, method="grid")
    states = {tuple(trial.setting.values()): trial.state for trial in tuning.tune(search, 4)}
    assert states.pop(("50%:", "98%:")) == "failed", "the same samples are held out and trained on"
    assert {*states.values()} == {"finished"}
    assert len(trained) == 3


@pytest.mark.slow
def test_a_run_is_given_up_at_an_evaluation_and_not_repeated(config, tmp_path, uncomputed):
    planned = grid_runs.plan_run(config, {}, "one", 0, tmp_path)
    seen = []

    def watch(step, metrics):
        seen.append((step, metrics[NLL]))
        raise Pruned(step)

    assert grid_runs.run_unless_done(planned, tmp_path, [NLL], watch) == "given up after step 2"
    result = grid_runs.read_result(grid_runs.result_path(tmp_path, "one_seed0"))
    assert (result.stopped_at, seen) == (2, [(2, result.figures[NLL])])
    assert grid_runs.run_unless_done(planned, tmp_path, [NLL], watch) == "already finished"


@pytest.mark.slow
def test_runs_below_the_median_are_given_up(config, tmp_path, trained, monkeypatch, capsys):
    def train(config, watch):
        trained.append(config.run_dir.name)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        with (config.run_dir / "metrics.jsonl").open("a") as file:
            for step in (2, 4):
                metrics = {NLL: loss_of(config) / step}
                file.write(json.dumps({"step": step, "train/loss": 1.0, **metrics}) + "\n")
                file.flush()
                if step < 4:
                    watch(step, metrics)

    monkeypatch.setattr(grid_runs, "train_unless_done", train)
    search = search_of(config, tmp_path, method="random", prune=True)
    trials = tuning.tune(search, 12)
    states = [trial.state for trial in trials]
    assert states[:5] == ["finished"] * 5
    assert {"finished", "given up"} == {*states[5:]}
    for trial in trials:
        if trial.state == "given up":
            rate = float(trial.setting[RATE])
            assert math.log10(rate / 0.005) ** 2 / 4 > min(one.value for one in trials if one.state == "finished")
    assert "| given up after step 2 |" in (tmp_path / "table.md").read_text()
    assert tuning.tune(search, 12) == trials
    assert len(trained) == 12


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--budget", "0"), "--budget 0 must be at least 1"),
        (("--seed", "-1"), "--seed -1 must be at least 0"),
        (("--field", "schedule.rate=1..2"), "unknown flag --schedule.rate"),
        (("--field", "optimizer.layer-decay=1..0"), "the lower end must be below the upper one"),
        (("--field", "seed=0..9"), "--field seed: every run has"),
        (("--field", f"{RATE}=1,2"), "once for each field"),
        (("--metric", "supervised/val/nll"), "these runs have no such metric; they evaluate supervised/held_out"),
        (("--metric", "bogus/held_out/nll"), "these runs have no such metric; they evaluate supervised/held_out"),
        (("--metric", "zero_shot/held_out/nll"), "these runs have no such metric; they evaluate supervised/held_out"),
        (("--metric", "train/gradient_norm"), "--metric train/gradient_norm: add --direction lower or higher"),
        (("--output", __file__), "is a file; --output takes a folder"),
        (("--prune", "--cadence.evaluate-steps", "0"), "set --cadence.evaluate-steps"),
        (("--prune", "--metric", "train/loss"), "name the metric of one"),
        (("--schedule.rate", "1"), "unknown flag --schedule.rate"),
    ],
)
def test_wrong_input_is_one_line(file, tmp_path, capsys, more, expected):
    assert expected in last_line(capsys, *arguments(file, tmp_path / "out", *more))
    assert not (tmp_path / "out").exists()


def test_a_command_without_its_arguments_says_which(capsys, file):
    assert "tune needs --config FILE, --field" in last_line(capsys, "tune", "--config", file)
    assert main(["tune", "--help"]) == 0
    assert "usage: lit-het tune" in capsys.readouterr().out


def test_a_metric_that_the_runs_lack_is_reported_after_the_first(file, tmp_path, trained, capsys):
    flags = arguments(file, tmp_path, "--metric", "supervised/held_out/nl", "--direction", "lower")
    line = last_line(capsys, *flags)
    assert "--metric supervised/held_out/nl: these runs have no such metric; they have" in line
    assert len(trained) == 1
    assert main(arguments(file, tmp_path, budget=1)) == 0, "another metric reads the same runs"


@pytest.mark.slow
def test_a_folder_of_another_search_is_refused(file, tmp_path, trained, capsys):
    assert main(arguments(file, tmp_path, budget=1)) == 0
    for more, expected in (
        (
            ("--length", "3"),
            "search.json was written with length = 4 steps, which is now 3 steps; give another --output",
        ),
        (("--field", "optimizer.layer-decay=0.5..1"), f"was written with other fields ({RATE}); give another --output"),
        (("--seed", "1"), "was written with other seed (0); give another --output"),
    ):
        assert expected in last_line(capsys, *arguments(file, tmp_path, *more, budget=1))


def test_a_broken_setting_is_an_error_with_its_path(config, tmp_path, trained):
    search = search_of(config, tmp_path)
    tuning.tune(search, 1)
    for content in ("{", '{"number": 0, "setting": {}, "problem": ""}'):
        (tmp_path / "settings" / "0000.json").write_text(content)
        with pytest.raises(UserError, match=r"0000\.json is not a setting of this search .*give another --output"):
            tuning.tune(search, 1)


def test_images_of_the_training_are_refused(config, data, held_out, tmp_path):
    folder = data / "train"

    def refused(*sets, **of_data):
        evaluations = tuple(ZeroShotConfig(one) for one in sets)
        changed = dataclasses.replace(config, evaluations=evaluations, data=dataclasses.replace(config.data, **of_data))
        try:
            tuning._check(dataclasses.replace(search_of(changed, tmp_path), metric="supervised/val/nll"), 1)
        except UserError as error:
            return str(error)
        return ""

    same = ImageSet("val", str(folder / "." / ".." / "train"), split=".")
    minival = ImageSet("val", str(folder), split=".", portion=Portion(90))
    for found in (refused(same), refused(same, shards=(f"{folder}/*.tar",)), refused(minival)):
        assert "val has images that the runs are trained on" in found
    assert not refused(minival, portion=Portion(0, 90))
    other = ImageSet("val", str(held_out), split=".")
    assert not refused(other)
    assert "val and test are the same images" in refused(other, dataclasses.replace(other, name="test"))
