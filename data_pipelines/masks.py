"""Masks of panoptic segmentation: of each pixel the class, and of things the instance (Kirillov et al. 2019).

A sample stores them as COCO does, in two members: ``panoptic.png``, whose colours are the ids of segments (R + 256 G +
256² B, 0 for void), and ``panoptic.json``, whose ``segments_info`` has of each id the category, and whether it is a
crowd. COCO's list of categories is in ``categories.json`` in the folder of the shards or its parent; a class is the
number of its category there, from 1.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.decoding import decode_whole, sides_of
from lit_het.data_pipelines.images.transforms import Box, Training
from lit_het.data_pipelines.labels import find_beside
from lit_het.data_pipelines.shards import storage, urls
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.data_pipelines.shards.writing import IMAGE
from lit_het.errors import UserError
from lit_het.untrusted import Malformed, parse_json

PIXELS, SEGMENTS = "panoptic.png", "panoptic.json"
"""The members with the id of each pixel's segment, and with the categories of these ids."""

CATEGORIES_FILE = "categories.json"
"""The categories of a data set in its folder, in COCO's form: a list with ``id``, ``name`` and ``isthing`` of each."""

MAX_ID = 2**24 - 1
"""The largest id that a colour can have."""


@dataclasses.dataclass(frozen=True)
class Categories:
    """The classes of a data set.

    Attributes:
        names: of the classes 1 to C, in order.
        ids: the ``id`` of each, as segments name them.
        are_things: whether each is of objects that are counted, such as cars; otherwise it is stuff, such as sky.
    """

    names: tuple[str, ...]
    ids: tuple[int, ...]
    are_things: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def classes(self) -> dict[int, int]:
        """The class of each ``id``."""
        return {identifier: number for number, identifier in enumerate(self.ids, 1)}

    @property
    def is_thing(self) -> Bool[np.ndarray, " k"]:
        """Whether a class is of things, for void and the classes."""
        return np.array([False, *self.are_things])


class Segment(NamedTuple):
    """An instance of a thing, or all of a kind of stuff in an image: its id, its class, and whether it is a crowd."""

    id: int
    label: int
    is_crowd: bool


def parse_categories(entries: Any, origin: str) -> Categories:
    """Returns the categories in COCO's form, a list of objects; ``origin`` is its file."""
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{origin}: expected a list of categories, each with id, name and isthing")
    for number, entry in enumerate(entries):
        fields = [entry.get(name) for name in ("id", "name", "isthing")] if isinstance(entry, dict) else []
        if [type(field) for field in fields] != [int, str, int] or fields[2] not in (0, 1):
            raise UserError(f"{origin}: categories[{number}] needs id (a number), name (a text) and isthing (0 or 1)")
    ids = tuple(entry["id"] for entry in entries)
    if len(set(ids)) < len(ids):
        raise UserError(f"{origin}: two categories have one id; give each its own")
    return Categories(tuple(e["name"] for e in entries), ids, tuple(bool(e["isthing"]) for e in entries))


def read_categories(address: str) -> Categories:
    """Returns the categories in a file."""
    try:
        content = storage.read_whole(address)
    except OSError as error:
        reason = storage.reason(error)
        raise UserError(f"{address}: cannot be read ({reason}); masks need COCO's list of categories there") from error
    try:
        return parse_categories(parse_json(content), address)
    except Malformed as error:
        raise UserError(f"{address}: {error}; write the list of categories as JSON") from error


def read_categories_beside(addresses: Sequence[str]) -> Categories:
    """Returns the categories beside the first shard, which must be those of all others."""
    folders = dict.fromkeys(map(urls.parent, addresses))
    first, *others = dict.fromkeys(find_beside(folder, CATEGORIES_FILE) for folder in folders)
    categories = read_categories(first)
    for other in others:
        if storage.exists(other) and read_categories(other) != categories:
            raise UserError(f"{other}: differs from {first}, so one number is of two classes; prepare them together")
    return categories


def segments_in(content: bytes, categories: Categories) -> list[Segment]:
    """Returns what a member `SEGMENTS` says.

    Raises:
        Unreadable: it is not of COCO's form, or names a category that is not among these.
    """
    try:
        found = parse_json(content)
    except Malformed as error:
        raise Unreadable("segments are not JSON", storage.reason(error)) from error
    entries = found.get("segments_info") if isinstance(found, dict) else None
    return segments_of(entries, categories)


def segments_of(entries: Any, categories: Categories) -> list[Segment]:
    """Returns the segments of COCO's ``segments_info``; raises as `segments_in`."""
    if not isinstance(entries, list):
        raise Unreadable("no segments", "segments_info is not a list")
    classes, segments = categories.classes, list[Segment]()
    for number, entry in enumerate(entries):
        fields = entry if isinstance(entry, dict) else {}
        identifier, category, is_crowd = fields.get("id"), fields.get("category_id"), fields.get("iscrowd", 0)
        if type(identifier) is not int or not 0 < identifier <= MAX_ID or is_crowd not in (0, 1):
            raise Unreadable(
                "not a segment", f"segments_info[{number}] needs an id from 1 to {MAX_ID}, and iscrowd 0 or 1"
            )
        if type(category) is not int or category not in classes:
            raise Unreadable("unknown category", f"segment {identifier} has the category {category!r}")
        segments.append(Segment(identifier, classes[category], bool(is_crowd)))
    if len({segment.id for segment in segments}) < len(segments):
        raise Unreadable("not a segment", "two segments have one id")
    return segments


