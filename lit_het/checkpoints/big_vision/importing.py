"""Weights that big_vision wrote, of every generation: ViTs, LiT with either text tower, SigLIP and SigLIP2, FlexiViT.

All sizes are inferred from shapes. Differences of generations are three: names (`_OLDER`), blocks apart or stacked,
and where the class token's position went.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from lit_het.checkpoints.big_vision.names import (
    BERT_HEAD_SIZE,
    BERT_TOWER,
    CLASSIFIER,
    IMAGE_TOWER,
    PROJECTION,
    TEXT_TOWER,
    Name,
)
from lit_het.checkpoints.imported import Imported
from lit_het.checkpoints.rename import Piece, Rule, depth_of, translate
from lit_het.checkpoints.resample import resample_patches, resample_positions
from lit_het.checkpoints.sources import Arrays, open_npz
from lit_het.errors import UserError
from lit_het.towers.bert import BertConfig
from lit_het.towers.layers import ComputeType
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig

# Where parameters lie in a file; beside them may be the optimizer's state.
_ROOTS = ("params", "opt/target", "opt/params")
# What older files call things: before Flax's linen numbers counted all layers of a block, positions lay in the
# encoder, and attention pooling was a part of the tower itself.
_OLDER = {
    "LayerNorm_1": "LayerNorm_[12]",
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_[01]",
    "MlpBlock_0": "MlpBlock_[03]",
    "MAPHead_0/": "(?:MAPHead_0/)?",
    "pos_embedding": "(?:Transformer/(?:posembed_input/)?)?pos_embedding",
}


def read(
    path: Path,
    subtree: str = "",
    *,
    image_size: int | None = None,
    patch_size: int | None = None,
    text_pooling: Literal["last", "first", "mean", "max"] = "last",
    text_length: int | None = None,
    compute_type: ComputeType = "float32",
) -> Imported:
    """Returns what a big_vision ``.npz`` holds, its images resampled to another size where one is asked for.

    Another image size alone takes positions corner to corner, as big_vision does before fine-tuning. Another patch size
    is FlexiViT's business, so that kernels and positions are resized as FlexiViT resizes them (`resample`).

    Args:
        path: the file.
        subtree: a part of it, such as ``img``.
        image_size: in pixels; None for the file's.
        patch_size: in pixels; None for the file's.
        text_pooling: of a text tower without attention pooling, which files do not tell. SigLIP and LiT take the last.
        text_length: tokens per text of a BERT, whose file has positions for 512; None for as many.
        compute_type: of the towers.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    arrays = _open(path, subtree)
    image, text = _prefixes(arrays)
    pieces = translate(arrays, _rules(arrays, image, text), _doubled_positions(arrays, text))
    shapes = _Shapes({piece.target: (piece.sources[0], arrays[piece.sources[0]].shape) for piece in pieces})
    image_tower, text_tower = None, None
    if image is not None:
        image_tower = _image_tower(shapes, image_size, patch_size, compute_type)
        pieces = _resampled(pieces, shapes, image_tower)
    if text is not None and "text_tower/segments/embedding" in shapes:
        text_tower = _bert_tower(shapes, text_length, compute_type)
        pieces = _cut(pieces, text_tower.length)
    elif text is not None:
        text_tower = _text_tower(shapes, text_pooling, compute_type)
        if text_length not in (None, text_tower.length):
            raise UserError(f"the file's texts have {text_tower.length} tokens; only a BERT's can have {text_length}")
    return Imported(
        arrays,
        pieces,
        image_tower,
        text_tower,
        has_bias="b" in arrays,
        num_classes=shapes.of("head/logits/kernel", 2)[1] if "head/logits/kernel" in shapes else None,
    )


def _open(path: Path, subtree: str) -> Arrays:
    """Returns the parameters below the root, or below a subtree of it."""
    names = open_npz(path)
    root = next((root for root in _ROOTS if any(name.startswith(f"{root}/") for name in names)), "")
    arrays = open_npz(path, "/".join(filter(None, (root, subtree))))
    tower = subtree.rsplit("/", 1)[-1]
    # A tower of two keeps its prefix, which says what its head is.
    return {f"{tower}/{name}": stored for name, stored in arrays.items()} if tower in ("img", "txt") else arrays


