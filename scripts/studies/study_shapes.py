"""Applies the method of SoViT to small ViTs on the glyph data, and tests the predicted shape (docs/shape_law.md).

    python -m scripts.studies.study_shapes --output runs/shapes

A grid and a star sweep (`lit-het shape grid` and `star`) give a start and exponents. The shape for 4 times the compute
of the start is then trained beside those with the proportions of ViT-B and ViT-Ti at equal compute, over seeds; sweeps
have seed 0. Finished runs are skipped, interrupted ones continue, and processes with the same output share the runs.
"""

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_het.apps.quickstart.running import write_data
from lit_het.configs import glyph_classifier, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError, pluralize
from lit_het.eval.metrics.significance import welch
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.search import grid, grid_runs
from lit_het.search.law import uncertainty
from lit_het.search.law.scaling import PUBLISHED_EXPONENTS
from lit_het.search.shape import budgets, fits, sweeps
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from scripts.studies import harness

SET = "held_out_typeface"
METRIC = f"supervised/{SET}/nll"
TOP1 = f"supervised/{SET}/top1"
CENTRE = {"width": 128, "depth": 4, "mlp": 512}
SPOKES = {"width": (32, 56, 96), "depth": (1, 2, 3), "mlp": (32, 96, 288)}
LENGTHS = "600 steps", "1200 steps", "2400 steps"
GRID = {"width": (32, 48, 72), "depth": (1, 2, 3), "mlp": (64, 128, 256)}
# Of the first grid the largest width was best, so that it is extended, as in SoViT App. B.3.
EXTENSION = {"width": (104, 152), "depth": (1,), "mlp": (128, 256)}
GRID_LENGTH = "1200 steps"
# Sizes are small, so that multiples of 16 would be coarse; 4 are the heads.
MULTIPLE = 4
GROWTH = 4
# Width per block of ViT-B (768, 12, 3072) and of the smallest published ViT (192, 12, 768).
VITS = {"ViT-B": 64, "ViT-Ti": 16}
MLP_PER_WIDTH = 4


def configuration(data: Path, output: Path) -> ExperimentConfig:
    """Returns the run that all others are made of: the glyph classifier with 4 patches and a deterministic head."""
    config = glyph_classifier.get_config(output, DeterministicConfig())
    tower = dataclasses.replace(config.task.require_image_tower(), patch_size=16)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, image_tower=tower),
        data=dataclasses.replace(config.data, shards=(str(data / "train"),)),
        evaluations=(ZeroShotConfig(ImageSet(SET, str(data / SET), split=".")),),
        schedule=Schedule(learning_rate=3e-3, warmup=Duration(100)),
        cadence=Cadence(log_steps=100, save_steps=1200),
    )


def sweep(config: ExperimentConfig, output: Path) -> None:
    """Trains both sweeps."""
    for values in (GRID, EXTENSION):
        sweeps.sweep("grid", config, output / "grid", [METRIC], centre={}, vary=values, lengths=[GRID_LENGTH])
    sweeps.sweep(
        "star", config, output / "star", [METRIC], centre=CENTRE, vary=SPOKES, lengths=LENGTHS, with_centre=True
    )


def predicted(config: ExperimentConfig, output: Path) -> tuple[dict[str, int], float]:
    """Returns the shape by the fits of both sweeps, and its budget in GFLOP.

    The published exponents stand for those that the star does not identify.
    """
    star, start = fits.read(output / "star"), budgets.start_of(output / "grid", None)
    found = {name: PUBLISHED_EXPONENTS[name] if name in star.unidentified else s for name, s in star.exponents.items()}
    budget = GROWTH * start.compute
    return budgets.scaled(start, budget, found, config, multiple=MULTIPLE).shape, budget


