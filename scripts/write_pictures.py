"""Renews the pictures of the demo and of results: ``python -m scripts.write_pictures runs/quickstart``.

It starts the demo of a finished run, and needs Chromium and ``pip install -e '.[test,demo]'``. ``scripts.draw_results``
draws results alone. Benchmarks and some studies write their own plots.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageFont

from lit_het.data_pipelines.glyphs import GlyphConfig, draw, font_path
from scripts import draw_results
from tests.cli.browser import CHROMIUM, Browser, browser, served

IMAGES = Path(__file__).parents[1] / "docs" / "images"
# What is hard to tell from the first, of which the model has no image.
LABELS = (
    *("greek capital dotted lunate sigma symbol", "latin capital letter c with stroke"),
    *("cyrillic capital letter es", "digit one"),
)


def main(quickstart: Path) -> None:
    """Draws docs/results, and writes what the demo shows of a character."""
    draw_results.main()
    if CHROMIUM is None:
        raise SystemExit("docs/images/demo.png needs Chromium: install it and run this again")
    shown = ("--checkpoint", quickstart / "het_xl", "--captions", quickstart / "data" / "names.txt")
    with tempfile.TemporaryDirectory() as folder, served(*shown) as address:
        image = write_character("\u03fe", Path(folder) / "character.png")
        with browser(Path(folder) / "profile") as page:
            page.look(1000, 900)
            page.open(address)
            ask(page, image)
            page.screenshot(IMAGES / "demo.png")


def write_character(character: str, path: Path) -> Path:
    """Draws a character as the quickstart does, in the typeface that it holds out."""
    config = GlyphConfig()
    font = ImageFont.truetype(str(font_path(config.held_out_typeface)), config.font_size)
    Image.fromarray(draw(character, font, config)[0]).save(path)
    return path


def ask(page: Browser, image: Path) -> None:
    """Gives the page an image and labels, and waits for all of the answer."""
    page.wait_for("Drop an image")
    page.choose_file(image)
    page.wait_for("Nearest captions")
    page.write("textarea", "\n".join(LABELS))
    for label in LABELS:
        page.wait_for(label)
    page.wait_for("with noise")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
