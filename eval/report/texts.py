"""Report parts on the texts of decoders: their calibration, and texts with the probability of each token."""

from collections.abc import Sequence

import numpy as np

from lit_het.eval.evaluation import Record
from lit_het.eval.report import figures
from lit_het.eval.report.figures import Line
from lit_het.eval.report.grids import Mark, mark_legend, marked
from lit_het.eval.report.naming import title_of_part
from lit_het.eval.report.page import Html, escaped, folded, heading, img, joined, paragraph, side_by_side
from lit_het.eval.report.predictions import SHARES, curve_of

_PARTS = ("plain", "noisy")


def drawn_texts(titled: Sequence[tuple[str, Record]]) -> list[Html]:
    """Returns the diagrams and the texts of records of decoders, under their titles."""
    found: list[Html] = []
    for number, (title, record) in enumerate(titled):
        if "token_p" not in record.drawing.arrays:
            continue  # of several processes, which draw nothing
        found += [
            folded(f"{title}: calibration", *_diagrams(record), unfolded=number == 0),
            folded(f"{title}: texts", _texts(record), unfolded=number == 0),
        ]
    return found


def _diagrams(record: Record) -> list[Html]:
    arrays = record.drawing.arrays
    found = [
        heading("Calibration of whole texts"),
        figures.reliability_diagrams(_curves(record, "reliability"), "texts"),
    ]
    if tokens := _curves(record, "token_reliability"):
        found += [
            heading("Calibration of tokens of the true texts"),
            figures.reliability_diagrams(tokens, "tokens"),
        ]
    lines = {
        _title(part): Line(*arrays[f"risk/{part}"].tolist(), colour=number)
        for number, part in enumerate(_PARTS)
        if f"risk/{part}" in arrays
    }
    everything = float(arrays["risk/plain"][1, -1])
    lines["random order"] = Line([0, 1], [everything, everything], colour=None)
    plot = figures.plot(
        "Errors among the most confident", lines, "share of texts", "wrong texts", ticks=SHARES, as_share=True
    )
    return [*found, side_by_side(plot)]


def _curves(record: Record, kind: str) -> dict[str, figures.ReliabilityCurve]:
    arrays = record.drawing.arrays
    return {_title(part): curve_of(arrays[f"{kind}/{part}"]) for part in _PARTS if f"{kind}/{part}" in arrays}


def _title(part: str) -> str:
    return title_of_part("" if part == "plain" else part)


def _texts(record: Record) -> Html:
    arrays, texts = record.drawing.arrays, record.drawing.texts
    pieces = iter(texts["tokens"])
    cards = []
    shown = zip(texts["titles"], arrays["row"], arrays["token_p"], strict=True)
    for number, (title, row, token_p) in enumerate(shown):
        # Translations have none.
        image = img(arrays["image"][number], f"image of {title}") if "image" in arrays else ""
        tokens = [(next(pieces), float(p)) for p in token_p[~np.isnan(token_p)]]
        is_right, confidence = arrays["right"][row] > 0.5, arrays["confidence"][row]
        mark = Mark.RIGHT if is_right else Mark.WRONG
        cards.append(
            f'<article class="card"><header>{image}<h3>{escaped(title)}</h3></header>'
            f'<p class="tokens">{joined(token(*one) for one in tokens)}</p>'
            f'<p class="note">{marked(mark)}{confidence:.1%} for the whole text</p></article>'
        )
    note = (
        "Texts from the most to the least confident, each below the true one. Under each token is its probability "
        "given those before it, in per cent; less probable ones are shaded, and ⏎ is the end."
    )
    return Html(f'{paragraph(note)}{mark_legend(None)}<div class="cards">{"".join(cards)}</div>')


def token(piece: str, p: float, band: tuple[float, float] | None = None) -> Html:
    """Returns a token above its probability, in per cent, and the ends of a band of it in brackets.

    Args:
        piece: of a text; empty for its end.
        p: probability of the token.
        band: of ``p`` over noise samples.
    """
    shown = escaped(piece.strip() or ("␣" if piece else "⏎"))
    spread = "" if band is None else f" ({100 * band[0]:.0f}–{100 * band[1]:.0f})"
    return Html(f'<ruby style="--doubt: {1 - min(p, 1):.0%}">{shown}<rt>{100 * p:.0f}{spread}</rt></ruby>')
