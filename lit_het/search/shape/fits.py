"""Fits of sweeps: exponents of a star, the start of a grid; their tables and JSON."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_het import untrusted
from lit_het.errors import UserError, pluralize
from lit_het.eval.report.tables import Cell, Row, Table
from lit_het.eval.report.writing import print_results
from lit_het.files import write_atomically
from lit_het.search import grid_runs
from lit_het.search.law import fitting, selection, uncertainty
from lit_het.search.law.law import Law
from lit_het.search.law.observations import Star, shown_shape, star
from lit_het.search.law.selection import Selection
from lit_het.search.law.uncertainty import Exponent, Exponents
from lit_het.search.shape import sweeps

FILE = "fit.json"


@dataclasses.dataclass(frozen=True)
class Saved:
    """What `lit-het shape scale` reads from ``fit.json``.

    Attributes:
        kind: "star" or "grid".
        metric: of the fit.
        exponents: scaling exponents s by dimension; empty for a grid.
        unidentified: why an exponent is not identified, by dimension.
        start: the shape to start from; empty for a star.
        start_compute: the least compute in GFLOP for which it is optimal; 0 for a star.
        detail: everything else.
    """

    kind: str
    metric: str
    exponents: dict[str, float]
    unidentified: dict[str, str]
    start: dict[str, float]
    start_compute: float
    detail: dict[str, Any]


def fit_star(folder: Path, metric: str, direction: str | None, level: float, resamples: int) -> Exponents:
    """Fits the law to a star sweep."""
    sweep = sweeps.load(folder)
    observed = sweeps.observations(sweep, folder, metric, direction)
    varied = _varied(sweep)
    centre = {name: float(value) for name, value in sweep.centre.items() if name in varied}
    shapes = [
        dataclasses.replace(one, shape={name: value for name, value in one.shape.items() if name in centre})
        for one in observed
    ]
    return uncertainty.exponents(fitting.fit(star(shapes, centre)), level, resamples)


def select_start(folder: Path, metric: str, direction: str | None) -> Selection:
    """Returns the start of a grid sweep."""
    return selection.select(sweeps.observations(sweeps.load(folder), folder, metric, direction))


def fit(folder: Path, metric: str, direction: str | None, level: float, resamples: int) -> Path:
    """Fits a sweep, prints the result and saves it as ``fit.json`` in its folder; returns the path."""
    uncertainty.check(level, resamples)
    kind = sweeps.load(folder).kind
    if kind == "deviations":
        raise UserError(f"{folder} is a sweep of equal compute, to which no law is fitted; see lit-het shape plot")
    if kind == "star":
        found = fit_star(folder, metric, direction, level, resamples)
        print_results(table(found))
        lines, saved = notes(found), _saved_star(found, metric, direction)
    else:
        chosen = select_start(folder, metric, direction)
        lines, saved = start_lines(chosen), _saved_grid(chosen, metric)
    for line in lines:
        print(line)
    path = folder / FILE
    write_atomically(path, json.dumps(dataclasses.asdict(saved), indent=1, ensure_ascii=False) + "\n")
    return path


def table(found: Exponents) -> Table:
    """Returns the exponents with their intervals; without resamples there is no column for the bootstrap."""
    rows = [Row(name, _cells(one)) for name, one in found.named().items()]
    columns = ("estimate", "profile likelihood", *(("bootstrap over runs",) if found.c.bootstrap else ()), "")
    return Table(f"Exponents with intervals of {found.level:.0%}", columns, tuple(rows))


def notes(found: Exponents) -> list[str]:
    """Returns what the table does not say: reasons, the error of the fit, and the centre."""
    data = found.fit.star
    lines = [f"{name}: not identified, {one.reason}" for name, one in found.named("s").items() if not one.is_identified]
    lines.append(f"{pluralize(len(data.f), 'run')}, relative error {found.fit.relative_error:.2%}")
    if data.excluded:
        lines.append(f"{pluralize(data.excluded, 'run')} without a finite metric above 0 left out")
    for one in data.at_centre:
        predicted = ", ".join(
            f"{name} {value:.4g}" for name, value in at_centre(found.fit.law, data, one.compute).items()
        )
        lines.append(
            f"centre at {one.compute:.3g} GFLOP, never fitted: measured {one.loss:.4g}, predicted by {predicted}"
        )
    return lines


def at_centre(law: Law, data: Star, compute: float) -> dict[str, float]:
    """Returns what the law of each dimension predicts for the centre."""
    return {name: float(law.value(name, data.centre[name], compute)) for name in data.dimensions}


def start_lines(chosen: Selection) -> list[str]:
    """Returns the start of a grid sweep as lines."""
    start = chosen.start
    lines = [
        f"start: {shown_shape(start.shape)}, optimal from {start.compute:.4g} to {start.until:.4g} GFLOP",
        f"frontier of {pluralize(len(chosen.frontier), 'shape')}",
    ]
    if chosen.excluded:
        lines.append(f"{pluralize(chosen.excluded, 'run')} without a finite metric left out")
    return [*lines, *([f"warning: {chosen.warning}"] if chosen.warning else [])]


def read(path: Path) -> Saved:
    """Reads ``fit.json``; a folder stands for the file in it."""
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{path} is missing; run lit-het shape fit, or give numbers such as width=0.22")
    with grid_runs.explained(path, "is not a fit", "repeat lit-het shape fit"):
        return grid_runs.CONVERTER.structure(untrusted.read_json(path), Saved)


def law_of(path: Path) -> tuple[Law, dict[str, float], str]:
    """Returns the law of the fit of a star sweep, the centre, and the name of the loss."""
    saved = read(path)
    if saved.kind != "star" or "centre" not in saved.detail:
        raise UserError(f"{path} has no law with its centre; repeat lit-het shape fit of a star sweep")
    with grid_runs.explained(path, "is not a fit", "repeat lit-het shape fit"):
        law = grid_runs.CONVERTER.structure(saved.detail["law"], Law)
        return law, grid_runs.CONVERTER.structure(saved.detail["centre"], dict[str, float]), str(saved.detail["loss"])


def prediction(path: Path, shape: Mapping[str, float], compute: float) -> list[str]:
    """Returns what the fit of a star sweep predicts for a whole shape (Eq. 3), as lines."""
    law, centre, loss = law_of(path)
    sweeps.check_dimensions(shape)
    for name, value in {"compute": compute, **shape}.items():
        if not 0 < value < math.inf:
            raise UserError(f"{name} {value:g} must be above 0 and finite")
    found, warning = float(law.whole(shape, compute, centre)), disagreement(law, centre)
    lines = [f"{shown_shape(shape)} at {compute:.4g} GFLOP: {loss} {found:.4g} by Eq. 3"]
    return [*lines, f"warning: {warning}"] if warning else lines


def disagreement(law: Law, centre: Mapping[str, float]) -> str:
    """Returns what speaks against Eq. 3 with the constants that the dimensions give, or nothing."""
    xi, epsilon = law.constants(centre)
    if min(xi, epsilon) > 0:
        return ""
    return f"Eq. 3 has ξ = {xi:.3g} and ε = {epsilon:.3g}, not both above 0: dimensions disagree"


def _varied(sweep: sweeps.Sweep) -> set[str]:
    """Returns the dimensions that vary; one without a spoke has no law."""
    return {name for run in sweep.runs for name, value in run.shape.items() if value != sweep.centre.get(name)}


def _cells(one: Exponent) -> tuple[Cell, ...]:
    estimate = Cell(f"{one.value:.3f}", faint=not one.is_identified)
    profile = Cell("" if one.profile is None else _interval(one.profile))
    bootstrap = () if one.bootstrap is None else (Cell(_interval(one.bootstrap)),)
    return estimate, profile, *bootstrap, Cell("" if one.is_identified else "not identified")


def _interval(ends: tuple[float | None, float | None]) -> str:
    return " to ".join("open" if end is None else f"{end:.3f}" for end in ends)


def _saved_star(found: Exponents, metric: str, direction: str | None) -> Saved:
    data = found.fit.star
    detail = {
        "level": found.level,
        "law": dataclasses.asdict(found.fit.law),
        "centre": dict(data.centre),
        "loss": sweeps.loss_name(metric, direction),
        "relative_error": found.fit.relative_error,
        "runs": len(data.f),
        "excluded": data.excluded,
        "intervals": {
            "c": dataclasses.asdict(found.c),
            **{title: _asdict(getattr(found, title)) for title in ("s", "a", "b")},
        },
    }
    exponents = {name: one.value for name, one in found.s.items()}
    unidentified = {name: one.reason for name, one in found.s.items() if not one.is_identified}
    return Saved("star", metric, exponents, unidentified, {}, 0.0, detail)


def _asdict(exponents: Mapping[str, Exponent]) -> dict[str, Any]:
    return {name: dataclasses.asdict(one) for name, one in exponents.items()}


def _saved_grid(chosen: Selection, metric: str) -> Saved:
    detail = {
        "frontier": [dataclasses.asdict(stretch) for stretch in chosen.frontier],
        "warning": chosen.warning,
        "excluded": chosen.excluded,
    }
    return Saved("grid", metric, {}, {}, dict(chosen.start.shape), chosen.start.compute, detail)
