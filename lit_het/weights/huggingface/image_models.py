"""Writes image towers as the image models of `transformers` that compute the same: SigLIP's, ViT, DINOv2 or CLIP's."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import transformers

from lit_het.errors import UserError
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.positions import sine_cosine_positions
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.tower import ACTIVATIONS

Flat: TypeAlias = dict[str, np.ndarray]

ACTIVATION_NAMES = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""The first of several names in `transformers` for each nonlinearity."""


@dataclasses.dataclass(frozen=True)
class WrittenTower:
    """A tower as a model of `transformers`.

    Attributes:
        config: its configuration, of the class of `transformers`.
        arrays: its parameters by their names.
        projection: ``[out in]``, a dense layer without bias behind the model.
    """

    config: Any
    arrays: Flat
    projection: np.ndarray


def require(model: str, wanted: list[tuple[str, Any, Any]]) -> None:
    """Checks fields of a tower: their names, their values and what a model of `transformers` has."""
    for field, value, needed in wanted:
        if value != needed:
            raise UserError(
                f"{field} = {value!r:.200} is not supported by {model}, which has {needed!r}; export with --to lit-het"
            )


def encoder_fields(tower: str, model: str, encoder: EncoderConfig, norms: str = "before") -> list[tuple[str, Any, Any]]:
    """Returns what a model of `transformers` needs of a tower's encoder, as arguments of `require`."""
    wanted: list[tuple[str, Any, Any]] = [
        (f"{tower}.encoder.experts", encoder.experts, None),
        (f"{tower}.encoder.norm_placement", encoder.norm_placement, norms),
        (f"{tower}.encoder.norm", encoder.norm, "layer"),
        (f"{tower}.encoder.head_size", encoder.head_size, None),
        (f"{tower}.encoder.first_norm", encoder.first_norm, True),
        (f"{tower}.encoder.layer_scale", encoder.layer_scale, False),
        (f"{tower}.encoder.causal", encoder.causal, False),
    ]
    if encoder.activation not in ACTIVATION_NAMES:
        wanted.append((f"{tower}.encoder.activation", encoder.activation, "gelu_tanh"))
    return wanted


def encoder_config(encoder: EncoderConfig) -> dict[str, Any]:
    """Returns the fields that the configurations of all models share."""
    return {
        "hidden_size": encoder.width,
        "num_hidden_layers": encoder.depth,
        "intermediate_size": encoder.mlp_width,
        "num_attention_heads": encoder.num_heads,
        "hidden_act": ACTIVATION_NAMES.get(encoder.activation, "gelu"),
        "layer_norm_eps": encoder.norm_epsilon,
    }


def write_image_tower(tower: ViTConfig, params: Flat) -> WrittenTower:
    """Returns a tower as the image model that computes the same embeddings.

    Args:
        tower: its configuration.
        params: its parameters by path.
    """
    plain = {"num_inputs": 1, "num_class_tokens": 1, "stem": None}
    require(
        "image towers of transformers",
        [(f"image_tower.{name}", getattr(tower, name), only) for name, only in plain.items()],
    )
    return _writer(tower)(tower, params)


def write_token_tower(tower: ViTConfig, params: Flat) -> WrittenTower:
    """Returns a tower without pooling as SigLIP's without its head: the last hidden states are the tower's tokens.

    Arguments and errors as of `write_image_tower`.
    """
    return _siglip(tower, params)


def is_siglip(tower: ViTConfig) -> bool:
    """Returns whether a tower is written as SigLIP's."""
    return tower.pooling in ("attention", "mean")


def _writer(tower: ViTConfig) -> Callable[[ViTConfig, Flat], WrittenTower]:
    if tower.pooling in ("none", "first", "class_and_mean"):
        require("a model of transformers", [("image_tower.pooling", tower.pooling, "class_token")])
    if is_siglip(tower):
        return _siglip
    require("a model of transformers without SigLIP's pooling", [("image_tower.max_patches", tower.max_patches, None)])
    if tower.input_norm:
        return _clip
    encoder = tower.encoder
    return _dino if tower.num_registers or encoder.layer_scale or encoder.activation == "swiglu" else _vit


