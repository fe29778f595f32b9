"""Imports models of OpenCLIP from folders as it writes them: CLIP's kind, SigLIP's and SigLIP 2's.

The folder has `CONFIG` and `WEIGHTS`. An image tower has OpenCLIP's own names, or those of timm. Not imported are
ResNets, CoCa, and the blocks and poolings that `_check` names.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from lit_het.console import message
from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.text_config import TextConfig
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.image_towers import first_layer_sources
from lit_het.weights.huggingface.processor import BICUBIC, BILINEAR, CLIP_PROCESSOR, Json, read_json, read_normalization
from lit_het.weights.huggingface.tokenizer import find_tokenizer
from lit_het.weights.huggingface.tower import Family, Tower, number, section, shape_of, zero_bias
from lit_het.weights.imported import Imported
from lit_het.weights.rename import ParameterSource, Rule, translate
from lit_het.weights.resample import resample_positions
from lit_het.weights.sources import Arrays, open_safetensors

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"

# What its tokenizers do that their files do not record: its own one, of CLIP's vocabulary, pads with 0.
CLIP_TOKENIZER: Json = {"padding_id": 0}
CANONICAL: Json = {"lowercase": True, "remove_punctuation": True, "split_underscores": True}

_BLOCKS = ("block_type", "qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
# The only values that our towers have: the first is also the default where a file leaves the field out.
_BOTH: Json = dict.fromkeys(_BLOCKS, None)
_IMAGE_FIELDS = _BOTH | {"attentional_pool": False, "pool_type": "tok"}
_TEXT_FIELDS = _BOTH | {"embed_cls": False}
_POOLINGS: dict[str, Any] = {"argmax": "end_token", "eos": "end_token", "last": "last", "first": "first"}
# By the sizes in timm's names. Its towers of SigLIP have the exact GELU, and later ones of SigLIP 2 the tanh form.
_TIMM_HEADS = {"base": 12, "large": 16, "so400m": 16, "giantopt": 16}
_TIMM_SIGLIP = re.compile(rf"vit_({'|'.join(_TIMM_HEADS)})_patch\d+_siglip_\d+")
_TIMM_TANH = re.compile(r"vit_(base_patch32|large_patch16_siglip_512|so400m_patch16|giantopt)")
# The rest of a model whose image tower is imported alone.
_TEXT_SIDE = Rule(r"text\..*|logit_scale|logit_bias", None)


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


def is_open_clip(folder: Path) -> bool:
    """Returns whether a folder is to be read as OpenCLIP's: it is no model of transformers at the same time."""
    if not (folder / CONFIG).is_file():
        return False
    weights = any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    return not (weights and (folder / "config.json").is_file() and "model_type" in read_json(folder / "config.json"))


def read_open_clip(
    folder: Path,
    *,
    image_size: int | None,
    patch_size: int | None,
    text_length: int | None,
    compute_type: ComputeType,
) -> Imported:
    """Imports a folder of OpenCLIP; arguments as for `read_huggingface`."""
    whole = read_json(folder / CONFIG)
    config = section(whole, "model_cfg", {})
    image, text = section(config, "vision_cfg", {}), section(config, "text_cfg", {})
    if "multimodal_cfg" in config:
        raise UserError(f"{folder}/{CONFIG} is of a CoCa, which cannot be imported; give a CLIP or SigLIP")
    arrays = open_safetensors(folder, WEIGHTS)
    processor = _processor(section(whole, "preprocess_cfg", {}), number(image, "image_size", 224))
    tower, layout, fields = _image_tower(folder, arrays, config, image, compute_type)
    size = {"image_size": image_size, "patch_size": patch_size}
    image_tower, sources = read_image_tower(tower, layout, read_normalization(processor, folder), **size, **fields)
    if text.get("hf_model_name"):
        message(
            f"{folder}: the text tower, {text['hf_model_name']!r:.100}, cannot be imported; the image tower is, alone"
        )
        found = translate(arrays, (_TEXT_SIDE,), sources)
        return Imported(arrays, found, image_tower, image_processor=processor)
    text_tower, found = _text_tower(folder, arrays, config, text, text_length, compute_type)
    sources += found + names.parameter_sources(arrays, names.HEAD, "", "head/")
    is_canonical = section(text, "tokenizer_kwargs", {}).get("clean") == "canonicalize"
    return Imported(
        arrays,
        translate(arrays, (), sources),
        image_tower,
        text_tower,
        has_bias="logit_bias" in arrays,
        tokenizer=find_tokenizer(folder, reads_json=not is_canonical),
        tokenizer_fields=CANONICAL if is_canonical else {} if text.get("hf_tokenizer_name") else CLIP_TOKENIZER,
        image_processor=processor,
    )


