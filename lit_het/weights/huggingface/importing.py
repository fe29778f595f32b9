"""Imports folders of Hugging Face models: SigLIP, SigLIP 2, CLIP, ViT, DINOv2, DINOv3, BERT, RoBERTa, dual encoders.

Folders of OpenCLIP and of ProLIP's authors have modules of their own.

Sizes are inferred from the arrays, and from the configuration where the arrays do not determine them. Our towers have
one fixed normalisation of pixels and no position for the class token. Another normalisation is therefore folded into
the first layer, and the position of a class token is added to that token; both changes are exact.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lit_het.console import message
from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType
from lit_het.weights.huggingface import image_towers, names, open_clip, prolip, sentence_models, text_towers
from lit_het.weights.huggingface.processor import Json, read_json, read_normalization, read_processor
from lit_het.weights.huggingface.tokenizer import TOKENIZER_JSON, find_tokenizer, folds_case, lowercases
from lit_het.weights.huggingface.tower import section, shape_of
from lit_het.weights.imported import Imported
from lit_het.weights.rename import ParameterSource, Rule, translate
from lit_het.weights.sources import Arrays, open_safetensors

_IGNORED = (
    # The constant 0, 1, 2, ..., which old versions stored.
    Rule(r".*embeddings\.position_ids", None),
    # Only used in pretraining with masked patches or words.
    Rule(r".*embeddings\.mask_token", None),
    Rule(r"cls\..*", None),
)
# The rest of a dual encoder whose image tower is imported alone.
_SEVERAL_LABELS = "multi_label_classification"
_OTHER_SIDE = Rule(r"text_model\..*|text_projection\..*|logit_scale", None)
# The towers of models that are defined as a whole, by ``model_type``.
_PAIRS = {
    "siglip": ("siglip_vision_model", "siglip_text_model"),
    "siglip2": ("siglip2_vision_model", "siglip2_text_model"),
    "clip": ("clip_vision_model", "clip_text_model"),
}
_DUAL = "vision-text-dual-encoder"
# Image towers whose classifier is a dense layer of the embedding.
_WITH_CLASSIFIER = ("vit", "siglip_vision_model", "siglip2_vision_model")
# SigLIP's attention pooling, where the mean of the patches is taken instead.
_UNUSED_POOLING = Rule(r"vision_model\.head\..*", None)


class _Part(NamedTuple):
    """One tower of a folder: its ``model_type``, its configuration, and the prefix of the model that contains it."""

    kind: str
    config: Json
    outer: str = ""


def read_huggingface(
    folder: Path,
    *,
    image_size: int | None = None,
    patch_size: int | None = None,
    text_length: int | None = None,
    text_pooling: str | None = None,
    compute_type: ComputeType = "float32",
) -> Imported:
    """Imports a folder that `transformers` wrote, OpenCLIP, or ProLIP's authors.

    Args:
        folder: with ``config.json`` or OpenCLIP's, safetensors files and optionally ``preprocessor_config.json``.
        image_size: in pixels; positions are resampled for it. None for the model's size, rounded down to whole patches:
            the original model ignores the remaining pixels.
        patch_size: in pixels; the first layer is resampled for it. None for the model's size.
        text_length: number of positions of the text tower; beyond those of the source they are interpolated. None for
            the source's.
        text_pooling: "first" or "mean", of a BERT or a tower like it; None for that of sentence-transformers beside it,
            or else the model's own. Other towers have one pooling.
        compute_type: type of activations.
    """
    sizes: Any = {"image_size": image_size, "patch_size": patch_size, "compute_type": compute_type}
    if open_clip.is_open_clip(folder):
        return open_clip.read_open_clip(folder, text_length=text_length, **sizes)
    config = read_json(folder / "config.json")
    if prolip.is_prolip(config):
        return prolip.read_prolip(folder, config, text_length=text_length, **sizes)
    image, text = _parts(config, folder)
    arrays = open_safetensors(folder)
    imported, sources, ignored = Imported(arrays, []), list[ParameterSource](), _IGNORED
    if image is not None:
        family = image_towers.FAMILIES[image.kind]
        processor = read_processor(folder, family.processor)
        normalization = read_normalization(processor, folder)
        tower, sources = image_towers.read_image_tower(arrays, *image, processor, normalization, **sizes)
        imported = dataclasses.replace(imported, image_tower=tower, image_processor=processor)
        ignored = (*family.ignored, *ignored)
        if text is None:
            ignored = (*ignored, _OTHER_SIDE)
        if tower.pooling == "mean":
            ignored = (*ignored, _UNUSED_POOLING)
        if head := _classifier(arrays, image.kind, tower.embedding_size, folder):
            sources += head
            num_classes = shape_of(arrays, "classifier.weight", 2)[0]
            is_several = config.get("problem_type") == _SEVERAL_LABELS
            imported = dataclasses.replace(imported, num_classes=num_classes, has_several_labels=is_several)
    if text is not None:
        pooling = _text_pooling(folder, text.kind, text_pooling)
        tower, found = text_towers.read_text_tower(
            arrays, *text, length=text_length, pooling=pooling, compute_type=compute_type
        )
        sources, ignored = sources + found, (*ignored, *text_towers.FAMILIES[text.kind].ignored)
        reads_json = not text.kind.startswith("siglip") or lowercases(folder) or folds_case(folder / TOKENIZER_JSON)
        tokenizer = find_tokenizer(folder, reads_json=reads_json)
        imported = dataclasses.replace(imported, text_tower=tower, tokenizer=tokenizer)
    if image is not None and text is not None:
        sources = sources + names.parameter_sources(arrays, names.HEAD, "", "head/")
        imported = dataclasses.replace(imported, has_bias=text.kind.startswith("siglip"))
    return dataclasses.replace(imported, parameter_sources=translate(arrays, ignored, sources))


def _text_pooling(folder: Path, kind: str, chosen: str | None) -> sentence_models.Pooling | None:
    """Returns how tokens of a text become an embedding; None for a tower's own way."""
    if kind not in text_towers.POOLED_ANYHOW:
        return None
    if chosen is None:
        return sentence_models.read_pooling(folder)
    if chosen not in ("first", "mean"):
        raise UserError(f"text_pooling = {chosen!r} is not one of {kind!r}; choose 'first' or 'mean'")
    return chosen