def _siglip(tower: ViTConfig, params: Flat) -> WrittenTower:
    require(
        "SiglipVisionModel",
        [
            ("image_tower.num_inputs", tower.num_inputs, 1),
            ("image_tower.num_registers", tower.num_registers, 0),
            ("image_tower.class_token", tower.class_token, False),
            ("image_tower.top", tower.top, None),
            ("image_tower.input_norm", tower.input_norm, False),
            ("image_tower.representation_size", tower.representation_size, None),
            *encoder_fields("image_tower", "SiglipVisionModel", tower.encoder),
        ],
    )
    if tower.pooling == "mean":
        params = params | _mean_as_attention(tower.encoder)
    prefix = "vision_model.embeddings."
    arrays = names.named_arrays(names.SIGLIP_IMAGE, "vision_model.", "", params) | {
        f"{prefix}patch_embedding.bias": params["patches/bias"],
        f"{prefix}position_embedding.weight": _positions(tower, params),
    }
    if tower.patches is not None:
        arrays[f"{prefix}patch_embedding.weight"] = params["patches/kernel"].T
        sizes = {"num_patches": tower.num_patches, "patch_size": tower.patch_size, **encoder_config(tower.encoder)}
        return WrittenTower(transformers.Siglip2VisionConfig(**sizes), arrays, _projection(tower, params))
    arrays[f"{prefix}patch_embedding.weight"] = _convolution(tower, params)
    config = transformers.SiglipVisionConfig(vision_use_head=tower.pooling != "none", **_config(tower))
    return WrittenTower(config, arrays, _projection(tower, params))


def _mean_as_attention(encoder: EncoderConfig) -> Flat:
    """Returns parameters of attention pooling that make it the mean: equal logits, and values that stay as they are."""
    width, mlp_width = encoder.width, encoder.mlp_width
    kernels = {"query": np.zeros, "key": np.zeros, "value": _identity, "out": _identity}
    found = {f"attention/{name}/kernel": kernel((width, width)) for name, kernel in kernels.items()}
    found |= {f"attention/{name}/bias": np.zeros(width) for name in kernels}
    found |= {"mlp/up/kernel": np.zeros((width, mlp_width)), "mlp/up/bias": np.zeros(mlp_width)}
    found |= {"mlp/down/kernel": np.zeros((mlp_width, width)), "mlp/down/bias": np.zeros(width)}
    found |= {"probe": np.zeros((1, width)), "norm/scale": np.ones(width), "norm/bias": np.zeros(width)}
    return {f"pooling/{path}": array.astype(np.float32) for path, array in found.items()}


def _identity(shape: tuple[int, int]) -> np.ndarray:
    return np.eye(*shape)


def _vit(tower: ViTConfig, params: Flat) -> WrittenTower:
    width, wanted = tower.encoder.width, encoder_fields("image_tower", "ViTModel", tower.encoder)
    if tower.representation_size is not None:
        wanted.append(("image_tower.representation_size", tower.representation_size, width))
        wanted.append(("image_tower.projection_size", tower.projection_size, None))
    require("ViTModel", wanted)
    # Its pooler is a dense layer, with or without tanh, of the tower's width.
    layer = "pre_logits" if tower.representation_size else "projection" if tower.projection_size == width else "none"
    pooler = {
        "pooler.dense.weight": params.get(f"{layer}/kernel", np.eye(width, dtype=np.float32)).T,
        "pooler.dense.bias": params.get(f"{layer}/bias", np.zeros(width, np.float32)),
    }
    arrays = names.named_arrays(names.VIT, "vision_model.", "", params)
    arrays |= _with_class_token(tower, params) | {f"vision_model.{name}": array for name, array in pooler.items()}
    config = transformers.ViTConfig(pooler_act="tanh" if tower.representation_size else "linear", **_config(tower))
    behind = dataclasses.replace(tower, projection_size=None) if layer == "projection" else tower
    return WrittenTower(config, arrays, _projection(behind, params))


