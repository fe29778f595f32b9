"""Icons and emoji with their names as captions, in several styles, as shards.

A folder of fonts has a folder per style with one TrueType file and the ``selection.json`` of IcoMoon, which names the
characters; the package ``@phosphor-icons/web`` (MIT License, ``npm pack @phosphor-icons/web``) has such folders under
``src``. A folder of emoji has a folder per style with the content of the npm package ``emoji-datasource-<style>``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lit_het import untrusted
from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.labels import words_of
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.errors import UserError

_SIZE, _MARGIN = 32, 2


Draw = Callable[[Path], Iterator[tuple[str, np.ndarray]]]
"""Yields the names and the grey levels ``[32 32]`` of a style, given its folder."""


def write_icon_shards(
    draw: Draw, folders: Sequence[Path], directory: Path, seed: int, held_out: str, advance: Callable[[int], None]
) -> None:
    """Writes ``train``, ``held_out_typeface`` (known names in the held-out style) and ``held_out_characters``.

    One name in ten is held out. Samples are as those of the characters: image, name, and the style as ``typeface``.

    Args:
        draw: reads a folder.
        folders: one for each style, with its name.
        directory: of the shards.
        seed: of the held-out names and of the order of samples.
        held_out: the held-out style.
        advance: called with 1 for every style that is drawn.
    """
    images = {}
    for folder in folders:
        images |= {(name, folder.name): image for name, image in draw(folder)}
        advance(1)
    names = sorted({name for name, _ in images})
    order = np.random.default_rng(seed).permutation(len(names))
    unseen = {names[i] for i in order[: round(0.1 * len(names))]}
    sets = {
        "train": lambda name, style: name not in unseen and style != held_out,
        "held_out_typeface": lambda name, style: name not in unseen and style == held_out,
        "held_out_characters": lambda name, style: name in unseen and style != held_out,
    }
    for part, is_member in sets.items():
        members = {pair: image for pair, image in images.items() if is_member(*pair)}
        write_shards(directory / part, _samples(members, seed))
    training = [name for name in names if name not in unseen]
    for file, lines in (("names.txt", names), ("words.txt", sorted({w for name in training for w in words_of(name)}))):
        (directory / file).write_text("".join(f"{line}\n" for line in lines))
    (directory / "train" / "classnames.txt").write_text("".join(f"{name}\n" for name in training))


def draw_icons(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and the grey levels ``[32 32]`` of a style's icons."""
    files = sorted(folder.glob("*.ttf"))
    selection = folder / "selection.json"
    if not files or not selection.exists():
        raise UserError(f"{folder} must hold a .ttf file and selection.json; unpack an icon font there, see --fonts")
    font = ImageFont.truetype(str(files[0]), _SIZE - 2 * _MARGIN, layout_engine=ImageFont.Layout.BASIC)
    for icon in untrusted.read_json(selection)["icons"]:
        # Synonyms follow a comma, and the style is the last word: "arrow-up-bold".
        name = icon["properties"]["name"].split(",")[0].removesuffix(f"-{folder.name}").replace("-", " ")
        image = Image.new("L", (_SIZE, _SIZE), 255)
        ImageDraw.Draw(image).text((_MARGIN, _MARGIN), chr(icon["properties"]["code"]), fill=0, font=font, anchor="la")
        yield name, np.asarray(image)


def draw_emoji(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and the grey levels ``[32 32]`` of a style's emoji, on white."""
    try:
        listed = untrusted.read_json(folder / "emoji.json")
    except OSError as error:
        raise UserError(f"{folder} must hold emoji.json; unpack emoji-datasource-{folder.name} there") from error
    for emoji in listed:
        if emoji[f"has_img_{folder.name}"]:
            with Image.open(folder / "img" / folder.name / "64" / emoji["image"]) as image:
                drawn = image.convert("RGBA").resize((_SIZE, _SIZE), Image.Resampling.LANCZOS)
            on_white = Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn)
            yield emoji["name"].lower(), np.asarray(on_white.convert("L"))


def _samples(images: Mapping[tuple[str, str], np.ndarray], seed: int) -> Iterator[Mapping[str, object]]:
    pairs = list(images)
    for key, i in enumerate(np.random.default_rng(seed).permutation(len(pairs))):
        name, style = pairs[i]
        image = encode_jpeg(images[pairs[i]][:, :, None])
        yield {"__key__": f"{key:06d}", "jpg": image, "txt": name, "json": {"typeface": style}}
