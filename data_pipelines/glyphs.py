"""The embedded data set: images of characters and the names that Unicode gives them.

matplotlib ships TrueType fonts (DejaVu, STIX) that draw thousands of characters in 16 faces: real images with names
that people wrote, such as "latin small letter e with acute". Some characters share one image (Latin A, Greek Alpha,
Cyrillic A), so that part of the label noise depends on the input, which is what HET-XL models.

Held out for evaluation: one face (new images of known names) and one character in ten (new names).
"""

import dataclasses
import importlib.util
import itertools
import json
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

from lit_het.data_pipelines.images import encode_jpeg
from lit_het.data_pipelines.labels import words_of
from lit_het.data_pipelines.shards import write_shards
from lit_het.errors import UserError

FACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
)
"""The faces that draw characters as text does; matplotlib's others hold parts of formulas."""


@dataclasses.dataclass(frozen=True)
class GlyphConfig:
    """Which characters are drawn, how, and which are held out.

    Attributes:
        image_size: pixels along each side.
        font_size: pixels per em.
        baseline: pixels from the top edge.
        scripts: first words of the names of the characters that take part.
        min_faces: that must draw a character, the held-out face among them.
        held_out_face: one of ``FACES``.
        held_out_fraction: part of the characters that training never sees.
        seed: of the choice of held-out characters and of the order of samples.
    """

    image_size: int = 32
    font_size: int = 22
    baseline: int = 25
    scripts: tuple[str, ...] = ("latin", "greek", "cyrillic", "digit")
    min_faces: int = 6
    held_out_face: str = "DejaVuSerif-Italic"
    held_out_fraction: float = 0.1
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Glyph:
    """One character drawn in one face.

    Attributes:
        character: a string of length one.
        face: one of ``FACES``.
        bitmap: grey levels ``[image_size image_size]``, black on white.
        clipped: whether the drawing is larger than the image.
    """

    character: str
    face: str
    bitmap: np.ndarray
    clipped: bool

    @property
    def name(self) -> str:
        """The Unicode name in lower case."""
        return name_of(self.character)


@dataclasses.dataclass(frozen=True)
class GlyphDataset:
    """What ``write_glyph_shards`` has written.

    Attributes:
        directory: holds ``train/``, ``held_out_face/`` and ``held_out_characters/``.
        num_names: of training and held-out characters together.
        num_train_images, num_held_out_face_images, num_held_out_character_images: images in each set.
        num_clipped_images: images whose drawing is larger than they are.
        num_homoglyph_classes: groups of two or more characters that look the same.
    """

    directory: Path
    num_names: int
    num_train_images: int
    num_held_out_face_images: int
    num_held_out_character_images: int
    num_clipped_images: int
    num_homoglyph_classes: int


def name_of(character: str) -> str:
    """The Unicode name of a character in lower case; empty if it has none."""
    return unicodedata.name(character, "").lower()


def font_path(face: str) -> Path:
    """The TrueType file of a face, in the installed matplotlib."""
    # Found without importing matplotlib, which would take longer than drawing a face.
    matplotlib = importlib.util.find_spec("matplotlib")
    if matplotlib is None or matplotlib.origin is None:
        raise UserError("the glyph data set takes its fonts from matplotlib; install it with 'pip install matplotlib'")
    return Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf" / f"{face}.ttf"


def characters_of(face: str, scripts: Sequence[str]) -> list[str]:
    """The characters of some scripts that a face maps to a glyph, by code point."""
    with TTFont(font_path(face), lazy=True) as font:
        code_points = sorted(font.getBestCmap() or {})
    return [chr(point) for point in code_points if name_of(chr(point)).partition(" ")[0] in scripts]


def draw_face(face: str, config: GlyphConfig) -> Iterator[Glyph]:
    """Draws the characters that a face has and that leave a mark."""
    font = ImageFont.truetype(str(font_path(face)), config.font_size, layout_engine=ImageFont.Layout.BASIC)
    for character in characters_of(face, config.scripts):
        bitmap, clipped = draw(character, font, config)
        if bitmap.min() < 255:
            yield Glyph(character, face, bitmap, clipped)


