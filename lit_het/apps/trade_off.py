"""``lit-het compare --pareto`` and ``--gains``: what runs reach, and at what cost of training."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from lit_het.console import Bar
from lit_het.errors import UserError
from lit_het.eval.metrics.gains import Gain, gains_of, mean_gains
from lit_het.eval.pareto import Cost, Point, check_figures, direction, points_of
from lit_het.eval.report import trade_offs
from lit_het.eval.report.naming import FigureStyle
from lit_het.eval.report.writing import print_results, write_files
from lit_het.eval.saved_runs import SavedRun, by_setting, read_runs
from lit_het.planning.plan import Step
from lit_het.sharding import MeshConfig
from lit_het.training.directory import load_config

_OF_PARETO: Mapping[str, Callable[[Sequence[Point], FigureStyle], str]] = {
    ".html": trade_offs.pareto_page,
    ".md": trade_offs.pareto_markdown,
    ".csv": trade_offs.pareto_csv,
    ".json": trade_offs.pareto_json,
}
_OF_GAINS: Mapping[str, Callable[[Sequence[Gain]], str]] = {
    ".md": trade_offs.gains_markdown,
    ".csv": trade_offs.gains_csv,
    ".json": trade_offs.gains_json,
}


def pareto(directories: Sequence[Path], names: Sequence[str], output: Path | None = None) -> list[Point]:
    """Prints the points of runs of any settings, and writes them to ``output`` if given.

    Args:
        directories: of the runs.
        names: figures ``<kind>/<set>/<figure>`` that share an axis.
        output: a file .html, with the figure, or .md, .csv or .json.
    """
    _check_output(output, _OF_PARETO)
    style, runs = direction(names), read_runs(directories)
    points = points_of(runs, names, _costs(runs, names))
    print_results(trade_offs.pareto_table(points, style), trade_offs.ON_COST)
    if output is not None:
        write_files({output: _OF_PARETO[output.suffix](points, style)})
    return points


def gains(
    directories: Sequence[Path], against: Sequence[Path], names: Sequence[str], output: Path | None = None
) -> list[Gain]:
    """Prints the improvements of runs over baselines at several costs, and writes them to ``output`` if given.

    Args:
        directories: runs of a method, of one or several settings.
        against: runs of the baseline, of as many settings.
        names: figures ``<kind>/<set>/<figure>`` that should be low; of several, the mean improvement.
        output: a file .md, .csv or .json.
    """
    _check_output(output, _OF_GAINS)
    for name in names:
        if direction([name]).higher_is_better:
            raise UserError(f"--gains {name}: name a figure that is better if it is lower, such as nll")
    runs = read_runs([*directories, *against])
    cost_of = _costs(runs, names)
    groups = runs[: len(directories)], runs[len(directories) :]
    found = [gains_of(*(points_of(group, [name], cost_of) for group in groups)) for name in names]
    means = mean_gains(found)
    print_results(trade_offs.gains_table(means), trade_offs.ON_COST)
    if output is not None:
        write_files({output: _OF_GAINS[output.suffix](means)})
    return means


def _costs(runs: Sequence[SavedRun], names: Sequence[str]) -> Callable[[SavedRun], Cost]:
    """Returns the cost of the first run of each setting; nothing is computed but shapes."""
    check_figures(runs, names)  # before the slow part
    settings, costs = by_setting(runs), {}
    with Bar("counting operations", len(settings), "settings") as bar:
        for members in settings:
            costs |= dict.fromkeys((run.name for run in members), _cost(members[0]))
            bar.advance(1)
    return lambda run: costs[run.name]


def _cost(run: SavedRun) -> Cost:
    config = load_config(run.directory)
    # The mesh of the run may need more devices than there are here.
    config = dataclasses.replace(config, mesh=MeshConfig())
    flops, dispatch = Step(config, config.mesh.build(jax.devices()[:1])).flops()
    unit = 1e9 * config.data.batch_size
    return Cost((flops - dispatch) / unit, dispatch / unit)


def _check_output(output: Path | None, writers: Mapping[str, Callable[..., str]]) -> None:
    if output is not None and output.suffix not in writers:
        raise UserError(f"--output {output}: its name must end in {', '.join(writers)}")
