"""Draws figures of docs/results as docs/images/NAME.svg: ``python -m scripts.draw_results``.

Every picture has a panel for each figure, a row for each model and a point for each condition, with its standard error.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
_COLOURS = ("#0b5394", "#d35400", "#1e8449", "#7d3c98", "#b7950b", "#5d6d7e")
_NUMBER = r"[+-]?[\d.]+"


class Estimate(NamedTuple):
    """A mean with its standard error, 0 where there is none; ``is_difference`` from the first model."""

    mean: float
    error: float
    is_difference: bool


Panels = Mapping[str, Mapping[str, Mapping[str, Estimate]]]
"""By title of the panel, condition and model."""


class Table:
    """A table of docs/results."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.columns, self.rows = content["columns"], content["rows"]

    def estimate(self, column: str, *names: str) -> Estimate | None:
        """Returns a cell of the row that begins with these names; None where it is empty or missing."""
        row = next((row for row in self.rows if tuple(row[: len(names)]) == names), None)
        if row is None or (cell := row[self.columns.index(column)]) in ("", None):
            return None
        is_difference = "difference" in column
        if isinstance(cell, float | int):
            error = column.replace(", difference", ", standard error of the difference")
            return Estimate(cell, row[self.columns.index(error)] or 0.0, is_difference)
        # "mean ± error", or "mean (difference ± error)".
        within = re.search(r"\((.*)\)", cell)
        mean, *error = re.findall(_NUMBER, within[1] if within else cell)
        return Estimate(float(mean), float(error[0]) if error else 0.0, is_difference or within is not None)

    def column(self, column: str, rows: Mapping[str, tuple[str, ...]]) -> dict[str, Estimate]:
        """Returns the cells that are there, by the names of ``rows``."""
        found = {name: self.estimate(column, *of) for name, of in rows.items()}
        return {name: estimate for name, estimate in found.items() if estimate is not None}


def tables(name: str) -> dict[str, Table]:
    """Reads the tables of a file of docs/results."""
    content = json.loads((DOCS / "results" / f"{name}.json").read_text("utf-8"))
    return {section: Table(of) for section, of in content.items()}


def rivals() -> Panels:
    """Methods of uncertainty: likelihoods, and what their scores find."""
    found = tables("rivals")
    names = ["deterministic", "HET-XL", "HET-XL, pairwise probit", "deterministic, sigmoid"]
    names += ["Gaussian, sigmoid (as ProLIP)", "3 text towers", "HET-XL by `lit-het add-noise`", "ProbVLM"]
    names += ["Monte Carlo dropout", "BayesVLM", "BayesVLM, probit", "distance to the nearest training image"]
    rows = {name: (name,) for name in names}
    both = {"clean captions": found["clean"], "wrong captions": found["noisy"]}
    fitted, scores = "NLL fitted, difference", ("confidence", "noise norm", "mutual information")
    others = {
        score: found["scores"].column("other scripts", {n: (f"{n}: {score}",) for n in names}) for score in scores
    }
    others["distance"] = found["scores"].column("other scripts", {names[-1]: (names[-1],)})
    return {
        "NLL as trained": {name: table.column("NLL", rows) for name, table in both.items()},
        "NLL fitted": {name: table.column(fitted, _without_first(rows)) for name, table in both.items()},
        "finds wrong captions (AUROC)": {s: found["noisy_captions"].column(s, rows) for s in scores},
        "finds other scripts (AUROC)": others,
    }


def ensembles() -> Panels:
    """Models of the e3 paper beside a V-MoE."""
    models = tables("ensembles")["models"]
    # MIMO, whose tower is too small, would make the others one point.
    rows = {row[0]: (row[0],) for row in models.rows[1:] if "±" in row[1] and not row[0].startswith("MIMO")}
    return {figure: {"": models.column(figure, rows)} for figure in ("fitted NLL", "error", "ECE")}


