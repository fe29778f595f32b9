"""Imports weights of big_vision, of all versions: ViT, FlexiViT, LiT with either text tower, SigLIP, SigLIP 2, NaFlex.

All sizes are inferred from shapes. Versions differ in three ways: the names of arrays (`_OLD_NAMES`), blocks stored
separately or stacked, and where the position of the class token is stored.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType, EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.text_config import BertConfig, TextConfig
from lit_het.weights.big_vision.names import (
    BERT_HEAD_SIZE,
    BERT_TOWER,
    CLASSIFIER,
    IMAGE_TOWER,
    PROJECTION,
    TEXT_TOWER,
    ParameterName,
)
from lit_het.weights.imported import Imported
from lit_het.weights.rename import ParameterSource, Rule, depth_of, translate
from lit_het.weights.resample import resample_patches, resample_positions, texts_of_length
from lit_het.weights.sources import Arrays, open_npz

# Prefixes of the parameters in files that also hold optimizer state.
_ROOTS = ("params", "opt/target", "opt/params")
# Patterns that also match the names in older files. Before Flax Linen, layers were numbered across the whole block,
# positions belonged to the encoder, and attention pooling had no module of its own.
_OLD_NAMES = {
    "LayerNorm_1": "LayerNorm_[12]",
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_[01]",
    "MlpBlock_0": "MlpBlock_[03]",
    "MAPHead_0/": "(?:MAPHead_0/)?",
    "pos_embedding": "(?:Transformer/(?:posembed_input/)?)?pos_embedding",
}


def read_big_vision(
    path: Path,
    subtree: str = "",
    *,
    image_size: int | None = None,
    patch_size: int | None = None,
    image_pooling: Literal["mean", "first"] = "mean",
    text_pooling: Literal["last", "first", "mean", "max"] = "last",
    text_length: int | None = None,
    compute_type: ComputeType = "float32",
) -> Imported:
    """Imports a big_vision ``.npz`` file, optionally for another image or patch size.

    With another image size only, positions are resampled with aligned corners, as big_vision does before fine-tuning.
    With another patch size, kernels and positions are resized as in FlexiViT (see `resample`). A NaFlex tower takes
    images of any shape in as many patches as it has positions, or squares of a given image size.

    Args:
        path: the file.
        subtree: only this subtree of the file, for example ``img``.
        image_size: in pixels; None for the size in the file, or of NaFlex for any shape.
        patch_size: in pixels; None for the size in the file.
        image_pooling: pooling of an image tower without class token and attention pooling, which the file does not
            record: "mean" (big_vision's 'gap') or "first" ('0').
        text_pooling: pooling of a text tower without attention pooling, which the file does not record. SigLIP and LiT
            use "last".
        text_length: tokens per text; beyond those of the file, positions are interpolated. Only a BERT can be read with
            fewer. None for the number of positions in the file.
        compute_type: of the towers.
    """
    arrays = _open(path, subtree)
    image, text = _prefixes(arrays)
    sources = translate(arrays, _rules(arrays, image, text), _summed_positions(arrays, text))
    shapes = _Shapes({one.target: (one.array_names[0], arrays[one.array_names[0]].shape) for one in sources})
    image_tower, text_tower = None, None
    if image is not None:
        image_tower = _image_tower(shapes, image_size, patch_size, image_pooling, compute_type)
        sources = _resampled(sources, shapes, image_tower)
    if text is not None and "text_tower/segments/embedding" in shapes:
        text_tower = _bert_tower(shapes, text_length, compute_type, is_mean=text_pooling == "mean")
    elif text is not None:
        text_tower = _text_tower(shapes, text_length, text_pooling, compute_type)
    if text_tower is not None:
        sources = texts_of_length(sources, text_tower.length)
    return Imported(
        arrays,
        sources,
        image_tower,
        text_tower,
        has_bias="b" in arrays,
        num_classes=shapes.shape("head/logits/kernel", 2)[1] if "head/logits/kernel" in shapes else None,
    )


def _open(path: Path, subtree: str) -> Arrays:
    """Returns the parameters of the whole file, or of a subtree."""
    names = open_npz(path)
    root = next((root for root in _ROOTS if any(name.startswith(f"{root}/") for name in names)), "")
    arrays = open_npz(path, "/".join(filter(None, (root, subtree))))
    tower = subtree.rsplit("/", 1)[-1]
    # The prefix stays for a tower of a two-tower model: with it the head is a projection, without it a classifier.
    return {f"{tower}/{name}": stored for name, stored in arrays.items()} if tower in ("img", "txt") else arrays


def _prefixes(arrays: Arrays) -> tuple[str | None, str | None]:
    """Returns the prefixes of the image tower's and the text tower's names; None without such a tower."""
    tops = {name.split("/", 1)[0] for name in arrays}
    if tops & {"img", "txt"}:
        return "img/" if "img" in tops else None, "txt/" if "txt" in tops else None
    return (None, "") if tops & {"Embed_0", "BertEncoder_0"} else ("", None)


def _rules(arrays: Arrays, image: str | None, text: str | None) -> list[Rule]:
    rules = [
        # big_vision multiplies by exp(t), we divide by τ: log τ = -t.
        Rule("t", "head/temperature/log_temperature", lambda array: -_drop_leading_axis(array)),
        Rule("b", "head/bias", _drop_leading_axis),
    ]
    if image is not None:
        rules += _rules_for(IMAGE_TOWER, image, "image_tower/")
        rules += _rules_for(PROJECTION, image, "image_tower/") if image else _rules_for(CLASSIFIER, image, "head/")
    if text is not None:
        is_bert = any(name.startswith(f"{text}BertEncoder_0/") for name in arrays)
        rules += _rules_for(BERT_TOWER if is_bert else TEXT_TOWER, text, "text_tower/")
    return rules


def _drop_leading_axis(array: np.ndarray) -> np.ndarray:
    """Returns the array without its first axis, of size 1. Other sizes raise a ValueError, which `load` reports."""
    return array.reshape(array.shape[1:])


def _rules_for(names: Sequence[ParameterName], theirs: str, ours: str) -> list[Rule]:
    """Returns rules for the names of all versions, for separate and for stacked blocks."""
    rules = []
    for name in names:
        pattern = theirs + name.theirs
        for current, any_version in _OLD_NAMES.items():
            pattern = pattern.replace(current, any_version)
        target = ours + name.ours
        rules.append(Rule(pattern.replace("_*", r"_(\d+)"), target.replace("*", r"\1"), name.to_ours))
        if "*" in pattern:
            # Stacked blocks have no number in their name; the * stays in the target and marks a stack.
            rules.append(Rule(pattern.replace("_*", ""), target, name.to_ours))
    return rules


def _summed_positions(arrays: Arrays, text: str | None) -> list[ParameterSource]:
    """Returns the sum of both position arrays, for old text towers that were trained with two by mistake."""
    names = (f"{text}pos_embedding", f"{text}Encoder_0/pos_embedding")
    if not all(name in arrays for name in names):
        return []
    return [ParameterSource("text_tower/positions", names, lambda first, second: _drop_leading_axis(first + second))]


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """Names and shapes of the arrays in the file, by the path of our parameter."""

    found: dict[str, tuple[str, tuple[int, ...]]]

    def __contains__(self, target: str) -> bool:
        return target in self.found

    def shape(self, target: str, rank: int) -> tuple[int, ...]:
        if target not in self.found:
            raise UserError(f"no array of the file becomes {target}; is it a complete big_vision file?")
        name, shape = self.found[target]
        if len(shape) != rank:
            raise UserError(f"{name} has shape {shape}, where {rank} axes are expected")
        return shape

    def size(self, target: str) -> int | None:
        """Returns the output size of a dense layer, or None without the layer."""
        return self.shape(target, 2)[1] if target in self.found else None

    def blocks(self, tower: str) -> tuple[str, int]:
        """Returns the path of one block, from which sizes are read, and the number of blocks."""
        start = f"{tower}/encoder/blocks/"
        numbers = {target.removeprefix(start).split("/")[0] for target in self.found if target.startswith(start)}
        if "*" in numbers:
            return f"{start}*", self.shape(f"{start}*/mlp/up/bias", 2)[0]
        if not numbers:
            raise UserError(f"no array of the file belongs to a block of the {tower.replace('_', ' ')}")
        return f"{start}0", depth_of(numbers)


def _encoder(shapes: _Shapes, tower: str, compute_type: ComputeType) -> EncoderConfig:
    block, depth = shapes.blocks(tower)
    stacked = int(block.endswith("*"))
    width, num_heads, _ = shapes.shape(f"{block}/attention/query/kernel", 3 + stacked)[stacked:]
    mlp_width = shapes.shape(f"{block}/mlp/up/kernel", 2 + stacked)[-1]
    return EncoderConfig(width, depth, mlp_width, num_heads, compute_type=compute_type)


def _image_tower(
    shapes: _Shapes,
    image_size: int | None,
    patch_size: int | None,
    image_pooling: Literal["mean", "first"],
    compute_type: ComputeType,
) -> ViTConfig:
    old_size = _old_patch_size(shapes)
    has_class_token, is_learned = "image_tower/class_token" in shapes, "image_tower/positions" in shapes
    takes_any_shape = _is_naflex(shapes) and image_size is None
    if is_learned:
        image_size = old_size * _old_side(shapes) if image_size is None else image_size
    elif image_size is None:
        raise UserError(
            "the file has no positions (they are sines and cosines), hence no image size; set it with --image-size"
        )
    pooled = "attention" if "image_tower/pooling/probe" in shapes else image_pooling
    tower = ViTConfig(
        image_size,
        old_size if patch_size is None else patch_size,
        _encoder(shapes, "image_tower", compute_type),
        "class_token" if has_class_token else pooled,
        "learned" if is_learned else "sine_cosine",
        representation_size=shapes.size("image_tower/pre_logits/kernel"),
        projection_size=shapes.size("image_tower/projection/kernel"),
    )
    return dataclasses.replace(tower, max_patches=tower.num_patches) if takes_any_shape else tower


def _is_naflex(shapes: _Shapes) -> bool:
    """Returns whether the tower reads flat patches, with positions [rows columns d] (SigLIP 2's NaFlex)."""
    names = ("image_tower/patches/kernel", "image_tower/positions")
    kernel, positions = (shapes.found[name][1] if name in shapes else () for name in names)
    return len(kernel) == 2 and len(positions) == 3 and positions[0] == positions[1]


def _old_patch_size(shapes: _Shapes) -> int:
    if _is_naflex(shapes):
        return math.isqrt(shapes.shape("image_tower/patches/kernel", 2)[0] // 3)
    height, width, _, _ = shapes.shape("image_tower/patches/kernel", 4)
    if height != width:
        raise UserError(f"the file's patches are {height} x {width} pixels; only square patches are supported")
    return height


def _has_class_token_position(shapes: _Shapes) -> bool:
    """Returns whether the first position belongs to the class token: n = k² patches then have n + 1 positions."""
    # The file does not record it, but no square number is one more than another (except 1), so the count decides.
    number = shapes.shape("image_tower/positions", 3)[1] - 1
    return "image_tower/class_token" in shapes and number > 0 and math.isqrt(number) ** 2 == number


def _old_side(shapes: _Shapes) -> int:
    rows, number, _ = shapes.shape("image_tower/positions", 3)
    number = rows * number if _is_naflex(shapes) else number - _has_class_token_position(shapes)
    if math.isqrt(number) ** 2 != number:
        name, _ = shapes.found["image_tower/positions"]
        raise UserError(f"{name} holds {number} positions, which form no square grid")
    return math.isqrt(number)


def _resampled(sources: Sequence[ParameterSource], shapes: _Shapes, tower: ViTConfig) -> list[ParameterSource]:
    """Returns sources that resample patches and positions; the class token's position is added to the class token."""
    num_class_tokens = int("image_tower/positions" in shapes and _has_class_token_position(shapes))
    old_size, is_naflex = _old_patch_size(shapes), _is_naflex(shapes)
    # NaFlex was trained with positions resampled at half-pixel centres.
    keeps_corners = old_size == tower.patch_size and not is_naflex

    def positions(array: np.ndarray) -> np.ndarray:
        rows = array.reshape(-1, array.shape[-1]) if is_naflex else _drop_leading_axis(array)
        return resample_positions(rows[num_class_tokens:], tower.side, keeps_corners=keeps_corners)

    def patches(kernel: np.ndarray) -> np.ndarray:
        square = kernel.reshape(old_size, old_size, 3, -1) if is_naflex else kernel
        return resample_patches(square, tower.patch_size).reshape(-1, kernel.shape[-1])

    # big_vision adds this position to the token before the first block. Our towers add none, so the sum is stored.
    def class_token(token: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return _drop_leading_axis(_drop_leading_axis(token)) + _drop_leading_axis(positions)[0]

    changed: dict[str, ParameterSource] = {}
    for source in sources:
        if source.target == "image_tower/positions":
            changed[source.target] = dataclasses.replace(source, combine=positions)
        elif source.target == "image_tower/patches/kernel":
            changed[source.target] = dataclasses.replace(source, combine=patches)
        elif source.target == "image_tower/class_token" and num_class_tokens:
            names = (*source.array_names, shapes.found["image_tower/positions"][0])
            changed[source.target] = ParameterSource(source.target, names, class_token)
    return [changed.get(source.target, source) for source in sources]


def _text_tower(
    shapes: _Shapes, length: int | None, pooling: Literal["last", "first", "mean", "max"], compute_type: ComputeType
) -> TextConfig:
    stored = shapes.shape("text_tower/positions", 3)[1]
    if length is not None and length < stored:
        raise UserError(
            f"the file has positions for texts of {stored} tokens; only a BERT can be read with fewer: "
            f"text_length = {length}"
        )
    return TextConfig(
        vocabulary_size=shapes.shape("text_tower/tokens/embedding", 2)[0],
        length=stored if length is None else length,
        embedding_size=shapes.shape("text_tower/projection/kernel", 2)[1],
        encoder=_encoder(shapes, "text_tower", compute_type),
        pooling="attention" if "text_tower/pooling/probe" in shapes else pooling,
    )


def _bert_tower(shapes: _Shapes, length: int | None, compute_type: ComputeType, *, is_mean: bool) -> BertConfig:
    block, depth = shapes.blocks("text_tower")
    vocabulary_size, width = shapes.shape("text_tower/tokens/embedding", 2)
    most = shapes.shape("text_tower/positions", 2)[0]
    encoder = EncoderConfig(
        width,
        depth,
        shapes.shape(f"{block}/mlp/up/kernel", 2)[1],
        width // BERT_HEAD_SIZE,
        # flaxformer approximates GELU with tanh; the original BERT uses the exact form.
        activation="gelu_tanh",
        norm_placement="after",
        norm_epsilon=1e-12,
        compute_type=compute_type,
    )
    size, segments = (
        shapes.shape("text_tower/projection/kernel", 2)[1],
        shapes.shape("text_tower/segments/embedding", 2)[0],
    )
    length = most if length is None else length
    return BertConfig(vocabulary_size, length, size, encoder, num_segments=segments, mean_pooling=is_mean)
