"""Report sections on predictions: calibration, selective prediction, worst classes, confidence, top names, noise."""

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from lit_het.eval.drawings import NUM_EXTREMES, NUM_OF_CONFUSION
from lit_het.eval.evaluation import CALIBRATED, Record
from lit_het.eval.metrics.calibration import ReliabilityCurve
from lit_het.eval.report import figures, grids
from lit_het.eval.report.figures import Line
from lit_het.eval.report.grids import Mark
from lit_het.eval.report.naming import PLAIN, PLAIN_CALIBRATED, title_of_part
from lit_het.eval.report.page import NOTHING, Html, Section, folded, heading, joined, side_by_side

# Ticks of a horizontal axis of shares, and of one of coverages, which are rarely below one half.
SHARES = {percent / 100: f"{percent}%" for percent in range(0, 101, 20)}
_COVERAGES = {percent / 100: f"{percent}%" for percent in range(50, 101, 10)}

# A title, such as the name of a run or of a set, and a record.
Titled = tuple[str, Record]


def sections_of_predictions(drawn: Sequence[Titled]) -> list[Section]:
    """Returns the sections for which classification records have data to draw."""
    shown = [(title, record) for title, record in drawn if "confidence" in record.drawing.arrays]
    parts = (
        (_calibration, _seen_against_new, _selective, _worst_classes, _confidence, _top_names, _spectrum)
        if shown
        else ()
    )
    # Images with several labels have no predictions to draw, but noise.
    sections = [*(part(shown) for part in parts), _alignment(drawn)]
    return [section for section in sections if section.body]


def _calibration(shown: Sequence[Titled]) -> Section:
    body = []
    for title, record in shown:
        plain = PLAIN_CALIBRATED if record.settings.get(CALIBRATED) else PLAIN
        arrays = record.drawing.arrays
        curves = {
            title_of_part("" if part == "plain" else part, plain): curve_of(arrays[f"reliability/{part}"])
            for part in ("plain", "calibrated", "noisy")
            if f"reliability/{part}" in arrays
        }
        body += [heading(title), figures.reliability_diagrams(curves)]
    return Section(
        "Calibration",
        tuple(body),
        "Accuracy of the top class name against its predicted probability. Calibrated: each half of the images is "
        "scaled by the temperature that fits the other half. Calibrated beforehand: by lit-het calibrate, on other "
        "images.",
    )


def _seen_against_new(shown: Sequence[Titled]) -> Section:
    lines = {}
    for number, (title, record) in enumerate(shown):
        if (curve := record.drawing.arrays.get("seen_against_new")) is not None:
            lines[title] = Line(curve[0].tolist(), curve[1].tolist(), colour=number)
            x, y = (record.figures[name] for name in ("seen_top1", "new_top1"))
            lines[f"{title}, as predicted"] = Line([x], [y], colour=number, joined=False)
    body = figures.plot(
        "Names of training against new ones",
        lines,
        "top-1 of names of training",
        "top-1 of new names",
        ticks=SHARES,
        as_share=True,
    )
    return Section(
        "Names that training had, and new ones",
        (body,) if lines else (),
        "All names are candidates. As an offset on the logits of names that training captions had moves from minus to "
        "plus infinity, images of new names lose what the others gain; the area under the curve is AUSUC (Chao et al. "
        "2016). --prior chooses a point of it.",
    )


def curve_of(stored: np.ndarray) -> ReliabilityCurve:
    """Returns a reliability curve from its bins, as drawings store them."""
    lower, confidence, accuracy, count = stored
    return ReliabilityCurve(np.append(lower, 1.0), confidence, accuracy, count.astype(np.int64))


def _selective(shown: Sequence[Titled]) -> Section:
    body = []
    for title, record in shown:
        # Evaluations of earlier versions have no curves.
        if "risk/plain" in record.drawing.arrays:
            body += [heading(title), side_by_side(_set_plot(record), _risk_plot(record))]
    return Section(
        "Prediction sets and selective prediction",
        tuple(body),
        "Prediction sets have as many class names as they need to contain the correct one with a given probability: "
        "their thresholds are from one half of the images, and they are measured on the other. Selective prediction "
        "answers only the images of which the model is most confident.",
    )


