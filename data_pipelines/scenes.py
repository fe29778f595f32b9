"""Scenes of glyphs: images with masks of panoptic segmentation, as COCO's, for a small machine.

Things are solid symbols of matplotlib's typefaces, turned, scaled, coloured and laid over one another; stuff are four
textures, which share the background. Each class of things has a hue of its own: by shapes alone two cores do not learn
the classes in an hour. As in photographs, some objects have no label (they are void), and some are too many and too
small to be labelled alone: one segment is of all of them, a crowd.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from jaxtyping import Bool, Int, UInt8
from PIL import Image, ImageDraw, ImageFont

from lit_het.data_pipelines.glyphs import font_path, name_of
from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.masks import CATEGORIES_FILE, MAX_ID, PIXELS, SEGMENTS, encode_ids
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.errors import UserError, require_at_least

THINGS = "■●▲★♥♣✚✈◗♞"
"""The classes of things, in order."""

STUFF = ("stripes", "checks", "dots", "noise")
"""The classes of stuff, which follow."""

TYPEFACES = tuple(f"DejaVuSans{kind}" for kind in ("", "-Bold", "-Oblique", "-BoldOblique"))

_UNLABELLED = "?%&"
_FIRST_STUFF_ID = 101  # as in COCO, ids are no numbers from 1 without gaps
_STAMP = 128  # side of a symbol before it is scaled, in pixels
_MIN_PIXELS = 20  # of a segment; smaller ones are void
_CROWD = 6  # symbols of a crowd
_HUES = 180  # of OpenCV


@dataclasses.dataclass(frozen=True)
class SceneConfig:
    """How many scenes are drawn, and how.

    Attributes:
        image_size: pixels along each side.
        num_train, num_test: images of each set.
        max_things: of an image; at least one is drawn.
        unlabelled_fraction, crowd_fraction: of images with an unlabelled object, and with a crowd.
        seed: of all draws.
    """

    image_size: int = 64
    num_train: int = 20_000
    num_test: int = 1_000
    max_things: int = 5
    unlabelled_fraction: float = 0.1
    crowd_fraction: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(32, self, "image_size")
        require_at_least(1, self, "num_train", "num_test", "max_things")
        require_at_least(0, self, "seed")


def scene_categories() -> list[dict[str, Any]]:
    """Returns the categories of scenes in COCO's form."""
    things = [
        {"id": number, "name": name_of(character).replace("black ", ""), "isthing": 1}
        for number, character in enumerate(THINGS, 1)
    ]
    return things + [{"id": number, "name": name, "isthing": 0} for number, name in enumerate(STUFF, _FIRST_STUFF_ID)]


def write_scenes(
    config: SceneConfig, directory: Path | str, advance: Callable[[int], None] = lambda count: None
) -> None:
    """Writes ``train/`` and ``test/`` as shards, their categories, and last ``scenes.json``, the configuration.

    Equal configurations give equal bytes. A sample is ``key.jpg`` and its masks, see `lit_het.data_pipelines.masks`.

    Args:
        config: what to draw.
        directory: the output folder; its sets must not hold shards yet.
        advance: called with 1 for each image drawn.
    """
    directory = Path(directory)
    for number, (name, count) in enumerate((("train", config.num_train), ("test", config.num_test))):
        write_shards(directory / name, _samples(config, number, count, advance))
    (directory / CATEGORIES_FILE).write_text(json.dumps(scene_categories(), indent=1) + "\n", "utf-8")
    # Written last: its presence shows that the data set is complete.
    (directory / "scenes.json").write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n", "utf-8")


def _samples(config: SceneConfig, part: int, count: int, advance: Callable[[int], None]) -> Iterator[Mapping[str, Any]]:
    for number in range(count):
        # A generator of its own: an image is the same in a set of any size.
        pixels, ids, segments = draw_scene(config, np.random.default_rng([config.seed, part, number]))
        yield {
            "__key__": f"{number:06d}",
            "jpg": encode_jpeg(pixels),
            PIXELS: encode_ids(ids),
            SEGMENTS: {"segments_info": segments},
        }
        advance(1)


def draw_scene(
    config: SceneConfig, generator: np.random.Generator
) -> tuple[UInt8[np.ndarray, "h w 3"], Int[np.ndarray, "h w"], list[dict[str, Any]]]:
    """Returns the pixels of a scene, the id of each pixel's segment, and COCO's ``segments_info``."""
    size = config.image_size
    pixels, ids = np.zeros((size, size, 3), np.uint8), np.zeros((size, size), np.int32)
    # Distinct, and of all three channels.
    new_ids = iter((1 + generator.choice(MAX_ID, 64, replace=False)).tolist())
    found: dict[int, tuple[int, int]] = {}  # category and crowd of each id

    def new_segment(category: int, is_crowd: int = 0) -> int:
        found[identifier := next(new_ids)] = category, is_crowd
        return identifier

    for kind, region in _regions(size, generator):
        pixels[region] = _texture(STUFF[kind], size, generator)[region]
        ids[region] = new_segment(_FIRST_STUFF_ID + kind)
    for character, sides in _objects(config, generator):
        segment = new_segment(1 + THINGS.index(character), int(len(sides) > 1)) if character in THINGS else 0
        colour, centre = _colour(character, generator), generator.uniform(0.1, 0.9, 2) * size
        for side in sides:
            place = centre + (generator.normal(0, side, 2) if len(sides) > 1 else 0)
            mask = _placed(character, side, place, size, generator)
            pixels[mask], ids[mask] = colour, segment
    return pixels, *_described(ids, found)


