"""Reads image towers of OpenCLIP, with its own names or those of timm: SigLIP's ViTs and the Perception Encoder."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.image_config import RotaryConfig, ViTConfig
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.image_towers import first_layer_sources
from lit_het.weights.huggingface.processor import Json
from lit_het.weights.huggingface.tower import Family, Tower, number, section, shape_of, zero_bias
from lit_het.weights.rename import ParameterSource
from lit_het.weights.resample import resample_positions
from lit_het.weights.sources import Arrays

_BLOCKS = ("block_type", "qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
ENCODER_FIELDS: Json = dict.fromkeys(_BLOCKS, None)
"""The only values that our encoders have of fields of OpenCLIP's, which are also the default of a file without them."""

_NATIVE_FIELDS = ENCODER_FIELDS | {"attentional_pool": False, "pool_type": "tok"}
# By the sizes in timm's names.
_HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "so400m": 16, "giantopt": 16}
_SIGLIP = re.compile(r"vit_(base|large|so400m|giantopt)_patch\d+_siglip_\d+")
# Its towers of SigLIP have the exact GELU, and those that it added for SigLIP 2 the tanh form.
_TANH = re.compile(r"vit_(base_patch32|large_patch16_siglip_512|so400m_patch16|giantopt)")
# The largest, gigantic, has attention pooling with an MLP of another width than those of its blocks.
_PERCEPTION = re.compile(r"vit_pe_core_(tiny|small|base|large)_patch(\d+)_(\d+)")


class Layout(NamedTuple):
    """The names of an image tower before its first block.

    Attributes:
        first: of the layer of patches, without ``.weight``.
        positions: of all tokens, one after the other.
        tokens: of the learned tokens before the patches, by our names.
    """

    first: str
    positions: str
    tokens: Mapping[str, str]


_NATIVE = Layout("conv1", "positional_embedding", {"class_token": "class_embedding"})
_TIMM = Layout("patch_embed.proj", "pos_embed", {})


class Opened(NamedTuple):
    """An image tower, as arguments of `read_image_tower`.

    Attributes:
        tower: its arrays.
        layout: its names before the first block.
        fields: of its `ViTConfig`.
    """

    tower: Tower
    layout: Layout
    fields: Json


def open_image_tower(path: Path, arrays: Arrays, model: Json, compute_type: ComputeType) -> Opened:
    """Returns the image tower of a model.

    Args:
        path: of the configuration, for messages.
        arrays: of the model.
        model: its ``model_cfg``.
        compute_type: of activations.
    """
    config = section(model, "vision_cfg", {})
    if config.get("timm_model_name"):
        return _open_timm(path, arrays, str(config["timm_model_name"]), config, compute_type)
    require_fields(path, "vision_cfg", config, _NATIVE_FIELDS)
    if isinstance(config.get("layers"), list):
        raise UserError(f"{path}: vision_cfg.layers = {config['layers']} is of a ResNet of CLIP, which is not imported")
    width = shape_of(arrays, "visual.proj", 2)[0] if "visual.proj" in arrays else 0
    heads = width // max(1, number(config, "head_width", 64))
    fields = encoder_fields(config, activation(path, config, model), heads)
    tower = Tower(arrays, Family(names.OPEN_CLIP_IMAGE, "visual.", "gelu", 1e-5), fields, compute_type, "image_tower/")
    has_norm = "input_norm/scale" in tower.array_names
    return Opened(tower, _NATIVE, {"pooling": "class_token", "input_norm": has_norm})


