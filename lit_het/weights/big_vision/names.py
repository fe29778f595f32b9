"""Maps big_vision's parameter names and axes to ours; one table serves the importer and the exporter.

Names are those of current big_vision files, with ``*`` for the number of a block. Axes are einops patterns. Our
attention layers join the head axis ``h`` and the head size ``k``; our patch kernels have the rows ``(p q c)``.
"""

import dataclasses

import einops
import numpy as np


@dataclasses.dataclass(frozen=True)
class ParameterName:
    """The names and axes of one kind of parameter.

    Attributes:
        theirs, ours: names within a tower.
        their_axes, our_axes: axes of one block's array; empty for arrays with the same layout.
    """

    theirs: str
    ours: str
    their_axes: str = ""
    our_axes: str = ""

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        """Returns their array in our layout; a leading axis of blocks is preserved.

        Raises:
            einops.EinopsError: the array has other axes.
        """
        return einops.rearrange(array, f"... {self.their_axes} -> ... {self.our_axes}")

    def to_theirs(self, array: np.ndarray, num_heads: int, patch_size: int) -> np.ndarray:
        """Returns our array in their layout."""
        sizes = {"h": num_heads, "p": patch_size, "q": patch_size}
        # Splitting a joined axis needs the size of one part; joining needs none.
        known = {axis: size for axis, size in sizes.items() if axis in self.their_axes.split()}
        return einops.rearrange(array, f"... {self.our_axes} -> ... {self.their_axes}", **known)


def _dense(theirs: str, ours: str) -> tuple[ParameterName, ...]:
    return tuple(ParameterName(f"{theirs}/{part}", f"{ours}/{part}") for part in ("kernel", "bias"))


def _norm(theirs: str, ours: str) -> tuple[ParameterName, ...]:
    return tuple(ParameterName(f"{theirs}/{part}", f"{ours}/{part}") for part in ("scale", "bias"))


def _attention(theirs: str, ours: str) -> tuple[ParameterName, ...]:
    names = []
    for layer in ("query", "key", "value"):
        names.append(ParameterName(f"{theirs}/{layer}/kernel", f"{ours}/{layer}/kernel", "d h k", "d (h k)"))
        names.append(ParameterName(f"{theirs}/{layer}/bias", f"{ours}/{layer}/bias", "h k", "(h k)"))
    names.append(ParameterName(f"{theirs}/out/kernel", f"{ours}/out/kernel", "h k d", "(h k) d"))
    return (*names, ParameterName(f"{theirs}/out/bias", f"{ours}/out/bias"))


def _mlp(theirs: str, ours: str) -> tuple[ParameterName, ...]:
    return _dense(f"{theirs}/Dense_0", f"{ours}/up") + _dense(f"{theirs}/Dense_1", f"{ours}/down")


def _encoder(theirs: str) -> tuple[ParameterName, ...]:
    block, ours = f"{theirs}/encoderblock_*", "encoder/blocks/*"
    return (
        *_norm(f"{block}/LayerNorm_0", f"{ours}/attention_norm"),
        *_attention(f"{block}/MultiHeadDotProductAttention_0", f"{ours}/attention"),
        *_norm(f"{block}/LayerNorm_1", f"{ours}/mlp_norm"),
        *_mlp(f"{block}/MlpBlock_0", f"{ours}/mlp"),
        *_norm(f"{theirs}/encoder_norm", "encoder/norm"),
    )


_POSITIONS = ParameterName("pos_embedding", "positions", "1 l d", "l d")
_POOLING = (
    ParameterName("MAPHead_0/probe", "pooling/probe", "1 1 d", "1 d"),
    *_attention("MAPHead_0/MultiHeadDotProductAttention_0", "pooling/attention"),
    *_norm("MAPHead_0/LayerNorm_0", "pooling/norm"),
    *_mlp("MAPHead_0/MlpBlock_0", "pooling/mlp"),
)

# The layer "head" is a projection in two-tower models and a classifier in a single ViT.
PROJECTION = _dense("head", "projection")
CLASSIFIER = _dense("head", "logits")

IMAGE_TOWER = (
    ParameterName("embedding/kernel", "patches/kernel", "p q c d", "(p q c) d"),
    ParameterName("embedding/bias", "patches/bias"),
    _POSITIONS,
    ParameterName("cls", "class_token", "1 1 d", "d"),
    *_encoder("Transformer"),
    *_POOLING,
    *_dense("pre_logits", "pre_logits"),
)

TEXT_TOWER = (
    ParameterName("Embed_0/embedding", "tokens/embedding"),
    _POSITIONS,
    *_encoder("Encoder_0"),
    *_POOLING,
    *PROJECTION,
)


def _bert_tower() -> tuple[ParameterName, ...]:
    """Returns the names of flaxformer's BERT, whose attention kernels join the heads, like ours."""
    block, ours = "BertEncoder_0/encoder_block/layer_sequence/layers_*", "encoder/blocks/*"
    attention, mlp = f"{block}/attention_block", f"{block}/mlp_block"
    inputs = {"token": "tokens/embedding", "position": "positions", "segment": "segments/embedding"}
    return (
        *(
            ParameterName(f"BertEncoder_0/embedder/embedders_{kind}_ids/embedding", path)
            for kind, path in inputs.items()
        ),
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
# BERT's joined kernels do not determine the head size; BERT-Base and BERT-Large use this one.
BERT_HEAD_SIZE = 64
