"""Images with masks of panoptic segmentation, from the files that COCO publishes (Kirillov et al. 2019).

A sample has what `lit_het.data_pipelines.masks` reads: the published PNG, byte by byte, and the entries of its segments
in the published JSON. Crowds stay, as the metric ignores what is predicted in them. Masks of an image that EXIF turns
are turned with it: the published ones are of the pixels as they are stored.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_het.data_pipelines.images.decoding import sides_of, turned
from lit_het.data_pipelines.images.headers import BrokenImage, format_of, jpeg_orientation
from lit_het.data_pipelines.masks import (
    PIXELS,
    SEGMENTS,
    Categories,
    encode_ids,
    ids_in,
    parse_categories,
    segments_of,
)
from lit_het.data_pipelines.prepare.archives import Files, open_files
from lit_het.data_pipelines.prepare.dataset import DataSet, Sample, Split, fingerprint, select_splits
from lit_het.data_pipelines.prepare.listed import Listed, field, match_name, read_object, split_of_listed
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.errors import UserError

MAX_FILE_BYTES = 2**29
"""The largest accepted JSON file: of each of a million segments, that of the training set has about 200 bytes."""

_PUBLISHED = {"train": 118_287, "val": 5_000}


def read_coco_panoptic(
    source: Path, scratch: Path, split: str | None = None, images: Path | None = None, masks: Path | None = None
) -> DataSet:
    """Opens COCO's panoptic segmentation.

    Args:
        source: ``panoptic_train2017.json`` or ``panoptic_val2017.json``.
        scratch: a folder with space for decompressed archives.
        split: None or the split in the name of ``source``.
        images: the folder or archive that contains the images at any depth; None means the folder of ``source``.
        masks: the folder or archive of the PNGs; None means that of the name of ``source``, beside it.
    """
    name = match_name(source, r"panoptic_(train|val)2017\.json", "panoptic_val2017.json")[1]
    select_splits([name], split, str(source))
    content = read_object(source, MAX_FILE_BYTES)
    entries = field(content, "categories", list, str(source))
    categories = parse_categories(entries, str(source))
    pixels = open_files(masks or _beside(source), scratch)
    listed, names = _listed(content, source, categories, pixels)
    num_images = len(field(content, "images", list, str(source)))
    files = open_files(images or source.parent, scratch)
    found = split_of_listed(listed, files, _PUBLISHED[name], {"without masks": num_images - len(listed)})
    return DataSet({name: _with_pixels(found, pixels, names)}, categories=entries)


def _beside(source: Path) -> Path:
    """Returns the folder of PNGs beside a published file, or the archive of it."""
    folder = source.with_suffix("")
    archive = folder.with_suffix(".zip")
    if not folder.is_dir() and not archive.is_file():
        raise UserError(
            f"{source}: {archive.name} is not beside it; unpack the published archive, or name it (--masks)"
        )
    return folder if folder.is_dir() else archive


def _listed(
    content: Mapping[str, Any], source: Path, categories: Categories, pixels: Files
) -> tuple[list[Listed], list[str]]:
    """Returns the annotated images with their segments, and the names of their PNGs."""
    images = {
        field(image, "id", int, f"{source}: images[{number}]"): image
        for number, image in enumerate(field(content, "images", list, str(source)))
    }
    anywhere = {name.rpartition("/")[2]: name for name in pixels.sizes}
    listed, names, first = list[Listed](), list[str](), dict[int, str]()
    for number, annotation in enumerate(field(content, "annotations", list, str(source))):
        where = f"{source}: annotations[{number}]"
        identifier, name = field(annotation, "image_id", int, where), field(annotation, "file_name", str, where)
        if identifier not in images:
            raise UserError(f"{where}: has the unknown image {identifier}; download the file again")
        if first.setdefault(identifier, where) != where:
            raise UserError(f"{where}: is of the same image as {first[identifier]}; download the file again")
        if name not in anywhere:
            raise UserError(f"{pixels.path}: holds no {name}, which {where} lists; download both again")
        entries = field(annotation, "segments_info", list, where)
        try:
            segments_of(entries, categories)
        except Unreadable as error:
            raise UserError(f"{where}: {error}; download the file again") from error
        path = field(images[identifier], "file_name", str, where)
        listed.append(Listed(where, path, {SEGMENTS: json.dumps({"segments_info": entries}).encode()}))
        names.append(anywhere[name])
    return listed, names


def _with_pixels(split: Split, pixels: Files, names: Sequence[str]) -> Split:
    """Returns a split whose samples also have their PNGs, which are checked as they are read."""

    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        for number, sample in zip(numbers, split.read(numbers), strict=True):
            content = _checked(pixels.read(names[number]), sample, pixels.where(names[number]))
            yield dataclasses.replace(sample, members={**sample.members, PIXELS: content})

    sizes = (f"{name}:{pixels.sizes[name]}" for name in names)
    return dataclasses.replace(split, read=read, fingerprint=fingerprint([split.fingerprint, *sizes]))


def _checked(content: bytes, sample: Sample, where: str) -> bytes:
    """Returns a PNG of its image and of its segments, turned as its image."""
    again = "download both again"
    try:
        ids = ids_in(content)
    except BrokenImage as error:
        raise UserError(f"{where}: {error}; {again}") from error
    try:
        sides = sides_of(sample.image)
    except BrokenImage:
        return content  # the writer says so, or leaves the sample out
    turn = jpeg_orientation(sample.image) if format_of(sample.image) == "JPEG" else 1
    is_stored = ids.shape == (sides[::-1] if turn >= 5 else sides)
    if not is_stored and ids.shape != sides:
        shapes = " and ".join(f"{width} x {height}" for height, width in (ids.shape, sides))
        raise UserError(f"{where}: differs in size from {sample.origin} ({shapes} pixels); {again}")
    shown = {*np.unique(ids).tolist()} - {0}
    described = {entry["id"] for entry in json.loads(sample.members[SEGMENTS])["segments_info"]}
    if unknown := shown - described:
        raise UserError(f"{where}: has pixels of the id {min(unknown)}, which its segments_info lacks; {again}")
    if missing := described - shown:
        raise UserError(f"{where}: has no pixel of the id {min(missing)}, which its segments_info has; {again}")
    return encode_ids(turned(ids, turn)) if is_stored and turn > 1 else content
