"""Between `Preprocessing` and Hugging Face's ``preprocessor_config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lit_het.checkpoints.huggingface.processor import BICUBIC, BILINEAR
from lit_het.data_pipelines.images import Filter
from lit_het.data_pipelines.transforms import Preprocessing

_FILTERS: dict[Any, Filter] = {BILINEAR: "bilinear", BICUBIC: "bicubic"}
_NUMBERS: dict[Filter, int] = {"bilinear": BILINEAR, "area": BILINEAR, "bicubic": BICUBIC, "fast": BICUBIC}
# What no preprocessing here does.
_CHANGES = ("do_pad", "do_flip_channel_order", "do_thumbnail", "do_image_splitting", "rescale_offset")


@dataclasses.dataclass(frozen=True)
class Reading:
    """What there is here for a processor.

    Attributes:
        preprocessing: the nearest one.
        image_size: of the squares that it made, in pixels.
        remarks: what differs, a line for each field.
    """

    preprocessing: Preprocessing
    image_size: int
    remarks: tuple[str, ...]


def read(processor: Mapping[str, Any], image_size: int) -> Reading:
    """Returns what there is here for a processor, leaving its normalisation aside.

    Args:
        processor: the content of the file.
        image_size: of the squares, where it does not say.
    """
    remarks = [f"{name} = {processor[name]!r} has no counterpart here" for name in _CHANGES if processor.get(name)]
    if not processor.get("do_resize", True):
        remarks.append("do_resize = False, but images are resized here")
    resample = processor.get("resample")
    filter = _FILTERS.get(resample) if isinstance(resample, int) else None
    if filter is None:
        remarks.append(f"resample = {resample!r} is no filter here; bicubic stands for it")
    fraction, size, remark = _square(processor, image_size)
    fit: Any = {"fit": "squash"} if fraction is None else {"fit": "crop", "crop_fraction": fraction}
    preprocessing = Preprocessing(**fit, filter=filter or "bicubic")
    return Reading(preprocessing, size, (*remarks, *([remark] if remark else [])))


def _square(processor: Mapping[str, Any], image_size: int) -> tuple[float | None, int, str | None]:
    """Returns the fraction of the shorter side in a square (None: all of both sides), its pixels, and what differs."""
    crops, size = bool(processor.get("do_center_crop")), processor.get("size", image_size)
    # In files of before sizes had names, a number that a crop follows is the shorter side.
    of_shorter = size.get("shortest_edge") if isinstance(size, Mapping) else size if crops else None
    edge = _side(size if of_shorter is None else of_shorter)
    if edge is None:
        return 1.0 if crops else None, image_size, f"size = {size!r} is no square; images fill one here"
    crop = processor.get("crop_size", edge)
    kept = _side(crop) if crops else edge
    if of_shorter is None:
        return None, edge, None if kept == edge else f"crop_size = {crop!r} of squashed images; all of them is taken"
    if kept is None or kept > edge:
        return 1.0, edge, f"crop_size = {crop!r} is no square in images of {edge}; the largest one is taken"
    return kept / edge, kept, None if crops else "do_center_crop = False, but the central square is taken here"


def _side(size: Any) -> int | None:
    """Returns the pixels of a square's side, or None for what is no square."""
    if isinstance(size, Mapping):
        size = size.get("height") if size.get("height") == size.get("width") else None
    return size if isinstance(size, int) and size > 0 else None


def write(preprocessing: Preprocessing, image_size: int) -> dict[str, Any]:
    """Returns the fields of a processor that say how images become squares; the nearest filter stands for ours."""
    resample = _NUMBERS[preprocessing.filter]
    side = {"height": image_size, "width": image_size}
    if preprocessing.fit == "squash":
        return {"size": side, "resample": resample}
    edge = round(image_size / preprocessing.crop_fraction)
    crop = {"size": {"shortest_edge": edge}, "do_center_crop": True, "crop_size": side, "resample": resample}
    return {"image_processor_type": "CLIPImageProcessor", **crop}  # SigLIP's cuts nothing off