def _processor(config: Json, image_size: int) -> Json:
    """Returns a processor of transformers with OpenCLIP's steps."""
    mode, size = config.get("resize_mode", "shortest"), config.get("size", image_size)
    mean, deviation = (config.get(one, CLIP_PROCESSOR[f"image_{one}"]) for one in ("mean", "std"))
    resample = BILINEAR if config.get("interpolation") == "bilinear" else BICUBIC
    shared = {"image_mean": mean, "image_std": deviation, "resample": resample}
    if mode == "shortest":
        return shared | {"do_center_crop": True, "size": {"shortest_edge": size}, "crop_size": size}
    # "longest" pads, which a remark of the import says.
    return shared | {"size": {"height": size, "width": size}, "do_pad": mode != "squash"}


def _image_tower(
    folder: Path, arrays: Arrays, config: Json, image: Json, compute_type: ComputeType
) -> tuple[Tower, Layout, Json]:
    """Returns an image tower with its names before the first block, and fields of its `ViTConfig`."""
    if name := image.get("timm_model_name"):
        return _timm_tower(folder, arrays, str(name), image, compute_type)
    _check(folder, "vision_cfg", image, _IMAGE_FIELDS)
    if isinstance(image.get("layers"), list):
        raise UserError(
            f"{folder}/{CONFIG}: vision_cfg.layers = {image['layers']} is of a ResNet of CLIP, not imported"
        )
    width = shape_of(arrays, "visual.proj", 2)[0] if "visual.proj" in arrays else 0
    heads = width // max(1, number(image, "head_width", 64))
    fields = encoder_fields(image, _activation(folder, image, config), heads)
    tower = Tower(arrays, Family(names.OPEN_CLIP_IMAGE, "visual.", "gelu", 1e-5), fields, compute_type, "image_tower/")
    return tower, _NATIVE, {"pooling": "class_token", "input_norm": "input_norm/scale" in tower.array_names}


def _timm_tower(
    folder: Path, arrays: Arrays, name: str, image: Json, compute_type: ComputeType
) -> tuple[Tower, Layout, Json]:
    found = _TIMM_SIGLIP.fullmatch(name)
    if found is None:
        raise UserError(
            f"{folder}/{CONFIG}: vision_cfg.timm_model_name = {name!r:.100} cannot be imported; of timm's only ViTs of "
            "SigLIP are"
        )
    _check(folder, "vision_cfg", image, {"timm_pool": "map", "timm_proj": "none"})
    depth = sum(re.fullmatch(r"visual\.trunk\.blocks\.\d+\.norm1\.weight", name) is not None for name in arrays)
    activation = "gelu_pytorch_tanh" if _TIMM_TANH.match(name) else "gelu"
    fields = {"hidden_act": activation, "num_attention_heads": _TIMM_HEADS[found[1]], "num_hidden_layers": depth}
    family = Family(names.TIMM_IMAGE, "visual.trunk.", "gelu", 1e-6)
    return Tower(arrays, family, fields, compute_type, "image_tower/"), _TIMM, {"pooling": "attention"}


