"""Sections that show what a model says of single images: calibration, worst classes, certainty, names, noise."""

import itertools
from collections.abc import Sequence

import numpy as np

from lit_het.eval.calibration import ReliabilityCurve
from lit_het.eval.drawings import NUM_EXTREMES, NUM_OF_CONFUSION
from lit_het.eval.evaluation import Record
from lit_het.eval.report import figures, grids
from lit_het.eval.report.grids import Mark
from lit_het.eval.report.naming import title_of_part
from lit_het.eval.report.page import NOTHING, Html, Section, folded, heading

# A record beside what it is of, such as a run and a set.
Titled = tuple[str, Record]


def sections_of_predictions(drawn: Sequence[Titled]) -> list[Section]:
    """Returns the sections for which records of classification hold something to draw."""
    shown = [(title, record) for title, record in drawn if "confidence" in record.drawing.arrays]
    if not shown:
        return []
    return [
        section
        for section in (
            _calibration(shown),
            _worst_classes(shown),
            _certainty(shown),
            _names(shown),
            _spectrum(shown),
        )
        if section.body
    ]


def _calibration(shown: Sequence[Titled]) -> Section:
    body = []
    for title, record in shown:
        curves = {
            title_of_part("" if part == "plain" else part): _curve(record.drawing.arrays[f"reliability/{part}"])
            for part in ("plain", "calibrated", "noisy")
            if f"reliability/{part}" in record.drawing.arrays
        }
        body += [heading(title), figures.reliability_diagrams(curves)]
    return Section(
        "Calibration",
        tuple(body),
        "How often the best name is right, against the probability that the model gives it. Calibrated: each half of "
        "the images is scaled by the temperature that fits the other half.",
    )


def _curve(stored: np.ndarray) -> ReliabilityCurve:
    lower, confidence, accuracy, count = stored
    return ReliabilityCurve(np.append(lower, 1.0), confidence, accuracy, count.astype(np.int64))


def _worst_classes(shown: Sequence[Titled]) -> Section:
    # Evaluations of earlier versions kept the most frequent confusions, whatever the class.
    drawn = [(title, record) for title, record in shown if len(record.drawing.arrays.get("worst", ()))]
    return Section(
        "Worst classes",
        _foldable([(title, _confusion_rows(record)) for title, record in drawn]),
        "The classes of the lowest recall, what their images were taken for most often, and some of these images. "
        "Of classes with the same recall, those come first whose images give the right name the lowest probability.",
    )


def _confusion_rows(record: Record) -> Html:
    arrays, names = record.drawing.arrays, record.drawing.texts["class_names"]
    rows = []
    for true, confusions in itertools.groupby(arrays["worst"].tolist(), key=lambda confusion: confusion[0]):
        told, examples, answers = [], [], []
        for _, predicted, count, of in confusions:
            told.append(f"{names[predicted]} ({count:,} of {of:,})")
            is_example = (arrays["label"] == true) & (arrays["top_classes"][:, 0] == predicted)
            places = np.flatnonzero(is_example)[:NUM_OF_CONFUSION].tolist()
            examples += places
            answers += [f"{names[true]}, taken for {names[predicted]}"] * len(places)
        title = f"{names[true]}, taken for {', '.join(told)}"
        rows.append(grids.image_row(title, arrays["image"][examples], [Mark.WRONG] * len(examples), answers))
    return Html(f'<div class="rows">{"".join(rows)}</div>')


def _certainty(shown: Sequence[Titled]) -> Section:
    parts = []
    for title, record in shown:
        confidence = record.drawing.arrays["confidence"][record.drawing.arrays["row"]]
        order = np.argsort(confidence, kind="stable")
        body = Html(
            _certainty_strip("Least certain", record, order[:NUM_EXTREMES])
            + _certainty_strip("Most certain", record, order[::-1][:NUM_EXTREMES])
            + _noise_of_errors(record)
        )
        parts.append((title, body))
    return Section(
        "How certain it is",
        _foldable(parts),
        "Images with the lowest and the highest probability of the best name. ✓: that name is right.",
    )


