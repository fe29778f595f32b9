"""Figures of reports: curves, lines, points with errors, reliability diagrams and distributions."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from lit_het.eval.metrics.calibration import ReliabilityCurve
from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.report.canvas import INK, LINE, MUTED, SERIES, WIDTH_INCHES, canvas, framed, stacked_canvas
from lit_het.eval.report.page import NOTHING, NUM_COLOURS, Html, legend, side_by_side

# Bins of reliability diagrams with so few examples are faded: their accuracy says little.
_FEW, _FADED = 2, 0.3
# Characters of a name beside a figure.
_LONGEST_NAME = 36


@dataclasses.dataclass(frozen=True)
class Chart:
    """One small chart of training curves.

    Attributes:
        metric: key of the records, such as ``train/loss``.
        title: heading.
        logarithmic: whether the vertical axis is logarithmic.
    """

    metric: str
    title: str
    logarithmic: bool = False


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        x, y: points; NaN in y makes a gap.
        error: standard errors of y; empty for none.
        band: lower and upper bounds around each point; None for no band.
        colour: index of its colour; indices beyond the palette are dashed. None is a faint line, for chance.
        bold: whether the line is emphasised.
        joined: whether points are joined; otherwise they are dots.
    """

    x: Sequence[int | float]
    y: Sequence[float]
    error: Sequence[float] = ()
    band: tuple[Sequence[float], Sequence[float]] | None = None
    colour: int | None = 0
    bold: bool = False
    joined: bool = True


def training_charts(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Chart]:
    """Returns the charts of training metrics that at least one run recorded."""
    charts = (
        Chart("train/loss", "Loss, nats"),
        Chart("train/learning_rate", "Learning rate"),
        Chart("train/temperature", "Temperature τ", logarithmic=True),
        Chart("train/image_noise_norm", "Noise norm of images"),
        Chart("train/text_noise_norm", "Noise norm of texts"),
        Chart("train/image_noise_alignment", "Noise of images along keys / isotropic"),
        Chart("train/text_noise_alignment", "Noise of texts along keys / isotropic"),
        Chart("train/image_noise_rank", "Effective rank of the noise of images"),
        Chart("train/text_noise_rank", "Effective rank of the noise of texts"),
        Chart("train/covariance_signal_to_noise", "Signal-to-noise ratio of the gradient of Σ"),
    )
    records = [record for history in histories.values() for record in history]
    # A head without noise records noise norms of zero, which need no chart.
    return [chart for chart in charts if any(record.get(chart.metric) for record in records)]


def curves(histories: Mapping[str, Sequence[Mapping[str, Any]]], charts: Sequence[Chart]) -> Html:
    """Returns training curves of several runs, with one chart per metric.

    Args:
        histories: the records of each run: mappings with ``step`` and metrics. Records and runs without the metric of a
            chart are left out.
        charts: to draw.
    """
    plots = [_curve_chart(histories, chart) for chart in charts]
    return Html(legend({name: number for number, name in enumerate(histories)}) + side_by_side(*plots))


def _curve_chart(histories: Mapping[str, Sequence[Mapping[str, Any]]], chart: Chart) -> Html:
    figure, axes = canvas(2.5)
    finals, drawn = list[str](), list[float]()
    for number, (name, records) in enumerate(histories.items()):
        points = [(record["step"], record[chart.metric]) for record in records if record.get(chart.metric) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            marker = "o" if len(points) == 1 else None
            axes.plot(steps, values, **_stroke(number), linewidth=1.6, marker=marker)
            finals.append(f"{name} ends at {values[-1]:.4g}")
            drawn += values
    if not finals:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=MUTED)
    if chart.logarithmic:
        _make_logarithmic(axes, drawn)
    axes.set_xlabel("step")
    return framed(chart.title, figure, "; ".join(finals))


