"""``lit-het shape``: sweeps are planned and trained, fitted, scaled and drawn."""

import dataclasses
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from lit_het.cli.main import main
from lit_het.cli.shape import factors
from lit_het.configs import experiment
from lit_het.search import grid_runs
from lit_het.search.shape import sweeps
from lit_het.search.shape.sweeps import Sweep, SweptRun
from scripts.studies.cover_shape_law import S
from tests.cli.seeds_of_heads import fails_with
from tests.cli.shape_sweeps import ERROR
from tests.eval.report.outline import Outline


@pytest.mark.slow
def test_a_star_sweep_is_planned_with_the_operations_of_the_plan(classifier, tmp_path, capsys):
    flags = ["--config", classifier, "--output", tmp_path / "star", "--metric", "train/loss", "--plan"]
    shape = ["--centre", "width=32", "depth=3", "mlp=64", "--vary", "width=8,16", "--factors", 0.5, "--multiple", 8]
    lengths = ["--lengths", "2 steps", "48 examples", "--data.batch-size", 16]
    assert main(["shape", "star", *map(str, [*flags, *shape, *lengths])]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.partition(":")[0] for line in lines]
    assert "width16_depth3_mlp64_2_steps_seed0" in names
    assert "width32_depth2_mlp64_48_examples_seed0" in names
    assert "width32_depth3_mlp32_2_steps_seed0" in names
    assert lines[-1].startswith("8 runs, ")
    assert not (tmp_path / "star").exists()
    of = dict(line.split(": ") for line in lines[:-1])
    two, three = (float(of[f"width16_depth3_mlp64_{length}_seed0"].split()[0]) for length in ("2_steps", "48_examples"))
    assert three == pytest.approx(1.5 * two, rel=1e-3)


def test_the_operations_are_those_of_lit_het_plan(classifier):
    config = sweeps.with_shape(experiment.load_module_config(classifier), {"width": 16})
    step = sweeps.Step(config, config.mesh.build(sweeps.jax.devices()[:1])).flops()[0]
    assert sweeps.gflop_per_example(config) * config.data.batch_size * 1e9 == pytest.approx(step)


