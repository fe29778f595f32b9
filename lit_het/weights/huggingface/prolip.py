"""Imports ProLIP (Chun et al. 2025), as its authors publish it: ``ProLIPHF``, with the names of OpenCLIP.

The published code differs from the paper in two places, which an import keeps: the last norm of the image tower is
applied to the class token twice, and the log-variance of a text is a dense layer of its mean. The token [UNC] of a text
only takes part in attention.
"""

from pathlib import Path

from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.text_config import TextConfig
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.open_clip import CANONICAL, CLIP_TOKENIZER
from lit_het.weights.huggingface.open_clip_images import (
    Layout,
    Opened,
    encoder_fields,
    read_image_tower,
    require_fields,
    token,
)
from lit_het.weights.huggingface.processor import CLIP_PROCESSOR, Json, read_normalization, read_processor
from lit_het.weights.huggingface.tokenizer import find_tokenizer
from lit_het.weights.huggingface.tower import Family, Tower, number, section, shape_of
from lit_het.weights.imported import Imported
from lit_het.weights.rename import ParameterSource, translate
from lit_het.weights.resample import length_of_texts, with_length
from lit_het.weights.sources import open_safetensors

_IMAGE = Family(names.PROLIP_IMAGE, "visual.", "gelu", 1e-5)
_TEXT = Family(names.PROLIP_TEXT, "text.", "gelu", 1e-5)
# The only values that our towers have: the first is also the default where a file leaves the field out.
_BOTH = {"ls_init_value": None, "act_kwargs": None, "output_tokens": False}
_IMAGE_FIELDS = _BOTH | {
    "timm_model_name": None,
    "attentional_pool": False,
    "no_ln_pre": False,
    "pos_embed_type": "learnable",
    "pool_type": "tok",
}
_TEXT_FIELDS = _BOTH | {"hf_model_name": None, "no_causal_mask": True, "proj_bias": True, "embed_cls": True}
_LAYOUT = Layout(
    "conv1", "positional_embedding", {"class_token": "class_embedding", "uncertainty_token": "unc_embedding"}
)
_TOWER = {"pooling": "class_token", "input_norm": True, "uncertainty_token": True, "norm_twice": True}


def is_prolip(config: Json) -> bool:
    """Returns whether a ``config.json`` is one of ``ProLIPHF``, which names no ``model_type``."""
    return "model_type" not in config and {"embed_dim", "vision_cfg", "text_cfg"} <= config.keys()


def read_prolip(
    folder: Path,
    config: Json,
    *,
    image_size: int | None,
    patch_size: int | None,
    text_length: int | None,
    compute_type: ComputeType,
) -> Imported:
    """Imports a folder of ``ProLIPHF``; arguments as for `read_huggingface`."""
    arrays = open_safetensors(folder)
    vision, text = section(config, "vision_cfg", {}), section(config, "text_cfg", {})
    require_fields(folder / "config.json", "vision_cfg", vision, _IMAGE_FIELDS)
    require_fields(folder / "config.json", "text_cfg", text, _TEXT_FIELDS)
    for name in ("visual.uncertainty_proj.weight", "text.text_uncertainty_projection.weight"):
        if name not in arrays:
            raise UserError(f"{folder} has no {name}; only a ProLIP with uncertainty tokens on both sides is imported")
    activation = "quick_gelu" if config.get("quick_gelu") else "gelu"
    processor = read_processor(folder, CLIP_PROCESSOR)
    width = shape_of(arrays, "visual.proj", 2)[0]
    heads = width // max(1, number(vision, "head_width", 64))
    image = Tower(arrays, _IMAGE, encoder_fields(vision, activation, heads), compute_type, "image_tower/")
    normalization = read_normalization(processor, folder)
    image_tower, sources = read_image_tower(Opened(image, _LAYOUT, _TOWER), normalization, image_size, patch_size)
    fields = encoder_fields(text, activation, number(text, "heads", 12))
    text_tower, found = _text_tower(Tower(arrays, _TEXT, fields, compute_type, "text_tower/"), text_length)
    sources += found + names.parameter_sources(arrays, names.HEAD, "", "head/")
    is_canonical = section(text, "tokenizer_kwargs", {}).get("clean") == "canonicalize"
    return Imported(
        arrays,
        translate(arrays, (), sources),
        image_tower,
        text_tower,
        has_bias="logit_bias" in arrays,
        tokenizer=find_tokenizer(folder, reads_json=not is_canonical),
        tokenizer_fields=CANONICAL if is_canonical else CLIP_TOKENIZER,
        image_processor=processor,
    )


def _text_tower(tower: Tower, length: int | None) -> tuple[TextConfig, list[ParameterSource]]:
    """Returns the text tower; its tokens are the words, [UNC] and the class token, all with positions."""
    positions = tower.require("positional_embedding")
    stored = shape_of(tower.arrays, positions, 2)[0] - 2
    length = length_of_texts(positions, stored, length, ", and padding counts as words")
    config = TextConfig(
        vocabulary_size=tower.shape("tokens/embedding", 2)[0],
        length=length,
        embedding_size=2 * tower.shape("projection/kernel", 2)[0],
        encoder=tower.encoder(),
        pooling="class_token",
        uncertainty_token=True,
        uncertainty_from="mean",
    )
    return config, [
        *tower.sources,
        ParameterSource("text_tower/positions", (positions,), lambda rows: with_length(rows[:-2], length)),
        token(tower, "unc_emb", "uncertainty_token", "positional_embedding", -2),
        token(tower, "cls_emb", "class_token", "positional_embedding", -1),
    ]