def plot(
    title: str,
    lines: Mapping[str, Line],
    x_label: str,
    y_label: str,
    *,
    ticks: Mapping[float, str] | None = None,
    as_share: bool = False,
    logarithmic: bool = False,
    caption: str = "",
) -> Html:
    """Returns a plot of several lines with a legend.

    Args:
        title: heading.
        lines: by name.
        x_label: label of the horizontal axis.
        y_label: label of the vertical axis, with its unit.
        ticks: tick labels by position on the horizontal axis; None for numbers.
        as_share: whether y are fractions, shown in per cent.
        logarithmic: whether the vertical axis is logarithmic.
        caption: plain text below the plot.
    """
    figure, axes = canvas(2.9)
    for line in lines.values():
        stroke = {"color": MUTED, "linestyle": ":"} if line.colour is None else _stroke(line.colour)
        width = 2.6 if line.bold else 1.3
        has_dots = not line.joined or (line.colour is not None and len(line.x) < 12)
        marker = {"marker": "o", "markersize": 4 if line.bold else 3} if has_dots else {}
        if not line.joined:
            stroke["linestyle"] = "none"
        if line.band is not None:
            axes.fill_between(line.x, *line.band, color=stroke["color"], alpha=0.2, linewidth=0)
        if len(line.error):
            axes.errorbar(line.x, line.y, line.error, **stroke, **marker, linewidth=width, capsize=3)
        else:
            axes.plot(line.x, line.y, **stroke, **marker, linewidth=width, zorder=3 if line.bold else 2)
    if logarithmic:
        _make_logarithmic(axes, [y for line in lines.values() for y in line.y])
    if ticks is not None:
        axes.set_xticks(list(ticks), list(ticks.values()))
    if as_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(xlabel=x_label, ylabel=y_label)
    names = {name: line.colour for name, line in lines.items() if [*lines] != [title]}
    return framed(title, figure, caption, legend(names) if names else NOTHING)


def dots(title: str, values: Mapping[str, Estimate], *, chance: float | None = None, as_share: bool = False) -> Html:
    """Returns named values one below the other, with bars of one standard error where it is known.

    Args:
        title: heading.
        values: by name.
        chance: value of a guess, a dotted line; None for none.
        as_share: whether values are fractions, shown in per cent.
    """
    figure, axes = canvas(0.8 + 0.28 * len(values), 1.2 * WIDTH_INCHES)
    for number, value in enumerate(values.values()):
        error = value.error if math.isfinite(value.error) else None
        axes.errorbar(value.mean, number, xerr=error, marker="o", color=SERIES[number % NUM_COLOURS], capsize=3)
    if chance is not None:
        axes.axvline(chance, color=MUTED, linewidth=1, linestyle=":")
    # Longer names would leave no room; the beginning is what runs share.
    names = [name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}" for name in values]
    axes.set_yticks(range(len(values)), names, color=INK)
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=LINE, linewidth=0.6)
    if as_share:
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    return framed(title, figure, "Bars: one standard error." + (" Dotted: chance." if chance is not None else ""))


