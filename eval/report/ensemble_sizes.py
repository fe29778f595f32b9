"""Maps and lines of models over E, K and M: sections of the page of ``lit-het compare --pareto``."""

import math
from collections.abc import Iterator, Mapping, Sequence

from lit_het.eval.ensemble_sizes import Family, Size, families_of, gains
from lit_het.eval.pareto import Point
from lit_het.eval.report import figures
from lit_het.eval.report.naming import FigureStyle
from lit_het.eval.report.page import Html, Section, side_by_side

_NOTE = (
    "E experts, of which a token has K; M predictions are averaged. The gain is over the least K and M: log10 of the "
    "gain in the figure for each GFLOP of training more, empty where nothing is gained."
)


def sections(points: Sequence[Point], style: FigureStyle) -> list[Section]:
    """Returns a section for each family of models that differ in E, K and M; none where models have one size."""
    found = []
    for family in families_of(points):
        bodies = (*_maps(family, style), side_by_side(*_lines(family, style)))
        found.append(Section(f"Sizes of ensembles; M counts {family.counted}", bodies, _NOTE))
    return found


def _maps(family: Family, style: FigureStyle) -> Iterator[Html]:
    """Yields three maps for each E (e3 Fig. 2)."""
    better = bool(style.higher_is_better)
    for grid in family.grids():
        experts = next(iter(grid)).E
        values = {size: point.value.mean for size, point in grid.items()}
        costs = {size: point.cost.gflop for size, point in grid.items()}
        parts = (
            (style.label, values, lambda value: style.shown(value, math.nan), better),
            ("GFLOP of training, per example", costs, "{:,.4g}".format, False),
            ("log10 of the gain per GFLOP", gains(grid, higher_is_better=better), "{:.2f}".format, True),
        )
        yield side_by_side(
            *(
                figures.heat_map(
                    f"E = {experts}: {name}", _cells(numbers), "K", "M", shown, higher_is_better=higher_is_better
                )
                for name, numbers, shown, higher_is_better in parts
            )
        )


def _cells(numbers: Mapping[Size, float]) -> dict[tuple[int, int], float]:
    return {(size.K, size.M): value for size, value in numbers.items()}


def _lines(family: Family, style: FigureStyle) -> Iterator[Html]:
    """Yields the figure over E, K and M, those in which models differ (e3 Fig. 12)."""
    for varied in Size._fields:
        lines = family.lines(varied)
        if not lines:
            continue
        drawn = {
            name: figures.Line(
                [getattr(size, varied) for size in sizes],
                [family.points[size].value.mean for size in sizes],
                [_finite(family.points[size].value.error) for size in sizes],
                colour=number,
            )
            for number, (name, sizes) in enumerate(lines.items())
        }
        numbers = sorted({getattr(size, varied) for sizes in lines.values() for size in sizes})
        ticks = {float(number): str(number) for number in numbers}
        caption = "Bars: one standard error over runs that differ only in their seeds."
        yield figures.plot(f"Over {varied}", drawn, varied, style.label, ticks=ticks, caption=caption)


def _finite(error: float) -> float:
    return error if math.isfinite(error) else 0.0
