"""A sweep over a grid: training, resuming, skipping finished runs, and the table."""

import dataclasses
import json
from pathlib import Path

import pytest

from lit_het.configs import experiment, glyph_classifier
from lit_het.errors import UserError
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.search import grid, grid_runs
from lit_het.search.grid import Axis, Result
from lit_het.training.log import read_metrics
from lit_het.training.loop import NonFinite
from scripts.sweep import main
from tests.scripts.conftest import refusal

GRID = ["--grid", "schedule.learning-rate=0.001,0.5", "--grid", "optimizer.weight-decay=0.0"]


@pytest.fixture(scope="module")
def arguments(config_file, tmp_path_factory):
    """Two settings of two steps, with one seed."""
    output = tmp_path_factory.mktemp("grid")
    flags = ["--config", config_file, *GRID, "--seeds", 1, "--metric", "train/loss", "--show", "train/gradient_norm"]
    # A head without noise compiles in less time.
    return [str(flag) for flag in [*flags, "--output", output, "--", "--length", 2, "--task.head", "deterministic"]]


def extended(arguments, *flags):
    """Returns the arguments with further flags before those of all runs."""
    place = arguments.index("--")
    return [*arguments[:place], *map(str, flags), *arguments[place:]]


@pytest.fixture(scope="module")
def finished(arguments):
    """The folder of the sweep, done as two parts of an array job and joined."""
    folder = Path(arguments[arguments.index("--output") + 1])
    for part in ("1/2", "0/2"):
        assert main(extended(arguments, "--part", part)) == 0
        assert not (folder / "table.md").exists()
    assert main(extended(arguments, "--table")) == 0
    return folder


@pytest.fixture
def stub(monkeypatch):
    """Trains in no time, but diverges at the learning rate 0.5; yields the runs that it was asked for."""
    asked = []

    def train(config, **_):
        asked.append(config.run_dir)
        if config.schedule.learning_rate == 0.5:
            raise NonFinite("the loss is nan at step 2", 2)
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "metrics.jsonl").write_text('{"step": 2, "train/loss": 1.5, "train/gradient_norm": 2.0}\n')

    monkeypatch.setattr(grid_runs, "train_unless_done", train)
    return asked


@pytest.mark.slow
def test_every_setting_is_trained_with_its_fields_and_seed(finished):
    names = {f"learning-rate={rate}_weight-decay=0.0_seed1" for rate in ("0.001", "0.5")}
    assert {path.name for path in (finished / "runs").iterdir()} == names
    for name in names:
        config = experiment.load(finished / "runs" / name / "config.json")
        assert f"={config.schedule.learning_rate}_" in name
        assert (config.seed, config.data.seed, config.optimizer.weight_decay) == (1, 1, 0.0)
        assert str(config.length) == "2 steps"


@pytest.mark.slow
def test_the_table_has_the_last_figures_and_the_best_setting_first(finished):
    content = json.loads((finished / "table.json").read_text())
    losses = {
        rate: read_metrics(finished / "runs" / f"learning-rate={rate}_weight-decay=0.0_seed1" / "metrics.jsonl")[-1]
        for rate in ("0.001", "0.5")
    }
    best = min(losses, key=lambda rate: losses[rate]["train/loss"])
    assert content["best"] == {"schedule.learning-rate": best, "optimizer.weight-decay": "0.0"}
    for row in content["rows"]:
        of_run = losses[row["setting"]["schedule.learning-rate"]]
        assert row["figures"]["train/loss"]["mean"] == of_run["train/loss"]
        assert row["figures"]["train/gradient_norm"]["mean"] == of_run["train/gradient_norm"]
    lines = (finished / "table.md").read_text().splitlines()
    assert lines[0] == "| schedule.learning-rate | optimizer.weight-decay | train/loss | train/gradient_norm | seeds |"
    assert lines[2].startswith(f"| {best} | 0.0 |")


