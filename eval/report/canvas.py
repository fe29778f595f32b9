"""The canvas of figures: inline SVG in the colours of the page, for light and dark mode."""

import io
import re

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text

from lit_het.eval.report.page import NOTHING, NUM_COLOURS, Html, escaped

# Placeholders: matplotlib needs hexadecimal colours, which are replaced by variables of the style sheet in the SVG.
INK, MUTED, LINE = "#0a0a01", "#0a0a02", "#0a0a03"
SERIES = tuple(f"#0a0a1{number}" for number in range(NUM_COLOURS))
_VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line"} | {
    colour: f"--series-{number}" for number, colour in enumerate(SERIES)
}
# Narrow, so that text is still readable when a phone shrinks the figure.
WIDTH_INCHES = 4.4


def canvas(height: float, width: float = WIDTH_INCHES) -> tuple[Figure, Axes]:
    """Returns a figure and its axes, without the global state of pyplot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    _tidy(axes)
    return figure, axes


def stacked_canvas(height: float) -> tuple[Figure, Axes, Axes]:
    """Returns a figure with a tall panel above a flat panel, on one horizontal axis."""
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    FigureCanvasSVG(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    _tidy(upper)
    _tidy(lower)
    return figure, upper, lower


def _tidy(axes: Axes) -> None:
    """Styles axes: two spines, a faint horizontal grid, and text in the colours of the page."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    axes.tick_params(which="both", color=LINE, labelcolor=MUTED, labelsize=9)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=MUTED, size=9)


def framed(title: str, figure: Figure, caption: str, key: Html = NOTHING) -> Html:
    """Returns a figure with heading, legend and caption, as markup."""
    shown = f"<figcaption>{escaped(caption)}</figcaption>" if caption else ""
    drawing = _svg(figure, f"{title}. {caption}")
    return Html(f'<figure class="plot"><h3>{escaped(title)}</h3>{key}{drawing}{shown}</figure>')


def _svg(figure: Figure, alt: str) -> Html:
    """Returns the figure as inline SVG with the fonts and colours of the page, a description and unique ids."""
    buffer = io.StringIO()
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name may hold dollars
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)
        figure.set_layout_engine(None)  # or matplotlib would draw all of it twice
    # "none" keeps text as text: small and selectable. The salt makes ids of clip paths differ between figures.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": alt}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    body = buffer.getvalue().partition("<svg")[2].partition(">")[2]
    body = re.sub(r"<style.*?</style>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r' id="[a-zA-Z0-9.]+_[0-9]+"', "", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    width, height = (72 * side for side in figure.get_size_inches())
    return Html(f'<svg role="img" aria-label="{escaped(alt)}" viewBox="0 0 {width:g} {height:g}">{body}')