def _dino(tower: ViTConfig, params: Flat) -> WrittenTower:
    encoder, is_gated = tower.encoder, tower.encoder.activation == "swiglu"
    wanted = [("image_tower.representation_size", tower.representation_size, None)]
    fields = encoder_fields("image_tower", "Dinov2Model", dataclasses.replace(encoder, layer_scale=False))
    require("Dinov2Model", wanted + [field for field in fields if not (is_gated and field[0].endswith("activation"))])
    if not encoder.layer_scale:
        ones = np.ones((encoder.depth, encoder.width), np.float32)
        params = params | {"encoder/blocks/attention_scale": ones, "encoder/blocks/mlp_scale": ones}
    arrays = names.named_arrays(names.GATED_DINO if is_gated else names.DINO, "vision_model.", "", params)
    arrays |= _with_class_token(tower, params)
    sizes = _config(tower) | {"mlp_ratio": _mlp_ratio(encoder), "use_swiglu_ffn": is_gated}
    if tower.num_registers:
        config = transformers.Dinov2WithRegistersConfig(num_register_tokens=tower.num_registers, **sizes)
        arrays["vision_model.embeddings.register_tokens"] = params["registers"][None]
        arrays["vision_model.embeddings.mask_token"] = np.zeros((1, encoder.width), np.float32)
    else:
        config = transformers.Dinov2Config(use_mask_token=False, **sizes)
    return WrittenTower(config, arrays, _projection(tower, params))


def _projection(tower: ViTConfig, params: Flat) -> np.ndarray:
    """Returns the layer behind the model, which has no bias: the tower's own projection, or the identity."""
    if tower.projection_size is None:
        return np.eye(tower.encoder.width, dtype=np.float32)
    largest = float(np.abs(params["projection/bias"]).max())
    require("a dual encoder", [("the largest bias of image_tower.projection", largest, 0.0)])
    return params["projection/kernel"].T


def _mlp_ratio(encoder: EncoderConfig) -> int:
    """Returns the ratio by which `Dinov2Config` describes the width of MLPs; gated ones have two thirds of it."""
    for ratio in range(1, 65):
        width = encoder.width * ratio
        if encoder.activation == "swiglu":
            width = (int(width * 2 / 3) + 7) // 8 * 8
        if width == encoder.mlp_width:
            return ratio
    raise UserError(
        f"image_tower.encoder.mlp_width = {encoder.mlp_width} is not supported by Dinov2Model, which has a multiple of "
        f"{encoder.width}; export with --to lit-het"
    )


def _clip(tower: ViTConfig, params: Flat) -> WrittenTower:
    wanted = [
        ("image_tower.num_inputs", tower.num_inputs, 1),
        ("image_tower.num_registers", tower.num_registers, 0),
        ("image_tower.representation_size", tower.representation_size, None),
        *encoder_fields("image_tower", "CLIPVisionModel", tower.encoder),
    ]
    require("CLIPVisionModel", wanted)
    projection = _projection(tower, params)
    # Its first layer has no bias: it is added to the positions instead.
    positions = _positions(tower, params) + params["patches/bias"]
    prefix = "vision_model.embeddings."
    arrays = names.named_arrays(names.CLIP_IMAGE, "vision_model.", "", params) | {
        f"{prefix}patch_embedding.weight": _convolution(tower, params),
        f"{prefix}class_embedding": params["class_token"],
        f"{prefix}position_embedding.weight": np.concatenate([np.zeros_like(positions[:1]), positions]),
    }
    return WrittenTower(
        transformers.CLIPVisionConfig(projection_dim=len(projection), **_config(tower)), arrays, projection
    )


def _config(tower: ViTConfig) -> dict[str, Any]:
    fields = ("rotary", "pooling_heads", "top")
    require("an export to transformers", [(f"image_tower.{field}", getattr(tower, field), None) for field in fields])
    return {"image_size": tower.image_size, "patch_size": tower.patch_size, **encoder_config(tower.encoder)}


def _convolution(tower: ViTConfig, params: Flat) -> np.ndarray:
    size = tower.patch_size
    return params["patches/kernel"].reshape(size, size, 3, -1).transpose(3, 2, 0, 1)


def _positions(tower: ViTConfig, params: Flat) -> np.ndarray:
    """Returns the positions of the patches; the models have learned ones only, and others are stored as such."""
    side, width = tower.side, tower.encoder.width
    if tower.positions == "none":
        return np.zeros((tower.num_patches, width), np.float32)
    return params.get("positions", sine_cosine_positions(side, side, width))


def _with_class_token(tower: ViTConfig, params: Flat) -> Flat:
    """Returns the first layer of ViT and DINOv2, whose class token has a position: here 0."""
    positions = _positions(tower, params)
    prefix = "vision_model.embeddings."
    return {
        f"{prefix}patch_embeddings.projection.weight": _convolution(tower, params),
        f"{prefix}patch_embeddings.projection.bias": params["patches/bias"],
        f"{prefix}cls_token": params["class_token"][None, None],
        f"{prefix}position_embeddings": np.concatenate([np.zeros_like(positions[:1]), positions])[None],
    }
