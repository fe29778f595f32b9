"""``lit-het shape``: means of metrics, whole shapes, frontiers, and shapes of equal compute."""

import json
import re
import shutil

import pytest

from lit_het import parameters
from lit_het.cli.main import main
from lit_het.configs import experiment
from lit_het.eval.report.tables import NO_FIGURE
from lit_het.search import grid_runs
from lit_het.search.shape import sweeps
from lit_het.search.shape.fits import law_of
from scripts.studies.cover_shape_law import CENTRE
from tests.cli.seeds_of_heads import fails_with
from tests.cli.shape_sweeps import ERROR


def test_the_mean_of_several_metrics_is_fitted(fitted, tmp_path, capsys):
    """SoViT Sec. 4.2: of four log-perplexities, here of errors whose mean is the known one."""
    other, names = tmp_path / "star", [f"few_shot/{name}/5_shot" for name in ("pets", "cars", "birds", "dtd")]
    shutil.copytree(fitted[0], other)
    shifts = [0.04, -0.03, 0.01, -0.02]
    for path in (other / "results").glob("*.json"):
        result = json.loads(path.read_text())
        if result["figures"]:
            known = result["figures"][ERROR]
            result["figures"] = {name: known + shift for name, shift in zip(names, shifts, strict=True)}
        path.write_text(json.dumps(result))
    command = ["shape", "fit", str(other), "--resamples", "0", "--metric", *names]
    assert main(command) == 0
    of_mean, of_one = (json.loads((folder / "fit.json").read_text()) for folder in (other, fitted[0]))
    assert of_mean["metric"] == "+".join(names)
    assert of_mean["detail"]["loss"] == f"1 - mean of {', '.join(names)}"
    assert of_mean["exponents"] == pytest.approx(of_one["exponents"], rel=1e-3)
    page = tmp_path / "page.html"
    assert main(["shape", "plot", str(other), "--metric", "+".join(names), names[0], "--output", str(page)]) == 0
    assert f"1: 1 - mean of {', '.join(names)}; 2: 1 - {names[0]}." in page.read_text()
    told = fails_with(capsys, *command[:-1], "train/loss")
    assert "of some of these lower values are better, of others higher; take one kind" in told


def test_the_error_of_a_whole_shape_is_predicted(fitted, capsys):
    star, small = fitted
    shape = ["width=1152", "depth=27", "mlp=4304"]
    assert main(["shape", "predict", str(star), "--shape", *shape, "--compute", "9e12"]) == 0
    told = capsys.readouterr().out
    found = law_of(star)
    expected = float(found[0].whole({"width": 1152.0, "depth": 27.0, "mlp": 4304.0}, 9e12, found[1]))
    assert told.startswith(f"width 1152, depth 27, mlp 4304 at 9e+12 GFLOP: 1 - {ERROR} {expected:.4g} by Eq. 3")
    # The simulated spokes are laws of their own, which no common ξ and ε∞ make.
    assert ("warning: Eq. 3 has ξ" in told) == (min(found[0].constants(found[1])) <= 0)
    at_centre = [f"{name}={value:g}" for name, value in CENTRE.items()]
    assert main(["shape", "predict", str(star), "--shape", *at_centre, "--compute", "1e12"]) == 0
    mean = sum(float(found[0].value(name, CENTRE[name], 1e12)) for name in CENTRE) / 3
    assert f"{mean:.4g} by Eq. 3" in capsys.readouterr().out
    told = fails_with(capsys, "shape", "predict", small, "--shape", *shape, "--compute", "1")
    assert "has no law with its centre; repeat lit-het shape fit of a star sweep" in told
    assert "mlp is missing" in fails_with(capsys, "shape", "predict", star, "--shape", *shape[:2], "--compute", "1")
    assert main(["shape", "scale", "--budget", "1e12", "--start", str(small), "--exponents", str(star)]) == 0
    assert " by Eq. 3" in capsys.readouterr().out


