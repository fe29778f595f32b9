"""The page of a report: text, facts, images, sections, and the whole page.

Functions take plain text and return `Html`. Text is escaped, so that a class name with a ``<`` cannot break a page, and
a type checker distinguishes text from markup.
"""

import base64
import dataclasses
import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NewType

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from lit_het.eval.report.style import STYLE

Html = NewType("Html", str)
NOTHING = Html("")

# The number of series colours in the style sheet.
NUM_COLOURS = 8

# So many sections of a page are unfolded.
_UNFOLDED = 3

# The longest side of stored images, in pixels: twice the displayed size, for high-density screens. Images up to
# `LARGEST_EXACT_SIDE` are stored without loss.
LARGEST_IMAGE_SIDE = 160
LARGEST_EXACT_SIDE = 64


@dataclasses.dataclass(frozen=True)
class Section:
    """A titled part of a page.

    Attributes:
        title: heading, plain text.
        body: markup, in order.
        note: plain text below the heading that explains how to read the section.
    """

    title: str
    body: tuple[Html, ...]
    note: str = ""


def escaped(text: object) -> Html:
    """Returns text escaped for HTML."""
    return Html(html.escape(str(text), quote=True))


def joined(parts: Iterable[Html]) -> Html:
    """Returns the parts joined by line breaks."""
    return Html("\n".join(parts))


def paragraph(text: str) -> Html:
    """Returns a paragraph of plain text."""
    return Html(f"<p>{escaped(text)}</p>")


def facts(items: Mapping[str, object]) -> Html:
    """Returns a strip of short facts, such as seed, commit, machine and seconds."""
    pairs = (f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in items.items())
    return Html(f'<dl class="facts">{"".join(pairs)}</dl>')


def configuration(config: str | Mapping[str, object], summary: str = "Configuration") -> Html:
    """Returns a collapsed block with a configuration; a mapping is shown as JSON."""
    text = config if isinstance(config, str) else json.dumps(config, indent=2, default=str, ensure_ascii=False)
    return Html(f"<details><summary>{escaped(summary)}</summary><pre>{escaped(text)}</pre></details>")


def side_by_side(*parts: Html) -> Html:
    """Returns parts side by side where the screen is wide enough."""
    cells = joined(Html(f"<div>{part}</div>") for part in parts)
    return Html(f'<div class="columns">{cells}</div>')


def legend(swatches: Mapping[str, int | None]) -> Html:
    """Returns the legend of a chart: names and colour indices of its series.

    Indices beyond the palette reuse its colours, dashed; None is a faint dotted line.
    """
    items = (f"<li>{_swatch(colour)}{escaped(name)}</li>" for name, colour in swatches.items())
    return Html(f'<ul class="legend">{"".join(items)}</ul>')


def _swatch(colour: int | None) -> Html:
    if colour is None:
        return Html('<span class="swatch dotted" style="--colour: var(--muted)"></span>')
    dashes = " dashed" if colour >= NUM_COLOURS else ""
    return Html(f'<span class="swatch{dashes}" style="--colour: var(--series-{colour % NUM_COLOURS})"></span>')


def heading(text: str) -> Html:
    """Returns a heading inside a section."""
    return Html(f"<h3>{escaped(text)}</h3>")


def folded(summary: str, *parts: Html, unfolded: bool = False) -> Html:
    """Returns a collapsible block."""
    state = " open" if unfolded else ""
    return Html(
        f'<details class="folded"{state}><summary>{escaped(summary)}</summary><div>{joined(parts)}</div></details>'
    )


def img(
    pixels: UInt8[np.ndarray, "h w c"] | UInt8[np.ndarray, "h w"], alt: str, largest_side: int = LARGEST_IMAGE_SIDE
) -> Html:
    """Returns an image stored in the page, with its description; ``c`` is 1 or 3.

    Small images are stored without loss; large images are shrunk and stored as JPEG.
    """
    squeezed = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels
    image = Image.fromarray(np.ascontiguousarray(squeezed))
    image.thumbnail((largest_side, largest_side))
    buffer = io.BytesIO()
    kind = "png" if max(image.size) <= LARGEST_EXACT_SIDE else "jpeg"
    image.save(buffer, format=kind, optimize=True, quality=88)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Html(f'<img src="data:image/{kind};base64,{data}" alt="{escaped(alt)}">')


def render_page(title: str, sections: Sequence[Section], verdict: str = "", header: Html = NOTHING) -> Html:
    """Returns the whole page as one string, without references to other files.

    Args:
        title: window title, and a line above the heading.
        sections: in order; those after the third are folded.
        verdict: the heading, in one sentence; by default the title.
        header: markup below the heading, such as `facts`.
    """
    links = "".join(f'<a href="#{_anchor(section.title)}">{escaped(section.title)}</a>' for section in sections)
    return Html(f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escaped(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
{f'<p class="subject">{escaped(title)}</p>' if verdict else ""}
<h1>{escaped(verdict or title)}</h1>
{header}
</header>
<nav aria-label="Contents">{links}</nav>
{joined(_render_section(section, number < _UNFOLDED) for number, section in enumerate(sections))}
</main>
</body>
</html>
""")


def _render_section(section: Section, unfolded: bool) -> Html:
    note = f'<p class="note">{escaped(section.note)}</p>\n' if section.note else ""
    title = f"<h2>{escaped(section.title)}</h2>"
    # A link to what is inside of a folded block unfolds it: the anchor is not that of the block.
    anchor = f'<div class="anchor" id="{_anchor(section.title)}"></div>'
    state = " open" if unfolded else ""
    body = f"<summary>{title}</summary>\n{anchor}{note}{joined(section.body)}"
    return Html(f'<section><details class="section"{state}>{body}\n</details></section>')


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