def ids_in(content: bytes) -> Int[np.ndarray, "h w"]:
    """Returns the id of each pixel's segment in a member `PIXELS`; raises `BrokenImage`."""
    red, green, blue = np.moveaxis(decode_whole(content).astype(np.int32), -1, 0)
    return red + (green << 8) + (blue << 16)


def encode_ids(ids: Int[np.ndarray, "h w"]) -> bytes:
    """Returns a member `PIXELS`."""
    import cv2

    # OpenCV writes the channels in reverse order.
    colours = np.stack([ids >> 16, ids >> 8 & 255, ids & 255], axis=-1).astype(np.uint8)
    return cv2.imencode(".png", colours)[1].tobytes()


def places_of(ids: Int[np.ndarray, "h w"], segments: Sequence[Segment]) -> Int[np.ndarray, "h w"]:
    """Returns the place of each pixel's segment among these, from 1; 0 for void.

    Raises:
        Unreadable: a pixel is of no segment.
    """
    ascending = sorted((segment.id, place) for place, segment in enumerate(segments, 1))
    # Of the type of ids, which a search would convert otherwise.
    known, places = np.array([(0, 0), *ascending], ids.dtype).T
    found = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    if (is_unknown := known[found] != ids).any():
        raise Unreadable("pixels without a segment", f"no segment has the id {ids[is_unknown][0]}")
    return places[found]


def masks_of(
    ids: Int[np.ndarray, "h w"], segments: Sequence[Segment], categories: Categories
) -> Int[np.ndarray, "h w 2"]:
    """Returns the class and the number of the instance of each pixel, see `lit_het.types.Batch`.

    Instances are numbered from the top by their centres, as in UViM (Kolesnikov et al. 2022; big_vision's
    ``make_canonical``): so numbers can be predicted. A crowd is one instance.

    Raises:
        Unreadable: a pixel is of no segment.
    """
    places, count = places_of(ids, segments), len(segments) + 1
    labels = np.array([0, *(segment.label for segment in segments)])
    height, width = ids.shape
    sizes = np.bincount(places.ravel(), minlength=count)
    # Their order is that of y h + x at the centres.
    heights = (np.arange(height)[:, None] * height + np.arange(width)).ravel()
    centres = np.bincount(places.ravel(), heights, count) / np.maximum(sizes, 1)
    is_instance = categories.is_thing[labels] & (sizes > 0)
    order = np.argsort(np.where(is_instance, centres, np.inf), kind="stable")[: is_instance.sum()]
    numbers = np.zeros(count, np.int64)
    numbers[order] = np.arange(1, len(order) + 1)
    return np.stack([labels[places], numbers[places]], axis=-1).astype(np.int32)


class Masks:
    """Reads `Batch.masks` ``[b size size 2]`` int32, cut as the images.

    Attributes:
        members: the kinds of members that are read.
        num_classes: without void.
    """

    members = (IMAGE, PIXELS, SEGMENTS)

    def __init__(self, categories: Categories, training: Training, size: int):
        self._categories, self._training, self._size = categories, training, size
        self.num_classes = len(categories)

    def zeros(self, count: int) -> Int[np.ndarray, "b h w 2"]:
        """Void."""
        return np.zeros((count, self._size, self._size, 2), np.int32)

    def read(self, members: Mapping[str, bytes], generator: np.random.Generator | None) -> Int[np.ndarray, "h w 2"]:
        """Returns the masks of an image; the generator is for training, None for evaluation.

        Raises:
            BrokenImage, Unreadable: they are broken, or are not of this image.
        """
        ids, segments = ids_in(members[PIXELS]), segments_in(members[SEGMENTS], self._categories)
        if (sides := sides_of(members[IMAGE])) != ids.shape:
            raise Unreadable("mask of another size", f"{ids.shape} pixels, and {sides} of its image")
        return masks_of(cut(ids, self._training, self._size, generator), segments, self._categories)


def cut(
    ids: Int[np.ndarray, "h w"], training: Training, size: int, generator: np.random.Generator | None
) -> Int[np.ndarray, "size size"]:
    """Cuts, resizes and mirrors what is known of each pixel as ``training`` does its image, with the same draws."""
    if generator is None:
        return nearest(ids, (size, size), training.preprocessing.box(size)(*ids.shape))
    ids = nearest(ids, (size, size), training.box(size, generator)(*ids.shape))
    for augmentation in training.augmentations:
        assert isinstance(augmentation, HorizontalFlip), "a configuration with others is refused"
        ids = augmentation.apply(ids, generator)
    return ids


def nearest(ids: Int[np.ndarray, "h w *c"], sides: tuple[int, int], box: Box) -> Int[np.ndarray, "height width *c"]:
    """Resizes a box of ids or of masks to a height and a width.

    Each pixel takes the value at its centre: the mean of two ids would be that of a third object.
    """
    left, top, right, bottom = box

    def centres(first: float, last: float, count: int, length: int) -> Int[np.ndarray, " count"]:
        found = first + (np.arange(count) + 0.5) * ((last - first) / count)
        return np.clip(found.astype(np.int64), 0, length - 1)

    rows, columns = (centres(top, bottom, sides[0], ids.shape[0]), centres(left, right, sides[1], ids.shape[1]))
    return ids[rows[:, None], columns]
