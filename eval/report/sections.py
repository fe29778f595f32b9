"""Report sections on evaluations: a table and plots for each."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lit_het.eval.evaluation import Record
from lit_het.eval.report import figures, grids
from lit_het.eval.report.figures import Line
from lit_het.eval.report.grids import Mark
from lit_het.eval.report.masks import drawn_masks
from lit_het.eval.report.naming import (
    SIGNIFICANTLY,
    place_of_kind,
    style_of,
    title_of_kind,
    title_of_part,
    title_of_score,
)
from lit_het.eval.report.page import NOTHING, Html, Section, folded, heading, joined, paragraph, side_by_side
from lit_het.eval.report.predictions import Titled, sections_of_predictions
from lit_het.eval.report.tables import evaluation_table
from lit_het.eval.report.texts import drawn_texts
from lit_het.eval.saved_runs import SavedRun

CLASSIFICATION = ("zero_shot", "supervised")
_BOLD = f"Bold: best {SIGNIFICANTLY}."
_OF_SIZES = "Plots: figures of ensembles of some of the members."
_NOTES = {
    "zero_shot": "Every image is compared with the class names.",
    "retrieval": "Recall: how often a correct item is in the top 1, 5 or 10.",
    "few_shot": "Ridge regression on frozen features; standard errors are over random draws of the training images.",
    "linear_probe": "A linear classifier on frozen features.",
    "shift": "The same images, with corruptions of increasing severity.",
    "out_of_distribution": "Whether out-of-distribution images have higher scores; an AUROC of 0.5 is chance.",
    "panoptic": "Segments match if their IoU is above 1/2; PQ is the product of the mean IoU of matches (SQ) and of "
    "their F1 score (RQ), by class, and then the mean over classes.",
    "captioning": "Captions that a decoder writes, and its predictions of the tokens of the true ones.",
    "question_answering": "Answers of a decoder; their confidence is the probability of the whole answer.",
    "ensemble": f"The mean of several predictions, and each of them. {_OF_SIZES}",
    "deep_ensemble": f"The mean of several models' predictions, and each of them. {_OF_SIZES}",
}


def keys_of(runs: Sequence[SavedRun]) -> list[tuple[str, str]]:
    """Returns kinds and names of all evaluations of the runs, in the order of reports."""
    keys = {key for run in runs for key in run.records}
    return sorted(keys, key=lambda key: (place_of_kind(key[0]), key))


def measured_by(runs: Sequence[SavedRun], key: tuple[str, str]) -> dict[str, Record]:
    """Returns the records of one evaluation, by the names of the runs that have it."""
    return {run.name: run.records[key] for run in runs if key in run.records}


def evaluation_sections(runs: Sequence[SavedRun], drawn: Sequence[SavedRun]) -> list[Section]:
    """Returns the sections of all evaluations.

    Args:
        runs: shown in tables and charts.
        drawn: the runs whose images and diagrams are shown.
    """
    sections: list[Section] = []
    keys = keys_of(runs)
    for kind in dict.fromkeys(kind for kind, _ in keys):
        body: list[Html] = []
        for key in (key for key in keys if key[0] == kind):
            body.append(evaluation_table(measured_by(runs, key)).html())
            body += _DRAWINGS.get(kind, _nothing)(runs, drawn, key)
        note = " ".join(filter(None, (_NOTES.get(kind, ""), _BOLD if len(runs) > 1 else "")))
        sections.append(Section(title_of_kind(kind), tuple(filter(None, body)), note))
        if kind in CLASSIFICATION:
            sections += sections_of_predictions(titled(drawn, [key for key in keys if key[0] == kind]))
    return sections


def titled(drawn: Sequence[SavedRun], keys: Sequence[tuple[str, str]]) -> list[Titled]:
    """Returns records with titles: the name of the run, of the set, or both, as far as there are several."""
    found = [(run.name, key[1], run.records[key]) for key in keys for run in drawn if key in run.records]
    several_runs, several_sets = (len({entry[column] for entry in found}) > 1 for column in (0, 1))
    return [
        (
            ", ".join(
                part for part, is_shown in ((run, several_runs), (name, several_sets or not several_runs)) if is_shown
            ),
            record,
        )
        for run, name, record in found
    ]


def _nothing(runs: Sequence[SavedRun], drawn: Sequence[SavedRun], key: tuple[str, str]) -> list[Html]:
    return []


def _retrieval(runs: Sequence[SavedRun], drawn: Sequence[SavedRun], key: tuple[str, str]) -> list[Html]:
    shown = [(title, record) for title, record in titled(drawn, [key]) if "query_rows" in record.drawing.arrays]
    return [
        folded(f"{title}: examples", _retrieval_grids(record), unfolded=number == 0)
        for number, (title, record) in enumerate(shown)
    ]


def _retrieval_grids(record: Record) -> Html:
    arrays, texts = record.drawing.arrays, record.drawing.texts
    captions = iter(texts["best_captions"])
    cards = [
        grids.answer_card(arrays["image"][place], "", [next(captions) for _ in is_right], _marks(is_right))
        for place, is_right in zip(arrays["query_rows"], arrays["caption_is_right"], strict=True)
    ]
    rows = [
        grids.image_row(query, arrays["image"][places], _marks(is_right))
        for query, places, is_right in zip(texts["queries"], arrays["found"], arrays["image_is_right"], strict=True)
    ]
    return joined(
        [
            grids.mark_legend(None),
            heading("Top texts of images"),
            Html(f'<div class="cards">{joined(cards)}</div>'),
            heading("Top images of texts"),
            Html(f'<div class="rows">{joined(rows)}</div>'),
        ]
    )


def _marks(is_right: np.ndarray) -> list[Mark]:
    return [Mark.RIGHT if right else Mark.WRONG for right in is_right.tolist()]


def _few_shot(runs: Sequence[SavedRun], drawn: Sequence[SavedRun], key: tuple[str, str]) -> list[Html]:
    lines, shots = {}, set()
    for number, (name, record) in enumerate(measured_by(runs, key).items()):
        points = sorted(
            (int(found[1]), found[0]) for found in map(re.compile(r"(\d+)_shot").fullmatch, record.figures) if found
        )
        if len(points) < 2:
            continue
        counts = [count for count, _ in points]
        shots |= set(counts)
        lines[name] = Line(
            [np.log2(count) for count in counts],
            [record.figures[figure] for _, figure in points],
            [record.errors.get(figure, 0.0) for _, figure in points],
            colour=number,
        )
    if not lines:
        return []
    ticks = {float(np.log2(count)): str(count) for count in sorted(shots)}
    return [
        figures.plot(
            f"{key[1]}: accuracy against shots", lines, "images per class", "accuracy", ticks=ticks, as_share=True
        )
    ]


def _linear_probe(runs: Sequence[SavedRun], drawn: Sequence[SavedRun], key: tuple[str, str]) -> list[Html]:
    paragraphs = []
    for name, record in measured_by(runs, key).items():
        best = {path.partition("/")[2]: value for path, value in record.figures.items() if path.startswith("best/")}
        if best:
            settings = ", ".join(f"{setting.replace('_', ' ')} {value:g}" for setting, value in best.items())
            settings += "".join(f", {crop} crop" for crop in record.drawing.texts.get("crop", ()) if crop != "whole")
            paragraphs.append(paragraph(f"{name}: best setting of the grid: {settings}."))
    return paragraphs


def _shift(runs: Sequence[SavedRun], drawn: Sequence[SavedRun], key: tuple[str, str]) -> list[Html]:
    measured = measured_by(runs, key)
    plots = []
    if len(measured) > 1:
        for figure in ("top1", "nll", "ece", "brier"):
            means = {
                name: _severity_line(record, "severity_{}", figure, colour=number, bold=True)
                for number, (name, record) in enumerate(measured.items())
            }
            plots.append(_severity_plot(f"{key[1]}: {style_of(figure).label}", means, measured, figure))
    for title, record in titled(drawn, [key]):
        corruptions = sorted({path.split("/")[0] for path in record.figures if path.count("/") == 2})
        for figure in ("top1", "ece"):
            lines = {
                title_of_part(name): _severity_line(record, name + "/{}", figure, colour=number + 1)
                for number, name in enumerate(corruptions)
            }
            lines = {"mean": _severity_line(record, "severity_{}", figure, colour=0, bold=True), **lines}
            plots.append(_severity_plot(f"{title}: {style_of(figure).label}", lines, {title: record}, figure))
    return [side_by_side(*plots)] if plots else []


def _severities(measured: Mapping[str, Record]) -> list[str]:
    found = {
        path.split("/")[0].removeprefix("severity_")
        for record in measured.values()
        for path in record.figures
        if path.startswith("severity_")
    }
    return sorted(found, key=lambda severity: (len(severity), severity))


def _severity_line(record: Record, pattern: str, figure: str, *, colour: int, bold: bool = False) -> Line:
    parts = ["clean", *(pattern.format(severity) for severity in _severities({"": record}))]
    values = [record.figures.get(f"{part}/{figure}", np.nan) for part in parts]
    return Line(range(len(parts)), values, colour=colour, bold=bold)


def _severity_plot(title: str, lines: Mapping[str, Line], measured: Mapping[str, Record], figure: str) -> Html:
    ticks = {float(place): tick for place, tick in enumerate(["clean", *_severities(measured)])}
    is_share = "%" in style_of(figure).format
    return figures.plot(title, lines, "severity", "", ticks=ticks, as_share=is_share)


def _out_of_distribution(runs: Sequence[SavedRun], drawn: Sequence[SavedRun], key: tuple[str, str]) -> list[Html]:
    blocks = []
    for number, (title, record) in enumerate(titled(drawn, [key])):
        arrays = record.drawing.arrays
        scores = [path.partition("/")[2] for path in arrays if path.startswith("inside/")]
        plots = [_histogram(score, record) for score in scores]
        if plots:
            blocks.append(folded(f"{title}: scores", side_by_side(*plots), unfolded=number == 0))
    return blocks


def _histogram(score: str, record: Record) -> Html:
    arrays = record.drawing.arrays
    sets = [path.rpartition("/")[0] for path in arrays if path.endswith(f"/{score}") and not path.startswith("inside/")]
    # One colour per set: further sets are left out.
    sets = sets[: figures.NUM_COLOURS - 1]
    values = {name: arrays[f"{name}/{score}"] for name in ("inside", *sets)}
    everything = np.concatenate(list(values.values()))
    everything = everything[np.isfinite(everything)]
    if not everything.size:
        return NOTHING
    # Outliers would compress the rest of the histogram, so values are clipped.
    low, high = np.quantile(everything, (0.005, 0.995))
    shown = {
        title_of_set(name): np.clip(np.nan_to_num(set_values, posinf=high, neginf=low), low, high)
        for name, set_values in values.items()
    }
    areas = ", ".join(
        f"{title_of_set(name)} {record.figures.get(f'{name}/{score}/auroc', np.nan):.3f}" for name in sets
    )
    title = title_of_score(score).capitalize()
    return figures.distribution(title, shown, "score (higher: more likely out of distribution)", f"AUROC: {areas}.")


def title_of_set(path: str) -> str:
    """Returns the title of an out-of-distribution set ``near/<name>`` or ``far/<name>``."""
    distance, _, name = path.partition("/")
    return f"{name} ({distance})" if name else path


def _ensemble(runs: Sequence[SavedRun], drawn: Sequence[SavedRun], key: tuple[str, str]) -> list[Html]:
    # Evaluations of earlier versions have no smaller ensembles.
    measured = {name: record for name, record in measured_by(runs, key).items() if "size" in record.drawing.arrays}
    if not measured:
        return []
    plots = []
    for figure in ("nll", "top1", "ece", "mutual_information"):
        lines, sizes = {}, set()
        for number, (name, record) in enumerate(measured.items()):
            arrays = record.drawing.arrays
            values, errors = arrays[f"size/{figure}"].tolist(), np.nan_to_num(arrays[f"size/{figure}/error"]).tolist()
            sizes |= set(arrays["size"].tolist())
            lines[name] = Line(np.log2(arrays["size"]).tolist(), values, errors, colour=number)
        style = style_of(figure)
        ticks = {float(np.log2(size)): f"{size:g}" for size in sorted(sizes)}
        title, caption = f"{key[1]}: {style.label}", f"{title_of_kind(key[0])}s of so many members, on average."
        is_share = "%" in style.format
        plots.append(figures.plot(title, lines, "members", "", ticks=ticks, as_share=is_share, caption=caption))
    return [side_by_side(*plots)]


def _texts(runs: Sequence[SavedRun], drawn: Sequence[SavedRun], key: tuple[str, str]) -> list[Html]:
    return drawn_texts(titled(drawn, [key]))


def _masks(runs: Sequence[SavedRun], drawn: Sequence[SavedRun], key: tuple[str, str]) -> list[Html]:
    return drawn_masks(titled(drawn, [key]))


_Drawings = Callable[[Sequence[SavedRun], Sequence[SavedRun], tuple[str, str]], list[Html]]
_DRAWINGS: Mapping[str, _Drawings] = {
    "retrieval": _retrieval,
    "few_shot": _few_shot,
    "linear_probe": _linear_probe,
    "shift": _shift,
    "out_of_distribution": _out_of_distribution,
    "ensemble": _ensemble,
    "deep_ensemble": _ensemble,
    "panoptic": _masks,
    "captioning": _texts,
    "question_answering": _texts,
}