def _set_plot(record: Record) -> Html:
    lines = {
        title_of_part(part): Line(coverage.tolist(), size.tolist(), error.tolist(), colour=number)
        for number, (part, (_, coverage, size, error)) in enumerate(_curves_of_parts(record, "sets").items())
        if coverage.size
    }
    if not lines:
        return NOTHING
    return figures.plot(
        "Size of prediction sets", lines, "coverage", "class names in a set", ticks=_COVERAGES, logarithmic=True
    )


def _risk_plot(record: Record) -> Html:
    lines = {}
    for number, (part, (coverage, risk)) in enumerate(_curves_of_parts(record, "risk").items()):
        name = "lowest noise norm first" if part == "noise_norm" else title_of_part(part)
        lines[name] = Line(coverage.tolist(), risk.tolist(), colour=number)
    everything = float(record.drawing.arrays["risk/plain"][1, -1])
    lines["random order"] = Line([0, 1], [everything, everything], colour=None)
    return figures.plot(
        "Errors among the most confident",
        lines,
        "share of images answered",
        "wrong predictions",
        ticks=SHARES,
        as_share=True,
    )


def _curves_of_parts(record: Record, kind: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a kind of curve by part; the plain part has an empty name."""
    paths = (f"{kind}/{part}" for part in ("plain", "calibrated", "noisy", "noise_norm"))
    found = {path: record.drawing.arrays[path] for path in paths if path in record.drawing.arrays}
    return {path.partition("/")[2].replace("plain", ""): stored for path, stored in found.items()}


def _worst_classes(shown: Sequence[Titled]) -> Section:
    # Evaluations of earlier versions have no "worst" array.
    drawn = [(title, record) for title, record in shown if len(record.drawing.arrays.get("worst", ()))]
    return Section(
        "Worst classes",
        _foldable([(title, _confusion_rows(record)) for title, record in drawn]),
        "The classes with the lowest recall, their most frequent wrong predictions, and example images. Classes with "
        "equal recall are sorted by the probability of the correct class name, lowest first.",
    )


def _confusion_rows(record: Record) -> Html:
    arrays, names = record.drawing.arrays, record.drawing.texts["class_names"]
    rows = []
    for true, confusions in itertools.groupby(arrays["worst"].tolist(), key=lambda confusion: confusion[0]):
        confused, examples, answers = [], [], []
        for _, predicted, count, of in confusions:
            confused.append(f"{names[predicted]} ({count:,} of {of:,})")
            is_example = (arrays["label"] == true) & (arrays["top_classes"][:, 0] == predicted)
            places = np.flatnonzero(is_example)[:NUM_OF_CONFUSION].tolist()
            examples += places
            answers += [f"{names[true]}, predicted as {names[predicted]}"] * len(places)
        title = f"{names[true]}, predicted as {', '.join(confused)}"
        rows.append(grids.image_row(title, arrays["image"][examples], [Mark.WRONG] * len(examples), answers))
    return Html(f'<div class="rows">{"".join(rows)}</div>')


def _confidence(shown: Sequence[Titled]) -> Section:
    parts = []
    for title, record in shown:
        strips = _strips("Least confident", "Most confident", record, "confidence")
        if record.drawing.arrays["noise_norm"].any():
            strips += _strips("Least noise", "Most noise", record, "noise_norm")
        parts.append((title, Html(strips + _noise_of_errors(record))))
    return Section(
        "Confidence",
        _foldable(parts),
        "Images with the lowest and highest probability of the top class name, and of a HET-XL head those with the "
        "least and most noise. ✓: the prediction is correct.",
    )


def _strips(lowest: str, highest: str, record: Record, values: str) -> Html:
    """Returns the images with the lowest and with the highest values of an array, under their titles."""
    order = np.argsort(record.drawing.arrays[values][record.drawing.arrays["row"]], kind="stable")
    ends = {lowest: order[:NUM_EXTREMES], highest: order[::-1][:NUM_EXTREMES]}
    return joined(_strip(title, record, chosen) for title, chosen in ends.items())


def _strip(title: str, record: Record, chosen: np.ndarray) -> Html:
    arrays, names = record.drawing.arrays, record.drawing.texts["class_names"]
    rows, labels, answers = arrays["row"][chosen], arrays["label"][chosen], arrays["top_classes"][chosen, 0]
    noise = arrays["noise_norm"][rows]
    values = [f"{share:.1%}" for share in arrays["confidence"][rows]]
    if arrays["noise_norm"].any():
        values = [f"{value}, noise {norm:.3f}" for value, norm in zip(values, noise, strict=True)]
    captions = [
        f"{names[label]}, predicted as {names[answer]}" if label != answer else str(names[label])
        for label, answer in zip(labels, answers, strict=True)
    ]
    marks = [Mark.RIGHT if label == answer else Mark.WRONG for label, answer in zip(labels, answers, strict=True)]
    return grids.image_strip(title, arrays["image"][chosen], captions, values, marks)


def _noise_of_errors(record: Record) -> Html:
    """Returns histograms of the noise norms of wrong and of correct predictions."""
    arrays = record.drawing.arrays
    right = arrays["correct"] > 0.5
    if not arrays["noise_norm"].any() or right.all() or not right.any():
        return NOTHING
    groups = {"wrong": arrays["noise_norm"][~right], "correct": arrays["noise_norm"][right]}
    return figures.distribution("Noise norm of wrong and correct predictions", groups, "noise norm √tr Σ(x)")


def _top_names(shown: Sequence[Titled]) -> Section:
    parts = [(title, top_names(record)) for title, record in shown]
    return Section(
        "Top class names",
        (grids.mark_legend(None), *_foldable(parts)),
        "The five most probable class names of images spread evenly over the set.",
    )


def top_names(record: Record, groups: Int[np.ndarray, " k"] | None = None) -> Html:
    """Returns the top class names of images spread evenly over the set; answers in the true class's group are marked.

    Args:
        record: of classification.
        groups: homoglyph group of each class (`lit_het.eval.metrics.ambiguity.groups_of`); None for no homoglyphs.
    """
    arrays = record.drawing.arrays
    # Saved images also include the least and most confident ones; the evenly spread ones are selected by row.
    wanted = np.linspace(0, len(arrays["confidence"]) - 1, NUM_EXTREMES).astype(int)
    chosen = np.flatnonzero(np.isin(arrays["row"], wanted))
    return grids.image_to_name_grid(
        arrays["image"][chosen],
        arrays["label"][chosen],
        arrays["top_classes"][chosen],
        arrays["top_probabilities"][chosen],
        record.drawing.texts["class_names"],
        groups,
    )


def _spectrum(shown: Sequence[Titled]) -> Section:
    lines, counts = {}, set()
    for title, record in shown:
        spectrum = record.drawing.arrays.get("spectrum", np.zeros((0, 0)))
        if not spectrum.size or not (spectrum > 0).any():
            continue
        counts.add(len(spectrum))
        # NaN leaves a gap: a logarithmic axis cannot show zero.
        mean, low, high = (
            np.where(values > 0, values, np.nan)
            for values in (spectrum.mean(axis=0), *np.quantile(spectrum, (0.05, 0.95), axis=0))
        )
        lines[title] = Line(
            range(1, len(mean) + 1), mean.tolist(), band=(low.tolist(), high.tolist()), colour=len(lines), bold=True
        )
    if not lines:
        return Section("Spectrum of the noise", ())
    images = " or ".join(f"{count:,}" for count in sorted(counts))
    drawing = figures.plot(
        "Square roots of the eigenvalues of Σ(x)",
        lines,
        "index of the eigenvalue",
        "standard deviation",
        logarithmic=True,
        caption=f"Mean over {images} images, and the band between the 5th and 95th percentile.",
    )
    note = (
        "How the noise of an image's embedding is distributed over directions: a steep decrease means that few "
        "directions have most of the variance."
    )
    return Section("Spectrum of the noise", (drawing,), note)


def _alignment(shown: Sequence[Titled]) -> Section:
    body = []
    for title, record in shown:
        cosines = record.drawing.arrays.get("kernel_alignment", np.zeros(0))
        if cosines.size:
            of_learned, of_random = cosines.T
            groups = {"random W": of_random, "learned W": of_learned}
            body.append(figures.distribution(title, groups, "cosine of the smallest angle"))
    note = (
        "The smallest angle between the row spaces of W and of the noise of HET heads (HET-XL App. I.1). Near 1, at "
        "least one direction of the noise lies in the row space of W; one that moves all logits alike counts, too. The "
        "cosines of a W of standard normals are the chance level."
    )
    return Section("Alignment of W and the noise", tuple(body), note)


def _foldable(parts: Sequence[tuple[str, Html]]) -> tuple[Html, ...]:
    """Returns a single part with its heading, or several collapsible parts, the first open."""
    if len(parts) == 1:
        return (heading(parts[0][0]), parts[0][1])
    return tuple(folded(title, body, unfolded=number == 0) for number, (title, body) in enumerate(parts))
