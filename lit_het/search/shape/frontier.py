"""``lit-het shape frontier``: shapes and parameters over compute, and the error along the law (SoViT Fig. 1, Eq. 3)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_het import parameters
from lit_het.configs.experiment import ExperimentConfig
from lit_het.eval.report import figures
from lit_het.eval.report.figures import Line
from lit_het.eval.report.page import Html, Section, paragraph, render_page, side_by_side
from lit_het.eval.report.tables import NO_FIGURE, Cell, Row, Table
from lit_het.eval.report.writing import print_results, write_files
from lit_het.search.law.law import Law
from lit_het.search.law.observations import shown_shape
from lit_het.search.law.scaling import Scaled, scale
from lit_het.search.shape import sweeps
from lit_het.search.shape.budgets import Start
from lit_het.search.shape.page import logs, ticks_of

_TITLES = {"width": "Width", "depth": "Depth", "mlp": "MLP"}


@dataclasses.dataclass(frozen=True)
class Point:
    """A budget with its shape.

    Attributes:
        compute: in GFLOP.
        scaled: the shape.
        num_parameters: of the image tower with the rounded shape; None without a configuration.
        loss: f of the unrounded shape by Eq. 3; None without a law, NaN where it is not above 0.
    """

    compute: float
    scaled: Scaled
    num_parameters: int | None
    loss: float | None


def points(
    start: Start,
    budgets: Sequence[float],
    exponents: Mapping[str, float],
    multiples: Mapping[str, int],
    *,
    weights: Mapping[str, float] | None = None,
    config: ExperimentConfig | None = None,
    law: tuple[Law, Mapping[str, float]] | None = None,
) -> list[Point]:
    """Returns the frontier at several budgets.

    Args:
        start: the small shape.
        budgets: in GFLOP.
        exponents: see `scale`.
        multiples: see `scale`.
        weights: see `scale`.
        config: whose image tower gets the shapes, to count its parameters.
        law: of a star sweep with its centre, to predict f.
    """
    sweeps.check_dimensions(start.shape)
    found = []
    for budget in budgets:
        one = scale(start.shape, start.compute, budget, exponents, multiples, weights)
        count = None if config is None else tower_parameters(sweeps.with_shape(config, one.shape))
        loss = None if law is None else float(law[0].whole(one.exact, budget, law[1]))
        # No loss is negative: far from its sweep a law may say so.
        found.append(Point(budget, one, count, loss if loss is None or loss > 0 else math.nan))
    return found


def tower_parameters(config: ExperimentConfig) -> int:
    """Returns the number of parameters of the image tower of a configuration; nothing is computed."""
    return parameters.count(config.task.build().shapes["image_tower"])


def table(found: Sequence[Point], loss: str) -> Table:
    """Returns the shape of each budget, with its parameters and its loss where these are known."""
    has_parameters, has_loss = found[0].num_parameters is not None, found[0].loss is not None
    columns = ("shape", *(("parameters",) * has_parameters), *((f"{loss}, predicted",) * has_loss))
    rows = []
    for one in found:
        cells = [Cell(shown_shape(one.scaled.shape))]
        cells += [Cell(f"{one.num_parameters / 1e6:.1f} M")] if one.num_parameters is not None else []
        if one.loss is not None:
            cells.append(Cell(NO_FIGURE, faint=True) if math.isnan(one.loss) else Cell(f"{one.loss:.4g}"))
        rows.append(Row(f"{one.compute:.3g} GFLOP", tuple(cells)))
    return Table("Frontier", columns, tuple(rows))


def write(found: Sequence[Point], start: Start, loss: str, output: Path, warning: str = "") -> None:
    """Prints the table, and writes a page with it and its curves.

    Args:
        found: the points.
        start: the small shape.
        loss: name of what the law predicts; empty without a law.
        output: path of the page.
        warning: what speaks against the law, or nothing.
    """
    made = table(found, loss)
    print_results(made)
    if warning:
        print(f"warning: {warning}")
    compute = [one.compute for one in found]
    sizes = {name: [one.scaled.exact[name] for one in found] for name in start.shape}
    drawn = [_curve(_TITLES[name], compute, values, name) for name, values in sizes.items()]
    counts = [one.num_parameters / 1e6 for one in found if one.num_parameters is not None]
    if counts:
        drawn.append(_curve("Parameters", compute, counts, "millions"))
    body: list[Html] = [side_by_side(*drawn)]
    losses = [one.loss for one in found if one.loss is not None]
    if any(map(math.isfinite, losses)):
        axes = [("Error over compute", compute, "GFLOP of training")]
        axes += [("Error over parameters", counts, "millions of parameters")] if counts else []
        shown = (
            figures.plot(title, {"Eq. 3": Line(logs(x), losses)}, label, loss, ticks=ticks_of(x))
            for title, x, label in axes
        )
        body.append(side_by_side(*shown))
    of_start = f"From {shown_shape(start.shape)} at {start.compute:.4g} GFLOP"
    body += [made.html(), *(paragraph(f"{text}.") for text in (of_start, start.warning, warning) if text)]
    section = Section("Frontier", tuple(body), "As in SoViT Fig. 1.")
    page = render_page("Shapes over compute", [section], _verdict(found))
    write_files({output: page})


def _verdict(found: Sequence[Point]) -> str:
    first, last = found[0], found[-1]
    if first is last:
        return f"{first.compute:.3g} GFLOP: {shown_shape(first.scaled.shape)}"
    grown = (f"{name} {value} to {last.scaled.shape[name]}" for name, value in first.scaled.shape.items())
    return f"{first.compute:.3g} to {last.compute:.3g} GFLOP: {', '.join(grown)}"


def _curve(title: str, compute: Sequence[float], values: Sequence[float], label: str) -> Html:
    return figures.plot(
        title,
        {title: Line(logs(compute), values)},
        "GFLOP of training",
        label,
        ticks=ticks_of(compute),
        logarithmic=True,
    )