def _colour(character: str, generator: np.random.Generator) -> UInt8[np.ndarray, "3"]:
    """Returns a colour: of a thing near the hue of its class, of another symbol any."""
    hue = generator.uniform(0, _HUES)
    if character in THINGS:
        hue = generator.normal(THINGS.index(character) * _HUES / len(THINGS), 3)
    pixel = [round(hue) % _HUES, generator.integers(170, 256), generator.integers(60, 200)]
    return cv2.cvtColor(np.array([[pixel]], np.uint8), cv2.COLOR_HSV2RGB)[0, 0]


def _objects(config: SceneConfig, generator: np.random.Generator) -> Iterator[tuple[str, list[float]]]:
    """Yields symbols from back to front, each with the sides of its copies; several copies are a crowd."""
    size = config.image_size
    if generator.random() < config.crowd_fraction:
        yield THINGS[generator.integers(len(THINGS))], [size * 0.14] * _CROWD
    if generator.random() < config.unlabelled_fraction:
        yield _UNLABELLED[generator.integers(len(_UNLABELLED))], [size * 0.4]
    for _ in range(generator.integers(1, config.max_things, endpoint=True)):
        yield THINGS[generator.integers(len(THINGS))], [size * generator.uniform(0.25, 0.55)]


def _described(
    ids: Int[np.ndarray, "h w"], found: Mapping[int, tuple[int, int]]
) -> tuple[Int[np.ndarray, "h w"], list[dict[str, Any]]]:
    """Returns the ids without segments that are hidden, and COCO's ``segments_info`` of the others."""
    segments = []
    for identifier, (category, is_crowd) in found.items():
        is_inside = ids == identifier
        if (area := int(is_inside.sum())) < _MIN_PIXELS:
            ids = np.where(is_inside, 0, ids)
            continue
        rows, columns = np.flatnonzero(is_inside.any(axis=1)), np.flatnonzero(is_inside.any(axis=0))
        left, top = int(columns[0]), int(rows[0])
        box = [left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1]
        segments.append({"id": identifier, "category_id": category, "iscrowd": is_crowd, "bbox": box, "area": area})
    return ids.astype(np.int32), segments


def _regions(size: int, generator: np.random.Generator) -> Iterator[tuple[int, Bool[np.ndarray, "h w"]]]:
    """Yields one to three kinds of stuff with their pixels: those that are nearest to its point."""
    kinds = generator.choice(len(STUFF), generator.integers(1, 3, endpoint=True), replace=False)
    points = generator.uniform(0, size, (len(kinds), 2))
    grid = np.moveaxis(np.mgrid[:size, :size], 0, -1)
    nearest = np.linalg.norm(grid[:, :, None] - points, axis=-1).argmin(axis=-1)
    for number, kind in enumerate(kinds.tolist()):
        if (region := nearest == number).any():
            yield kind, region


def _texture(kind: str, size: int, generator: np.random.Generator) -> UInt8[np.ndarray, "h w 3"]:
    """Returns a texture of two pale colours, turned at random."""
    angle, period = generator.uniform(0, math.pi), size * generator.uniform(0.09, 0.14)
    y, x = np.mgrid[:size, :size] * (2 * math.pi / period)
    u, v = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    levels = {
        "stripes": lambda: np.sin(u) > 0,
        "checks": lambda: np.sin(u / 1.5) * np.sin(v / 1.5) > 0,
        "dots": lambda: np.cos(u) + np.cos(v) > 1,
        "noise": lambda: generator.random((size, size)) > 0.5,
    }[kind]()
    colours = generator.integers(110, 256, 3) - np.array([[0], [generator.integers(50, 90)]])
    return colours.astype(np.uint8)[levels.astype(int)]


def _placed(
    character: str, side: float, centre: np.ndarray, size: int, generator: np.random.Generator
) -> Bool[np.ndarray, "h w"]:
    """Returns the pixels of a symbol, turned by up to 30 degrees."""
    stamp = _stamp(character, TYPEFACES[generator.integers(len(TYPEFACES))])
    matrix = cv2.getRotationMatrix2D((_STAMP / 2, _STAMP / 2), float(generator.uniform(-30, 30)), side / _STAMP)
    matrix[:, 2] += centre - _STAMP / 2
    return cv2.warpAffine(stamp, matrix, (size, size), flags=cv2.INTER_AREA) > 127


@functools.cache
def _stamp(character: str, typeface: str) -> UInt8[np.ndarray, "h w"]:
    """Returns a symbol, white on black, as large as its square."""
    font = ImageFont.truetype(str(font_path(typeface)), _STAMP, layout_engine=ImageFont.Layout.BASIC)
    left, top, right, bottom = (round(edge) for edge in font.getbbox(character, anchor="ls"))
    if right <= left or bottom <= top:
        raise UserError(f"{typeface} does not draw {character!r}; install the matplotlib that lit-het requires")
    image = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(image).text((-left, -top), character, fill=255, font=font, anchor="ls")
    scale = _STAMP / max(image.size)
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    square = Image.new("L", (_STAMP, _STAMP))
    square.paste(image, ((_STAMP - image.width) // 2, (_STAMP - image.height) // 2))
    return np.asarray(square)
