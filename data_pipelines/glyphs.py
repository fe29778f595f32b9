"""The glyph data set: images of characters with their Unicode names as captions.

matplotlib ships TrueType fonts (DejaVu, STIX) with 16 typefaces that draw thousands of characters: real images with
human-written names, such as "latin small letter e with acute". Homoglyphs share one image (Latin A, Greek Alpha,
Cyrillic A): label noise that depends on the input, which HET-XL models.

Held out for evaluation: one typeface (new images of known names) and one character in ten (new names).
"""

import dataclasses
import importlib.util
import itertools
import json
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.labels import words_of
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.errors import UserError

TYPEFACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
)
"""The typefaces for text; matplotlib's other typefaces hold parts of formulas."""


@dataclasses.dataclass(frozen=True)
class GlyphConfig:
    """Which characters are drawn, how, and which are held out.

    Attributes:
        image_size: pixels along each side.
        font_size: pixels per em.
        baseline: pixels from the top edge.
        scripts: first words of the Unicode names of the included characters.
        min_typefaces: in how many typefaces, the held-out one included, a character must exist.
        held_out_typeface: one of ``TYPEFACES``.
        held_out_fraction: fraction of the characters that training never sees.
        noisy_script: the script, one of ``scripts``, of whose training images a fraction has wrong captions in the
            field ``noisy_caption``; None for no such field in any set.
        noisy_fraction: that fraction.
        seed: of the held-out characters, of the wrong captions and of the order of samples.
    """

    image_size: int = 32
    font_size: int = 22
    baseline: int = 25
    scripts: tuple[str, ...] = ("latin", "greek", "cyrillic", "digit")
    min_typefaces: int = 6
    held_out_typeface: str = "DejaVuSerif-Italic"
    held_out_fraction: float = 0.1
    noisy_script: str | None = None
    noisy_fraction: float = 0.4
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Glyph:
    """One character drawn in one typeface.

    Attributes:
        character: a string of length one.
        typeface: one of ``TYPEFACES``.
        bitmap: grey levels ``[image_size image_size]``, black on white.
        clipped: whether the glyph is larger than the image.
    """

    character: str
    typeface: str
    bitmap: np.ndarray
    clipped: bool

    @property
    def name(self) -> str:
        """The Unicode name in lower case."""
        return name_of(self.character)


@dataclasses.dataclass(frozen=True)
class GlyphDataset:
    """The summary of the data set that ``write_glyph_shards`` has written.

    Attributes:
        directory: holds ``train/``, ``held_out_typeface/`` and ``held_out_characters/``.
        num_names: of training and held-out characters together.
        num_train_images, num_held_out_typeface_images, num_held_out_character_images: images in each set.
        num_clipped_images: images that are smaller than their glyph.
        num_homoglyph_classes: groups of two or more homoglyphs.
    """

    directory: Path
    num_names: int
    num_train_images: int
    num_held_out_typeface_images: int
    num_held_out_character_images: int
    num_clipped_images: int
    num_homoglyph_classes: int


def name_of(character: str) -> str:
    """The Unicode name of a character in lower case; empty if it has none."""
    return unicodedata.name(character, "").lower()


def questions_about(name: str) -> list[dict[str, Any]]:
    """Returns questions about a character and their answers, as ``lit-het data prepare`` writes those of VQA sets."""
    words = name.split()
    case = next((word for word in words if word in ("capital", "small")), "none")
    answers = {"script": words[0], "case": case, "mark": "yes" if "with" in words else "no"}
    asked = {"script": "which script?", "case": "capital or small?", "mark": "is there a mark?"}
    return [{"question": asked[kind], "answers": [answer], "type": kind} for kind, answer in answers.items()]


def font_path(typeface: str) -> Path:
    """The TrueType file of a typeface, in the installed matplotlib."""
    # Without importing matplotlib, which would take longer than drawing a typeface.
    matplotlib = importlib.util.find_spec("matplotlib")
    if matplotlib is None or matplotlib.origin is None:
        raise UserError("the glyph data set takes its fonts from matplotlib; install it with 'pip install matplotlib'")
    return Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf" / f"{typeface}.ttf"


def characters_of(typeface: str, scripts: Sequence[str]) -> list[str]:
    """The characters of some scripts that a typeface maps to a glyph, by code point."""
    with TTFont(font_path(typeface), lazy=True) as font:
        # Sorted, so that the order of characters does not depend on the font file.
        code_points = sorted(font.getBestCmap() or {})
    return [chr(point) for point in code_points if name_of(chr(point)).partition(" ")[0] in scripts]