def scatter(
    title: str,
    points: Mapping[str, tuple[float, float]],
    x_label: str,
    y_label: str,
    caption: str = "",
    *,
    errors: Mapping[str, float] | None = None,
    higher_is_better: bool = False,
) -> Html:
    """Returns named points, of which those that no other point beats in both coordinates are joined (the Pareto front).

    Args:
        title: heading.
        points: positive x, on a logarithmic axis, and y, by name; smaller x is better.
        x_label: label of the horizontal axis, with its unit.
        y_label: label of the vertical axis, with its unit.
        caption: plain text below the figure.
        errors: standard errors of y, by name; NaN for none. The front has a band of one of them.
        higher_is_better: whether larger y is better.
    """
    # Names take the half of the width.
    figure, axes = canvas(1.5 + 0.22 * max(4, len(points)), 1.7 * WIDTH_INCHES)
    errors = {name: error for name, error in (errors or {}).items() if math.isfinite(error)}
    sign = -1 if higher_is_better else 1
    front = [(x, sign * y) for x, y in pareto_front([(x, sign * y) for x, y in points.values()])]
    _draw_front(
        axes, front, [max(errors.get(name, 0.0) for name in points if points[name] == place) for place in front]
    )
    _spread_costs(axes, [x for x, _ in points.values()])
    # Names stand in a column beside the points, in the order of y, so that none covers another.
    by_height = sorted(points.items(), key=lambda item: item[1][1])
    for number, (name, (x, y)) in enumerate(by_height):
        colour = SERIES[1] if (x, y) in front else SERIES[0]
        axes.errorbar(x, y, errors.get(name), marker="o", markersize=4, color=colour, elinewidth=1.2, capsize=2.5)
        place = (1.03, 0.02 + 0.96 * number / max(1, len(points) - 1))
        style = {"arrowstyle": "-", "color": LINE, "linewidth": 0.6, "relpos": (0, 0.5)}
        axes.annotate(
            name, (x, y), place, textcoords="axes fraction", va="center", fontsize=8, color=INK, arrowprops=style
        )
    low = min(y - errors.get(name, 0.0) for name, (_, y) in points.items())
    high = max(y + errors.get(name, 0.0) for name, (_, y) in points.items())
    margin = 0.08 * (high - low) or 0.1
    axes.set(xlabel=x_label, ylabel=y_label, ylim=(low - margin, high + margin))
    return framed(title, figure, caption)


def heat_map(
    title: str,
    cells: Mapping[tuple[int, int], float],
    x_label: str,
    y_label: str,
    shown: Callable[[float], str],
    *,
    higher_is_better: bool,
) -> Html:
    """Returns a map of numbers at pairs of numbers, brighter where it is better; NaN and pairs without one are empty.

    Args:
        title: heading.
        cells: by x and y.
        x_label: name of x.
        y_label: name of y.
        shown: the text of a number.
        higher_is_better: whether larger numbers are better.
    """
    columns, rows = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    values = np.array([[cells.get((x, y), math.nan) for x in columns] for y in rows])
    figure, axes = canvas(1.1 + 0.5 * len(rows), 1.1 + 0.8 * len(columns))
    axes.grid(visible=False)
    brightness = values if higher_is_better else -values
    axes.pcolormesh(brightness, cmap="viridis", edgecolors=LINE, linewidth=0.6)
    middle = (np.nanmin(brightness) + np.nanmax(brightness)) / 2 if np.isfinite(brightness).any() else 0.0
    for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
        # Colours of cells are the same in light and dark mode, so are those of numbers on them.
        colour = "#000000" if brightness[row, column] > middle else "#ffffff"
        text = shown(float(values[row, column]))
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(np.arange(len(columns)) + 0.5, list(map(str, columns)))
    axes.set_yticks(np.arange(len(rows)) + 0.5, list(map(str, rows)))
    axes.set(xlabel=x_label, ylabel=y_label)
    return framed(title, figure, "")


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points than which no other is smaller in both coordinates, nor in one and equal in the other."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _draw_front(axes: Axes, front: Sequence[tuple[float, float]], errors: Sequence[float]) -> None:
    """Draws the best value that each cost reaches, from point to point, with a band of one standard error."""
    x, y = (np.array(values) for values in zip(*front, strict=True))
    axes.step(x, y, where="post", color=MUTED, linestyle=":", linewidth=1.2)
    if any(errors):
        axes.fill_between(x, y - errors, y + errors, step="post", color=MUTED, alpha=0.15, linewidth=0)