def test_the_frontier_has_shapes_parameters_and_errors_over_compute(fitted, classifier, tmp_path, capsys):
    star, _ = fitted
    page, start = tmp_path / "page.html", ["--start", "width=32", "depth=2", "mlp=64", "--start-compute", "1e11"]
    command = ["shape", "frontier", "--budgets", "1e11..1e13:3", *start, "--output", str(page), "--multiple", "8"]
    flags = ["--weights", "width=0.5", "depth=0.25", "mlp=0.25", "--config", str(classifier)]
    assert main([*command, *flags, "--exponents", str(star)]) == 0
    told, text = capsys.readouterr().out, page.read_text()
    s = json.loads((star / "fit.json").read_text())["exponents"]
    wide = 8 * round(32 * 100 ** (0.5 * s["width"]) / 8)
    largest = next(line for line in told.splitlines() if " 1e+13 GFLOP" in line)
    assert f"width {wide}," in largest
    config = sweeps.with_shape(experiment.load_module_config(classifier), {"width": 32, "depth": 2, "mlp": 64})
    tower = config.task.build().shapes["image_tower"]
    assert f"{parameters.count(tower) / 1e6:.1f} M" in next(
        line for line in told.splitlines() if " 1e+11 GFLOP" in line
    )
    for title in ("Width", "Depth", "MLP", "Parameters", "Error over compute", "Error over parameters"):
        assert title in text
    assert "width 32 to" in text
    assert main(command) == 0
    assert "Parameters" not in page.read_text(), "without a configuration there is none to count"
    assert "sum of 1" in fails_with(capsys, *command, "--weights", "width=1")
    assert "--budgets 1..0:3: write LOW..HIGH:N" in fails_with(capsys, *command, "--budgets", "1..0:3")


def test_a_frontier_has_no_error_below_zero_and_warns_of_a_law_whose_dimensions_disagree(fitted, tmp_path, capsys):
    star, _ = fitted
    page, start = tmp_path / "page.html", ["--start", "width=32", "depth=2", "mlp=64", "--start-compute", "1"]
    flags = ["--exponents", str(star), "--output", str(page)]
    assert main(["shape", "frontier", "--budgets", "1..100:3", *start, *flags]) == 0
    told = capsys.readouterr().out
    assert next(line for line in told.splitlines() if " 100 GFLOP" in line).split()[-1] == NO_FIGURE
    assert re.search(r"warning: Eq. 3 has ξ = -.*, not both above 0: dimensions disagree", told)
    assert "dimensions disagree" in page.read_text()
    assert "Error over compute" not in page.read_text()


def test_deviations_have_equal_compute(classifier, tmp_path, capsys):
    flags = ["--config", classifier, "--output", tmp_path / "around", "--metric", "train/loss", "--length", "100 steps"]
    shape = ["--centre", "width=16", "depth=2", "mlp=32", "--vary", "width=8,32", "depth=1,2,4", "--plan"]
    assert main(["shape", "deviate", *map(str, [*flags, *shape])]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.partition(":")[0] for line in lines[:-1]]
    assert names[0] == "width16_depth2_mlp32_100_steps_seed0"
    shapes = [(16, 2, 32), (8, 2, 32), (32, 2, 32), (16, 1, 32), (16, 4, 32)]
    config = experiment.load_module_config(classifier)
    costs = [
        sweeps.gflop_per_example(sweeps.with_shape(config, dict(zip(("width", "depth", "mlp"), one, strict=True))))
        for one in shapes
    ]
    for name, (width, depth, mlp), cost in zip(names, shapes, costs, strict=True):
        steps = round(100 * costs[0] / cost)
        assert name == f"width{width}_depth{depth}_mlp{mlp}_{steps}_steps_seed0"
    gflop = [float(line.split()[1]) for line in lines[:-1]]
    # Up to half a step.
    assert gflop == pytest.approx([gflop[0]] * 5, rel=0.02)
    assert not (tmp_path / "around").exists()
    told = fails_with(capsys, "shape", "deviate", *flags, "--vary", "width=64")
    assert "all shapes are the centre; give other values" in told
    told = fails_with(capsys, "shape", "deviate", *flags[:-1], "2 epochs", "--vary", "width=8")
    assert "length 2 epochs: give steps or examples" in told


def test_deviations_are_trained_and_drawn(classifier, tmp_path, capsys, monkeypatch):
    def train(config, **options):
        config.run_dir.mkdir(parents=True)
        loss = abs(config.task.image_tower.encoder.width - 16) / 16 + 1 + 0.01 * config.seed
        (config.run_dir / "metrics.jsonl").write_text(json.dumps({"step": 2, "train/loss": loss}) + "\n")

    monkeypatch.setattr(grid_runs, "train_unless_done", train)
    output, page = tmp_path / "around", tmp_path / "page.html"
    flags = ["--config", classifier, "--output", output, "--metric", "train/loss", "--seeds", 0, 1]
    command = ["shape", "deviate", *map(str, flags), "--centre", "width=16", "--vary", "width=8,32"]
    assert main(command) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    rows = {line.split(",")[0]: line for line in lines if line.startswith("width ")}
    assert "1.0050 ± 0.0050" in rows["width 16"]
    assert "+49.75%" in rows["width 8"]
    assert "+99.50%" in rows["width 32"]
    assert main(["shape", "plot", str(output), "--metric", "train/loss", "--output", str(page)]) == 0
    assert "Measured, with equal compute" in page.read_text()
    told = fails_with(capsys, "shape", "fit", output, "--metric", "train/loss")
    assert "is a sweep of equal compute, to which no law is fitted; see lit-het shape plot" in told