def draw_typeface(typeface: str, config: GlyphConfig) -> Iterator[Glyph]:
    """Draws the characters of a typeface whose glyphs are not blank."""
    # The basic layout engine gives the same pixels on every machine; Raqm is not always installed.
    font = ImageFont.truetype(str(font_path(typeface)), config.font_size, layout_engine=ImageFont.Layout.BASIC)
    for character in characters_of(typeface, config.scripts):
        bitmap, clipped = draw(character, font, config)
        if bitmap.min() < 255:
            yield Glyph(character, typeface, bitmap, clipped)


def draw(character: str, font: ImageFont.FreeTypeFont, config: GlyphConfig) -> tuple[np.ndarray, bool]:
    """Draws one character, centred horizontally and on a fixed baseline, so that "o" differs from "O".

    A glyph that would cross the upper or lower edge is moved off the baseline just as far as needed. A glyph that is
    too large is centred and clipped.

    Returns:
        Grey levels ``[image_size image_size]``, and whether the glyph was clipped.
    """
    size = config.image_size
    left, top, right, bottom = font.getbbox(character, anchor="ls")
    width, height = right - left, bottom - top
    x = round((size - width) / 2 - left)
    y = min(max(config.baseline, -top), size - bottom) if height <= size else round((size - height) / 2 - top)
    image = Image.new("L", (size, size), 255)
    ImageDraw.Draw(image).text((x, y), character, fill=0, font=font, anchor="ls")
    return np.asarray(image), width > size or height > size


def homoglyph_classes(glyphs: Iterable[Glyph]) -> dict[str, str]:
    """Maps each character to the first of its homoglyphs.

    Two characters are homoglyphs if their bitmaps are equal in at least half of the typefaces that draw both. The
    relation is made transitive: a chain of homoglyphs is one class.
    """
    typefaces: dict[str, set[str]] = defaultdict(set)
    same_shape: dict[tuple[str, bytes], list[str]] = defaultdict(list)
    for glyph in glyphs:
        typefaces[glyph.character].add(glyph.typeface)
        same_shape[glyph.typeface, glyph.bitmap.tobytes()].append(glyph.character)
    num_equal: dict[tuple[str, str], int] = defaultdict(int)
    for characters in same_shape.values():
        for pair in itertools.combinations(sorted(characters), 2):
            num_equal[pair] += 1

    parent = {character: character for character in sorted(typefaces)}

    def root(character: str) -> str:
        while parent[character] != character:
            character = parent[character]
        return character

    for (one, other), count in num_equal.items():
        if 2 * count >= len(typefaces[one] & typefaces[other]):
            # Union-find; the lowest code point stands for its class, whatever the order of pairs.
            first, second = sorted((root(one), root(other)))
            parent[second] = first
    return {character: root(character) for character in parent}


