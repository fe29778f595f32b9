"""The page of ``lit-het benchmark-uncertainty``: tables, a Pareto figure, and what to take when."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.report import figures, page
from lit_het.eval.report.naming import SIGNIFICANTLY, STYLES, FigureStyle
from lit_het.eval.report.page import Html, Section
from lit_het.eval.report.tables import NO_FIGURE, Cell, Row, Table, best_of

# The figures of a method: ``measuring.Benchmark.measure``, with standard errors over seeds.
Figures = Mapping[str, Estimate]


def _named(figure: str, label: str) -> FigureStyle:
    return dataclasses.replace(STYLES[figure], label=label)


AUROC = STYLES["auroc"]
_CORRELATION = FigureStyle("rank correlation", "{:.3f}", higher_is_better=True)
_ANSWERED: Mapping[str, FigureStyle] = {
    "top1": STYLES["top1"],
    "nll": _named("nll", "NLL"),
    "fitted_nll": _named("nll", "NLL, temperature"),
    "vector_nll": _named("nll", "NLL, vector"),
    "ece": _named("ece", "ECE"),
    "fitted_ece": _named("ece", "ECE, temperature"),
    "vector_ece": _named("ece", "ECE, vector"),
    "aurc": _named("aurc", "AURC"),
    "set_size90": dataclasses.replace(STYLES["set_size90"], label="90 % set", format="{:.1f}"),
}
_COSTS: Mapping[str, FigureStyle] = {
    "training_seconds": FigureStyle("training, s", "{:.0f}", higher_is_better=False),
    "head_megabytes": FigureStyle("head, MB", "{:.2f}", higher_is_better=False),
    "tower_passes": FigureStyle("tower passes", "{:.0f}", higher_is_better=False),
    "quiet_microseconds": FigureStyle("µs per image", "{:.0f}", higher_is_better=False),
    "quiet_megabytes": FigureStyle("MB at use", "{:.2f}", higher_is_better=False),
    "sampled_microseconds": FigureStyle("µs per image, samples", "{:.0f}", higher_is_better=False),
    "sampled_megabytes": FigureStyle("MB at use, samples", "{:.2f}", higher_is_better=False),
}
_RETRIEVAL: Mapping[str, FigureStyle] = {
    "r_precision": FigureStyle("R-Precision", "{:.1%}", higher_is_better=True),
    "map_at_r": FigureStyle("mAP@R", "{:.1%}", higher_is_better=True),
}
_PREDICTIONS = {"quiet": "", "sampled": ", mean of samples"}


def best_prediction(found: Figures, name: str) -> str:
    """Returns which prediction of a set a method is used with: over samples where there are any."""
    return "sampled" if f"{name}/sampled/nll" in found else "quiet"


def sections(methods: Mapping[str, Figures], sets: Sequence[str], note: str = "") -> list[Section]:
    """Returns the page's sections.

    Args:
        methods: figures by name.
        sets: names of the labelled sets; the first is drawn.
        note: how errors were computed.
    """
    return [
        Section("Which method when", tuple(map(page.paragraph, advice(methods, sets[0]))), note),
        Section("Cost and gain", (pareto(methods, sets[0]),), _PARETO_NOTE),
        *(Section(f"Answers: {name}", (answer_table(methods, name).html(),), _ANSWERS_NOTE) for name in sets),
        Section("What the uncertainty finds", tuple(table.html() for table in detection_tables(methods)), _FINDS_NOTE),
        Section("Retrieval and cost", tuple(table.html() for table in other_tables(methods, sets)), _COST_NOTE),
    ]


_ANSWERS_NOTE = (
    "As trained, with a temperature, and with vector scaling, each fitted on the other half of the images. Bold: the "
    f"best of a column {SIGNIFICANTLY}; a single seed has none. AURC is the area under the risk-coverage curve; 90 % "
    "set is the mean number of classes in a conformal set."
)
_FINDS_NOTE = (
    "AUROC of a score for wrong answers, out-of-distribution images and images with wrong captions, and its rank "
    "correlation with the severity of a corruption. 0.5 and 0 are chance. A row is a score that a method has: the "
    "confidence and the entropy of its prediction, the mutual information of its samples, models or views, its noise "
    "norm, and the distance to the nearest training image."
)
_COST_NOTE = (
    "Time per image of the probabilities after the image tower, on the machine of the benchmark with its other work; "
    "memory of that program for 256 images on a device: parameters of the head, class names, features, intermediate "
    "values and result. Of an ensemble it is that of the model that needs most, as one answers after the other."
)
_PARETO_NOTE = (
    "Methods with noise answer by the mean of samples. The dotted line joins those that no other beats in both. Times "
    "are those of this machine, with other work on it."
)


def tables(methods: Mapping[str, Figures], sets: Sequence[str]) -> list[Table]:
    """Returns all tables of the page."""
    return [*(answer_table(methods, name) for name in sets), *detection_tables(methods), *other_tables(methods, sets)]


def answer_table(methods: Mapping[str, Figures], name: str) -> Table:
    """Returns the figures of a set, a row per method and prediction."""
    rows = {
        f"{method}{suffix}": {
            figure: found[path] for figure in _ANSWERED if (path := f"{name}/{kind}/{figure}") in found
        }
        for method, found in methods.items()
        for kind, suffix in _PREDICTIONS.items()
        if f"{name}/{kind}/nll" in found
    }
    return _table(name, rows, _ANSWERED)


def detection_tables(methods: Mapping[str, Figures]) -> list[Table]:
    """Returns what every score of every method finds."""
    kinds = {"errors": AUROC, "outside": AUROC, "captions": AUROC, "severity": _CORRELATION}
    found = []
    for kind, style in kinds.items():
        rows: dict[str, dict[str, Estimate]] = {}
        for method, of_method in methods.items():
            for path, value in of_method.items():
                first, *middle, score = path.split("/")
                if first != kind:
                    continue
                place = " ".join(middle) or _words(score)
                label = method if kind == "captions" else f"{method}: {_words(score)}"
                rows.setdefault(label, {})[place] = value
        columns = dict.fromkeys(place for row in rows.values() for place in row)
        if rows:
            found.append(_table(_TITLES[kind], rows, dict.fromkeys(columns, style)))
    return found


_TITLES = {
    "errors": "AUROC for wrong answers",
    "outside": "AUROC for out-of-distribution images",
    "captions": "AUROC for images with wrong captions",
    "severity": "Rank correlation with the severity of a corruption",
}


def other_tables(methods: Mapping[str, Figures], sets: Sequence[str]) -> list[Table]:
    """Returns the tables of retrieval and of cost."""
    found = []
    for title, prefix, styles in (
        *(
            (f"Retrieval of all images of a class by its name: {name}", f"retrieval/{name}", _RETRIEVAL)
            for name in sets
        ),
        ("Cost", "cost", _COSTS),
    ):
        rows = {
            method: {figure: of[path] for figure in styles if (path := f"{prefix}/{figure}") in of}
            for method, of in methods.items()
        }
        if any(rows.values()):
            found.append(_table(title, {name: row for name, row in rows.items() if row}, styles))
    return found


def pareto(methods: Mapping[str, Figures], name: str) -> Html:
    """Returns NLL with a fitted temperature against the time per image; each method is a point."""
    points = {}
    for method, found in methods.items():
        kind = best_prediction(found, name)
        cost, nll = found.get(f"cost/{kind}_microseconds"), found.get(f"{name}/{kind}/fitted_nll")
        if cost is not None and nll is not None:
            points[method] = cost.mean, nll.mean
    return figures.scatter(f"Fitted NLL and time: {name}", points, "µs per image after the tower", "NLL, fitted, nats")


def advice(methods: Mapping[str, Figures], name: str) -> list[str]:
    """Returns sentences on the best methods, whose words follow from the figures."""
    best = {method: found[f"{name}/{best_prediction(found, name)}/fitted_nll"] for method, found in methods.items()}
    first = min(best, key=lambda method: best[method].mean)
    sentences = [
        f"Probabilities: {first} has the lowest NLL on {name} with a fitted temperature, {best[first].shown(3)} nats"
        f"{_close_to(first, best)}."
    ]
    for prefix, what in (
        (f"errors/{name}/", "Wrong answers"),
        ("outside/", "Out-of-distribution images"),
        ("captions/", "Images with wrong captions"),
    ):
        # The loss and the CLIP score know the caption; the others are of the image alone.
        scored = {
            " of ".join(filter(None, (f"{method} by {_words(score)}", path[len(prefix) :].rpartition("/")[0]))): value
            for method, found in methods.items()
            for path, value in found.items()
            if path.startswith(prefix) and (score := path.rpartition("/")[2]) not in ("loss", "clip_score")
        }
        if scored:
            winner = max(scored, key=lambda found_by: scored[found_by].mean)
            shown = scored[winner].shown(3)
            sentences.append(f"{what}: {winner} has the highest AUROC, {shown}{_close_to(winner, scored)}.")
    return sentences


def _close_to(best: str, values: Mapping[str, Estimate]) -> str:
    """Returns which other values lie within two standard errors of one, in words; empty if none does."""
    one = values[best]
    # Without standard errors nothing is close: a comparison with NaN is false.
    close = [
        name
        for name, other in values.items()
        if name != best and abs(one.mean - other.mean) <= 2 * np.hypot(one.error, other.error)
    ]
    return f"; within two standard errors of it: {'; '.join(close)}" if close else ""


def _words(score: str) -> str:
    return {"max_probability": "confidence", "clip_score": "CLIP score"}.get(score, score.replace("_", " "))


def _table(title: str, rows: Mapping[str, Mapping[str, Estimate]], styles: Mapping[str, FigureStyle]) -> Table:
    """Returns a table whose best value of each column is bold; columns that no row has are left out."""
    columns = [figure for figure in styles if any(figure in row for row in rows.values())]
    missing = Estimate(math.nan, math.nan)
    best = {figure: best_of([row.get(figure, missing) for row in rows.values()], styles[figure]) for figure in columns}

    def cell(row: Mapping[str, Estimate], figure: str, number: int) -> Cell:
        if figure not in row:
            return Cell(NO_FIGURE)
        return Cell(styles[figure].shown(row[figure].mean, row[figure].error), strong=number == best[figure])

    heads = tuple(styles[figure].label if styles[figure] in _NAMED else figure for figure in columns)
    cells = (tuple(cell(row, figure, number) for figure in columns) for number, row in enumerate(rows.values()))
    return Table(title, heads, tuple(map(Row, rows, cells)))


_NAMED = (*_ANSWERED.values(), *_COSTS.values(), *_RETRIEVAL.values())
