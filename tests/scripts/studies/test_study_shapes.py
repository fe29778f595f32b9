"""The study of shapes: it trains both sweeps and the comparison once, and records all figures."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest

from lit_het.eval.metrics.significance import estimate
from lit_het.search import grid_runs
from lit_het.search.law import fitting, uncertainty
from lit_het.search.shape import fits, sweeps
from lit_het.tasks.classification import ClassificationConfig
from scripts.studies import study_shapes
from scripts.studies.study_shapes import METRIC, TOP1

BATCH_SIZE = 64


def cost(shape):
    """Returns GFLOP per example, about."""
    width, depth, mlp = shape.values()
    return 1e-8 * (width * 1379 + (depth + 1) * 4 * (4 * width**2 + 2 * width * mlp))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Does the study and yields its results, the names of the runs that are trained, and what repeats it.

    Runs are trained by a stub that knows a law; tracing is left out.
    """
    names, folder = [], tmp_path_factory.mktemp("study")

    def train(config, **_):
        names.append(config.run_dir.name)
        shape = sweeps.shape_of(config)
        t = cost(shape) * BATCH_SIZE * config.length.amount
        nll = sum(5 * x**-0.8 + 0.01 * x * t**-0.6 for x in shape.values()) + 10 * t**-0.6 + 0.5
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "train/loss": nll, METRIC: nll + 1e-3 * config.seed, TOP1: 1 / (1 + nll)}) + "\n"
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid_runs, "train_unless_done", train)
        patch.setattr(grid_runs, "abstract_params", lambda _: {})
        patch.setattr(sweeps, "_gflop_per_step", lambda config: BATCH_SIZE * cost(sweeps.shape_of(config)))
        patch.setattr(study_shapes, "write_data", lambda *_: None)
        patch.setattr(uncertainty, "RESAMPLES", 2)
        patch.setattr(uncertainty, "_PRECISION", 0.2)
        patch.setattr(fitting, "_STARTS_OF_C", (0.4,))
        patch.setattr(ClassificationConfig, "build", lambda _: None)
        # Fits take most of the time, and those of a repeated study are the same.
        patch.setattr(fits, "fit", functools.cache(fits.fit))

        def repeat(results, *more):
            flags = ("--output", folder / "runs", "--data", folder, "--results", results, *more)
            return study_shapes.main([str(flag) for flag in flags])

        assert repeat(folder / "results" / "shapes.json") == 0
        yield json.loads((folder / "results" / "shapes.json").read_text()), names, repeat


@pytest.mark.slow
def test_the_study_compares_equal_computes_and_is_not_repeated(study, tmp_path, capsys):
    found, trained, repeat = study
    assert len(trained) == len(set(trained)) == 27 + 4 + 30 + 9
    assert len(found["grid"]["runs"]) == 31
    assert len(found["star"]["runs"]) == 30
    assert found["star"]["fits"][TOP1]["metric"] == TOP1
    compared = found["compared"]
    start = found["grid"]["fits"][METRIC]["start_compute"]
    assert compared["budget"] == 4 * start
    for one in compared["shapes"].values():
        assert one["gflop"] == pytest.approx(4 * start, rel=0.01)
        assert len(one[METRIC]) == 3
    width, depth, mlp = compared["shapes"]["ViT-Ti"]["shape"].values()
    assert (depth, mlp) == (round(width / 16), 4 * width)
    trained.clear()
    assert repeat(tmp_path / "shapes.json") == 0
    assert repeat(tmp_path / "table.json", "--table") == 0
    assert (tmp_path / "table.json").read_text() == (tmp_path / "shapes.json").read_text()
    assert "hours of training in all" in capsys.readouterr().out
    assert not trained


@pytest.mark.slow
def test_runs_of_the_comparison_that_diverge_are_counted_or_refused(study, tmp_path, capsys, monkeypatch):
    repeat, results, read = study[2], tmp_path / "shapes.json", grid_runs.read_result

    def diverged(seeds):
        def read_result(path):
            result = read(path)
            has_diverged = path.parents[1].name == "compared" and result.seed in seeds
            return dataclasses.replace(result, figures={}) if has_diverged else result

        monkeypatch.setattr(grid_runs, "read_result", read_result)

    diverged({2})
    assert repeat(results) == 0
    found = json.loads(results.read_text())["compared"]["shapes"]
    assert [(one["diverged"], len(one[METRIC])) for one in found.values()] == [(1, 2)] * 3
    diverged({1, 2})
    assert repeat(results) == 1
    assert "1 run of predicted did not diverge; give more --seeds" in capsys.readouterr().err


def test_the_table_of_the_document_has_the_recorded_figures():
    root = Path(__file__).parents[3]
    shapes = json.loads((root / "docs/results/shapes.json").read_text())["compared"]["shapes"]
    lines = (root / "docs/shape_law.md").read_text().splitlines()
    for name, one in shapes.items():
        shape = ", ".join(map(str, one["shape"].values()))
        cells = [f"{name}: {shape}", f"{one['steps']:,}", f"{one['gflop']:.1f}"]
        cells += [estimate(one[metric]).shown(3) for metric in (METRIC, TOP1)]
        if "test" in one:
            low, high = one["test"]["interval"]
            cells += [f"{one['test']['difference']:.3f}", f"{low:.3f} to {high:.3f}", f"{one['test']['p_value']:.2f}"]
        assert any(line.startswith(f"| {' | '.join(cells)} |") for line in lines), cells
