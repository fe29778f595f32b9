"""Reads the image processor of a Hugging Face model from ``preprocessor_config.json``."""

import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

from lit_het import untrusted
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

Json: TypeAlias = dict[str, Any]

MAX_JSON_BYTES = 2**24
"""A larger JSON file in a Hugging Face folder is refused; the largest published have about 1 MB."""

BILINEAR, BICUBIC = 2, 3
"""Pillow's numbers of resampling filters, the values of ``resample``."""

# The defaults of each model's own processor, for folders without a file.
VIT_PROCESSOR: Json = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5), "resample": BILINEAR}
SIGLIP_PROCESSOR: Json = VIT_PROCESSOR | {"resample": BICUBIC}
CLIP_PROCESSOR: Json = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "resample": BICUBIC,
    "do_center_crop": True,
}
DINO_PROCESSOR: Json = {
    "image_mean": (0.485, 0.456, 0.406),
    "image_std": (0.229, 0.224, 0.225),
    "resample": BICUBIC,
    "do_center_crop": True,
    "size": {"shortest_edge": 256},
    "crop_size": 224,
}
DINO_V3_PROCESSOR: Json = {
    "image_mean": DINO_PROCESSOR["image_mean"],
    "image_std": DINO_PROCESSOR["image_std"],
    "resample": BILINEAR,
    "size": {"height": 224, "width": 224},
}


def read_processor(folder: Path, default: Json) -> Json:
    """Returns the image processor of a folder.

    Args:
        folder: with ``preprocessor_config.json`` or ``processor_config.json``; without either, the default is returned.
        default: also completes a file without normalisation or filter.
    """
    found: Any = None
    if (folder / "preprocessor_config.json").exists():
        found = read_json(folder / "preprocessor_config.json")
    elif (folder / "processor_config.json").exists():
        found = read_json(folder / "processor_config.json").get("image_processor")
    if not found:
        return default
    if not isinstance(found, dict):
        raise UserError(f"{folder}/processor_config.json: image_processor = {found!r:.100} is not an object")
    defaults = {name: default[name] for name in ("image_mean", "image_std", "resample")}
    return defaults | {name: value for name, value in found.items() if value is not None}


def read_json(path: Path, most_bytes: int = MAX_JSON_BYTES) -> Json:
    """Returns the JSON object in a file."""
    try:
        return untrusted.read_json_object(path, most_bytes)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a folder with config.json") from error
    except Malformed as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def read_normalization(processor: Json, folder: Path) -> Float[np.ndarray, "2 c"]:
    """Returns the mean and standard deviation by which the model normalises pixels in [0, 1]."""
    mean, deviation = processor["image_mean"], processor["image_std"]
    # A processor may map levels to another range than [0, 1] before it normalises, or not rescale at all.
    scale = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1
    if not processor.get("do_normalize", True):
        mean, deviation = (0.0,) * 3, (1.0,) * 3
    try:
        pair = np.array([mean, deviation], np.float64).reshape(2, 3)
        if not (np.isfinite(pair).all() and pair[1].min() > 0 and 0 < float(scale) < math.inf):
            raise ValueError("a division by 0")
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"the image processor of {folder} has image_mean = {mean!r:.100}, image_std = {deviation!r:.100}, "
            f"rescale_factor = {scale!r:.100}; the first two must be three numbers each, image_std and rescale_factor "
            "above 0"
        ) from error
    return pair / (255 * scale)  # the model normalises 255 · v · scale for v in [0, 1]