def proportions_of_vit(config: ExperimentConfig, width_per_block: int, cost: float) -> dict[str, int]:
    """Returns the shape with the proportions of a ViT whose cost is closest, in GFLOP of training per example."""
    nearest, gap = {}, math.inf
    for width in itertools.count(MULTIPLE, MULTIPLE):
        shape = {"width": width, "depth": max(1, round(width / width_per_block)), "mlp": MLP_PER_WIDTH * width}
        own = sweeps.gflop_per_example(sweeps.with_shape(config, shape))
        if abs(own - cost) < gap:
            nearest, gap = shape, abs(own - cost)
        if own > cost:
            break
    return nearest


def compare(config: ExperimentConfig, output: Path, seeds: Sequence[int], *, trains: bool) -> dict[str, Any]:
    """Trains the predicted shape and those of ViTs with equal compute; returns all with their figures and tests."""
    shape, budget = predicted(config, output)
    cost = sweeps.gflop_per_example(sweeps.with_shape(config, shape))
    shapes = {"predicted": shape} | {name: proportions_of_vit(config, ratio, cost) for name, ratio in VITS.items()}
    found: dict[str, Any] = {}
    for name, one in shapes.items():
        own = sweeps.gflop_per_example(sweeps.with_shape(config, one))
        steps = round(budget / own / config.data.batch_size)
        planned = sweeps.plan(config, [one], [Duration(steps)], seeds, output / "compared")
        if trains:
            grid.run(planned, output / "compared", (METRIC,))
        of_all = [grid_runs.read_result(grid_runs.result_path(output / "compared", run.name)) for run in planned]
        # A run that diverged has no metrics.
        results = [result for result in of_all if METRIC in result.figures]
        if len(results) < 2:
            raise UserError(f"{pluralize(len(results), 'run')} of {name} did not diverge; give more --seeds")
        found[name] = {
            "shape": one,
            "steps": steps,
            "gflop": own * config.data.batch_size * steps,
            "diverged": len(of_all) - len(results),
            "num_parameters": results[0].num_parameters,
            "seconds": [result.seconds for result in results],
            **{metric: [result.figures[metric] for result in results] for metric in (METRIC, TOP1)},
        }
        if name in VITS:
            test = welch(found["predicted"][METRIC], found[name][METRIC])
            print(f"predicted - {name}: {test.difference:.4f}, 95 % interval {test.interval}")
            found[name]["test"] = dataclasses.asdict(test)
    return {"budget": budget, "shapes": found}


def recorded(output: Path, kind: str) -> dict[str, Any]:
    """Returns the runs of a sweep and its fits by both metrics; the fit by `METRIC` remains in the folder."""
    folder, runs, found = output / kind, [], {}
    for run in sweeps.load(folder).runs:
        result = grid_runs.read_result(grid_runs.result_path(folder, run.name))
        figures = {name: result.figures.get(name) for name in (METRIC, TOP1)}
        runs.append({**run.shape, "length": run.length, "gflop": run.gflop, **figures, "seconds": result.seconds})
    for metric in (TOP1, METRIC):
        found[metric] = dataclasses.asdict(
            fits.read(fits.fit(folder, metric, None, uncertainty.LEVEL, uncertainty.RESAMPLES))
        )
    return {"runs": runs, "fits": found}


def study(options: argparse.Namespace) -> None:
    """Trains what is not finished, and writes the results of both sweeps and of the comparison."""
    config = configuration(options.data, options.output)
    if not options.table:
        write_data(options.data, quickstart_upstream.glyphs())
        sweep(config, options.output)
    found = {kind: recorded(options.output, kind) for kind in ("grid", "star")}
    compared = compare(config, options.output, options.seeds, trains=not options.table)
    seconds = [run["seconds"] for kind in found.values() for run in kind["runs"]]
    seconds += [one for shape in compared["shapes"].values() for one in shape["seconds"]]
    hours = sum(seconds) / 3600
    harness.write_json(options.results, {**found, "compared": compared, "hours": hours})
    print(f"{hours:.2f} hours of training in all; results: {options.results}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    parser = harness.study_parser(__doc__, "runs/shapes", data=True, seeds=(1, 2, 3))
    parser.add_argument("--results", type=Path, default=Path("docs/results/shapes.json"), metavar="FILE")
    return harness.run_study("study_shapes", study, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
