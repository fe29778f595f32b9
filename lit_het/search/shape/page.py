"""``lit-het shape plot``: a page with figures as in SoViT Fig. 3 to 6."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from lit_het.errors import UserError
from lit_het.eval.report import figures
from lit_het.eval.report.figures import Line
from lit_het.eval.report.page import Html, Section, paragraph, render_page, side_by_side
from lit_het.eval.report.writing import write_files
from lit_het.search.law import uncertainty
from lit_het.search.law.fitting import Fit
from lit_het.search.law.observations import Observation, shown_shape
from lit_het.search.law.selection import Selection
from lit_het.search.law.uncertainty import Exponent, Exponents
from lit_het.search.shape import fits, sweeps

_COMPUTE = "GFLOP of training"
# Points of a drawn curve.
_POINTS = 60
# Curves of equal compute: the least, middle and largest of a sweep.
_QUANTILES = (0.0, 0.5, 1.0)
# Deviations from the optimum in Fig. 6.
_DEVIATIONS = 0.5, 2.0


def write(folders: Sequence[Path], metrics: Sequence[str], direction: str | None, level: float, output: Path) -> None:
    """Writes a page with the figures of sweeps.

    Args:
        folders: of star and grid sweeps.
        metrics: of which exponents are compared; all other figures are of the first one.
        direction: as `sweeps.observations`; of all metrics.
        level: of the intervals.
        output: path of the page.
    """
    if len(set(metrics)) < len(metrics):
        raise UserError("--metric: name each metric once")
    metric = metrics[0]
    uncertainty.check(level, 0)
    name, sections = sweeps.loss_name(metric, direction), []
    for folder in folders:
        sweep = sweeps.load(folder)
        if sweep.kind == "grid":
            observed = sweeps.observations(sweep, folder, metric, direction)
            section = grid_section(observed, fits.select_start(folder, metric, direction), name, folder.name)
        elif sweep.kind == "deviations":
            observed = sweeps.observations(sweep, folder, metric, direction)
            section = deviations_section(observed, sweep.centre, name, folder.name)
        else:
            # A page needs no bootstrap: the table of the fit has it.
            of_metrics = {
                sweeps.loss_name(one, direction): fits.fit_star(folder, one, direction, level, 0) for one in metrics
            }
            section = star_section(of_metrics[name], name, folder.name)
            if len(metrics) > 1:
                section = dataclasses.replace(section, body=(*section.body, metrics_figure(of_metrics)))
        times = sweeps.training_times(sweep, folder)
        sections.append(dataclasses.replace(section, body=(*section.body, times_figure(times))))
    write_files({output: render_page("Shape law", sections, f"Of {name}, lower is better.")})


def grid_section(observed: Sequence[Observation], chosen: Selection, loss: str, title: str) -> Section:
    """Returns the metric of a grid sweep against compute, with its frontier (Fig. 3)."""
    finite = [one for one in observed if math.isfinite(one.loss)]
    front = [point for stretch in chosen.frontier for point in stretch.losses]
    # Steps: between two runs of the frontier, the cheaper one is the best.
    x = [compute for compute, _ in front for _ in range(2)][1:]
    y = [value for _, value in front for _ in range(2)][:-1]
    start_x, start_y = zip(*chosen.start.losses, strict=True)
    lines = {
        "shapes": Line(logs([one.compute for one in finite]), [one.loss for one in finite], joined=False),
        "frontier": Line(logs(x), y, colour=1),
        f"start: {shown_shape(chosen.start.shape)}": Line(logs(start_x), start_y, colour=2, bold=True, joined=False),
    }
    drawn = figures.plot(
        "Metric against compute", lines, _COMPUTE, loss, ticks=ticks_of([one.compute for one in finite])
    )
    return Section(f"Grid sweep {title}", (drawn, *map(paragraph, fits.start_lines(chosen))))


def deviations_section(observed: Sequence[Observation], centre: Mapping[str, float], loss: str, title: str) -> Section:
    """Returns the measured loss of shapes of equal compute that differ from one in one dimension (Fig. 6)."""
    lines = {}
    for colour, name in enumerate(centre):
        others = [one for one in observed if all(one.shape[k] == centre[k] for k in centre if k != name)]
        shown = sorted((one.shape[name] / centre[name], one.loss) for one in others if math.isfinite(one.loss))
        if len({factor for factor, _ in shown}) > 1:
            lines[name] = Line(logs([factor for factor, _ in shown]), [value for _, value in shown], colour=colour)
    if not lines:
        raise UserError(f"{title}: no dimension has two shapes that are finished and finite; train more of them")
    factors = sorted({one.shape[name] / centre[name] for one in observed for name in centre})
    drawn = figures.plot(
        "Measured, with equal compute", lines, "size / size of the centre", loss, ticks=_numbers(factors)
    )
    compute = np.mean([one.compute for one in observed])
    text = f"Around {shown_shape(centre)}, each with {_shown(float(compute))} GFLOP; one point for each seed."
    return Section(f"Deviations {title}", (drawn, paragraph(text)))


def star_section(found: Exponents, loss: str, title: str) -> Section:
    """Returns the exponents of a star sweep and what its law predicts (Fig. 4 to 6)."""
    names = found.fit.star.dimensions
    drawn = (
        side_by_side(exponents_figure(found), predictions_figure(found.fit, loss)),
        side_by_side(*(isoflop_figure(found.fit, name, loss) for name in names)),
        deviations_figure(found.fit, loss),
    )
    body = (*drawn, fits.table(found).html(), *map(paragraph, fits.notes(found)))
    return Section(f"Star sweep {title}", body, "Eq. 2 of SoViT, fitted by its relative error.")


def exponents_figure(found: Exponents) -> Html:
    """Returns the exponents with their profile intervals (Fig. 5); open ends are at the edge of what is drawn."""
    shown = found.named()
    lines = {
        "estimate": Line(tuple(range(len(shown))), [one.value for one in shown.values()], colour=1, joined=False),
        "interval": _intervals(list(enumerate(shown.values())), colour=0),
    }
    # Ten names side by side have room for an initial only.
    ticks = {float(place): name[:2] + name[2:3].upper() for place, name in enumerate(shown)}
    initials = ", ".join(f"{name[0].upper()} {name}" for name in found.s)
    caption = f"{initials}. Lines: {found.level:.0%} intervals of c and s by profile likelihood. {_unidentified(shown)}"
    return figures.plot("Exponents", lines, "", "exponent", ticks=ticks, caption=caption.strip())


def metrics_figure(of_metrics: Mapping[str, Exponents]) -> Html:
    """Returns c and each s across metrics with their profile intervals (Fig. 5); open ends as in `exponents_figure`."""
    by_name: dict[str, list[Exponent]] = {}
    for found in of_metrics.values():
        for name, one in found.named("s").items():
            by_name.setdefault(name, []).append(one)
    lines, drawn = {}, []
    for colour, (name, exponents) in enumerate(by_name.items()):
        # Side by side, so that the intervals of one metric do not overlap.
        x = [number + 0.1 * (colour - (len(by_name) - 1) / 2) for number in range(1, len(exponents) + 1)]
        lines[name] = Line(x, [one.value for one in exponents], colour=colour, joined=False)
        drawn += zip(x, exponents, strict=True)
    lines["interval"] = _intervals(drawn, colour=None)
    names = "; ".join(f"{number}: {name}" for number, name in enumerate(of_metrics, 1))
    missing = ", ".join(
        f"{name} of {number}"
        for name, exponents in by_name.items()
        for number, one in enumerate(exponents, 1)
        if not one.is_identified
    )
    caption = f"{names}." + (f" Not identified: {missing}." if missing else "")
    ticks = {float(number): str(number) for number in range(1, len(of_metrics) + 1)}
    return figures.plot("Exponents by metric", lines, "metric", "exponent", ticks=ticks, caption=caption)


def predictions_figure(fit: Fit, loss: str) -> Html:
    """Returns predicted against measured values of each run (Fig. 4, left)."""
    star, predicted = fit.star, fit.predictions()
    ends = (min(star.f.min(), predicted.min()), max(star.f.max(), predicted.max()))
    lines = {"equal": Line(ends, ends, colour=None)}
    for colour, name in enumerate(star.dimensions):
        rows = star.of(name)
        lines[name] = Line(star.f[rows].tolist(), predicted[rows].tolist(), colour=colour, joined=False)
    measured, at_centre = [], []
    for one in star.at_centre:
        values = list(fits.at_centre(fit.law, star, one.compute).values())
        measured += [one.loss] * len(values)
        at_centre += values
    if measured:
        lines["centre, never fitted"] = Line(measured, at_centre, colour=len(star.dimensions), joined=False, bold=True)
    caption = f"Standard deviation of the relative error: {fit.relative_error:.2%}."
    return figures.plot("Predicted against measured", lines, f"measured {loss}", "predicted", caption=caption)


def isoflop_figure(fit: Fit, name: str, loss: str) -> Html:
    """Returns the law of one dimension at a few computes, with its optima and their frontier (Fig. 4, middle)."""
    star = fit.star
    rows = star.of(name)
    sizes = np.geomspace(star.x[rows].min(), star.x[rows].max(), _POINTS)
    lines, best_x, best_y = {}, [], []
    for colour, compute in enumerate(np.quantile(star.t[rows], _QUANTILES).tolist()):
        values = fit.law.value(name, sizes, compute)
        lines[f"{_shown(compute)} GFLOP"] = Line(logs(sizes), values.tolist(), colour=colour)
        best = float(fit.law.optimum(name, compute))
        if sizes[0] <= best <= sizes[-1]:
            best_x.append(best)
            best_y.append(float(fit.law.frontier(name, compute)))
    between = np.geomspace(star.t[rows].min(), star.t[rows].max(), _POINTS)
    optima = fit.law.optimum(name, between)
    inside = (sizes[0] <= optima) & (optima <= sizes[-1])
    if inside.any():
        lines["frontier (Eq. 5)"] = Line(
            logs(optima[inside]), fit.law.frontier(name, between[inside]).tolist(), colour=None
        )
    if best_x:
        lines["optimum"] = Line(logs(best_x), best_y, colour=len(_QUANTILES), joined=False, bold=True)
    caption = "" if best_x else "No optimum lies within the sizes of the sweep."
    ticks = {math.log10(x): f"{x:g}" for x in sorted(set(star.x[rows].tolist()))}
    return figures.plot(f"Equal compute: {name}", lines, name, loss, ticks=ticks, caption=caption)


def deviations_figure(fit: Fit, loss: str) -> Html:
    """Returns how much worse other sizes are than the optimal ones at the largest compute (Fig. 6)."""
    factors = np.geomspace(*_DEVIATIONS, _POINTS)
    compute, lines = float(fit.star.t.max()), {}
    for colour, name in enumerate(fit.star.dimensions):
        best = fit.law.optimum(name, compute)
        excess = fit.law.value(name, factors * best, compute) / fit.law.value(name, best, compute) - 1
        lines[name] = Line(logs(factors), excess.tolist(), colour=colour)
    ticks = {math.log10(factor): f"{factor:g}" for factor in (0.5, 0.7, 1.0, 1.4, 2.0)}
    return figures.plot(
        f"Cost of other sizes at {_shown(compute)} GFLOP, predicted",
        lines,
        "size / optimal size",
        "above the optimum",
        ticks=ticks,
        as_share=True,
    )


def times_figure(times: Sequence[tuple[float, float]]) -> Html:
    """Returns hours of training against GFLOP (Fig. 4, right)."""
    gflop, hours = zip(*times, strict=True)
    rate = f"{sum(gflop) / sum(hours):.3g} GFLOP in an hour"
    varies = min(len(set(gflop)), len(set(hours))) > 1
    correlation = f"Correlation {np.corrcoef(gflop, hours)[0, 1]:.2f}; " if varies else ""
    caption = f"{correlation}{rate}, compilation and evaluations included. Of resumed runs, the last process counts."
    line = Line(logs(gflop), hours, joined=False)
    return figures.plot(
        "Hours of training", {"runs": line}, _COMPUTE, "hours", ticks=ticks_of(gflop), logarithmic=True, caption=caption
    )


def _intervals(shown: Sequence[tuple[float, Exponent]], colour: int | None) -> Line:
    """Returns one line for all profile intervals, with gaps between them."""
    x, y = [], []
    for place, one in shown:
        low, high = one.profile or (one.value, one.value)
        x += [place, place, math.nan]
        y += [0.0 if low is None else low, 2 * one.value if high is None else high, math.nan]
    return Line(x, y, colour=colour)


def _unidentified(shown: Mapping[str, Exponent]) -> str:
    names = [name for name, one in shown.items() if not one.is_identified]
    return f"Not identified: {', '.join(names)}." if names else ""


def logs(values: Sequence[float] | Float[np.ndarray, " n"]) -> list[float]:
    """Returns positions on a logarithmic axis."""
    return np.log10(np.asarray(values, np.float64)).tolist()


def _numbers(values: Sequence[float]) -> dict[float, str]:
    return {math.log10(value): f"{value:.2g}" for value in values}


def _shown(compute: float) -> str:
    """Returns compute with two digits: 170, 3.6e10."""
    return f"{float(f'{compute:.2g}'):g}".replace("e+", "e")


def ticks_of(computes: Sequence[float]) -> dict[float, str]:
    """Returns ticks of a logarithmic axis: about four round numbers."""
    low, high = (math.log10(value) for value in (min(computes), max(computes)))
    step = max(0.1, (high - low) / 3)
    return {place: _shown(10**place) for place in np.arange(low, high + step / 2, step).tolist()}