def _prefixes(arrays: Arrays) -> tuple[str | None, str | None]:
    """Returns what the names of the image tower and of the text tower begin with; None for no such tower."""
    tops = {name.split("/", 1)[0] for name in arrays}
    if tops & {"img", "txt"}:
        return "img/" if "img" in tops else None, "txt/" if "txt" in tops else None
    return (None, "") if tops & {"Embed_0", "BertEncoder_0"} else ("", None)


def _rules(arrays: Arrays, image: str | None, text: str | None) -> list[Rule]:
    rules = [
        # Their exp(t) multiplies where our τ divides.
        Rule("t", "head/temperature/log_temperature", lambda array: -_only(array)),
        Rule("b", "head/bias", _only),
    ]
    if image is not None:
        rules += _renamed(IMAGE_TOWER, image, "image_tower/")
        rules += _renamed(PROJECTION, image, "image_tower/") if image else _renamed(CLASSIFIER, image, "head/")
    if text is not None:
        is_bert = any(name.startswith(f"{text}BertEncoder_0/") for name in arrays)
        rules += _renamed(BERT_TOWER if is_bert else TEXT_TOWER, text, "text_tower/")
    return rules


def _only(array: np.ndarray) -> np.ndarray:
    """Returns what lies below a first axis of size 1; any other size is a ValueError, which `load` reports."""
    return array.reshape(array.shape[1:])


def _renamed(names: Sequence[Name], theirs: str, ours: str) -> list[Rule]:
    """Returns rules for names of all generations, with blocks apart and with blocks stacked."""
    rules = []
    for name in names:
        source = theirs + name.theirs
        for today, ever in _OLDER.items():
            source = source.replace(today, ever)
        target = ours + name.ours
        rules.append(Rule(source.replace("_*", r"_(\d+)"), target.replace("*", r"\1"), name.to_ours))
        if "*" in source:
            rules.append(Rule(source.replace("_*", ""), target, name.to_ours))
    return rules


def _doubled_positions(arrays: Arrays, text: str | None) -> list[Piece]:
    """Returns the sum of positions in text towers whose training added them twice, by mistake."""
    sources = (f"{text}pos_embedding", f"{text}Encoder_0/pos_embedding")
    if not all(name in arrays for name in sources):
        return []
    return [Piece("text_tower/positions", sources, lambda first, second: _only(first + second))]


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """Sources and their shapes, by our names."""

    found: dict[str, tuple[str, tuple[int, ...]]]

    def __contains__(self, target: str) -> bool:
        return target in self.found

    def of(self, target: str, rank: int) -> tuple[int, ...]:
        if target not in self.found:
            raise UserError(f"no array of the file becomes {target}; is it whole, and big_vision's?")
        source, shape = self.found[target]
        if len(shape) != rank:
            raise UserError(f"{source} has shape {shape}, where {rank} axes are expected")
        return shape

    def size(self, target: str) -> int | None:
        """Returns the size of a dense layer's output, or None without the layer."""
        return self.of(target, 2)[1] if target in self.found else None

    def blocks(self, tower: str) -> tuple[str, int]:
        """Returns the path of a block that stands for all, and how many there are."""
        start = f"{tower}/encoder/blocks/"
        numbers = {target.removeprefix(start).split("/")[0] for target in self.found if target.startswith(start)}
        if "*" in numbers:
            return f"{start}*", self.of(f"{start}*/mlp/up/bias", 2)[0]
        if not numbers:
            raise UserError(f"no array of the file belongs to a block of the {tower.replace('_', ' ')}")
        return f"{start}0", depth_of(numbers)


def _encoder(shapes: _Shapes, tower: str, compute_type: ComputeType) -> EncoderConfig:
    block, depth = shapes.blocks(tower)
    stacked = int(block.endswith("*"))
    width, num_heads, _ = shapes.of(f"{block}/attention/query/kernel", 3 + stacked)[stacked:]
    mlp_width = shapes.of(f"{block}/mlp/up/kernel", 2 + stacked)[-1]
    return EncoderConfig(width, depth, mlp_width, num_heads, compute_type=compute_type)


def _image_tower(
    shapes: _Shapes, image_size: int | None, patch_size: int | None, compute_type: ComputeType
) -> ViTConfig:
    height, width, _, _ = shapes.of("image_tower/patches/kernel", 4)
    if height != width:
        raise UserError(f"the file's patches are {height} x {width} pixels; only square ones can be read")
    has_class_token, is_learned = "image_tower/class_token" in shapes, "image_tower/positions" in shapes
    if is_learned:
        image_size = height * _old_side(shapes) if image_size is None else image_size
    elif image_size is None:
        raise UserError("the file's positions are sines and cosines, so that it tells no image size; give one")
    pooled = "attention" if "image_tower/pooling/probe" in shapes else "mean"
    return ViTConfig(
        image_size,
        height if patch_size is None else patch_size,
        _encoder(shapes, "image_tower", compute_type),
        "class_token" if has_class_token else pooled,
        "learned" if is_learned else "sine_cosine",
        representation_size=shapes.size("image_tower/pre_logits/kernel"),
        projection_size=shapes.size("image_tower/projection/kernel"),
    )