@pytest.mark.slow
def test_a_grid_is_trained_and_its_start_chosen(classifier, tmp_path, capsys, monkeypatch):
    output = tmp_path / "grid"
    flags = ["--config", classifier, "--output", output, "--metric", "train/loss", "--lengths", "2 steps"]
    command = ["shape", "grid", *map(str, [*flags, "--vary", "width=8,16", "depth=1"])]
    train_unless_done = grid_runs.train_unless_done

    def train_the_narrow_one(config, **options):
        if config.task.image_tower.encoder.width == 8:
            train_unless_done(config, **options)
        else:
            config.run_dir.mkdir(parents=True)
            (config.run_dir / "metrics.jsonl").write_text('{"step": 2, "train/loss": 1000.0}\n')

    monkeypatch.setattr(grid_runs, "train_unless_done", train_the_narrow_one)
    assert main(command) == 0
    monkeypatch.setattr(grid_runs, "train_unless_done", lambda _, **__: pytest.fail("nothing is left to train"))
    assert main(command) == 0
    assert capsys.readouterr().err.count("already finished") == 2
    assert main(["shape", "fit", str(output), "--metric", "train/loss"]) == 0
    assert "warning: the optimal shape lies on the boundary of the grid in width" in capsys.readouterr().out
    saved = json.loads((output / "fit.json").read_text())
    assert saved["start"] == {"width": 8.0, "depth": 1.0, "mlp": 64.0}
    assert main(["shape", "scale", "--budget", "1", "--start", str(output), "--config", str(classifier)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("warning: the optimal shape lies on the boundary of the grid in width")
    assert "examples for 1 GFLOP" in told


def test_a_folder_takes_further_runs_of_the_same_sweep_only(tmp_path):
    one, other = (SweptRun(f"run{number}", {"width": number}, "1 steps", 1.0, 1.0) for number in (1, 2))
    sweeps.save(Sweep("grid", {"width": 3}, (one,)), tmp_path)
    assert sweeps.save(Sweep("grid", {"width": 3}, (other,)), tmp_path).runs == (one, other)
    with pytest.raises(sweeps.UserError, match="holds a grid sweep of centre width 3; give another --output"):
        sweeps.save(Sweep("star", {"width": 3}, (one,)), tmp_path)


@pytest.fixture
def trained(classifier, tmp_path, monkeypatch) -> list[str]:
    """A command that trained a grid, by a stub; further flags follow."""

    def train(config, **_):
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "metrics.jsonl").write_text('{"step": 2, "train/loss": 1.0}\n')

    monkeypatch.setattr(grid_runs, "train_unless_done", train)
    monkeypatch.setattr(sweeps, "_gflop_per_step", lambda config: float(config.data.batch_size))  # not traced
    flags = ["--config", classifier, "--output", tmp_path / "grid", "--metric", "train/loss", "--lengths", "2 steps"]
    command = ["shape", "grid", *map(str, flags), "--vary", "depth=1"]
    assert main([*command, "width=8"]) == 0
    return command


@pytest.mark.parametrize(
    ("width", "flags", "field"),
    [
        # The same run with another compute.
        (8, ["--data.batch-size", "4"], "data.batch_size"),
        (16, ["--schedule.learning-rate", "0.5"], "schedule.learning_rate"),
    ],
)
def test_another_configuration_is_refused_and_changes_nothing(trained, tmp_path, capsys, width, flags, field):
    path = tmp_path / "grid" / "sweep.json"
    before = path.read_text()
    assert main([*trained, f"width={width}", *flags]) == 1
    assert f"was written with {field} = " in capsys.readouterr().err.splitlines()[-1]
    assert path.read_text() == before


def test_a_sweep_without_a_configuration_is_kept_from_other_runs_of_the_same_name(trained, tmp_path, capsys):
    path = tmp_path / "grid" / "sweep.json"
    content = json.loads(path.read_text())
    del content["config"]
    path.write_text(json.dumps(content))
    assert main([*trained, "width=8", "--data.batch-size", "4"]) == 1
    assert "seed0.json was written with data.batch_size = " in capsys.readouterr().err.splitlines()[-1]
    assert json.loads(path.read_text()) == content


def test_a_grid_takes_further_lengths_and_seeds(trained, tmp_path):
    assert main([*trained, "width=16", "--lengths", "3 steps", "--seeds", "0", "1"]) == 0
    assert len(sweeps.load(tmp_path / "grid").runs) == 3


def test_factors_may_be_exponentially_spaced():
    assert factors(["0.25..1:3", "2"]) == pytest.approx([0.25, 0.5, 1.0, 2.0])


def test_commands_that_extend_a_sweep_wait_for_each_other(tmp_path):
    one = SweptRun("run0", {"width": 1}, "1 steps", 1.0, 1.0)
    more = [dataclasses.replace(one, name=f"run{number}") for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda run: sweeps.save(Sweep("grid", {"width": 3}, (run,)), tmp_path), more))
    assert {run.name for run in sweeps.load(tmp_path).runs} == {run.name for run in more}


def test_a_star_gives_the_exponents_with_their_intervals(fitted):
    star, _ = fitted
    told = (star / "told.txt").read_text()
    assert "54 runs, relative error 0." in told
    assert "1 run without a finite metric above 0 left out" in told
    assert "centre at 1e+12 GFLOP, never fitted: measured 0.5, predicted by width" in told
    saved = json.loads((star / "fit.json").read_text())
    for name, value in S.items():
        low, high = saved["detail"]["intervals"]["s"][name]["profile"]
        assert low < value < high
        assert low < saved["exponents"][name] < high


def test_both_fits_give_the_shape_of_a_budget(fitted, capsys):
    star, small = fitted
    start = json.loads((small / "fit.json").read_text())
    assert start["start"] == {"width": 608, "depth": 10, "mlp": 928}
    exponents = json.loads((star / "fit.json").read_text())["exponents"]
    budget = 1e3 * start["start_compute"]
    flags = ["--budget", budget, "--start", small, "--exponents", star, "--heads", 16]
    assert main(["shape", "scale", *map(str, flags)]) == 0
    told = capsys.readouterr().out
    assert f"width {608 * 1000 ** (exponents['width'] / 3):.1f}" in told
    assert "compute x 1000 from width 608, depth 10, mlp 928" in told
    hours = ["--budget", budget / 1e3, "--unit", "GPU-hours", "--gflop-per-hour", 1e3]
    assert main(["shape", "scale", *map(str, [*hours, *flags[2:]])]) == 0
    assert capsys.readouterr().out == told


