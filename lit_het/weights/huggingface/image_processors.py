"""Conversion between `Preprocessing` and Hugging Face's ``preprocessor_config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lit_het.data_pipelines.images.transforms import Filter, Preprocessing
from lit_het.patches_config import Patches
from lit_het.weights.huggingface.processor import BICUBIC, BILINEAR

_FILTERS: dict[Any, Filter] = {BILINEAR: "bilinear", BICUBIC: "bicubic"}
_NUMBERS: dict[Filter, int] = {"bilinear": BILINEAR, "area": BILINEAR, "bicubic": BICUBIC, "fast": BICUBIC}
# Steps of processors that `Preprocessing` does not have.
_UNSUPPORTED = ("do_pad", "do_flip_channel_order", "do_thumbnail", "do_image_splitting", "rescale_offset")


@dataclasses.dataclass(frozen=True)
class Reading:
    """A processor as `Preprocessing`.

    Attributes:
        preprocessing: the nearest equivalent.
        image_size: side of the square images, in pixels.
        remarks: differences from the processor, one per field.
    """

    preprocessing: Preprocessing
    image_size: int
    remarks: tuple[str, ...]


def read(processor: Mapping[str, Any], image_size: int, patches: Patches | None = None) -> Reading:
    """Returns the `Preprocessing` for a processor, without its normalisation.

    Args:
        processor: the content of the file.
        image_size: side of the square images, if the processor does not set it.
        patches: those of the tower; None for squares.
    """
    processor = _with_crop(processor)
    remarks = [f"{name} = {processor[name]!r} is not supported" for name in _UNSUPPORTED if processor.get(name)]
    if not processor.get("do_resize", True):
        remarks.append("do_resize = False, but lit-het always resizes images")
    resample = processor.get("resample")
    filter = _FILTERS.get(resample) if isinstance(resample, int) else None
    if filter is None:
        remarks.append(f"resample = {resample!r} is not a supported filter; bicubic is used")
    fraction, size, remark = _square(processor, image_size) if patches is None else (None, image_size, None)
    fit: Any = {"fit": "squash"} if fraction is None else {"fit": "crop", "crop_fraction": fraction}
    # All of them convert to RGB, by which transparency is dropped.
    preprocessing = Preprocessing(**fit, filter=filter or "bicubic", transparency="dropped", patches=patches)
    return Reading(preprocessing, size, (*remarks, *([remark] if remark else [])))


def _with_crop(processor: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a processor with ConvNeXt's ``crop_pct`` as a crop: from 384 pixels on it squashes."""
    size, fraction = processor.get("size"), processor.get("crop_pct")
    side = size.get("shortest_edge") if isinstance(size, Mapping) else size
    if not isinstance(fraction, float) or not 0 < fraction <= 1 or not isinstance(side, int):
        return processor
    square = {"height": side, "width": side}
    if side >= 384:
        return {**processor, "size": square}
    return {**processor, "size": {"shortest_edge": int(side / fraction)}, "do_center_crop": True, "crop_size": square}


def _square(processor: Mapping[str, Any], image_size: int) -> tuple[float | None, int, str | None]:
    """Returns the crop as a fraction of the shorter side (None: squash), its pixels, and a remark if it differs."""
    crops, size = bool(processor.get("do_center_crop")), processor.get("size", image_size)
    # In old files a plain number is the shorter side if a crop follows.
    shorter = size.get("shortest_edge") if isinstance(size, Mapping) else size if crops else None
    edge = _side(size if shorter is None else shorter)
    if edge is None:
        return 1.0 if crops else None, image_size, f"size = {size!r} is not square; images are squashed to a square"
    crop = processor.get("crop_size", edge)
    side = _side(crop) if crops else edge
    if shorter is None:
        return None, edge, None if side == edge else f"crop_size = {crop!r} of squashed images is ignored"
    if side is None or side > edge:
        return 1.0, edge, f"crop_size = {crop!r} is not a square within {edge} pixels; the largest square is used"
    return side / edge, side, None if crops else "do_center_crop = False, but the central square is used"


def _side(size: Any) -> int | None:
    """Returns the side of a square in pixels, or None if the size is not square."""
    if isinstance(size, Mapping):
        size = size.get("height") if size.get("height") == size.get("width") else None
    return size if isinstance(size, int) and size > 0 else None


def write(preprocessing: Preprocessing, image_size: int) -> dict[str, Any]:
    """Returns the fields of a processor for resizing and cropping, with the nearest supported filter."""
    resample = _NUMBERS[preprocessing.filter]
    if (patches := preprocessing.patches) is not None:
        sizes = {"patch_size": patches.size, "max_num_patches": patches.most}
        return {"image_processor_type": "Siglip2ImageProcessor", "resample": resample, **sizes}
    side = {"height": image_size, "width": image_size}
    if preprocessing.fit == "squash":
        return {"size": side, "resample": resample}
    edge = round(image_size / preprocessing.crop_fraction)
    crop = {"size": {"shortest_edge": edge}, "do_center_crop": True, "crop_size": side, "resample": resample}
    return {"image_processor_type": "CLIPImageProcessor", **crop}  # SigLIP's processor cannot crop