def read_image_tower(
    tower: Tower,
    layout: Layout,
    normalization: Float[np.ndarray, "2 c"],
    image_size: int | None,
    patch_size: int | None,
    **fields: Any,
) -> tuple[ViTConfig, list[ParameterSource]]:
    """Returns an image tower and the sources of its parameters.

    Args:
        tower: its arrays.
        layout: its names before the first block.
        normalization: from `read_normalization`.
        image_size: as for `read_huggingface`.
        patch_size: as for `read_huggingface`.
        **fields: of its `ViTConfig`.
    """
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
        projection_size=_projected(tower),
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
    return config, [*_with_bias(tower), *layer, stored, *tokens]


def _text_tower(
    folder: Path, arrays: Arrays, config: Json, text: Json, length: int | None, compute_type: ComputeType
) -> tuple[TextConfig, list[ParameterSource]]:
    _check(folder, "text_cfg", text, _TEXT_FIELDS)
    pool_type = text.get("pool_type", "argmax")
    if pool_type not in _POOLINGS:
        raise UserError(f"{folder}/{CONFIG}: text_cfg.pool_type = {pool_type!r:.100} is not one of {list(_POOLINGS)}")
    fields = encoder_fields(text, _activation(folder, text, config), number(text, "heads", 8))
    tower = Tower(arrays, Family(names.OPEN_CLIP_TEXT, "text.", "gelu", 1e-5), fields, compute_type, "text_tower/")
    positions, sources = tower.require("positional_embedding"), _with_bias(tower)
    stored = shape_of(arrays, positions, 2)[0]
    is_causal = not text.get("no_causal_mask", False)
    # Without a mask, or with the last token, an embedding depends on the padding.
    if length is not None and length != stored and not (length < stored and is_causal and pool_type != "last"):
        raise UserError(f"{positions} holds {stored} positions; leave out text_length = {length}")
    if "projection/kernel" not in tower.array_names:
        if text.get("proj_type") != "none":
            raise UserError(f"the source has no array {tower.prefix}text_projection; is the file complete?")
        sources += _identity(tower)
    width = tower.shape("tokens/embedding", 2)[1]
    tower_config = TextConfig(
        vocabulary_size=tower.shape("tokens/embedding", 2)[0],
        length=length or stored,
        embedding_size=_projected(tower) or width,
        encoder=tower.encoder(causal=is_causal),
        pooling=_POOLINGS[pool_type],
        end_token=number(text, "eos_id", 2) if pool_type == "eos" else None,
    )
    first = ParameterSource("text_tower/positions", (positions,), lambda rows: rows[: length or stored])
    return tower_config, [*sources, first]


def _projected(tower: Tower) -> int | None:
    """Returns the size of the projection; None without one."""
    if "projection/kernel" not in tower.array_names:
        return None
    rows, columns = tower.shape("projection/kernel", 2)
    # A dense layer [out in], or a matrix [in out].
    return rows if tower.array_names["projection/kernel"].endswith(".weight") else columns


def _identity(tower: Tower) -> list[ParameterSource]:
    """Returns the sources of a projection that changes nothing, where a tower has none."""
    kernel = ParameterSource(
        f"{tower.path}projection/kernel", (tower.require("ln_final.weight"),), lambda scale: np.eye(len(scale))
    )
    return [kernel, zero_bias(kernel)]


def _with_bias(tower: Tower) -> list[ParameterSource]:
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


def _activation(folder: Path, config: Json, model: Json) -> str:
    options = config.get("act_kwargs")
    if options == {"approximate": "tanh"}:
        return "gelu_pytorch_tanh"
    if options:
        raise UserError(f"{folder}/{CONFIG}: act_kwargs = {options!r:.100} cannot be imported")
    return "quick_gelu" if model.get("quick_gelu") else "gelu"


def _check(folder: Path, part: str, config: Json, only: Json) -> None:
    require_fields(folder / CONFIG, part, config, only)


def require_fields(path: Path, part: str, config: Json, only: Json) -> None:
    """Checks that fields of a part of a configuration have the only values that can be imported."""
    for field, value in only.items():
        if (found := config.get(field, value)) != value and (found or value):
            raise UserError(f"{path}: {part}.{field} = {found!r:.100} cannot be imported, only {value!r}")
