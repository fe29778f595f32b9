"""What runs cost and what they reach: a point for each setting, over its seeds, and the Pareto front of the points."""

import dataclasses
import difflib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lit_het.errors import UserError
from lit_het.eval.evaluation import Record
from lit_het.eval.metrics.significance import Estimate, estimate
from lit_het.eval.report.figures import pareto_front
from lit_het.eval.report.naming import FigureStyle, split, style_of
from lit_het.eval.run_comparison import check_same_settings, figures_of
from lit_het.eval.saved_runs import SavedRun, by_setting

# Figures that a message lists, the most similar ones first.
_MOST_LISTED = 5


@dataclasses.dataclass(frozen=True)
class Cost:
    """Operations of a training step for one example, in GFLOP.

    Attributes:
        gflop: of matrix products and convolutions, without the dispatch of tokens to experts.
        dispatch: of products with one-hot vectors, which move tokens to experts and back.
    """

    gflop: float
    dispatch: float = 0.0


@dataclasses.dataclass(frozen=True)
class Point:
    """Runs that differ only in their seeds.

    Attributes:
        name: of the point.
        runs: their names.
        figure: what was measured, ``<kind>/<set>/<figure>``.
        cost: of one of them; of a deep ensemble, of all its members.
        value: mean and standard error over the runs.
        models: of a deep ensemble; 1 of a single model.
        settings: the dotted fields of the configuration of the runs.
    """

    name: str
    runs: tuple[str, ...]
    figure: str
    cost: Cost
    value: Estimate
    models: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)


def points_of(runs: Sequence[SavedRun], figures: Sequence[str], cost_of: Callable[[SavedRun], Cost]) -> list[Point]:
    """Returns a point for each setting and figure, in order of cost.

    Members of a deep ensemble count as models of the cost of the run that has the evaluation.

    Args:
        runs: of any settings; those without a figure have no point of it.
        figures: ``<kind>/<set>/<figure>``, such as ``zero_shot/pets/nll`` and ``deep_ensemble/pets/joint_nll``.
        cost_of: returns the cost of a run's model; it is called once for each setting.
    """
    found = []
    check_figures(runs, figures)
    for members in by_setting(runs):
        model, shared = cost_of(members[0]), _shared_name([run.name for run in members])
        settings = members[0].settings()
        for figure in figures:
            for models, alike in _by_models(members, figure).items():
                value = estimate([_value(run, figure) for run in alike])
                cost = Cost(models * model.gflop, models * model.dispatch)
                name = shared if models == 1 else f"{models} x {shared}"
                names = tuple(run.name for run in alike)
                found.append(Point(name, names, figure, cost, value, models, settings))
    return sorted(_with_own_names(found), key=lambda point: point.cost.gflop)


def direction(figures: Sequence[str]) -> FigureStyle:
    """Returns the style of figures that share an axis."""
    styles = {figure: style_of(split(figure.split("/", 2)[-1])[1]) for figure in figures}
    first = styles[figures[0]]
    for figure, style in styles.items():
        if style != first:
            raise UserError(f"{figure} and {figures[0]} cannot share an axis; name figures of one kind, such as nll")
    if first.higher_is_better is None:
        raise UserError(f"{figures[0]}: neither high nor low values are better; name another figure, such as nll")
    return first


def front_of(points: Sequence[Point], *, higher_is_better: bool) -> list[Point]:
    """Returns the points than which no other costs at most as much and is at least as good, in order of cost."""
    sign = -1.0 if higher_is_better else 1.0
    places = {(point.cost.gflop, sign * point.value.mean): point for point in reversed(points)}
    return [places[place] for place in pareto_front(list(places))]


def check_figures(runs: Sequence[SavedRun], figures: Sequence[str]) -> None:
    """Checks that figures are in some run, and were measured with the same settings in all runs that have them."""
    for figure in figures:
        having = [run for run in runs if _record(run, figure) is not None]
        if not having:
            known = {name for run in runs for name in figures_of(run.records.values())}
            similar = difflib.get_close_matches(figure, sorted(known), _MOST_LISTED, cutoff=0)
            raise UserError(f"no run has the figure {figure}; they have {', '.join(similar) or 'no evaluations'}")
        check_same_settings({run.name: _without_members(_record(run, figure)) for run in having})


def _record(run: SavedRun, figure: str) -> Record | None:
    kind, _, rest = figure.partition("/")
    name, _, path = rest.partition("/")
    record = run.records.get((kind, name))
    return record if record is not None and path in record.figures else None


def _value(run: SavedRun, figure: str) -> float:
    record = _record(run, figure)
    assert record is not None
    return record.figures[figure.split("/", 2)[2]]


def _by_models(runs: Sequence[SavedRun], figure: str) -> dict[int, list[SavedRun]]:
    """Returns the runs that have a figure, by the number of models that it is measured of."""
    found: dict[int, list[SavedRun]] = {}
    for run in runs:
        if (record := _record(run, figure)) is not None:
            found.setdefault(_num_models(record), []).append(run)
    return found


def _num_models(record: Record) -> int:
    """Returns the number of models of a deep ensemble; 1 for a single one."""
    checkpoints = record.settings.get("checkpoints")
    return len(checkpoints) if isinstance(checkpoints, list) else 1


def _without_members(record: Record | None) -> Record:
    assert record is not None
    # Ensembles of other numbers of models are other points.
    settings = {field: value for field, value in record.settings.items() if field != "checkpoints"}
    return dataclasses.replace(record, settings=settings)


def _shared_name(names: Sequence[str]) -> str:
    """Returns the words with which all names begin, or else end; without any, the first name."""
    words = [re.split(r"(?<=[/_\-. ])|(?=[/_\-. ])", name) for name in names]
    for parts, order in ((words, 1), ([name[::-1] for name in words], -1)):
        same = [group[0] for group in itertools.takewhile(lambda g: len(set(g)) == 1, zip(*parts, strict=False))]
        if shared := "".join(same[::order]).strip("/_-. "):
            return shared
    return names[0]


def _with_own_names(points: Sequence[Point]) -> Iterator[Point]:
    """Yields points whose names differ: of those with equal names, with the kind, and with the first run if need be."""
    for point in points:
        name = point.name
        kind = point.figure.partition("/")[0].replace("_", " ")
        equal = [other for other in points if other.name == name]
        if len({other.figure for other in equal}) > 1:
            name = f"{name}, {kind}"
        if len({other.runs for other in equal}) > 1:
            name = f"{name} ({point.runs[0]})"
        yield dataclasses.replace(point, name=name)
