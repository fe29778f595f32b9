"""Retrieval grids with pictures: names for an image, images for a name, and strips of examples."""

import enum
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, UInt8

from eval.ambiguity import NO_GROUP
from eval.report.page import NOTHING, Html, escaped, joined, picture

# One image [h w c] each; sizes may differ.
Pictures = Sequence[np.ndarray] | UInt8[np.ndarray, "n h w c"]


class Mark(enum.Enum):
    """How an answer relates to the truth: a style of its own, a sign that needs no colour, and a word."""

    RIGHT = ("right", "✓", "right answer")
    MATE = ("mate", "≈", "looks like the right answer")
    WRONG = ("wrong", "", "wrong answer")

    def __init__(self, style: str, sign: str, meaning: str):
        self.style, self.sign, self.meaning = style, sign, meaning


def mark_of(answer: int, truth: int, groups: Int[np.ndarray, " k"] | None) -> Mark:
    """Right, a look-alike of the truth (same group), or wrong; without groups there are no look-alikes."""
    if answer == truth:
        return Mark.RIGHT
    if groups is not None and groups[truth] != NO_GROUP and groups[answer] == groups[truth]:
        return Mark.MATE
    return Mark.WRONG


def mark_legend(mate_meaning: str = Mark.MATE.meaning) -> Html:
    """What the signs in the grids mean."""
    meanings = ((Mark.RIGHT, Mark.RIGHT.meaning), (Mark.MATE, mate_meaning))
    items = (f'<li><span class="{mark.style}">{mark.sign}</span> {escaped(text)}</li>' for mark, text in meanings)
    return Html(f'<ul class="legend">{"".join(items)}</ul>')


def image_to_name_grid(
    images: Pictures,
    labels: Int[np.ndarray, " n"],
    top_classes: Int[np.ndarray, "n top"],
    top_probabilities: Float[np.ndarray, "n top"],
    class_names: Sequence[str],
    groups: Int[np.ndarray, " k"] | None = None,
) -> Html:
    """A card for each picture: its true name, and the best names with their probabilities.

    Args:
        images: pictures.
        labels: true classes.
        top_classes: best classes, falling (`ZeroShotResult.top_classes`).
        top_probabilities: their probabilities.
        class_names: names of the classes.
        groups: look-alike group of each class (`eval.ambiguity.groups_of`).
    """
    cards = (
        _name_card(image, int(label), answers, probabilities, class_names, groups)
        for image, label, answers, probabilities in zip(images, labels, top_classes, top_probabilities, strict=True)
    )
    return Html(f'<div class="cards">{joined(cards)}</div>')


def _name_card(
    image: np.ndarray,
    label: int,
    answers: np.ndarray,
    probabilities: np.ndarray,
    class_names: Sequence[str],
    groups: np.ndarray | None,
) -> Html:
    lines = []
    for answer, probability in zip(answers.tolist(), probabilities.tolist(), strict=True):
        mark = mark_of(answer, label, groups)
        lines.append(
            f'<li class="{mark.style}" style="--share: {probability:.1%}"><span>{_sign(mark)}</span>'
            f'<span>{escaped(class_names[answer])}</span><span class="share">{_percent(probability)}</span></li>'
        )
    truth = class_names[label]
    return Html(
        f'<article class="card"><header>{picture(image, f"picture of {truth}")}<h3>{escaped(truth)}</h3></header>'
        f'<ol class="candidates">{"".join(lines)}</ol></article>'
    )


def name_to_image_grid(
    names: Sequence[int],
    images: Sequence[Pictures],
    image_labels: Int[np.ndarray, "queries top"],
    class_names: Sequence[str],
    groups: Int[np.ndarray, " k"] | None = None,
) -> Html:
    """A row for each name: the pictures nearest to it, the nearest first.

    Args:
        names: classes whose names are the queries.
        images: for each query, its best pictures.
        image_labels: true classes of those pictures.
        class_names: names of the classes.
        groups: look-alike group of each class.
    """
    rows = []
    for query, pictures, labels in zip(names, images, image_labels, strict=True):
        shown = []
        for image, label in zip(pictures, labels.tolist(), strict=True):
            mark = mark_of(label, query, groups)
            alt = f"{mark.meaning}: picture of {class_names[label]}"
            shown.append(
                f'<figure class="{mark.style}" title="{escaped(class_names[label])}">{picture(image, alt)}'
                f"<figcaption>{_sign(mark)}</figcaption></figure>"
            )
        heading = f"<h3>{escaped(class_names[query])}</h3>"
        rows.append(Html(f'<div class="row">{heading}<div class="pictures">{"".join(shown)}</div></div>'))
    return Html(f'<div class="rows">{joined(rows)}</div>')


def picture_strip(title: str, images: Pictures, captions: Sequence[str], values: Sequence[str]) -> Html:
    """A titled strip of pictures, each with a value and a caption, such as a noise norm and a name."""
    figures = (
        Html(
            f"<figure>{picture(image, f'picture of {caption}')}"
            f"<figcaption><b>{escaped(value)}</b>{escaped(caption)}</figcaption></figure>"
        )
        for image, caption, value in zip(images, captions, values, strict=True)
    )
    return Html(f'<h3>{escaped(title)}</h3><div class="strip">{joined(figures)}</div>')


def _sign(mark: Mark) -> Html:
    """The sign of a mark, read aloud as its meaning."""
    return Html(f'<span role="img" aria-label="{mark.meaning}">{mark.sign}</span>') if mark.sign else NOTHING


def _percent(probability: float) -> str:
    return "<0.1%" if probability < 0.001 else f"{probability:.1%}"