def write_glyph_shards(
    config: GlyphConfig, directory: Path | str, advance: Callable[[int], None] | None = None
) -> GlyphDataset:
    """Draws the data set and writes it as shards; equal configs give equal bytes.

    ``train/`` holds the training characters in the training typefaces, ``held_out_typeface/`` the training characters
    in the held-out typeface, ``held_out_characters/`` the other characters in the training typefaces. A sample is
    ``key.jpg``, ``key.txt`` (its name), ``key.cls`` (the line in the set's ``classnames.txt``) and ``key.json``
    (character, code point, typeface, questions). If asked for, ``key.json`` also has ``noisy_caption``: the
    name, or for some in ``train/`` a random name, with ``is_wrong`` 1. Beside the sets are ``names.txt`` (all names),
    ``words.txt`` (the words of training names), ``homoglyphs.json`` (from each name to the name of its first homoglyph)
    and, written last, ``glyphs.json`` (the config and the counts).

    Args:
        config: what to draw.
        directory: the output folder; its sets must not hold shards yet.
        advance: called with 1 for each of the ``len(TYPEFACES)`` typefaces drawn and for each of the 3 sets written.
    """
    directory = Path(directory)
    if config.held_out_typeface not in TYPEFACES:
        raise UserError(
            f"held-out typeface {config.held_out_typeface!r} is unknown; choose one of {', '.join(TYPEFACES)}"
        )
    advance = advance or (lambda _: None)
    glyphs = list(_draw_all(config, advance))
    training, held_out = split_characters(glyphs, config)

    counts = {}
    for name, characters, in_held_out_typeface in (
        ("train", training, False),
        ("held_out_typeface", training, True),
        ("held_out_characters", held_out, False),
    ):
        chosen = set(characters)
        members = [
            g
            for g in glyphs
            if g.character in chosen and (g.typeface == config.held_out_typeface) == in_held_out_typeface
        ]
        samples = _samples(members, characters, config.seed)
        if config.noisy_script is not None:
            fraction = config.noisy_fraction if name == "train" else 0.0
            samples = _with_noisy_captions(samples, [name_of(c) for c in characters], config, fraction)
        write_shards(directory / name, samples)
        _write_lines(directory / name / "classnames.txt", [name_of(character) for character in characters])
        counts[name] = len(members)
        advance(1)

    _write_lines(directory / "names.txt", [name_of(character) for character in sorted(training + held_out)])
    _write_lines(directory / "words.txt", sorted({word for c in training for word in words_of(name_of(c))}))
    classes = homoglyph_classes(glyphs)
    _write_json(directory / "homoglyphs.json", {name_of(c): name_of(first) for c, first in classes.items()})
    dataset = GlyphDataset(
        directory=directory,
        num_names=len(training) + len(held_out),
        num_train_images=counts["train"],
        num_held_out_typeface_images=counts["held_out_typeface"],
        num_held_out_character_images=counts["held_out_characters"],
        num_clipped_images=sum(glyph.clipped for glyph in glyphs),
        num_homoglyph_classes=len({first for c, first in classes.items() if c != first}),
    )
    # Written last: its presence shows that the data set is complete.
    summary = {**dataclasses.asdict(dataset), "config": dataclasses.asdict(config)}
    del summary["directory"]  # the folder may move
    _write_json(directory / "glyphs.json", summary)
    return dataset


def split_characters(glyphs: Sequence[Glyph], config: GlyphConfig) -> tuple[list[str], list[str]]:
    """Splits the drawn characters into those for training and those held out, each by code point."""
    characters = sorted({glyph.character for glyph in glyphs})
    order = np.random.default_rng(config.seed).permutation(len(characters))
    held_out = {characters[i] for i in order[: round(config.held_out_fraction * len(characters))]}
    return [c for c in characters if c not in held_out], sorted(held_out)


def _draw_all(config: GlyphConfig, advance: Callable[[int], None]) -> Iterator[Glyph]:
    """Draws all typefaces; yields the characters that enough typefaces have, the held-out one included."""
    drawn: dict[str, dict[str, Glyph]] = defaultdict(dict)
    for typeface in TYPEFACES:
        for glyph in draw_typeface(typeface, config):
            drawn[glyph.character][typeface] = glyph
        advance(1)
    selected = [g for g in drawn.values() if config.held_out_typeface in g and len(g) >= config.min_typefaces]
    if len(selected) < 2:
        raise UserError(
            f"no characters of {', '.join(config.scripts)} are drawn by {config.min_typefaces} typefaces;"
            " lower min_typefaces or add scripts"
        )
    return itertools.chain.from_iterable(by_typeface.values() for by_typeface in selected)


def _with_noisy_captions(
    samples: Iterable[Mapping[str, Any]], names: Sequence[str], config: GlyphConfig, fraction: float
) -> Iterator[Mapping[str, Any]]:
    """Yields samples with a second caption: a random name for a fraction of those of the noisy script."""
    random = np.random.default_rng([config.seed, 1])
    for sample in samples:
        is_chosen, drawn = random.random() < fraction, names[int(random.integers(len(names)))]
        name = sample["txt"]
        caption = drawn if is_chosen and name.partition(" ")[0] == config.noisy_script else name
        about = {**sample["json"], "noisy_caption": caption, "is_wrong": int(caption != name)}
        yield {**sample, "json": about}


def _samples(glyphs: Sequence[Glyph], characters: Sequence[str], seed: int) -> Iterator[Mapping[str, Any]]:
    """Yields samples in random order, for readers that cannot shuffle globally."""
    class_index = {character: index for index, character in enumerate(characters)}
    for key, i in enumerate(np.random.default_rng(seed).permutation(len(glyphs))):
        glyph = glyphs[i]
        yield {
            "__key__": f"{key:06d}",
            "jpg": encode_jpeg(glyph.bitmap[:, :, None]),
            "txt": glyph.name,
            "cls": class_index[glyph.character],
            "json": {
                "character": glyph.character,
                "code_point": f"U+{ord(glyph.character):04X}",
                "typeface": glyph.typeface,
                "questions": questions_about(glyph.name),
            },
        }


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