def _certainty_strip(title: str, record: Record, chosen: np.ndarray) -> Html:
    arrays, names = record.drawing.arrays, record.drawing.texts["class_names"]
    rows, labels, answers = arrays["row"][chosen], arrays["label"][chosen], arrays["top_classes"][chosen, 0]
    noise = arrays["noise_norm"][rows]
    values = [f"{share:.1%}" for share in arrays["confidence"][rows]]
    if arrays["noise_norm"].any():
        values = [f"{value}, noise {norm:.3f}" for value, norm in zip(values, noise, strict=True)]
    captions = [
        f"{names[label]}, taken for {names[answer]}" if label != answer else str(names[label])
        for label, answer in zip(labels, answers, strict=True)
    ]
    marks = [Mark.RIGHT if label == answer else Mark.WRONG for label, answer in zip(labels, answers, strict=True)]
    return grids.image_strip(title, arrays["image"][chosen], captions, values, marks)


def _noise_of_errors(record: Record) -> Html:
    """Whether the noise of images that are mistaken is larger."""
    arrays = record.drawing.arrays
    right = arrays["correct"] > 0.5
    if not arrays["noise_norm"].any() or right.all() or not right.any():
        return NOTHING
    groups = {"wrong": arrays["noise_norm"][~right], "right": arrays["noise_norm"][right]}
    return figures.distribution("Noise of images that were recognised or not", groups, "noise norm √tr Σ(x)")


def _names(shown: Sequence[Titled]) -> Section:
    parts = [(title, _cards(record)) for title, record in shown]
    return Section(
        "Image to name",
        (grids.mark_legend(None), *_foldable(parts)),
        "The five best names of images spread evenly over the set.",
    )


def _cards(record: Record) -> Html:
    arrays = record.drawing.arrays
    # Of the images that are kept, those that nobody has picked.
    wanted = np.linspace(0, len(arrays["confidence"]) - 1, NUM_EXTREMES).astype(int)
    chosen = np.flatnonzero(np.isin(arrays["row"], wanted))
    return grids.image_to_name_grid(
        arrays["image"][chosen],
        arrays["label"][chosen],
        arrays["top_classes"][chosen],
        arrays["top_probabilities"][chosen],
        record.drawing.texts["class_names"],
    )


def _spectrum(shown: Sequence[Titled]) -> Section:
    lines, counts = {}, set()
    for title, record in shown:
        spectrum = record.drawing.arrays.get("spectrum", np.zeros((0, 0)))
        if not spectrum.size or not (spectrum > 0).any():
            continue
        counts.add(len(spectrum))
        # Zeros have no place on a logarithmic axis.
        mean, low, high = (
            np.where(values > 0, values, np.nan)
            for values in (spectrum.mean(axis=0), *np.quantile(spectrum, (0.05, 0.95), axis=0))
        )
        lines[title] = figures.Line(
            range(1, len(mean) + 1), mean.tolist(), band=(low.tolist(), high.tolist()), colour=len(lines), bold=True
        )
    if not lines:
        return Section("Spectrum of the noise", ())
    images = " or ".join(f"{count:,}" for count in sorted(counts))
    drawing = figures.plot(
        "Square roots of the eigenvalues of Σ(x)",
        lines,
        "number of the eigenvalue",
        "standard deviation",
        logarithmic=True,
        caption=f"Mean over {images} images, and the band that holds 90 % of them.",
    )
    note = (
        "How the noise around an image's embedding is spread over directions: a steep fall means that few directions "
        "hold most of it."
    )
    return Section("Spectrum of the noise", (drawing,), note)


def _foldable(parts: Sequence[tuple[str, Html]]) -> tuple[Html, ...]:
    """Several parts below each other, the first of which is unfolded."""
    if len(parts) == 1:
        return (heading(parts[0][0]), parts[0][1])
    return tuple(folded(title, body, unfolded=number == 0) for number, (title, body) in enumerate(parts))
