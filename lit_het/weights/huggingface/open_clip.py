"""Imports models of OpenCLIP from folders as it writes them: CLIP's kind, SigLIP's, and the Perception Encoder.

The folder has `CONFIG` and `WEIGHTS`. A text tower of another library's class is left out.
"""

from pathlib import Path
from typing import Any

import numpy as np

from lit_het.console import message
from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.text_config import TextConfig
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.open_clip_images import (
    ENCODER_FIELDS,
    activation,
    encoder_fields,
    open_image_tower,
    projected_size,
    read_image_tower,
    require_fields,
    with_bias,
)
from lit_het.weights.huggingface.processor import BICUBIC, BILINEAR, CLIP_PROCESSOR, Json, read_json, read_normalization
from lit_het.weights.huggingface.tokenizer import find_tokenizer
from lit_het.weights.huggingface.tower import Family, Tower, number, section, shape_of, zero_bias
from lit_het.weights.imported import Imported
from lit_het.weights.rename import ParameterSource, Rule, translate
from lit_het.weights.resample import length_of_texts, with_length
from lit_het.weights.sources import Arrays, open_safetensors

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"

# What its tokenizers do that their files do not record: its own one, of CLIP's vocabulary, pads with 0.
CLIP_TOKENIZER: Json = {"padding_id": 0}
CANONICAL: Json = {"lowercase": True, "remove_punctuation": True, "split_underscores": True}

_TEXT_FIELDS = ENCODER_FIELDS | {"embed_cls": False}
_POOLINGS: dict[str, Any] = {"argmax": "end_token", "eos": "end_token", "last": "last", "first": "first"}
# The rest of a model whose image tower is imported alone.
_TEXT_SIDE = Rule(r"text\..*|logit_scale|logit_bias", None)


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
    opened = open_image_tower(folder / CONFIG, arrays, config, compute_type)
    normalization = read_normalization(processor, folder)
    image_tower, sources = read_image_tower(opened, normalization, image_size, patch_size)
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


def _text_tower(
    folder: Path, arrays: Arrays, config: Json, text: Json, length: int | None, compute_type: ComputeType
) -> tuple[TextConfig, list[ParameterSource]]:
    require_fields(folder / CONFIG, "text_cfg", text, _TEXT_FIELDS)
    pool_type = text.get("pool_type", "argmax")
    if pool_type not in _POOLINGS:
        raise UserError(f"{folder}/{CONFIG}: text_cfg.pool_type = {pool_type!r:.100} is not one of {list(_POOLINGS)}")
    fields = encoder_fields(text, activation(folder / CONFIG, text, config), number(text, "heads", 8))
    tower = Tower(arrays, Family(names.OPEN_CLIP_TEXT, "text.", "gelu", 1e-5), fields, compute_type, "text_tower/")
    positions, sources = tower.require("positional_embedding"), with_bias(tower)
    stored = shape_of(arrays, positions, 2)[0]
    is_causal = not text.get("no_causal_mask", False)
    # Without a mask, or with the last token, an embedding depends on the padding.
    if not is_causal or pool_type == "last":
        length = length_of_texts(positions, stored, length)
    if "projection/kernel" not in tower.array_names:
        if text.get("proj_type") != "none":
            raise UserError(f"the source has no array {tower.prefix}text_projection; is the file complete?")
        sources += _identity(tower)
    width = tower.shape("tokens/embedding", 2)[1]
    tower_config = TextConfig(
        vocabulary_size=tower.shape("tokens/embedding", 2)[0],
        length=length or stored,
        embedding_size=projected_size(tower) or width,
        encoder=tower.encoder(causal=is_causal),
        pooling=_POOLINGS[pool_type],
        end_token=number(text, "eos_id", 2) if pool_type == "eos" else None,
    )
    first = ParameterSource("text_tower/positions", (positions,), lambda rows: with_length(rows, length or stored))
    return tower_config, [*sources, first]


def _identity(tower: Tower) -> list[ParameterSource]:
    """Returns the sources of a projection that changes nothing, where a tower has none."""
    kernel = ParameterSource(
        f"{tower.path}projection/kernel", (tower.require("ln_final.weight"),), lambda scale: np.eye(len(scale))
    )
    return [kernel, zero_bias(kernel)]
