"""big_vision's names and axes beside ours: one table, which the importer and the exporter both read.

Names are those that big_vision writes today, with ``*`` for the number of a block. Axes are einops patterns; ours of an
attention layer join heads ``h`` and their size ``k``, ours of the patches are ``(p q c)``.
"""

import dataclasses

import einops
import numpy as np


@dataclasses.dataclass(frozen=True)
class Name:
    """One kind of parameter.

    Attributes:
        theirs, ours: names below a tower.
        their_axes, our_axes: of one block's part; empty for arrays that are the same on both sides.
    """

    theirs: str
    ours: str
    their_axes: str = ""
    our_axes: str = ""

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        """Returns their array in our layout; an axis of blocks in front stays.

        Raises:
            einops.EinopsError: the axes are not those.
        """
        return einops.rearrange(array, f"... {self.their_axes} -> ... {self.our_axes}")

    def to_theirs(self, array: np.ndarray, num_heads: int, patch_size: int) -> np.ndarray:
        """Returns our array in their layout."""
        sizes = {"h": num_heads, "p": patch_size, "q": patch_size}
        known = {axis: size for axis, size in sizes.items() if axis in self.their_axes.split()}
        return einops.rearrange(array, f"... {self.our_axes} -> ... {self.their_axes}", **known)


def _dense(theirs: str, ours: str) -> tuple[Name, ...]:
    return tuple(Name(f"{theirs}/{part}", f"{ours}/{part}") for part in ("kernel", "bias"))


def _norm(theirs: str, ours: str) -> tuple[Name, ...]:
    return tuple(Name(f"{theirs}/{part}", f"{ours}/{part}") for part in ("scale", "bias"))


def _attention(theirs: str, ours: str) -> tuple[Name, ...]:
    names = []
    for layer in ("query", "key", "value"):
        names.append(Name(f"{theirs}/{layer}/kernel", f"{ours}/{layer}/kernel", "d h k", "d (h k)"))
        names.append(Name(f"{theirs}/{layer}/bias", f"{ours}/{layer}/bias", "h k", "(h k)"))
    names.append(Name(f"{theirs}/out/kernel", f"{ours}/out/kernel", "h k d", "(h k) d"))
    return (*names, Name(f"{theirs}/out/bias", f"{ours}/out/bias"))


def _mlp(theirs: str, ours: str) -> tuple[Name, ...]:
    return _dense(f"{theirs}/Dense_0", f"{ours}/up") + _dense(f"{theirs}/Dense_1", f"{ours}/down")


def _encoder(theirs: str) -> tuple[Name, ...]:
    block, ours = f"{theirs}/encoderblock_*", "encoder/blocks/*"
    return (
        *_norm(f"{block}/LayerNorm_0", f"{ours}/attention_norm"),
        *_attention(f"{block}/MultiHeadDotProductAttention_0", f"{ours}/attention"),
        *_norm(f"{block}/LayerNorm_1", f"{ours}/mlp_norm"),
        *_mlp(f"{block}/MlpBlock_0", f"{ours}/mlp"),
        *_norm(f"{theirs}/encoder_norm", "encoder/norm"),
    )


_POSITIONS = Name("pos_embedding", "positions", "1 l d", "l d")
_POOLING = (
    Name("MAPHead_0/probe", "pooling/probe", "1 1 d", "1 d"),
    *_attention("MAPHead_0/MultiHeadDotProductAttention_0", "pooling/attention"),
    *_norm("MAPHead_0/LayerNorm_0", "pooling/norm"),
    *_mlp("MAPHead_0/MlpBlock_0", "pooling/mlp"),
)

# What "head" is depends on the file: a tower of two has a projection, a ViT alone is a classifier.
PROJECTION = _dense("head", "projection")
CLASSIFIER = _dense("head", "logits")

IMAGE_TOWER = (
    Name("embedding/kernel", "patches/kernel", "p q c d", "(p q c) d"),
    Name("embedding/bias", "patches/bias"),
    _POSITIONS,
    Name("cls", "class_token", "1 1 d", "d"),
    *_encoder("Transformer"),
    *_POOLING,
    *_dense("pre_logits", "pre_logits"),
)

TEXT_TOWER = (
    Name("Embed_0/embedding", "tokens/embedding"),
    _POSITIONS,
    *_encoder("Encoder_0"),
    *_POOLING,
    *PROJECTION,
)


def _bert_tower() -> tuple[Name, ...]:
    """Returns the names of flaxformer's BERT, whose attention is stored with heads joined, as ours is."""
    block, ours = "BertEncoder_0/encoder_block/layer_sequence/layers_*", "encoder/blocks/*"
    attention, mlp = f"{block}/attention_block", f"{block}/mlp_block"
    inputs = {"token": "tokens/embedding", "position": "positions", "segment": "segments/embedding"}
    return (
        *(Name(f"BertEncoder_0/embedder/embedders_{kind}_ids/embedding", path) for kind, path in inputs.items()),
        *_norm("BertEncoder_0/layer_norm", "input_norm"),
        *(
            name
            for layer in ("query", "key", "value")
            for name in _dense(f"{attention}/attention_layer/{layer}", f"{ours}/attention/{layer}")
        ),
        *_dense(f"{attention}/dense_layer", f"{ours}/attention/out"),
        *_norm(f"{attention}/layer_norm", f"{ours}/attention_norm"),
        *_dense(f"{mlp}/mlp/dense_layer", f"{ours}/mlp/up"),
        *_dense(f"{mlp}/dense_layer", f"{ours}/mlp/down"),
        *_norm(f"{mlp}/layer_norm", f"{ours}/mlp_norm"),
        *PROJECTION,
    )


BERT_TOWER = _bert_tower()
# Its kernels do not show the size of a head; base and large have this one.
BERT_HEAD_SIZE = 64