def _classifier(arrays: Arrays, kind: str, size: int, folder: Path) -> list[ParameterSource]:
    """Returns the sources of a classifier's head; none without one, or of one that reads more than the embedding."""
    if "classifier.weight" not in arrays:
        return []
    if kind in _WITH_CLASSIFIER:
        return names.parameter_sources(arrays, names.dense("classifier", "logits"), "", "head/")
    if not kind.startswith("dinov2") or arrays["classifier.weight"].read()[:, size:].any():
        message(f"{folder}: its classifier reads more than the embedding, and is left out; the image tower is imported")
        return []
    # As our exports write it: the half that reads the mean of the patches is zero.
    return [
        ParameterSource("head/logits/kernel", ("classifier.weight",), lambda kernel: kernel[:, :size].T),
        ParameterSource("head/logits/bias", ("classifier.bias",), lambda bias: bias),
    ]


def _parts(config: Json, folder: Path) -> tuple[_Part | None, _Part | None]:
    """Returns the image tower and the text tower of a folder, None without one."""
    kind = str(config.get("model_type"))
    if kind in image_towers.FAMILIES:
        return _Part(kind, section(config, "vision_config", config)), None
    if kind in text_towers.FAMILIES:
        return None, _Part(kind, section(config, "text_config", config))
    image, text = section(config, "vision_config", {}), section(config, "text_config", {})
    if kind == "clip":
        image, text = (_clip_section(config, field) for field in ("vision_config", "text_config"))
    if kind in _PAIRS and str(config.get("architectures")).endswith("ForImageClassification']"):
        if kind == "clip":
            raise UserError(
                f"{folder}: CLIP's image classifier reads the mean of patches before the last norm, which no tower "
                "here computes; import a CLIP, or a classifier of a ViT or of SigLIP"
            )
        # It takes the mean of the patches, whether or not there is a head with attention.
        return _Part(_PAIRS[kind][0], image | {"vision_use_head": False}), None
    if kind in _PAIRS:
        return _Part(_PAIRS[kind][0], image), _Part(_PAIRS[kind][1], text)
    if kind != _DUAL:
        known = {*image_towers.FAMILIES, *text_towers.FAMILIES, *_PAIRS, _DUAL}
        _refuse(folder, "model_type", kind, known)
    parts = (
        _Part(str(image.get("model_type")), image, "vision_model."),
        _Part(str(text.get("model_type")), text, "text_model."),
    )
    if parts[0].kind not in image_towers.FAMILIES:
        _refuse(folder, "vision_config.model_type", parts[0].kind, image_towers.FAMILIES)
    if parts[1].kind not in text_towers.FAMILIES.keys() - text_towers.ALONE:
        # LiT needs no more than the image tower; most text towers of dual encoders are not ours.
        message(f"{folder}: the text tower, {parts[1].kind!r:.100}, cannot be imported; the image tower is, alone")
        return parts[0], None
    return parts


def _clip_section(config: Json, field: str) -> Json:
    """Returns a section of CLIP's configuration as transformers reads it.

    Early versions wrote it as ``vision_config_dict``, which replaces the other one whole.
    """
    return section(config, field if config.get(f"{field}_dict") is None else f"{field}_dict", {})


def _refuse(folder: Path, field: str, value: str, known: Iterable[str]) -> NoReturn:
    raise UserError(
        f"{folder}/config.json: {field} = {value!r:.100} cannot be imported; supported are {', '.join(sorted(known))}"
    )
