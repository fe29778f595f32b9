"""Hugging Face's names of parameters and ours, in tables that importers read forwards and exporters backwards.

In names ``#`` is the number of a block. Where a table has two names for one parameter, both are found in files: those
that transformers writes come first.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from lit_het.checkpoints.rename import Piece


@dataclasses.dataclass(frozen=True)
class Form:
    """How their array of a parameter and ours become one another."""

    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


SAME = Form(lambda array: array, lambda array: array)
# PyTorch's dense layers hold [out, in].
TRANSPOSED = Form(np.transpose, np.transpose)
# Theirs have leading axes of one.
PROBE = Form(lambda array: array.reshape(1, -1), lambda array: array[None])
ROWS = Form(lambda array: array.reshape(array.shape[-2:]), lambda array: array)
# They multiply by exp(logit_scale), we divide by τ.
LOG_SCALE = Form(lambda array: (-array).reshape(()), lambda array: (-array).reshape(1))
SCALAR = Form(lambda array: array.reshape(()), lambda array: array.reshape(1))


@dataclasses.dataclass(frozen=True)
class Match:
    """Their array and our parameters, several if theirs holds them one under another."""

    theirs: str
    ours: tuple[str, ...]
    form: Form = SAME

    def pieces(self, name: str, prefix: str, path: str) -> list[Piece]:
        """Returns what becomes of the array ``name``, if this is its match; ``path`` is the tower's, with its slash."""
        pattern = re.escape(prefix + self.theirs).replace(r"\#", r"(\d+)")
        found = re.fullmatch(pattern, name)
        if found is None:
            return []
        block = found[1] if found.groups() else ""
        return [
            Piece(path + part.replace("#", block), (name,), self._part(index)) for index, part in enumerate(self.ours)
        ]

    def arrays(self, prefix: str, path: str, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns their arrays of this match, one for each block; ``params`` are ours by path, blocks stacked."""
        parts = [params[path + part.replace("/#/", "/")] for part in self.ours]
        if "#" not in self.theirs:
            return {prefix + self.theirs: self._joined(parts)}
        depth = len(parts[0])
        return {
            prefix + self.theirs.replace("#", str(block)): self._joined([part[block] for part in parts])
            for block in range(depth)
        }

    def _joined(self, parts: list[np.ndarray]) -> np.ndarray:
        written = [self.form.write(part) for part in parts]
        # One after the other in memory, which transposed views are not and safetensors takes for granted.
        return np.ascontiguousarray(written[0] if len(written) == 1 else np.concatenate(written))

    def _part(self, index: int) -> Callable[[np.ndarray], np.ndarray]:
        if len(self.ours) == 1:
            return self.form.read
        return lambda array: self.form.read(np.split(array, len(self.ours))[index])


Table = tuple[Match, ...]


def pieces(names: Iterable[str], table: Table, prefix: str, path: str) -> list[Piece]:
    """Returns the pieces of all arrays in a table, of those whose names begin with ``prefix``."""
    return [piece for name in names for match in table for piece in match.pieces(name, prefix, path)]


def dense(theirs: str, *ours: str) -> Table:
    """Returns the matches of a dense layer, or of several whose rows lie one under another."""
    return (
        Match(f"{theirs}.weight", tuple(f"{path}/kernel" for path in ours), TRANSPOSED),
        Match(f"{theirs}.bias", tuple(f"{path}/bias" for path in ours)),
    )


def norm(theirs: str, ours: str) -> Table:
    """Returns the matches of a LayerNorm."""
    return Match(f"{theirs}.weight", (f"{ours}/scale",)), Match(f"{theirs}.bias", (f"{ours}/bias",))


def _block(theirs: str, *, layers: dict[str, str], norms: dict[str, str]) -> Table:
    ours = "encoder/blocks/#/"
    of_layers = (match for name, path in layers.items() for match in dense(f"{theirs}.{name}", ours + path))
    of_norms = (match for name, path in norms.items() for match in norm(f"{theirs}.{name}", ours + path))
    return *of_layers, *of_norms


_FULLY_CONNECTED = {"mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down"}
_CLIP_BLOCKS = _block(
    "encoder.layers.#",
    layers={
        "self_attn.q_proj": "attention/query",
        "self_attn.k_proj": "attention/key",
        "self_attn.v_proj": "attention/value",
        "self_attn.out_proj": "attention/out",
        **_FULLY_CONNECTED,
    },
    norms={"layer_norm1": "attention_norm", "layer_norm2": "mlp_norm"},
)
_VIT_ATTENTION = {
    "attention.attention.query": "attention/query",
    "attention.attention.key": "attention/key",
    "attention.attention.value": "attention/value",
    "attention.output.dense": "attention/out",
}
_NEW_ATTENTION = {
    "attention.q_proj": "attention/query",
    "attention.k_proj": "attention/key",
    "attention.v_proj": "attention/value",
    "attention.o_proj": "attention/out",
}
_VIT_NORMS = {"layernorm_before": "attention_norm", "layernorm_after": "mlp_norm"}
_DINO_NORMS = {"norm1": "attention_norm", "norm2": "mlp_norm"}
_DENSE_MLP = {"intermediate.dense": "mlp/up", "output.dense": "mlp/down"}

SIGLIP_IMAGE: Table = (
    *_CLIP_BLOCKS,
    *norm("post_layernorm", "encoder/norm"),
    Match("head.probe", ("pooling/probe",), PROBE),
    Match(
        "head.attention.in_proj_weight",
        ("pooling/attention/query/kernel", "pooling/attention/key/kernel", "pooling/attention/value/kernel"),
        TRANSPOSED,
    ),
    Match(
        "head.attention.in_proj_bias",
        ("pooling/attention/query/bias", "pooling/attention/key/bias", "pooling/attention/value/bias"),
    ),
    *dense("head.attention.out_proj", "pooling/attention/out"),
    *norm("head.layernorm", "pooling/norm"),
    *dense("head.mlp.fc1", "pooling/mlp/up"),
    *dense("head.mlp.fc2", "pooling/mlp/down"),
)
SIGLIP_TEXT: Table = (
    Match("embeddings.token_embedding.weight", ("tokens/embedding",)),
    *_CLIP_BLOCKS,
    *norm("final_layer_norm", "encoder/norm"),
    *dense("head", "projection"),
)
SIGLIP_HEAD: Table = (
    Match("logit_scale", ("temperature/log_temperature",), LOG_SCALE),
    Match("logit_bias", ("bias",), SCALAR),
)
CLIP_IMAGE: Table = (
    *_CLIP_BLOCKS,
    *norm("pre_layrnorm", "input_norm"),  # their spelling
    *norm("post_layernorm", "encoder/norm"),
)
VIT: Table = (
    *_block("encoder.layer.#", layers=_VIT_ATTENTION | _DENSE_MLP, norms=_VIT_NORMS),
    *_block("layers.#", layers=_NEW_ATTENTION | _FULLY_CONNECTED, norms=_VIT_NORMS),
    *norm("layernorm", "encoder/norm"),
    *dense("pooler.dense", "pre_logits"),
)
DINO: Table = (
    *_block("encoder.layer.#", layers=_VIT_ATTENTION | _NEW_ATTENTION | _FULLY_CONNECTED, norms=_DINO_NORMS),
    # silu(first half) times the second half.
    *dense("encoder.layer.#.mlp.weights_in", "encoder/blocks/#/mlp/gate", "encoder/blocks/#/mlp/up"),
    *dense("encoder.layer.#.mlp.weights_out", "encoder/blocks/#/mlp/down"),
    *dense("encoder.layer.#.mlp.gate_proj", "encoder/blocks/#/mlp/gate"),
    *dense("encoder.layer.#.mlp.up_proj", "encoder/blocks/#/mlp/up"),
    *dense("encoder.layer.#.mlp.down_proj", "encoder/blocks/#/mlp/down"),
    Match("encoder.layer.#.layer_scale1.lambda1", ("encoder/blocks/#/attention_scale",)),
    Match("encoder.layer.#.layer_scale2.lambda1", ("encoder/blocks/#/mlp_scale",)),
    Match("embeddings.register_tokens", ("registers",), ROWS),
    *norm("layernorm", "encoder/norm"),
)
_BERT: Table = (
    Match("embeddings.word_embeddings.weight", ("tokens/embedding",)),
    Match("embeddings.token_type_embeddings.weight", ("segments/embedding",)),
    *norm("embeddings.LayerNorm", "input_norm"),
    *_block(
        "encoder.layer.#",
        layers={
            "attention.self.query": "attention/query",
            "attention.self.key": "attention/key",
            "attention.self.value": "attention/value",
            "attention.output.dense": "attention/out",
            **_DENSE_MLP,
        },
        norms={"attention.output.LayerNorm": "attention_norm", "output.LayerNorm": "mlp_norm"},
    ),
    *dense("pooler.dense", "pre_logits"),
)
# Files converted from the original TensorFlow ones call scale and bias of a norm gamma and beta.
_OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
BERT: Table = _BERT + tuple(
    dataclasses.replace(match, theirs=match.theirs.replace(new, old))
    for match in _BERT
    for new, old in _OLD_NORMS.items()
    if match.theirs.endswith(new)
)