def _has_joined_position(shapes: _Shapes) -> bool:
    """Returns whether the class token has a position, the first: n + 1 of them is then no square, n is one."""
    number = shapes.of("image_tower/positions", 3)[1] - 1
    return "image_tower/class_token" in shapes and number > 0 and math.isqrt(number) ** 2 == number


def _old_side(shapes: _Shapes) -> int:
    number = shapes.of("image_tower/positions", 3)[1] - _has_joined_position(shapes)
    if math.isqrt(number) ** 2 != number:
        source, _ = shapes.found["image_tower/positions"]
        raise UserError(f"{source} holds {number} positions, which form no square grid")
    return math.isqrt(number)


def _resampled(pieces: Sequence[Piece], shapes: _Shapes, tower: ViTConfig) -> list[Piece]:
    """Returns pieces that bring patches and positions to the tower's sizes, the class token's own among the token."""
    joined = int("image_tower/positions" in shapes and _has_joined_position(shapes))
    is_flexible = shapes.of("image_tower/patches/kernel", 4)[0] != tower.patch_size

    def positions(array: np.ndarray) -> np.ndarray:
        return resample_positions(_only(array)[joined:], tower.side, keeps_corners=not is_flexible)

    def patches(kernel: np.ndarray) -> np.ndarray:
        return resample_patches(kernel, tower.patch_size).reshape(-1, kernel.shape[-1])

    def class_token(token: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return _only(_only(token)) + _only(positions)[0]

    changed: dict[str, Piece] = {}
    for piece in pieces:
        if piece.target == "image_tower/positions":
            changed[piece.target] = dataclasses.replace(piece, combine=positions)
        elif piece.target == "image_tower/patches/kernel":
            changed[piece.target] = dataclasses.replace(piece, combine=patches)
        elif piece.target == "image_tower/class_token" and joined:
            sources = (*piece.sources, shapes.found["image_tower/positions"][0])
            changed[piece.target] = Piece(piece.target, sources, class_token)
    return [changed.get(piece.target, piece) for piece in pieces]


def _text_tower(
    shapes: _Shapes, pooling: Literal["last", "first", "mean", "max"], compute_type: ComputeType
) -> TextConfig:
    return TextConfig(
        vocabulary_size=shapes.of("text_tower/tokens/embedding", 2)[0],
        length=shapes.of("text_tower/positions", 3)[1],
        embedding_size=shapes.of("text_tower/projection/kernel", 2)[1],
        encoder=_encoder(shapes, "text_tower", compute_type),
        pooling="attention" if "text_tower/pooling/probe" in shapes else pooling,
    )


def _bert_tower(shapes: _Shapes, length: int | None, compute_type: ComputeType) -> BertConfig:
    block, depth = shapes.blocks("text_tower")
    vocabulary_size, width = shapes.of("text_tower/tokens/embedding", 2)
    most = shapes.of("text_tower/positions", 2)[0]
    if length is not None and length > most:
        raise UserError(f"the file has positions for {most} tokens, fewer than {length}")
    encoder = EncoderConfig(
        width,
        depth,
        shapes.of(f"{block}/mlp/up/kernel", 2)[1],
        width // BERT_HEAD_SIZE,
        # flaxformer's GELU is the tanh form; BERT's own is exact.
        activation="gelu_tanh",
        norm_placement="after",
        norm_epsilon=1e-12,
        compute_type=compute_type,
    )
    size, segments = shapes.of("text_tower/projection/kernel", 2)[1], shapes.of("text_tower/segments/embedding", 2)[0]
    return BertConfig(vocabulary_size, most if length is None else length, size, encoder, num_segments=segments)


def _cut(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """Returns pieces that keep the first positions of a BERT, the only ones that shorter texts reach."""
    return [
        dataclasses.replace(piece, combine=lambda array: array[:length])
        if piece.target == "text_tower/positions"
        else piece
        for piece in pieces
    ]
