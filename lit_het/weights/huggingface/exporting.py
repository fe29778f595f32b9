"""Exports a trained image-text model to a folder that `transformers` loads, with the same logits.

A model that was trained with a sigmoid becomes a `SiglipModel`, one that was trained with a softmax a
`VisionTextDualEncoderModel`: of these, the pipeline ``zero-shot-image-classification`` reports the sigmoid of each
label's logit, and their softmax. It gives the former texts of 64 tokens and the latter those of the longest label.
Texts are therefore filled with the padding token at least up to the text tower's length, and the exported text tower
ignores what is behind it, see `lengthening`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import transformers

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.files import write_atomically, write_safetensors
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.text_config import BertConfig, TextConfig, TextTowerConfig
from lit_het.types import Params
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.image_models import Flat, WrittenTower, is_siglip, require, write_image_tower
from lit_het.weights.huggingface.processor import BILINEAR, Json
from lit_het.weights.huggingface.text_models import SIGLIP_LENGTH, write_bert, write_megatron_bert, write_siglip_text
from lit_het.weights.huggingface.tokenizer import SentencePiece, TokenizerJson, tokenizer_files


def write_image_text(
    folder: Path,
    image_tower: ViTConfig,
    text_tower: TextTowerConfig,
    params: Params,
    tokenizer: SentencePiece | TokenizerJson | None = None,
    image_processor: Mapping[str, Any] = MappingProxyType({}),
    *,
    is_sigmoid: bool,
) -> tuple[str, ...]:
    """Writes the parameters, the configuration, the image processor and optionally the tokenizer.

    The exported model computes logits without noise: the covariance of a HET-XL head is not exported. Fixed positions
    are written as learned ones, a missing bias as zero.

    Args:
        folder: created if missing.
        image_tower: the image tower.
        text_tower: the text tower.
        params: of the contrastive task: ``image_tower``, ``text_tower`` and ``head``.
        tokenizer: the tokenizer of training; None exports none.
        image_processor: fields of ``preprocessor_config.json`` for resizing and cropping. By default images are resized
            to a square with a bilinear filter, without keeping their aspect ratio.
        is_sigmoid: whether probabilities are sigmoids of single logits, or a softmax.

    Returns:
        What differs from the trained model, one sentence each.
    """
    if tokenizer is not None and tokenizer.length != text_tower.length:
        raise UserError(f"captions of {tokenizer.length} tokens do not fit text_tower.length = {text_tower.length}")
    if not isinstance(text_tower, (TextConfig, BertConfig)):
        raise UserError(f"transformers has no image-text model with a {type(text_tower).__name__}; use --to lit-het")
    is_bert = isinstance(text_tower, BertConfig)
    if tokenizer is not None and is_bert and tokenizer.padding_id != text_tower.padding_id:
        raise UserError(
            f"transformers masks padding: padding_id = {tokenizer.padding_id} of the tokenizer is not that of the text "
            f"tower, {text_tower.padding_id}; export with --to lit-het"
        )
    parts = {part: to_float32(params.get(part, {})) for part in ("image_tower", "text_tower", "head")}
    if "temperature/log_temperature" not in parts["head"]:
        raise UserError("transformers learns log τ: head.temperature must be a LogTemperature to be exported")
    image = write_image_tower(image_tower, parts["image_tower"])
    remarks: tuple[str, ...] = ()
    if not is_bert:
        remarks = ("load it in float32 or bfloat16: the text tower of the export overflows in float16",)
    if is_sigmoid and is_siglip(image_tower) and not image_tower.projection_size and not is_bert:
        text = write_siglip_text(text_tower, parts["text_tower"])
        config, arrays = _siglip(image, text, parts["head"])
        padding = SIGLIP_LENGTH - text_tower.length
    else:
        require("a dual encoder of transformers", [("image_tower.max_patches", image_tower.max_patches, None)])
        if is_bert:
            text, padding = write_bert(text_tower, parts["text_tower"]), 0
        else:
            text, padding = write_megatron_bert(text_tower, parts["text_tower"]), text_tower.length - 1
        config, arrays = _dual_encoder(image, text, parts["head"])
        remarks += (
            f"transformers' pipeline does not cut texts: labels of more than {text_tower.length} tokens, with their "
            "prompt, score otherwise than here",
        )
        if is_sigmoid:
            remarks += (
                "only a SiglipModel reports sigmoids, and it does not have these towers: the ranking of labels is as "
                "trained, but the probabilities of transformers' pipeline are a softmax over labels",
            )
    files = {} if tokenizer is None else tokenizer_files(tokenizer, padding, is_masked=is_bert)
    files["preprocessor_config.json"] = preprocessing(image_tower, image_processor)
    write_folder(folder, config, files, arrays)
    if isinstance(tokenizer, SentencePiece):
        (folder / "spiece.model").write_bytes(tokenizer.model_bytes)
    return remarks


def to_float32(params: Params) -> Flat:
    """Returns parameters by path, in float32."""
    return {path: np.asarray(array, np.float32) for path, array in parameters.flatten(params).items()}


def write_folder(folder: Path, config: Any, files: dict[str, Json], arrays: Flat) -> None:
    """Writes arrays and JSON files, and ``config.json`` with a configuration of `transformers`."""
    folder.mkdir(parents=True, exist_ok=True)
    # config.json follows last: without it transformers does not take the folder for a model.
    contiguous = {name: np.asarray(array, np.float32, order="C") for name, array in arrays.items()}
    write_safetensors(folder / "model.safetensors", contiguous, {"format": "pt"})
    for name, content in {**files, "config.json": config.to_diff_dict()}.items():
        write_atomically(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _siglip(image: WrittenTower, text: WrittenTower, head: Flat) -> tuple[Any, Flat]:
    # SiglipModel always adds a bias, which the softmax loss does not have.
    head = {"bias": np.zeros((), np.float32)} | head
    if image.config.model_type == "siglip2_vision_model":
        # Its text model is the same, by another name.
        fields = {name: value for name, value in text.config.to_dict().items() if name != "model_type"}
        config: Any = transformers.Siglip2Config(text_config=fields, vision_config=image.config.to_dict())
        config.architectures, config.dtype = ["Siglip2Model"], "float32"
    else:
        config = transformers.SiglipConfig(
            text_config=text.config, vision_config=image.config, architectures=["SiglipModel"], dtype="float32"
        )
    return config, image.arrays | text.arrays | names.named_arrays(names.HEAD, "", "", head)


def _dual_encoder(image: WrittenTower, text: WrittenTower, head: Flat) -> tuple[Any, Flat]:
    config = transformers.VisionTextDualEncoderConfig(
        vision_config=image.config.to_dict(),
        text_config=text.config.to_dict(),
        projection_dim=len(image.projection),
        architectures=["VisionTextDualEncoderModel"],
        dtype="float32",
    )
    own = {
        "visual_projection.weight": image.projection,
        "text_projection.weight": text.projection,
        "logit_scale": -head["temperature/log_temperature"],
    }
    return config, image.arrays | text.arrays | own


def preprocessing(image: ViTConfig, changes: Mapping[str, Any]) -> Json:
    """Returns the content of ``preprocessor_config.json``: that of a tower, with changes."""
    return {
        "image_processor_type": "SiglipImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        **({"size": {"height": image.image_size, "width": image.image_size}} if image.patches is None else {}),
        "resample": BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        **changes,
    }