def test_figures_are_means_with_standard_errors_over_seeds_and_the_name_tells_which_are_better(tmp_path):
    config = glyph_classifier.get_config()
    axes = [Axis("length", ("5 steps", "6 steps"))]
    planned = grid.plan(config, axes, [0, 1], tmp_path)
    (tmp_path / "results").mkdir()
    for one, value in zip(planned, (0.5, 0.6, 0.7, 0.6), strict=True):  # seed 0 of both lengths, then seed 1
        figures = {"minival/top1": value, "minival/nll": value}
        result = Result(one.setting, one.config.seed, figures, 1, 1.0, "cpu", experiment.fields(one.config))
        (tmp_path / "results" / f"{one.name}.json").write_text(json.dumps(dataclasses.asdict(result)))
    first, second = grid.table(planned, tmp_path, "minival/top1", [])
    assert (first.figures["minival/top1"].mean, first.seeds) == (pytest.approx(0.6), (0, 1))
    assert {first.setting["length"], second.setting["length"]} == {"5 steps", "6 steps"}
    planned, results = planned[:2], tmp_path / "results"
    assert grid.table(planned, tmp_path, "minival/top1", [])[0].setting == {"length": "6 steps"}
    assert grid.table(planned, tmp_path, "minival/nll", [])[0].setting == {"length": "5 steps"}
    assert grid.table(planned, tmp_path, "minival/nll", [], "higher")[0].setting == {"length": "6 steps"}
    assert {path.stem for path in results.iterdir()} >= {"length=5_steps_seed0", "length=6_steps_seed0"}
    with pytest.raises(UserError, match=r"--metric minival/top5: .* they have minival/nll, minival/top1"):
        grid.table(planned, tmp_path, "minival/top5", [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--grid", "schedule.rate=1"), "unknown flag --schedule.rate"),
        (("--grid", "seed"), "write FIELD=VALUE,VALUE"),
        (("--grid", "seed=1,,2"), "write FIELD=VALUE,VALUE"),
        (("--grid", "schedule.learning-rate=3"), "two axes have the same field"),
        (("--metric", "train/gradient_norm"), "--metric train/gradient_norm: add --direction lower or higher"),
        (("--metric", "minival/top1"), "these runs have no such metric; they have train/"),
        (("--grid", "optimizer.layer-decay=1.0,0.9", "--table"), "no run is finished; start without --table"),
    ],
)
def test_wrong_input_is_one_line(finished, arguments, capsys, flags, expected):
    line = refusal(capsys, main, *extended(arguments, *flags, "--table"))
    assert line.startswith("sweep: ")
    assert expected in line


@pytest.mark.slow
def test_results_of_another_configuration_are_refused(finished, arguments, capsys):
    line = refusal(capsys, main, *arguments, "--cadence.log-steps", 1, "--task.mixup", 0.2)
    assert "was written with task.mixup = 0.0, which is now 0.2; give another --output" in line


def test_an_invalid_result_is_an_error_with_its_path(tmp_path):
    for content in ('{"setting": {"seed": "1"}}', "{", "[]"):
        (tmp_path / "broken.json").write_text(content)
        with pytest.raises(UserError, match=r"broken\.json is not a result of a run .*delete it") as caught:
            grid_runs.read_result(tmp_path / "broken.json")
        assert "\n" not in str(caught.value)


def test_results_of_other_evaluations_are_refused(tmp_path):
    one = ZeroShotConfig(ImageSet("held_out", "here"))
    config = dataclasses.replace(glyph_classifier.get_config(), evaluations=(one,))
    larger = dataclasses.replace(one, data=dataclasses.replace(one.data, batch_size=8))
    grid_runs.check_same(tmp_path, experiment.fields(dataclasses.replace(config, evaluations=(larger,))), config)
    other = dataclasses.replace(one, data=dataclasses.replace(one.data, directory="elsewhere"))
    with pytest.raises(UserError, match=r"evaluations\.0\.data\.directory = elsewhere, which is now here"):
        grid_runs.check_same(tmp_path, experiment.fields(dataclasses.replace(config, evaluations=(other,))), config)


def test_an_invalid_part_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(extended(arguments, "--part", "2/2"))
    assert "write I/N with I from 0 to N - 1" in capsys.readouterr().err


def test_a_diverging_setting_is_last_and_the_others_are_trained(arguments, tmp_path, capsys, stub):
    reversed_rates = [argument.replace("0.001,0.5", "0.5,0.001") for argument in arguments]
    assert main(extended(reversed_rates, "--output", tmp_path)) == 0
    assert len(stub) == 2
    printed = capsys.readouterr()
    assert "seed1: failed: the loss is nan at step 2" in printed.err
    assert printed.out.index("| 0.001 |") < printed.out.index("| 0.5 |")


def test_an_unknown_metric_is_reported_after_the_first_run(arguments, tmp_path, capsys, stub):
    line = refusal(capsys, main, *extended(arguments, "--metric", "minival/top1", "--output", tmp_path))
    assert "--metric minival/top1: these runs have no such metric; they have train/gradient_norm, train/loss" in line
    assert len(stub) == 1
