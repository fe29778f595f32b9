"""Exports a trained LiT model to a folder that `transformers` loads as a `SiglipModel`, with the same logits."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import safetensors.numpy

from lit_het import parameters
from lit_het.checkpoints.huggingface import names
from lit_het.checkpoints.huggingface.processor import BILINEAR
from lit_het.checkpoints.huggingface.tokenizer import SentencePiece, tokenizer_files
from lit_het.checkpoints.huggingface.tower import ACTIVATIONS
from lit_het.errors import UserError
from lit_het.files import write_atomically
from lit_het.towers.positions import sine_cosine_positions, sinusoidal_positions
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Params

# The first of several names in `transformers` for each nonlinearity.
_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}


def write_siglip(
    folder: Path,
    image_tower: ViTConfig,
    text_tower: TextConfig,
    params: Params,
    tokenizer: SentencePiece | None = None,
    image_processor: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes the parameters, the configuration, the image processor and optionally the tokenizer.

    The exported model computes logits without noise: the covariance of a HET-XL head is not exported. Fixed positions
    are written as learned ones, a missing bias as zero. As for every SigLIP, tokenise in `transformers` with
    ``padding="max_length", truncation=True``.

    Args:
        folder: created if missing.
        image_tower: with attention pooling.
        text_tower: with pooling of the last position.
        params: of the contrastive task: ``image_tower``, ``text_tower`` and ``head``.
        tokenizer: the tokenizer of training; None exports none.
        image_processor: fields of ``preprocessor_config.json`` for resizing and cropping. By default images are resized
            to a square with a bilinear filter, without keeping their aspect ratio.

    Raises:
        UserError: `SiglipModel` does not support a field, the temperature is not a `LogTemperature`, or `transformers`
            cannot reproduce the ids of the tokenizer.
    """
    _check(image_tower, text_tower)
    flat = {path: np.asarray(array, np.float32) for path, array in parameters.flatten(params).items()}
    if "head/temperature/log_temperature" not in flat:
        raise UserError("a SiglipModel learns log τ: head.temperature must be a LogTemperature to be exported")
    if tokenizer is not None and tokenizer.length != text_tower.length:
        raise UserError(f"captions of {tokenizer.length} tokens do not fit text_tower.length = {text_tower.length}")
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        (folder / "spiece.model").write_bytes(tokenizer.model_bytes)
    # Renamed when complete. config.json follows last: without it transformers does not take the folder for a model.
    partial = folder / "model.safetensors.partial"
    # SiglipModel always adds a bias, which the softmax loss does not have.
    arrays = _arrays(image_tower, text_tower, {"head/bias": np.zeros((), np.float32)} | flat)
    safetensors.numpy.save_file(arrays, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    files["preprocessor_config.json"] = {**_preprocessing(image_tower), **image_processor}
    files["config.json"] = _config(image_tower, text_tower)
    for name, content in files.items():
        write_atomically(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _check(image: ViTConfig, text: TextConfig) -> None:
    wanted: list[tuple[str, Any, Any]] = [
        ("image_tower.pooling", image.pooling, "attention"),
        ("image_tower.num_registers", image.num_registers, 0),
        ("image_tower.input_norm", image.input_norm, False),
        ("image_tower.representation_size", image.representation_size, None),
        ("image_tower.projection_size", image.projection_size, None),
        ("text_tower.pooling", text.pooling, "last"),
    ]
    for tower, encoder in (("image_tower", image.encoder), ("text_tower", text.encoder)):
        wanted += [
            (f"{tower}.encoder.experts", encoder.experts, None),
            (f"{tower}.encoder.norm_placement", encoder.norm_placement, "before"),
            (f"{tower}.encoder.layer_scale", encoder.layer_scale, False),
            (f"{tower}.encoder.causal", encoder.causal, False),
        ]
        if encoder.activation not in _ACTIVATIONS:
            wanted.append((f"{tower}.encoder.activation", encoder.activation, "gelu_tanh"))
    for field, value, needed in wanted:
        if value != needed:
            raise UserError(f"{field} = {value!r} is not supported by SiglipModel, which has {needed!r}")


def _arrays(image: ViTConfig, text: TextConfig, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns Hugging Face's arrays by name, from our parameters by path."""
    tables = (
        (names.SIGLIP_IMAGE, "vision_model.", "image_tower/"),
        (names.SIGLIP_TEXT, "text_model.", "text_tower/"),
        (names.HEAD, "", "head/"),
    )
    arrays = {
        name: array
        for table, prefix, path in tables
        for match in table
        for name, array in match.arrays(prefix, path, params).items()
    }
    size, side = image.patch_size, image.side
    kernel = params["image_tower/patches/kernel"].reshape(size, size, 3, -1).transpose(3, 2, 0, 1)
    # SigLIP has learned positions only; fixed ones are stored as if they had been learned.
    image_positions = params.get("image_tower/positions")
    if image_positions is None:
        image_positions = sine_cosine_positions(side, side, image.encoder.width)
    text_positions = params.get("text_tower/positions")
    if text_positions is None:
        text_positions = sinusoidal_positions(text.length, text.encoder.width)
    return arrays | {
        "vision_model.embeddings.patch_embedding.weight": np.ascontiguousarray(kernel),
        "vision_model.embeddings.patch_embedding.bias": params["image_tower/patches/bias"],
        "vision_model.embeddings.position_embedding.weight": image_positions,
        "text_model.embeddings.position_embedding.weight": text_positions,
    }


def _encoder(config: EncoderConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "intermediate_size": config.mlp_width,
        "num_attention_heads": config.num_heads,
        "hidden_act": _ACTIVATIONS[config.activation],
        "layer_norm_eps": config.norm_epsilon,
        "attention_dropout": 0.0,
    }


def _config(image: ViTConfig, text: TextConfig) -> dict[str, Any]:
    return {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "dtype": "float32",
        "initializer_factor": 1.0,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "image_size": image.image_size,
            "patch_size": image.patch_size,
            "num_channels": 3,
            "vision_use_head": True,
            **_encoder(image.encoder),
        },
        "text_config": {
            "model_type": "siglip_text_model",
            "vocab_size": text.vocabulary_size,
            "max_position_embeddings": text.length,
            "projection_size": text.embedding_size,
            # The defaults of `transformers` are CLIP's tokens. The files of the tokenizer contain its own.
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            **_encoder(text.encoder),
        },
    }


def _preprocessing(image: ViTConfig) -> dict[str, Any]:
    return {
        "image_processor_type": "SiglipImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": image.image_size, "width": image.image_size},
        "resample": BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
