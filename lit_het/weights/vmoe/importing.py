"""Imports V-MoE and e3 checkpoints as released by their authors (Riquelme et al. 2021; Allingham et al. 2022).

Also read are the two towers of their contrastive trainings, of which either may have experts.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType, EncoderConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.text_config import TextConfig
from lit_het.weights.imported import Imported
from lit_het.weights.rename import ParameterSource, Rule, depth_of, translate
from lit_het.weights.resample import length_of_texts, resample_positions, texts_of_length
from lit_het.weights.sources import Arrays
from lit_het.weights.vmoe.files import open_vmoe

_POSITIONS = "Encoder/posembed_input/pos_embedding"
# Dense layers that only some models have.
_OPTIONAL = {"pre_logits/kernel": 2, "head/kernel": 2, _POSITIONS: 3}
# Arrays that sizes are inferred from, with their number of axes.
_QUERY = "Encoder/encoderblock_0/SelfAttention/query/kernel"
_RANKS = {"embedding/kernel": 4, _QUERY: 3}
_TEXT_RANKS = {"Embed_0/embedding": 2, _QUERY: 3, _POSITIONS: 3, "head/kernel": 2}


def read_vmoe(
    prefix: Path,
    *,
    experts: Mapping[str, Any] = MappingProxyType({}),
    image_size: int | None = None,
    image_pooling: Literal["mean", "first"] = "mean",
    text_pooling: Literal["last", "first", "mean", "max"] = "last",
    text_length: int | None = None,
    compute_type: ComputeType = "float32",
) -> Imported:
    """Imports a checkpoint ``NAME.index``.

    Args:
        prefix: the path without ``.index``.
        experts: as for `describe_vmoe`.
        image_size: as for `describe_vmoe`.
        image_pooling: as for `describe_vmoe`.
        text_pooling: of a text tower without attention pooling, which the file does not record.
        text_length: in tokens; beyond those of the file, positions are interpolated. None for the file's.
        compute_type: as for `describe_vmoe`.
    """
    arrays = _parameters(open_vmoe(prefix))
    options: Any = {"experts": experts, "image_size": image_size, "image_pooling": image_pooling}
    if any(name.startswith(("img/", "txt/")) for name in arrays):
        of_texts: Any = {"text_pooling": text_pooling, "text_length": text_length}
        return describe_two_towers(arrays, compute_type=compute_type, **of_texts, **options)
    return describe_vmoe(arrays, compute_type=compute_type, **options)


def describe_two_towers(
    arrays: Arrays,
    *,
    text_pooling: Literal["last", "first", "mean", "max"] = "last",
    text_length: int | None = None,
    experts: Mapping[str, Any] = MappingProxyType({}),
    compute_type: ComputeType = "float32",
    **image_options: Any,
) -> Imported:
    """Returns both towers and the head of arrays ``img/...``, ``txt/...``, ``s`` and ``b``.

    Args:
        arrays: by name.
        text_pooling: as for `read_vmoe`.
        text_length: as for `read_vmoe`.
        experts: as for `describe_vmoe`, of both towers.
        compute_type: of the towers.
        **image_options: as for `describe_vmoe`.
    """
    image = describe_vmoe(_below(arrays, "img/"), experts=experts, compute_type=compute_type, **image_options)
    assert image.image_tower is not None
    text_tower, text = _text_tower(_below(arrays, "txt/"), experts, text_length, text_pooling, compute_type)
    others = {name: array for name, array in arrays.items() if not name.startswith(("img/", "txt/"))}
    sources = [*_above(image.parameter_sources, "img/"), *_above(text, "txt/"), *translate(others, _HEAD_RULES)]
    image_tower = dataclasses.replace(image.image_tower, projection_size=image.num_classes)
    return Imported(arrays, sources, image_tower, text_tower, has_bias="b" in arrays)


def _below(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _above(sources: list[ParameterSource], prefix: str) -> list[ParameterSource]:
    """Returns the sources of a tower within a whole file, where its head is a projection and not a classifier."""
    return [
        ParameterSource(
            one.target.replace("head/logits/", "image_tower/projection/"),
            tuple(prefix + name for name in one.array_names),
            one.combine,
        )
        for one in sources
    ]


def describe_vmoe(
    arrays: Arrays,
    *,
    experts: Mapping[str, Any] = MappingProxyType({}),
    image_size: int | None = None,
    image_pooling: Literal["mean", "first"] = "mean",
    compute_type: ComputeType = "float32",
) -> Imported:
    """Returns the tower and the head of arrays with V-MoE's names.

    Args:
        arrays: by name, such as ``Encoder/encoderblock_5/Moe/Router/dense/kernel``.
        experts: fields of `ExpertsConfig` that the file does not record: K and the capacities, and for an ensemble made
            from a V-MoE the number of members M. The file determines the number of experts and their blocks, and, for
            an e3, M.
        image_size: in pixels; another size than the file's resamples the positions. None for the file's.
        image_pooling: without class token and attention pooling, which the file records: "mean" (the authors' 'gap') or
            "first" ('0').
        compute_type: of the tower.
    """
    _require(arrays, _RANKS)
    for name in _OPTIONAL.keys() & arrays.keys():
        if len(arrays[name].shape) != _OPTIONAL[name]:
            raise UserError(f"{name} has shape {arrays[name].shape}, where {_OPTIONAL[name]} axes are expected")
    patch_size = arrays["embedding/kernel"].shape[1]
    tower = ViTConfig(
        image_size=_stored_size(arrays, patch_size) if image_size is None else image_size,
        patch_size=patch_size,
        encoder=_encoder(arrays, experts, compute_type),
        pooling=_pooling(arrays, image_pooling),
        positions="learned" if _POSITIONS in arrays else "sine_cosine",
        representation_size=arrays["pre_logits/kernel"].shape[1] if "pre_logits/kernel" in arrays else None,
    )
    sources = []
    if _POSITIONS in arrays:
        first = int("cls" in arrays)
        sources.append(
            ParameterSource(
                "image_tower/positions", (_POSITIONS,), lambda x: resample_positions(x[0, first:], tower.side)
            )
        )
    if "cls" in arrays and _POSITIONS in arrays:
        # V-MoE adds a position to the class token as well; we add it once, here, to the class token itself.
        sources.append(
            ParameterSource("image_tower/class_token", ("cls", _POSITIONS), lambda cls, x: cls[0, 0] + x[0, 0])
        )
    num_classes = arrays["head/kernel"].shape[1] if "head/kernel" in arrays else None
    return Imported(arrays, translate(arrays, _RULES, sources), image_tower=tower, num_classes=num_classes)


def _text_tower(
    arrays: Arrays,
    experts: Mapping[str, Any],
    length: int | None,
    pooling: Literal["last", "first", "mean", "max"],
    compute_type: ComputeType,
) -> tuple[TextConfig, list[ParameterSource]]:
    _require(arrays, _TEXT_RANKS)
    length = length_of_texts(_POSITIONS, arrays[_POSITIONS].shape[1], length)
    tower = TextConfig(
        vocabulary_size=arrays["Embed_0/embedding"].shape[0],
        length=length,
        embedding_size=arrays["head/kernel"].shape[1],
        encoder=_encoder(arrays, experts, compute_type),
        pooling="attention" if "MapHead/probe" in arrays else pooling,
    )
    return tower, texts_of_length(translate(arrays, _TEXT_RULES), length)


def _require(arrays: Arrays, ranks: Mapping[str, int]) -> None:
    for name, rank in ranks.items():
        if name not in arrays or len(arrays[name].shape) != rank:
            raise UserError(f"the checkpoint lacks {name} with {rank} axes, which every V-MoE has; it is another model")


def _encoder(arrays: Arrays, experts: Mapping[str, Any], compute_type: ComputeType) -> EncoderConfig:
    depth = depth_of(found[1] for name in arrays if (found := re.match(r"Encoder/encoderblock_(\d+)/", name)))
    width, num_heads, _ = arrays[_QUERY].shape
    return EncoderConfig(
        width=width,
        depth=depth,
        mlp_width=_mlp_width(arrays),
        num_heads=num_heads,
        experts=_experts(arrays, depth, experts),
        compute_type=compute_type,
    )


def _mlp_width(arrays: Arrays) -> int:
    """Returns the hidden size of the MLPs, which experts share."""
    pattern = re.compile(r"Encoder/encoderblock_\d+/(Moe/)?Mlp/Dense_0/kernel")
    name = next((name for name in arrays if pattern.fullmatch(name)), None)
    if name is None:
        raise UserError("the checkpoint lacks the MLPs of its blocks, which every V-MoE has; it is another model")
    return arrays[name].shape[-1]


def _stored_size(arrays: Arrays, patch_size: int) -> int:
    """Returns the image size of learned positions."""
    if _POSITIONS not in arrays:
        raise UserError(
            "the checkpoint has no positions (they are sines and cosines), hence no image size; set --image-size"
        )
    return round((arrays[_POSITIONS].shape[1] - ("cls" in arrays)) ** 0.5) * patch_size


def _pooling(arrays: Arrays, chosen: Literal["mean", "first"]) -> Literal["class_token", "attention", "mean", "first"]:
    """Returns the pooling, which is in the arrays unless it has none of its own."""
    if "cls" in arrays:
        return "class_token"
    return "attention" if "MapHead/probe" in arrays else chosen


def _parameters(arrays: Arrays) -> Arrays:
    """Returns the parameters of a checkpoint that may also hold optimizer state."""
    if not any(name.startswith("params/") for name in arrays):
        return arrays
    return {name.removeprefix("params/"): array for name, array in arrays.items() if name.startswith("params/")}


def _experts(arrays: Arrays, depth: int, settings: Mapping[str, Any]) -> ExpertsConfig | None:
    found = [re.fullmatch(r"Encoder/encoderblock_(\d+)/Moe/Router/dense/kernel", name) for name in arrays]
    numbers = tuple(sorted(int(match[1]) for match in found if match))
    if not numbers:
        return None
    _, *split = arrays[f"Encoder/encoderblock_{numbers[0]}/Moe/Router/dense/kernel"].shape
    if len(split) not in (1, 2):
        raise UserError(f"the router of block {numbers[0]} has {1 + len(split)} axes, where 2 or 3 are expected")
    inferred: dict[str, Any] = {"num_experts": int(np.prod(split)), "num_blocks": len(numbers), "blocks": None}
    if len(split) == 2:
        inferred["num_members"] = split[0]
    # What the file determines wins over the settings.
    experts = ExpertsConfig(**{**settings, **inferred})
    are_last_odd = numbers == tuple(range(1, depth, 2))[-len(numbers) :]
    return experts if are_last_odd else dataclasses.replace(experts, num_blocks=None, blocks=numbers)


def _block(pattern: str, target: str, transform: str) -> Rule:
    return Rule(
        rf"Encoder/encoderblock_(\d+)/{pattern}", rf"image_tower/encoder/blocks/\1/{target}", _TRANSFORMS[transform]
    )


_TRANSFORMS = {
    "same": lambda x: x,
    "heads in": lambda x: x.reshape(x.shape[0], -1),
    "heads out": lambda x: x.reshape(-1, x.shape[-1]),
    "flat": lambda x: x.reshape(-1),
    # The router of an e3 has an axis for the members: [d, M, E/M].
    "router": lambda x: x.reshape(x.shape[0], -1),
}
# Layers of attention, with the axes of heads joined.
_ATTENTION = (
    *(
        (name, kind, how)
        for name in ("query", "key", "value")
        for kind, how in (("kernel", "heads in"), ("bias", "flat"))
    ),
    ("out", "kernel", "heads out"),
    ("out", "bias", "same"),
)
_RULES = (
    *(_block(rf"SelfAttention/{name}/{kind}", f"attention/{name}/{kind}", how) for name, kind, how in _ATTENTION),
    _block("LayerNorm_0/(scale|bias)", r"attention_norm/\2", "same"),
    _block("LayerNorm_1/(scale|bias)", r"mlp_norm/\2", "same"),
    _block("Mlp/Dense_0/(kernel|bias)", r"mlp/up/\2", "same"),
    _block("Mlp/Dense_1/(kernel|bias)", r"mlp/down/\2", "same"),
    _block("Moe/Mlp/Dense_0/(kernel|bias)", r"mixture/experts/up/\2", "same"),
    _block("Moe/Mlp/Dense_1/(kernel|bias)", r"mixture/experts/down/\2", "same"),
    _block("Moe/Router/dense/kernel", "mixture/router/kernel", "router"),
    *(
        Rule(
            rf"MapHead/MultiHeadDotProductAttention/{name}/{kind}",
            f"image_tower/pooling/attention/{name}/{kind}",
            _TRANSFORMS[how],
        )
        for name, kind, how in _ATTENTION
    ),
    Rule(r"MapHead/probe", "image_tower/pooling/probe", lambda x: x[0]),
    Rule(r"MapHead/LayerNorm/(scale|bias)", r"image_tower/pooling/norm/\1"),
    Rule(r"MapHead/Mlp/Dense_0/(kernel|bias)", r"image_tower/pooling/mlp/up/\1"),
    Rule(r"MapHead/Mlp/Dense_1/(kernel|bias)", r"image_tower/pooling/mlp/down/\1"),
    # Without learned positions, to which it would be added.
    Rule(r"cls", "image_tower/class_token", lambda x: x[0, 0]),
    Rule(r"Encoder/encoder_norm/(scale|bias)", r"image_tower/encoder/norm/\1"),
    Rule(r"embedding/kernel", "image_tower/patches/kernel", _TRANSFORMS["heads out"]),
    Rule(r"embedding/bias", "image_tower/patches/bias"),
    Rule(r"pre_logits/(kernel|bias)", r"image_tower/pre_logits/\1"),
    Rule(r"head/(kernel|bias)", r"head/logits/\1"),
)
_TEXT_RULES = (
    Rule(r"Embed_0/embedding", "text_tower/tokens/embedding"),
    Rule(re.escape(_POSITIONS), "text_tower/positions", lambda x: x[0]),
    Rule(r"head/(kernel|bias)", r"text_tower/projection/\1"),
    *(
        dataclasses.replace(rule, target=rule.target.replace("image_tower/", "text_tower/"))
        for rule in _RULES
        if rule.target is not None and rule.pattern.startswith(("Encoder/", "MapHead/"))
    ),
)
_HEAD_RULES = (
    # V-MoE multiplies by exp(s), we divide by τ: log τ = -s.
    Rule(r"s", "head/temperature/log_temperature", np.negative),
    Rule(r"b", "head/bias"),
)