def noise() -> Panels:
    """HET-XL, and label smoothing, beside the deterministic head."""
    found = tables("noise")
    heads = ["HET-XL", "HET-XL, by 32 samples", "label smoothing"]
    data = {"characters": "40 % wrong", "characters, clean": "clean", "icons": "40 % wrong", "icons, clean": "clean"}
    return {
        figure: {
            f"{name}, {captions}" if captions != "clean" else name: found[name.partition(",")[0]].column(
                f"{figure}, difference", {head: (captions, head) for head in heads}
            )
            for name, captions in data.items()
        }
        for figure in ("top-1", "NLL fitted", "ECE", "new names: NLL fitted")
    }


def names() -> Panels:
    """Candidates for the default beside the deterministic head, on known and on new names."""
    default = tables("names")["default"]
    data, models = (list(dict.fromkeys(row[at] for row in default.rows)) for at in (0, 1))
    figures = ("known: top-1", "known: NLL", "new: NLL", "H, balanced")
    return {
        figure: {one: default.column(figure, {model: (one, model) for model in models[1:]}) for one in data}
        for figure in figures
    }


def quickstart() -> Panels:
    """HET-XL with label smoothing beside the deterministic head."""
    figures = tables("quickstart")["figures"]
    sets = dict.fromkeys(row[1] for row in figures.rows)
    return {
        figure: {
            f"{captions} captions": figures.column("difference", {name: (captions, name, figure) for name in sets})
            for captions in ("clean", "noisy")
        }
        for figure in ("top-1", "NLL fitted", "ECE fitted")
    }


def _without_first(rows: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Leaves out the model that the others are compared with."""
    return dict([*rows.items()][1:])


DRAWINGS: Mapping[str, Callable[[], Panels]] = {
    "rivals": rivals,
    "ensembles": ensembles,
    "noise": noise,
    "names": names,
    "quickstart": quickstart,
}


def draw(panels: Panels) -> Figure:
    """Returns the picture of the panels, two side by side, or three in one row, with one list of models."""
    rows = list(dict.fromkeys(row for series in panels.values() for of in series.values() for row in of))
    conditions = dict.fromkeys(condition for series in panels.values() for condition in series)
    colours = dict(zip(conditions, _COLOURS, strict=False))
    across = 3 if len(panels) == 3 else 2
    down = -(-len(panels) // across)
    figure = Figure(figsize=(2.2 + 2.7 * across, 0.5 + down * (0.7 + 0.27 * len(rows))), layout="constrained")
    every = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes, (title, series) in zip(every.flat, panels.items(), strict=True):
        _draw_panel(axes, title, series, rows, colours)
    every[0, 0].set_yticks(range(len(rows)), [row.replace("`", "") for row in rows])
    every[0, 0].set_ylim(len(rows) - 0.4, -0.6)
    if len(colours) > 1:
        points = {
            name: points for axes in every.flat for points, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            [*points.values()], [*points], loc="outside lower right", ncols=min(4, len(points)), frameon=False
        )
    return figure


def _draw_panel(
    axes: Axes,
    title: str,
    series: Mapping[str, Mapping[str, Estimate]],
    rows: list[str],
    colours: Mapping[str, str],
) -> None:
    differences = [estimate.is_difference for of in series.values() for estimate in of.values()]
    for number, (name, of) in enumerate(series.items()):
        # Points of one row one below the other.
        heights = [rows.index(row) + (number - (len(series) - 1) / 2) * 0.7 / len(series) for row in of]
        means, errors, _ = zip(*of.values(), strict=True)
        axes.errorbar(means, heights, xerr=errors, fmt="o", markersize=4, color=colours[name], label=name)
    if all(differences):
        axes.axvline(0, color="0.6", linewidth=1, zorder=0)
        title += ", difference"
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", color="0.9")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def main(names: Iterable[str] = DRAWINGS) -> None:
    """Draws and writes pictures; equal results give equal files."""
    with matplotlib.rc_context({"svg.hashsalt": "lit-het", "svg.fonttype": "none"}):
        for name in names:
            draw(DRAWINGS[name]()).savefig(DOCS / "images" / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