def _open_timm(path: Path, arrays: Arrays, name: str, config: Json, compute_type: ComputeType) -> Opened:
    depth = sum(re.fullmatch(r"visual\.trunk\.blocks\.\d+\.norm1\.weight", name) is not None for name in arrays)

    def opened(size: str, act: str, epsilon: float, projection: str | None) -> Tower:
        require_fields(path, "vision_cfg", config, {"timm_pool": "map", "timm_proj": projection})
        fields = {"hidden_act": act, "num_attention_heads": _HEADS[size], "num_hidden_layers": depth}
        family = Family(names.TIMM_IMAGE, "visual.trunk.", "gelu", epsilon)
        return Tower(arrays, family, fields, compute_type, "image_tower/")

    if found := _SIGLIP.fullmatch(name):
        act = "gelu_pytorch_tanh" if _TANH.match(name) else "gelu"
        return Opened(opened(found[1], act, 1e-6, "none"), _TIMM, {"pooling": "attention"})
    if found := _PERCEPTION.fullmatch(name):
        tower = opened(found[1], "gelu", 1e-5, None)
        tower.sources = [_in_our_planes(one, _HEADS[found[1]]) for one in tower.sources]
        # Angles of patch i are i + 1, at the size of images that it was trained with; other sizes have the same edges.
        rotary = RotaryConfig(10_000.0, 0.0, float(int(found[3]) // int(found[2])), 1.0)
        fields = {"pooling": "attention", "class_token": True, "input_norm": True, "pooling_heads": 8, "rotary": rotary}
        return Opened(tower, _TIMM._replace(tokens={"class_token": "cls_token"}), fields)
    raise UserError(
        f"{path}: vision_cfg.timm_model_name = {name!r:.100} cannot be imported; of timm's only ViTs of SigLIP and the "
        "Perception Encoder (PE-Core, but for the largest) are"
    )


def _in_our_planes(source: ParameterSource, num_heads: int) -> ParameterSource:
    """Returns the source of a layer of queries or keys with its outputs in the order of our rotary positions.

    timm turns entries 2 i and 2 i + 1 of a head by the column in the first half of planes, then by the row.
    """
    if not re.search(r"/blocks/\d+/attention/(query|key)/", source.target):
        return source

    def ordered(*arrays: np.ndarray) -> np.ndarray:
        array = source.combine(*arrays)
        half = array.shape[-1] // num_heads // 2
        planes = np.roll(np.arange(half), half // 2)
        by_head = array.reshape(*array.shape[:-1], num_heads, 2 * half)
        return by_head[..., np.concatenate([2 * planes, 2 * planes + 1])].reshape(array.shape)

    return dataclasses.replace(source, combine=ordered)


def read_image_tower(
    opened: Opened, normalization: Float[np.ndarray, "2 c"], image_size: int | None, patch_size: int | None
) -> tuple[ViTConfig, list[ParameterSource]]:
    """Returns an image tower and the sources of its parameters.

    Args:
        opened: its arrays and names.
        normalization: from `read_normalization`.
        image_size: as for `read_huggingface`.
        patch_size: as for `read_huggingface`.
    """
    tower, layout, fields = opened
    positions, first = tower.require(layout.positions), tower.require(f"{layout.first}.weight")
    num_tokens = len(layout.tokens)
    num_patches = shape_of(tower.arrays, positions, 2, 3)[-2] - num_tokens
    old_size = shape_of(tower.arrays, first, 4)[-1]
    side = round(max(0, num_patches) ** 0.5)
    if side * side != num_patches or not side:
        raise UserError(f"{positions} holds {num_patches} patches, which form no square")
    config = ViTConfig(
        side * old_size if image_size is None else image_size,
        old_size if patch_size is None else patch_size,
        tower.encoder(),
        projection_size=projected_size(tower),
        **fields,
    )

    def patches(positions: np.ndarray) -> np.ndarray:
        rows = positions.reshape(-1, positions.shape[-1]).astype(np.float32)
        return resample_positions(rows[num_tokens:], config.side, keeps_corners=False)

    bias = tower.find(f"{layout.first}.bias")
    layer = first_layer_sources((first, bias) if bias else (first,), normalization, old_size, config.patch_size)
    tokens = [
        token(tower, theirs, ours, layout.positions, row) for row, (ours, theirs) in enumerate(layout.tokens.items())
    ]
    stored = ParameterSource("image_tower/positions", (positions,), patches)
    return config, [*with_bias(tower), *layer, stored, *tokens]


def projected_size(tower: Tower) -> int | None:
    """Returns the size of the projection; None without one."""
    if "projection/kernel" not in tower.array_names:
        return None
    rows, columns = tower.shape("projection/kernel", 2)
    # A dense layer [out in], or a matrix [in out].
    return rows if tower.array_names["projection/kernel"].endswith(".weight") else columns


def with_bias(tower: Tower) -> list[ParameterSource]:
    """Returns the sources of a tower, with a bias of zero for a projection without one."""
    kernels = [one for one in tower.sources if one.target == f"{tower.path}projection/kernel"]
    return tower.sources + ([] if "projection/bias" in tower.array_names else [zero_bias(one) for one in kernels])


def token(tower: Tower, theirs: str, ours: str, positions: str, row: int) -> ParameterSource:
    """Returns the source of a learned token, to which its own position is added."""

    def combined(token: np.ndarray, positions: np.ndarray) -> np.ndarray:
        rows = positions.reshape(-1, positions.shape[-1])
        return token.ravel().astype(np.float32) + rows[row].astype(np.float32)

    return ParameterSource(tower.path + ours, (tower.require(theirs), tower.require(positions)), combined)


def encoder_fields(config: Json, activation: str, num_heads: int) -> Json:
    """Returns the names of `transformers` for the fields of an encoder."""
    shared = {"hidden_act": activation, "num_attention_heads": num_heads}
    epsilon = number(section(config, "norm_kwargs", {}) if config.get("norm_kwargs") else {}, "eps", 1e-5)
    return shared | {"num_hidden_layers": number(config, "layers", 12), "layer_norm_eps": epsilon}


def activation(path: Path, config: Json, model: Json) -> str:
    """Returns the name in `transformers` of a tower's nonlinearity."""
    options = config.get("act_kwargs")
    if options == {"approximate": "tanh"}:
        return "gelu_pytorch_tanh"
    if options:
        raise UserError(f"{path}: act_kwargs = {options!r:.100} cannot be imported")
    return "quick_gelu" if model.get("quick_gelu") else "gelu"


def require_fields(path: Path, part: str, config: Json, only: Json) -> None:
    """Checks that fields of a part of a configuration have the only values that can be imported."""
    for field, value in only.items():
        if (found := config.get(field, value)) != value and (found or value):
            raise UserError(f"{path}: {part}.{field} = {found!r:.100} cannot be imported, only {value!r}")