def _spread_costs(axes: Axes, costs: Sequence[float]) -> None:
    """Makes the horizontal axis logarithmic, unless all costs are alike."""
    ratio = max(costs) / min(costs)
    if ratio < 2:
        axes.margins(x=0.1)
        return
    axes.set_xscale("log")
    # Few labels, as they stand side by side.
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if ratio >= 10 else (1, 2, 3, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _make_logarithmic(axes: Axes, values: Sequence[float]) -> None:
    axes.set_yscale("log")
    # Within a power of ten there may be one of three numbers, by which nothing can be read.
    positive = [value for value in values if value > 0]
    is_narrow = max(positive, default=1) <= 10 * min(positive, default=1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, *range(2, 10)) if is_narrow else (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _stroke(number: int) -> dict[str, Any]:
    """Returns the line style of a series; series beyond the palette reuse its colours, dashed."""
    return {"color": SERIES[number % NUM_COLOURS], "linestyle": "-" if number < NUM_COLOURS else "--"}


def reliability_diagrams(reliabilities: Mapping[str, ReliabilityCurve], examples: str = "images") -> Html:
    """Returns a reliability diagram per model: accuracy against confidence, above a histogram of confidence.

    Args:
        reliabilities: by the name of the model.
        examples: what has a confidence.
    """
    curves = enumerate(reliabilities.items())
    return side_by_side(*(_reliability(name, curve, n % NUM_COLOURS, examples) for n, (name, curve) in curves))


def _reliability(name: str, curve: ReliabilityCurve, number: int, examples: str) -> Html:
    figure, axes, counts = stacked_canvas(4.2)
    is_few = (curve.count > 0) & (curve.count <= _FEW)
    width, colour = np.diff(curve.edges), SERIES[number]
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=":")
    for bins, alpha, line in ((curve.count > _FEW, 1.0, "-"), (is_few, _FADED, "none")):
        heights = curve.accuracy[bins]
        axes.bar(curve.edges[:-1][bins], heights, width[bins], align="edge", color=colour, alpha=0.22 * alpha, lw=0)
        place = curve.confidence[bins], heights
        axes.plot(*place, color=colour, alpha=alpha, marker="o", markersize=4, linewidth=1.6, linestyle=line)
    axes.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    counts.bar(curve.edges[:-1], curve.count, width, align="edge", color=colour, alpha=0.6, lw=0)
    counts.set(xlabel="confidence", ylabel=examples)
    caption = (
        f"Calibration error {curve.expected_calibration_error:.1%} over {curve.count.sum():,} {examples}; "
        "points under the dotted line are overconfident."
        f"{f' Faded: bins of at most {_FEW} {examples}.' if is_few.any() else ''}"
    )
    return framed(name, figure, caption)


def distribution(
    title: str, groups: Mapping[str, Float[np.ndarray, " n"]], x_label: str, caption: str = "", bins: int = 40
) -> Html:
    """Returns overlaid histograms of groups of values, as shares of each group, with medians as vertical lines.

    Args:
        title: heading.
        groups: values of each group; at most as many groups as colours. The first group has the second colour of the
            palette, which is the most salient.
        x_label: name of the values, with their unit.
        caption: plain text below the figure, such as the result of a test.
        bins: number of bins of equal width over the range of all values.
    """
    figure, axes = canvas(2.9)
    edges = np.histogram_bin_edges(np.concatenate(list(groups.values())), bins=bins)
    palette = [1, 0, *range(2, NUM_COLOURS)][: len(groups)]
    for number, values in zip(palette, groups.values(), strict=True):
        shares = np.histogram(values, edges)[0] / values.size
        axes.stairs(shares, edges, color=SERIES[number], fill=True, alpha=0.25, linewidth=0)
        axes.stairs(shares, edges, color=SERIES[number], linewidth=1.4)
        axes.axvline(float(np.median(values)), color=SERIES[number], linewidth=1.4, linestyle="--")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set(xlabel=x_label, ylabel="share of its group")
    axes.set_ylim(bottom=0)
    names = (f"{name} (n = {values.size:,})" for name, values in groups.items())
    caption = f"{caption} Dashed lines: medians.".strip()
    return framed(title, figure, caption, legend(dict(zip(names, palette, strict=True))))
