"""Grids of images: the top class names of an image, rows of images, and strips of examples."""

import enum
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, UInt8

from lit_het.eval.metrics.ambiguity import NO_GROUP
from lit_het.eval.report.page import NOTHING, Html, escaped, img, joined

# Images [h w c]; sizes may differ.
Images = Sequence[np.ndarray] | UInt8[np.ndarray, "n h w c"]


class Mark(enum.Enum):
    """How an answer relates to the true class: a CSS class, a sign that needs no colour, and a description."""

    RIGHT = ("right", "✓", "right answer")
    HOMOGLYPH = ("homoglyph", "≈", "homoglyph of the right answer")
    WRONG = ("wrong", "", "wrong answer")

    def __init__(self, style: str, sign: str, meaning: str):
        self.style, self.sign, self.meaning = style, sign, meaning


def mark_of(answer: int, truth: int, groups: Int[np.ndarray, " k"] | None) -> Mark:
    """Returns whether an answer is right, a homoglyph of the truth (in the same group), or wrong."""
    if answer == truth:
        return Mark.RIGHT
    if groups is not None and groups[truth] != NO_GROUP and groups[answer] == groups[truth]:
        return Mark.HOMOGLYPH
    return Mark.WRONG


def mark_legend(homoglyph_meaning: str | None = Mark.HOMOGLYPH.meaning) -> Html:
    """Returns the legend of the signs in grids; None if there are no homoglyphs."""
    meanings = [(Mark.RIGHT, Mark.RIGHT.meaning)]
    if homoglyph_meaning is not None:
        meanings.append((Mark.HOMOGLYPH, homoglyph_meaning))
    items = (f'<li><span class="{mark.style}">{mark.sign}</span> {escaped(text)}</li>' for mark, text in meanings)
    return Html(f'<ul class="legend">{"".join(items)}</ul>')


def image_to_name_grid(
    images: Images,
    labels: Int[np.ndarray, " n"],
    top_classes: Int[np.ndarray, "n top"],
    top_probabilities: Float[np.ndarray, "n top"],
    class_names: Sequence[str],
    groups: Int[np.ndarray, " k"] | None = None,
) -> Html:
    """Returns a card per image: its true class name, and the top class names with their probabilities.

    Args:
        images: images.
        labels: true classes.
        top_classes: top classes, most probable first (`lit_het.eval.predictions.Predictions.top`).
        top_probabilities: their probabilities.
        class_names: names of the classes.
        groups: homoglyph group of each class (`lit_het.eval.metrics.ambiguity.groups_of`); None for no homoglyphs.
    """
    cards = (
        answer_card(
            image,
            class_names[int(label)],
            [class_names[int(answer)] for answer in answers],
            [mark_of(answer, int(label), groups) for answer in answers.tolist()],
            probabilities,
        )
        for image, label, answers, probabilities in zip(images, labels, top_classes, top_probabilities, strict=True)
    )
    return Html(f'<div class="cards">{joined(cards)}</div>')


def answer_card(
    image: np.ndarray,
    title: str,
    answers: Sequence[str],
    marks: Sequence[Mark],
    probabilities: Sequence[float] | Float[np.ndarray, " top"] | None = None,
) -> Html:
    """Returns a card with an image, a title and a list of answers, with their probabilities if given."""
    shares = [None] * len(answers) if probabilities is None else [float(share) for share in probabilities]
    lines = (_answer(text, mark, share) for text, mark, share in zip(answers, marks, shares, strict=True))
    shown = f"<h3>{escaped(title)}</h3>" if title else ""
    return Html(
        f'<article class="card"><header>{img(image, f"image of {title}" if title else "image")}{shown}</header>'
        f'<ol class="candidates">{"".join(lines)}</ol></article>'
    )


def pair_card(images: Images, title: str, lines: Sequence[str]) -> Html:
    """Returns a card with images beside each other, a title and lines of text."""
    shown = joined(img(image, f"image of {line}") for image, line in zip(images, lines, strict=True))
    texts = joined(Html(f'<p class="note">{escaped(line)}</p>') for line in lines)
    return Html(f'<article class="card pair"><header>{shown}</header><h3>{escaped(title)}</h3>{texts}</article>')


def _answer(text: str, mark: Mark, share: float | None) -> Html:
    bar = "" if share is None else f' style="--share: {share:.1%}"'
    number = "" if share is None else f'<span class="share">{_percent(share)}</span>'
    return Html(f'<li class="{mark.style}"{bar}><span>{_sign(mark)}</span><span>{escaped(text)}</span>{number}</li>')


def image_row(title: str, images: Images, marks: Sequence[Mark], names: Sequence[str] | None = None) -> Html:
    """Returns a row with a title and marked images; names are tooltips."""
    shown = []
    for image, mark, name in zip(images, marks, names or [""] * len(marks), strict=True):
        alt = f"{mark.meaning}: image of {name}" if name else f"{mark.meaning}: image"
        tip = f' title="{escaped(name)}"' if name else ""
        shown.append(
            f'<figure class="{mark.style}"{tip}>{img(image, alt)}<figcaption>{_sign(mark)}</figcaption></figure>'
        )
    return Html(f'<div class="row"><h3>{escaped(title)}</h3><div class="images">{"".join(shown)}</div></div>')


def image_strip(
    title: str, images: Images, captions: Sequence[str], values: Sequence[str], marks: Sequence[Mark] | None = None
) -> Html:
    """Returns a titled strip of images, each with a value (such as a noise norm), a caption, and a mark if given."""
    figures = (
        Html(
            f"<figure>{img(image, f'image of {caption}')}"
            f"<figcaption><b>{marked(mark)}{escaped(value)}</b>{escaped(caption)}</figcaption></figure>"
        )
        for image, caption, value, mark in zip(images, captions, values, marks or [None] * len(values), strict=True)
    )
    return Html(f'<h3>{escaped(title)}</h3><div class="strip">{joined(figures)}</div>')


def marked(mark: Mark | None) -> Html:
    """Returns the sign of a mark in its colour, or nothing."""
    return NOTHING if mark is None else Html(f'<span class="{mark.style}">{_sign(mark)}</span> ')


def _sign(mark: Mark) -> Html:
    """Returns the sign of a mark; screen readers read its meaning."""
    return Html(f'<span role="img" aria-label="{mark.meaning}">{mark.sign}</span>') if mark.sign else NOTHING


def _percent(probability: float) -> str:
    return "<0.1%" if probability < 0.001 else f"{probability:.1%}"
