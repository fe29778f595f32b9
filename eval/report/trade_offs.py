"""Points of cost and gain: their table, their figure, and their rows in files."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lit_het.eval.metrics.gains import Gain
from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.pareto import Point, front_of
from lit_het.eval.report import ensemble_sizes, figures
from lit_het.eval.report.exports import csv_text
from lit_het.eval.report.naming import FigureStyle
from lit_het.eval.report.page import Section, render_page
from lit_het.eval.report.tables import NO_FIGURE, Cell, Row, Table, in_markdown

ON_COST = (
    "GFLOP: matrix products and convolutions of a training step for one example, forward and backward, as lit-het plan "
    "counts them, without the dispatch of tokens to experts. A deep ensemble costs as much as its models together."
)
_GFLOP = "{:,.4g}"


def pareto_table(points: Sequence[Point], style: FigureStyle) -> Table:
    """Returns a row for each point in order of cost; the values of the Pareto front are bold."""
    front = front_of(points, higher_is_better=bool(style.higher_is_better))
    has_dispatch = any(point.cost.dispatch for point in points)
    rows = [
        Row(
            point.name,
            (
                Cell(str(len(point.runs))),
                Cell(_GFLOP.format(point.cost.gflop)),
                *([Cell(_GFLOP.format(point.cost.dispatch))] if has_dispatch else []),
                Cell(style.shown(point.value.mean, point.value.error), strong=point in front),
            ),
        )
        for point in points
    ]
    columns = ("runs", "GFLOP", *(["dispatch"] if has_dispatch else []), style.label)
    return Table("Mean ± standard error over runs; bold: the Pareto front", columns, tuple(rows))


def pareto_page(points: Sequence[Point], style: FigureStyle) -> str:
    """Returns a page with the points, their front, their table, and maps over the sizes of ensembles."""
    drawn = figures.scatter(
        f"{style.label.partition(',')[0].capitalize()} against operations",
        {point.name: (point.cost.gflop, point.value.mean) for point in points},
        "GFLOP of training, per example",
        style.label,
        "Bars and the band: one standard error over runs that differ only in their seeds.",
        errors={point.name: point.value.error for point in points},
        higher_is_better=bool(style.higher_is_better),
    )
    of = ", ".join(dict.fromkeys(point.figure for point in points))
    front = Section(of, (drawn, pareto_table(points, style).html()), ON_COST)
    return render_page("Pareto front", [front, *ensemble_sizes.sections(points, style)])


def pareto_markdown(points: Sequence[Point], style: FigureStyle) -> str:
    """Returns the table of the terminal."""
    return f"{pareto_table(points, style).markdown()}\n{in_markdown(ON_COST)}\n"


def pareto_csv(points: Sequence[Point], style: FigureStyle) -> str:
    """Returns a line for each point, in full precision; missing numbers are empty."""
    return _csv(_rows_of_points(points, style))


def pareto_json(points: Sequence[Point], style: FigureStyle) -> str:
    """Returns the points in full precision; values that are not finite are null."""
    return _json(_rows_of_points(points, style))


def gains_table(gains: Sequence[Gain]) -> Table:
    """Returns a row for each pair of settings, in order of cost."""
    rows = [
        Row(
            f"{gain.method.name} over {gain.baseline.name}",
            (
                Cell(_GFLOP.format(gain.method.cost.gflop)),
                Cell(_GFLOP.format(gain.baseline.cost.gflop)),
                *(Cell(_shown_share(share)) for share in (gain.improvement, gain.normalized)),
            ),
        )
        for gain in gains
    ]
    columns = ("GFLOP", "of the baseline", "improvement", "normalised")
    return Table("Relative improvements ± standard error over runs", columns, tuple(rows))


def gains_markdown(gains: Sequence[Gain]) -> str:
    """Returns the table of the terminal."""
    return f"{gains_table(gains).markdown()}\n{in_markdown(ON_COST)}\n"


def gains_csv(gains: Sequence[Gain]) -> str:
    """Returns a line for each pair of settings, in full precision; missing numbers are empty."""
    return _csv([_row_of_gain(gain) for gain in gains])


def gains_json(gains: Sequence[Gain]) -> str:
    """Returns the gains in full precision; values that are not finite are null."""
    return _json([_row_of_gain(gain) for gain in gains])


def _rows_of_points(points: Sequence[Point], style: FigureStyle) -> list[dict[str, Any]]:
    front = front_of(points, higher_is_better=bool(style.higher_is_better))
    return [{**_row_of_point(point), "in_front": point in front} for point in points]


def _row_of_point(point: Point) -> dict[str, Any]:
    return {
        "name": point.name,
        "figure": point.figure,
        "runs": list(point.runs),
        "gflop": point.cost.gflop,
        "dispatch_gflop": point.cost.dispatch,
        "mean": point.value.mean,
        "error": point.value.error,
    }


def _row_of_gain(gain: Gain) -> dict[str, Any]:
    return {
        "method": gain.method.name,
        "baseline": gain.baseline.name,
        "method_gflop": gain.method.cost.gflop,
        "baseline_gflop": gain.baseline.cost.gflop,
        "improvement": gain.improvement.mean,
        "improvement_error": gain.improvement.error,
        "normalized": gain.normalized.mean,
        "normalized_error": gain.normalized.error,
    }


def _json(rows: Sequence[Mapping[str, Any]]) -> str:
    finite = [{name: None if _is_missing(value) else value for name, value in row.items()} for row in rows]
    return json.dumps(finite, indent=1, ensure_ascii=False) + "\n"


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    def cell(value: Any) -> Any:
        return "" if _is_missing(value) else " ".join(value) if isinstance(value, list) else value

    return csv_text(tuple(rows[0]), [{name: cell(value) for name, value in row.items()} for row in rows])


def _is_missing(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _shown_share(share: Estimate) -> str:
    error = "" if math.isnan(share.error) else f" ± {100 * share.error:.2f}"
    return NO_FIGURE if math.isnan(share.mean) else f"{share.mean:+.2%}{error}"
