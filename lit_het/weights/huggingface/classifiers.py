"""Exports a classifier without noise to a folder that `transformers` loads for image classification."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import transformers

from lit_het.towers.image_config import ViTConfig
from lit_het.types import Params
from lit_het.weights.huggingface.exporting import preprocessing, to_float32, write_folder
from lit_het.weights.huggingface.image_models import Flat, require, write_image_tower

_PREFIX = "vision_model."


def write_classifier(
    folder: Path,
    tower: ViTConfig,
    params: Params,
    temperature: float,
    names: Sequence[str],
    image_processor: Mapping[str, Any] = MappingProxyType({}),
    *,
    is_sigmoid: bool,
) -> None:
    """Writes a ViT or DINOv2 with a class token, or a SigLIP tower that takes the mean of its patches, and one layer.

    Args:
        folder: created if missing.
        tower: the image tower.
        params: ``image_tower`` and a ``head`` without noise, whose ``logits`` are the layer.
        temperature: divides the logits.
        names: of the classes, in order; empty for ``LABEL_0`` and so on.
        image_processor: as of `exporting.write_image_text`.
        is_sigmoid: whether probabilities are sigmoids of single logits, or a softmax.
    """
    head = to_float32(params["head"])
    # These models read the encoder's tokens, without dense layers between.
    fields = ("representation_size", "projection_size")
    wanted: list[tuple[str, Any, Any]] = [(f"image_tower.{field}", getattr(tower, field), None) for field in fields]
    wanted += [("image_tower.pooling", tower.pooling, "class_token")] * (tower.pooling not in ("class_token", "mean"))
    wanted += [("image_tower.input_norm", tower.input_norm, False), ("image_tower.num_inputs", tower.num_inputs, 1)]
    require("image classification of transformers", wanted)
    written = write_image_tower(tower, to_float32(params["image_tower"]))
    kernel, bias = head["logits/kernel"].T / temperature, head["logits/bias"] / temperature
    labels = list(names) or [f"LABEL_{number}" for number in range(len(bias))]
    config, arrays = _model(written.config, written.arrays, kernel)
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForImageClassification"]
    config.dtype = "float32"
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = "multi_label_classification" if is_sigmoid else "single_label_classification"
    arrays["classifier.bias"] = bias
    write_folder(folder, config, {"preprocessor_config.json": preprocessing(tower, image_processor)}, arrays)


def _model(config: Any, arrays: Flat, kernel: np.ndarray) -> tuple[Any, Flat]:
    """Returns configuration and arrays of the class that reads a tower, and its dense layer."""
    kind = config.model_type
    if kind in ("siglip_vision_model", "siglip2_vision_model"):
        # It takes the mean of the tokens itself, in place of attention pooling.
        config.vision_use_head = False
        arrays = {name: array for name, array in arrays.items() if not name.startswith(f"{_PREFIX}head.")}
        outer = transformers.SiglipConfig if kind == "siglip_vision_model" else transformers.Siglip2Config
        return outer(vision_config=config), arrays | {"classifier.weight": kernel}
    renamed = {
        f"{kind}.{array.removeprefix(_PREFIX)}": value
        for array, value in arrays.items()
        if not array.startswith(f"{_PREFIX}pooler.")
    }
    if kind != "vit":  # DINOv2's layer also reads the mean of the patches
        kernel = np.concatenate([kernel, np.zeros_like(kernel)], axis=1)
    return config, renamed | {"classifier.weight": kernel}