@pytest.mark.slow
def test_heads_that_are_given_come_before_those_of_the_configuration(classifier, capsys):
    start = ["--start", "width=40", "--start-compute", 1, "--exponents", "width=0.2"]
    flags = ["--budget", 1, *start, "--config", classifier, "--multiple", 8]
    assert main(["shape", "scale", *map(str, flags)]) == 0
    assert "shape: width 40\n" in capsys.readouterr().out
    assert main(["shape", "scale", *map(str, flags), "--heads", "3"]) == 0
    assert "shape: width 48\n" in capsys.readouterr().out


def test_the_page_has_the_figures_of_both_sweeps(fitted, tmp_path):
    page = tmp_path / "page.html"
    assert main(["shape", "plot", *map(str, [*fitted, "--metric", ERROR, "--output", page])]) == 0
    text = page.read_text()
    assert Outline(text).titles == ["Star sweep star", "Grid sweep grid"]
    for title in (
        "Exponents",
        "Predicted against measured",
        "Equal compute: mlp",
        "Cost of other sizes",
        "Metric against compute",
        "Hours of training",
    ):
        assert title in text
    assert "Correlation 1.00; 3.6e+12 GFLOP in an hour" in text
    assert "start: width 608, depth 10, mlp 928" in text
    assert "Exponents by metric" not in text, "there is one"


