"""``lit-het shape deviate``: shapes around an optimal one, each trained with the same compute (SoViT Fig. 6)."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError
from lit_het.eval.metrics.significance import estimate
from lit_het.eval.report.tables import Cell, Row, Table
from lit_het.eval.report.writing import print_results
from lit_het.search import grid, grid_runs
from lit_het.search.grid_runs import Planned
from lit_het.search.law.observations import Observation, shown_shape
from lit_het.search.law.scaling import MULTIPLE
from lit_het.search.shape import sweeps
from lit_het.search.shape.sweeps import Sweep
from lit_het.training.durations import Duration, RunLength


def deviate(
    config: ExperimentConfig,
    output: Path,
    metrics: Sequence[str],
    *,
    centre: Mapping[str, int],
    vary: Mapping[str, Sequence[int]],
    factors: Sequence[float] = (),
    multiple: int = MULTIPLE,
    seeds: Sequence[int] = (0,),
    only_plan: bool = False,
) -> Sweep:
    """Trains a shape, and those that differ from it in one dimension, each for as many steps as its compute lasts.

    Args:
        config: of all runs; its length is that of the shape in the centre, and all have the compute of this run.
        output: folder of the sweep.
        metrics: that every run must have; the first is in the table.
        centre: values of the optimal shape that differ from the configuration's.
        vary: values by dimension, below or above.
        factors: of the centre, for dimensions without values.
        multiple: of which values by factors are multiples.
        seeds: of every shape.
        only_plan: whether nothing is trained or written.
    """
    sweeps.loss_name(metrics[0])  # before the training
    config = sweeps.with_shape(config, centre)
    planned = plan(config, shapes_of(config, vary, factors, multiple), seeds, output)
    found = sweeps.describe("deviations", config, planned)
    for line in sweeps.listed(found):
        print(line)
    if not only_plan:
        grid_runs.check_folder(planned, output)
        found = sweeps.save(found, output)
        grid.run(planned, output, tuple(metrics))
        print_results(table(sweeps.observations(found, output, metrics[0]), found.centre, metrics[0]))
    return found


def shapes_of(
    config: ExperimentConfig, vary: Mapping[str, Sequence[int]], factors: Sequence[float], multiple: int
) -> list[dict[str, int]]:
    """Returns the shape of a configuration, and those that differ from it in one dimension."""
    whole = sweeps.shape_of(config)
    values = sweeps.values_of(whole, vary, factors, sweeps.multiples_of(config, multiple))
    others = [{**whole, name: value} for name, spoke in values.items() for value in spoke if value != whole[name]]
    if not others:
        raise UserError("all shapes are the centre; give other values with --vary or --factors")
    return [whole, *others]


def plan(
    config: ExperimentConfig, shapes: Sequence[Mapping[str, int]], seeds: Sequence[int], output: Path
) -> list[Planned]:
    """Returns runs of equal compute, up to half a step; the schedule of each is that of its own length."""
    if config.length.unit == "epochs":
        raise UserError(f"length {config.length}: give steps or examples, so that the compute is known before training")
    num_steps = RunLength.resolve(config.length, config.data.batch_size, None).num_steps
    budget = num_steps * sweeps.gflop_per_example(config)
    planned = []
    for shape in shapes:
        steps = math.floor(budget / sweeps.gflop_per_example(sweeps.with_shape(config, shape)) + 0.5)
        planned += sweeps.plan(config, [shape], [Duration(max(1, steps))], seeds, output)
    return planned


def table(observed: Sequence[Observation], centre: Mapping[str, float], metric: str) -> Table:
    """Returns the loss of each shape, means over seeds with standard errors, and how far it is above the centre's."""
    losses: dict[tuple[float, ...], list[float]] = {}
    for one in observed:
        losses.setdefault(tuple(one.shape.values()), []).append(one.loss)
    of_centre = losses.get(tuple(map(float, centre.values())), [math.nan])
    base = sum(of_centre) / len(of_centre)
    rows = []
    for shape, values in losses.items():
        found = estimate(values)
        more = Cell("" if math.isnan(base) else f"{found.mean / base - 1:+.2%}")
        name = shown_shape(dict(zip(centre, shape, strict=True)))
        rows.append(Row(name, (Cell(found.shown(4)), more, Cell(str(len(values))))))
    loss = sweeps.loss_name(metric)
    return Table("Shapes of equal compute", (loss, "above the centre", "seeds"), tuple(rows))
