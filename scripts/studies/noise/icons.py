"""Icons with their names as captions, drawn from icon fonts with several styles, as shards.

A folder of fonts has a folder per style with one TrueType file and the ``selection.json`` of IcoMoon, which names the
characters; the package ``@phosphor-icons/web`` (MIT License, ``npm pack @phosphor-icons/web``) has such folders under
``src``.
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


def write_icon_shards(
    fonts: Path, styles: Sequence[str], directory: Path, seed: int, held_out: str, advance: Callable[[int], None]
) -> None:
    """Writes ``train``, ``held_out_typeface`` (known names in the held-out style) and ``held_out_characters``.

    One name in ten is held out. Samples are as those of the characters: image, name, and the style as ``typeface``.

    Args:
        fonts: the folder of fonts.
        styles: names of folders in it.
        directory: of the shards.
        seed: of the held-out names and of the order of samples.
        held_out: the held-out style.
        advance: called with 1 for every style that is drawn.
    """
    images = {}
    for style in styles:
        images |= {(name, style): image for name, image in _draw(fonts / style)}
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


def _draw(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
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


def _samples(images: Mapping[tuple[str, str], np.ndarray], seed: int) -> Iterator[Mapping[str, object]]:
    pairs = list(images)
    for key, i in enumerate(np.random.default_rng(seed).permutation(len(pairs))):
        name, style = pairs[i]
        image = encode_jpeg(images[pairs[i]][:, :, None])
        yield {"__key__": f"{key:06d}", "jpg": image, "txt": name, "json": {"typeface": style}}