@pytest.mark.slow
def test_several_metrics_are_compared_by_their_exponents(fitted, tmp_path, capsys):
    page, other = tmp_path / "page.html", tmp_path / "star"
    shutil.copytree(fitted[0], other)
    for path in (other / "results").glob("*.json"):
        result = json.loads(path.read_text())
        if result["figures"]:
            result["figures"]["train/loss"] = 1 - result["figures"][ERROR]
        path.write_text(json.dumps(result))
    command = ["shape", "plot", str(other), str(fitted[1]), "--output", str(page), "--metric", ERROR]
    assert main([*command, "train/loss"]) == 0
    text = page.read_text()
    assert "Exponents by metric" in text
    assert f"1: 1 - {ERROR}; 2: train/loss." in text
    told = fails_with(capsys, *command, ERROR)
    assert "--metric: name each metric once" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["star", "--vary", "width=64"], "width: the centre 64 must be above all values of its spoke"),
        (["star", "--vary", "heads=2"], "heads is not a dimension of a shape; they are width, depth, mlp"),
        (["star", "--vary", "width=a"], "--vary width=a: write DIM=NUMBER, such as width=608"),
        (["star", "--vary", "width=7.5"], "--vary: sizes must be whole numbers of at least 1"),
        (["star", "--factors", "1e308"], "a size of inf is too large"),
        (["star"], "nothing varies: give --vary width=... depth=... mlp=..., or --factors"),
        (["star", "--centre", "heads=2", "--vary", "width=8"], "heads is not a dimension of a shape"),
        (["grid", "--vary", "width=8", "--lengths", "3 weeks"], "--lengths '3 weeks' is not a duration"),
        (["grid", "--vary", "width=8", "--plan", "--lengths", "6 steps", "1 steps"], "warmup 1 steps must be shorter"),
        (
            ["grid", "--vary", "width=8", "width=16"],
            "--vary width=16: width is given twice; write all",
        ),
        (["star", "--factors", "0.3..0.2:4"], "--factors 0.3..0.2:4: write LOW..HIGH:N with 0 < LOW < HIGH"),
        (["star", "--factors", "0.3:6"], "--factors 0.3:6: write a number, or LOW..HIGH:N"),
        (["star", "--factors", "0"], "--factors must be above 0 and finite"),
        (["star", "--factors", "0.3..0.8"], "--factors 0.3..0.8: write a number, or LOW..HIGH:N"),
        (["grid", "--vary", "width=8", "--lengths", "3 epochs"], "length 3 epochs: give steps or examples"),
        (["grid", "--vary", "width=9"], "encoder.width = 9 is not a multiple of encoder.num_heads"),
    ],
)
def test_impossible_sweeps_are_refused(classifier, tmp_path, capsys, arguments, message):
    flags = ["--config", classifier, "--output", tmp_path / "new", "--metric", "train/loss"]
    assert message in fails_with(capsys, "shape", arguments[0], *flags, *arguments[1:])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "STAR", "--metric", "zero_shot/pets/top1"], "run0 has no metric zero_shot/pets/top1; it has few_shot"),
        (["fit", "STAR", "--metric", "train/other"], "--metric train/other: add --direction lower or higher"),
        (["fit", "nowhere", "--metric", ERROR], "sweep.json is missing; give the --output of lit-het shape star"),
        (["fit", "STAR", "--metric", ERROR, "--level", "2"], "level 2 must be between 0 and 1"),
        (["fit", "GRID", "--metric", ERROR, "--level", "5"], "level 5 must be between 0 and 1"),
        (["fit", "GRID", "--metric", ERROR, "--resamples", "-3"], "-3 resamples must be at least 0"),
        (["plot", "GRID", "--metric", ERROR, "--output", "page.html", "--level", "5"], "level 5 must be between"),
        (["scale", "--budget", "1", "--start", "foo=3", "--start-compute", "1"], "foo is not a dimension of a shape"),
        (["scale", "--budget", "1", "--start", "GRID"], "budget 1 GFLOP is below"),
        (["scale", "--budget", "1", "--start", "STAR"], "is the fit of a star; give that of a grid sweep to --start"),
        (
            ["scale", "--budget", "1", "--start", "GRID", "--exponents", "GRID"],
            "is the fit of a grid; give that of a star sweep to --exponents",
        ),
        (["scale", "--budget", "1", "--start", "width=2"], "--start of numbers needs --start-compute"),
        (["scale", "--budget", "1", "--start", "width=2,3"], "--start: give one number of each dimension"),
        (["scale", "--budget", "1", "--start", "nowhere"], "nowhere is missing; run lit-het shape fit"),
        (["scale", "--budget", "1", "--unit", "TPU-hours", "--start", "GRID"], "needs the GFLOP of one hour"),
        (["plot", "STAR", "--metric", ERROR, "--output", "page.pdf"], "name a file that ends in .html"),
    ],
)
def test_wrong_arguments_are_one_line(fitted, capsys, arguments, message):
    star, small = fitted
    places = {"STAR": str(star), "GRID": str(small)}
    assert message in fails_with(capsys, "shape", *(places.get(argument, argument) for argument in arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"unidentified": {"mlp": "the runs fit about as well with s = 10"}},
            "does not identify s of mlp (the runs fit about as well",
        ),
        (
            {"metric": "train/loss"},
            f"is the fit of train/loss, but the start that of {ERROR}; fit both to the same metric",
        ),
    ],
)
def test_exponents_are_identified_and_of_the_metric_of_the_start(fitted, tmp_path, capsys, changes, message):
    star, small = fitted
    (tmp_path / "fit.json").write_text(json.dumps({**json.loads((star / "fit.json").read_text()), **changes}))
    assert message in fails_with(
        capsys, "shape", "scale", "--budget", "1e12", "--start", small, "--exponents", tmp_path
    )


@pytest.mark.parametrize("name", ["sweep", "fit"])
def test_damaged_files_are_one_line(fitted, tmp_path, capsys, name):
    (tmp_path / f"{name}.json").write_text('{"kind": "star"}')
    command = ["fit", str(tmp_path), "--metric", ERROR]
    if name == "fit":
        command = ["scale", "--budget", "1", "--start", str(tmp_path)]
    problem = "is not a fit" if name == "fit" else "does not describe a sweep"
    told = fails_with(capsys, "shape", *command)
    assert f"{problem} (required field missing @ $." in told
    assert "repeat lit-het shape" in told
