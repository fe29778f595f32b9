"""Exports towers to a file that big_vision loads, with the name table of the importer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.files import completed
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.text_config import BertConfig, TextConfig, TextTowerConfig
from lit_het.types import Params
from lit_het.weights.big_vision.names import (
    BERT_HEAD_SIZE,
    BERT_TOWER,
    CLASSIFIER,
    IMAGE_TOWER,
    PROJECTION,
    TEXT_TOWER,
    ParameterName,
)

# big_vision's models support only these values.
_ENCODER = {
    "activation": "gelu_tanh",
    "norm_placement": "before",
    "norm_epsilon": 1e-6,
    "norm": "layer",
    "head_size": None,
    "first_norm": True,
    "layer_scale": False,
    "causal": False,
    "experts": None,
}
_BERT_ENCODER = {**_ENCODER, "norm_placement": "after", "norm_epsilon": 1e-12}
_IMAGE_TOWER = {
    "num_registers": 0,
    "input_norm": False,
    "num_inputs": 1,
    "num_class_tokens": 1,
    "rotary": None,
    "class_token": False,
    "pooling_heads": None,
    "max_patches": None,
    "top": None,
    "stem": None,
}


def write_npz(path: Path, image_tower: ViTConfig, text_tower: TextTowerConfig | None, params: Params) -> None:
    """Writes a two-tower model, or without a text tower a ViT, in big_vision's layout.

    The file records neither the pooling of the text tower nor fixed sine-cosine positions; set these in big_vision's
    configuration.

    Args:
        path: of the file, which is replaced once it is complete.
        image_tower: configuration of the image tower.
        text_tower: configuration of the text tower; None writes a single ViT.
        params: ``image_tower``, ``text_tower`` and ``head``: temperature and bias, or a classifier's ``logits``.
    """
    _check_image_tower(image_tower)
    encoder, flat = image_tower.encoder, parameters.flatten(params)
    if text_tower is None:
        if image_tower.projection_size is not None:
            raise UserError(
                f"big_vision has no single ViT with a projection: projection_size = {image_tower.projection_size}"
            )
        arrays = _take_arrays(flat, IMAGE_TOWER, "image_tower/", "", encoder, image_tower.patch_size)
        arrays |= _take_arrays(flat, CLASSIFIER, "head/", "", encoder)
    else:
        _check_text_tower(text_tower)
        names = BERT_TOWER if isinstance(text_tower, BertConfig) else TEXT_TOWER
        arrays = _take_arrays(flat, IMAGE_TOWER + PROJECTION, "image_tower/", "img/", encoder, image_tower.patch_size)
        arrays |= _take_arrays(flat, names, "text_tower/", "txt/", text_tower.encoder) | _scalars(flat)
    if flat:
        raise UserError(f"big_vision has no parameter for {', '.join(sorted(flat)[:8])}")
    with completed(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def _check_image_tower(config: ViTConfig) -> None:
    if config.pooling in ("none", "class_and_mean"):
        raise UserError(f"big_vision has no image tower with pooling = {config.pooling!r}")
    _check(config, _IMAGE_TOWER)
    _check(config.encoder, _ENCODER)
    if config.positions == "none":
        raise UserError("big_vision has no image tower with positions = 'none'")


def _check_text_tower(config: TextTowerConfig) -> None:
    if isinstance(config, BertConfig):
        _check(config, {"pooler": False, "padding_id": 0, "mean_pooling": False})
        _check(config.encoder, {**_BERT_ENCODER, "num_heads": config.encoder.width // BERT_HEAD_SIZE})
    elif not isinstance(config, TextConfig):
        raise UserError(f"big_vision has no {type(config).__name__}; export with --to lit-het")
    else:
        _check(config, {"positions": "learned", "padding_token": None, "scaled_embedding": False})
        if config.pooling == "end_token":
            raise UserError("big_vision has no text tower with pooling = 'end_token'")
        _check(config.encoder, _ENCODER)


def _check(config: Any, only: dict[str, Any]) -> None:
    for field, value in only.items():
        if (ours := getattr(config, field)) != value:
            raise UserError(f"big_vision has no {type(config).__name__} with {field} = {ours!r}, only {value!r}")


def _take_arrays(
    flat: dict[str, Any],
    names: Sequence[ParameterName],
    ours: str,
    theirs: str,
    encoder: EncoderConfig,
    patch_size: int = 1,
) -> dict[str, np.ndarray]:
    """Removes a tower's parameters from ``flat`` and returns them under big_vision's names, one array per block."""
    arrays = {}
    for name in names:
        path = ours + name.ours.replace("/*/", "/")
        if path not in flat:
            continue
        # Taken out, so that whatever remains at the end has no place in big_vision and is reported.
        array = np.asarray(flat.pop(path))
        target = theirs + name.theirs
        for number, block in enumerate(array) if "*" in target else [(0, array)]:
            arrays[target.replace("*", str(number))] = name.to_theirs(block, encoder.num_heads, patch_size)
    return arrays


def _scalars(flat: dict[str, Any]) -> dict[str, np.ndarray]:
    """Removes temperature and bias from ``flat`` and returns them under big_vision's names."""
    arrays = {}
    if "head/temperature/log_temperature" in flat:
        # big_vision multiplies by exp(t), we divide by τ: t = -log τ.
        arrays["t"] = -np.asarray(flat.pop("head/temperature/log_temperature")).reshape(1)
    if "head/bias" in flat:
        arrays["b"] = np.asarray(flat.pop("head/bias")).reshape(1)
    return arrays
