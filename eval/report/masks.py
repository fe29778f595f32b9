"""Report parts on panoptic segmentation: masks over images, and the figures of each class."""

import colorsys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from lit_het.eval.evaluation import Record
from lit_het.eval.report.naming import style_of
from lit_het.eval.report.page import Html, escaped, folded, img, joined, paragraph
from lit_het.eval.report.tables import NO_FIGURE, Cell, Row, Table

# Small masks are enlarged to about this side, in pixels, so that outlines are thin; and none is larger.
_SIDE = 320
_OPACITY = 0.65
# Steps of the hue, by which classes near one another differ most, and saturations and values: hues nearly return after
# 8 and 13 classes, and no multiple of 3 is among these.
_GOLDEN, _LEVELS = 0.618034, ((0.95, 1.0), (0.5, 1.0), (0.9, 0.6))


def drawn_masks(titled: Sequence[tuple[str, Record]]) -> list[Html]:
    """Returns the masks and the classes of records of panoptic segmentation, under their titles."""
    found: list[Html] = []
    for number, (title, record) in enumerate(titled):
        if "predicted" in record.drawing.arrays:  # not of several processes, which draw nothing
            found += [
                folded(f"{title}: masks", _masks(record), unfolded=number == 0),
                folded(f"{title}: classes", _classes(record), unfolded=number == 0),
            ]
    return found


def _masks(record: Record) -> Html:
    arrays, names = record.drawing.arrays, record.drawing.texts["class_names"]
    cards = []
    shown = zip(record.drawing.texts["keys"], arrays["image"], arrays["true"], arrays["predicted"], strict=True)
    for number, (key, image, true, predicted) in enumerate(shown):
        pictures = {"image": image, "truth": overlaid(image, true), "prediction": overlaid(image, predicted)}
        figures = joined(
            Html(f"<figure>{img(_enlarged(pixels), f'{name} of {key}', _SIDE)}<figcaption>{name}</figcaption></figure>")
            for name, pixels in pictures.items()
        )
        matched, wrong, missed = arrays["found"][number].tolist()
        present = np.union1d(true[..., 0], predicted[..., 0])
        cards.append(
            f'<article class="card"><header>{figures}</header>{_legend(present[present > 0].tolist(), names)}'
            f'<p class="note">{escaped(key)}: {matched} matched, {wrong} wrong, {missed} missed</p></article>'
        )
    note = "Colours are classes, white lines outline things, and void is grey. Images are spread evenly."
    return Html(f'{paragraph(note)}<div class="cards masks">{joined(map(Html, cards))}</div>')


def _legend(classes: Sequence[int], names: Sequence[str]) -> Html:
    items = (
        f'<li><span class="swatch" style="--colour: rgb{tuple(_colours(label)[-1].tolist())}"></span>'
        f"{escaped(names[label - 1])}</li>"
        for label in classes
    )
    return Html(f'<ul class="legend">{"".join(items)}</ul>')


def overlaid(image: UInt8[np.ndarray, "h w 3"], masks: Int[np.ndarray, "h w 2"]) -> UInt8[np.ndarray, "height width 3"]:
    """Returns an image, enlarged, in grey with the colours of its masks over it and the outlines of instances."""
    # Without its own colours, which would mix with those of classes.
    grey = np.asarray(Image.fromarray(image).convert("L"))
    image, masks = _enlarged(grey)[..., None].repeat(3, axis=-1), _enlarged(masks)
    labels, instances = masks[..., 0], masks[..., 1]
    colours = _colours(int(labels.max()))[labels]
    blended = np.where(labels[..., None] > 0, (1 - _OPACITY) * image + _OPACITY * colours, image)
    # An outline is inside of its instance: of two that touch, each has its own.
    padded = np.pad(instances, 1, mode="edge")
    neighbours = [padded[1 + y : -1 + y or None, 1 + x : -1 + x or None] for y, x in ((0, 1), (0, -1), (1, 0), (-1, 0))]
    is_edge = (instances > 0) & np.any([other != instances for other in neighbours], axis=0)
    return np.where(is_edge[..., None], 255, blended).astype(np.uint8)


def _enlarged(pixels: np.ndarray) -> np.ndarray:
    times = max(1, _SIDE // max(pixels.shape[:2]))
    return pixels.repeat(times, axis=0).repeat(times, axis=1)


def _colours(last: int) -> UInt8[np.ndarray, "k 3"]:
    """Returns the colours of void, which is never shown, and of the classes up to the last."""
    values = [colorsys.hsv_to_rgb(label * _GOLDEN % 1, *_LEVELS[label % len(_LEVELS)]) for label in range(last + 1)]
    return np.round(255 * np.array(values)).astype(np.uint8)


def _classes(record: Record) -> Html:
    arrays, names = record.drawing.arrays, record.drawing.texts["class_names"]
    rows: list[Row] = []
    for title, chosen in (("things", arrays["is_thing"]), ("stuff", ~arrays["is_thing"])):
        places = np.flatnonzero(chosen).tolist()
        rows += [Row(title)] * bool(places) + [_class(names[place], place, record) for place in places]
    return Table("", ("PQ", "SQ", "RQ", "matched", "wrong", "missed"), tuple(rows)).html()


def _class(name: str, place: int, record: Record) -> Row:
    arrays = record.drawing.arrays
    quality, error = arrays["quality"][place].tolist(), float(arrays["pq_error"][place])
    if np.isnan(quality[0]):
        return Row(name, tuple(Cell(NO_FIGURE, faint=True) for _ in range(6)))
    shown = [style_of(figure).shown(value) for figure, value in zip(("pq", "sq", "rq"), quality, strict=True)]
    shown[0] = style_of("pq").shown(quality[0], error)
    counts = [f"{count:,.0f}" for count in arrays["counts"][place, 1:].tolist()]
    return Row(name, tuple(map(Cell, (*shown, *counts))))