def draw(character: str, font: ImageFont.FreeTypeFont, config: GlyphConfig) -> tuple[np.ndarray, bool]:
    """Draws one character: centred from left to right, on a fixed baseline, so that "o" differs from "O".

    A drawing that would cross the upper or lower edge is moved off the baseline just as far as needed; one that is
    too large is centred and loses its margins.

    Returns:
        Grey levels ``[image_size image_size]``, and whether anything was cut off.
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
    """Maps each character to the first of those that look the same.

    Two characters belong together if their bitmaps are equal in at least half of the faces that draw both, or if a
    chain of such characters joins them.
    """
    faces: dict[str, set[str]] = defaultdict(set)
    lookalikes: dict[tuple[str, bytes], list[str]] = defaultdict(list)
    for glyph in glyphs:
        faces[glyph.character].add(glyph.face)
        lookalikes[glyph.face, glyph.bitmap.tobytes()].append(glyph.character)
    num_equal: dict[tuple[str, str], int] = defaultdict(int)
    for characters in lookalikes.values():
        for pair in itertools.combinations(sorted(characters), 2):
            num_equal[pair] += 1

    parent = {character: character for character in sorted(faces)}

    def root(character: str) -> str:
        while parent[character] != character:
            character = parent[character]
        return character

    for (one, other), count in num_equal.items():
        if 2 * count >= len(faces[one] & faces[other]):
            first, second = sorted((root(one), root(other)))
            parent[second] = first
    return {character: root(character) for character in parent}


def write_glyph_shards(
    config: GlyphConfig, directory: Path | str, advance: Callable[[int], None] | None = None
) -> GlyphDataset:
    """Draws the data set and writes it as shards; equal configs give equal bytes.

    ``train/`` holds the training characters in the training faces, ``held_out_face/`` the training characters in the
    held-out face, ``held_out_characters/`` the other characters in the training faces. A sample is ``key.jpg``,
    ``key.txt`` (its name), ``key.cls`` (the line in the set's ``classnames.txt``) and ``key.json`` (character, code
    point, face). Beside the sets: ``names.txt`` (all names), ``words.txt`` (the words of training names),
    ``homoglyphs.json`` (name to the name of the first character that looks the same) and, last, ``glyphs.json`` (the
    config and the counts).

    Args:
        config: what to draw.
        directory: where to write; its sets must not hold shards yet.
        advance: called with 1 for each of the ``len(FACES)`` faces drawn and for each of the 3 sets written.

    Raises:
        UserError: the held-out face is unknown, the rules leave no characters, or there are shards already.
    """
    directory = Path(directory)
    if config.held_out_face not in FACES:
        raise UserError(f"held-out face {config.held_out_face!r} is unknown; choose one of {', '.join(FACES)}")
    advance = advance or (lambda _: None)
    glyphs = list(_draw_all(config, advance))
    training, held_out = split_characters(glyphs, config)

    counts = {}
    for name, characters, in_held_out_face in (
        ("train", training, False),
        ("held_out_face", training, True),
        ("held_out_characters", held_out, False),
    ):
        chosen = set(characters)
        members = [g for g in glyphs if g.character in chosen and (g.face == config.held_out_face) == in_held_out_face]
        write_shards(directory / name, _samples(members, characters, config.seed))
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
        num_held_out_face_images=counts["held_out_face"],
        num_held_out_character_images=counts["held_out_characters"],
        num_clipped_images=sum(glyph.clipped for glyph in glyphs),
        num_homoglyph_classes=len({first for c, first in classes.items() if c != first}),
    )
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
    """Draws all faces and keeps the characters that enough of them draw, the held-out face among them."""
    drawn: dict[str, dict[str, Glyph]] = defaultdict(dict)
    for face in FACES:
        for glyph in draw_face(face, config):
            drawn[glyph.character][face] = glyph
        advance(1)
    kept = [g for g in drawn.values() if config.held_out_face in g and len(g) >= config.min_faces]
    if len(kept) < 2:
        raise UserError(
            f"no characters of {', '.join(config.scripts)} are drawn by {config.min_faces} faces;"
            " lower min_faces or add scripts"
        )
    return itertools.chain.from_iterable(by_face.values() for by_face in kept)


def _samples(glyphs: Sequence[Glyph], characters: Sequence[str], seed: int) -> Iterator[Mapping[str, object]]:
    """Samples in an order that mixes faces and characters, for readers that cannot shuffle globally."""
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
                "face": glyph.face,
            },
        }


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
