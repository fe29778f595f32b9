"""Maps Hugging Face's parameter names to ours; the same tables serve importers and exporters.

``#`` in a name stands for the number of a block. Some parameters have two names in a table, because both occur in
files; the name that transformers writes comes first.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from lit_het.weights.rename import ParameterSource


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Converts an array between Hugging Face's layout and ours.

    Attributes:
        read: their array → ours.
        write: our array → theirs.
    """

    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


SAME = Conversion(lambda array: array, lambda array: array)
# PyTorch stores dense kernels as [out, in].
TRANSPOSED = Conversion(np.transpose, np.transpose)
# Their arrays have leading axes of size 1.
PROBE = Conversion(lambda array: array.reshape(1, -1), lambda array: array[None])
ROWS = Conversion(lambda array: array.reshape(array.shape[-2:]), lambda array: array)
# They multiply by exp(logit_scale), we divide by τ: log τ = -logit_scale.
LOG_SCALE = Conversion(lambda array: (-array).reshape(()), lambda array: (-array).reshape(1))
SCALAR = Conversion(lambda array: array.reshape(()), lambda array: array.reshape(1))


@dataclasses.dataclass(frozen=True)
class Match:
    """Matches one of their arrays with our parameters.

    Attributes:
        theirs: name of the array, without the prefix of the tower.
        ours: paths of our parameters; several if the array holds them concatenated.
        conversion: between the two layouts.
        axis: of the array, along which several are concatenated.
    """

    theirs: str
    ours: tuple[str, ...]
    conversion: Conversion = SAME
    axis: int = 0

    def parameter_sources(self, name: str, prefix: str, path: str) -> list[ParameterSource]:
        """Returns the sources of the parameters in the array ``name``; an empty list if the name does not match.

        Args:
            name: of the array.
            prefix: of the tower in the names of arrays.
            path: of the tower in our parameters, with a trailing slash.
        """
        # Names contain dots, so they are escaped; only # stands for a number.
        pattern = re.escape(prefix + self.theirs).replace(r"\#", r"(\d+)")
        found = re.fullmatch(pattern, name)
        if found is None:
            return []
        block = found[1] if found.groups() else ""
        return [
            ParameterSource(path + target.replace("#", block), (name,), self._read(index))
            for index, target in enumerate(self.ours)
        ]

    def arrays(self, prefix: str, path: str, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns their arrays, one for each block, from our parameters by path, in which blocks are stacked."""
        parts = [params[path + part.replace("/#/", "/")] for part in self.ours]
        if "#" not in self.theirs:
            return {prefix + self.theirs: self._joined(parts)}
        depth = len(parts[0])
        return {
            prefix + self.theirs.replace("#", str(block)): self._joined([part[block] for part in parts])
            for block in range(depth)
        }

    def _joined(self, parts: list[np.ndarray]) -> np.ndarray:
        written = [self.conversion.write(part) for part in parts]
        # safetensors 0.8 writes the buffer of an array as it is, which would be wrong for a transposed view.
        return np.ascontiguousarray(written[0] if len(written) == 1 else np.concatenate(written, self.axis))

    def _read(self, index: int) -> Callable[[np.ndarray], np.ndarray]:
        if len(self.ours) == 1:
            return self.conversion.read
        return lambda array: self.conversion.read(np.split(array, len(self.ours), self.axis)[index])


Table = tuple[Match, ...]


def named_arrays(table: Table, prefix: str, path: str, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns their arrays of all our parameters in a table, each under its first name; see `Match.arrays`."""
    found, written = {}, set()
    for match in table:
        paths = {path + part.replace("/#/", "/") for part in match.ours}
        if paths <= params.keys() and not paths & written:
            found |= match.arrays(prefix, path, params)
            written |= paths
    return found


def parameter_sources(names: Iterable[str], table: Table, prefix: str, path: str) -> list[ParameterSource]:
    """Returns the parameter sources of all arrays that match a table; arguments as for `Match.parameter_sources`."""
    return [source for name in names for match in table for source in match.parameter_sources(name, prefix, path)]


def dense(theirs: str, *ours: str) -> Table:
    """Returns the matches of a dense layer, or of several layers whose outputs are concatenated."""
    return (
        Match(f"{theirs}.weight", tuple(f"{path}/kernel" for path in ours), TRANSPOSED),
        Match(f"{theirs}.bias", tuple(f"{path}/bias" for path in ours)),
    )


def _conv1d(theirs: str, *ours: str) -> Table:
    """Returns the matches of a dense layer of GPT-2, whose kernel is [in, out] as ours."""
    return (
        Match(f"{theirs}.weight", tuple(f"{path}/kernel" for path in ours), axis=1),
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


def _joined(kind: str) -> tuple[str, ...]:
    """Returns the parameters of queries, keys and values of a block, which PyTorch concatenates."""
    return tuple(f"encoder/blocks/#/attention/{layer}/{kind}" for layer in ("query", "key", "value"))


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
CLIP_TEXT: Table = (
    Match("embeddings.token_embedding.weight", ("tokens/embedding",)),
    *_CLIP_BLOCKS,
    *norm("final_layer_norm", "encoder/norm"),
)
SIGLIP_TEXT: Table = (*CLIP_TEXT, *dense("head", "projection"))
# Of all image-text models; only SigLIP's have a bias.
HEAD: Table = (
    Match("logit_scale", ("temperature/log_temperature",), LOG_SCALE),
    Match("logit_bias", ("bias",), SCALAR),
)
CLIP_IMAGE: Table = (
    *_CLIP_BLOCKS,
    *norm("pre_layrnorm", "input_norm"),  # their spelling
    *norm("post_layernorm", "encoder/norm"),
)
_OPEN_CLIP_BLOCKS: Table = (
    *_block(
        "transformer.resblocks.#",
        layers={"attn.out_proj": "attention/out", "mlp.c_fc": "mlp/up", "mlp.c_proj": "mlp/down"},
        norms={"ln_1": "attention_norm", "ln_2": "mlp_norm"},
    ),
    Match("transformer.resblocks.#.attn.in_proj_weight", _joined("kernel"), TRANSPOSED),
    Match("transformer.resblocks.#.attn.in_proj_bias", _joined("bias")),
    Match("transformer.resblocks.#.ls_1.gamma", ("encoder/blocks/#/attention_scale",)),
    Match("transformer.resblocks.#.ls_2.gamma", ("encoder/blocks/#/mlp_scale",)),
)
OPEN_CLIP_IMAGE: Table = (
    *_OPEN_CLIP_BLOCKS,
    *norm("ln_pre", "input_norm"),
    *norm("ln_post", "encoder/norm"),
    Match("proj", ("projection/kernel",)),
)
OPEN_CLIP_TEXT: Table = (
    *_OPEN_CLIP_BLOCKS,
    Match("token_embedding.weight", ("tokens/embedding",)),
    *norm("ln_final", "encoder/norm"),
    Match("text_projection", ("projection/kernel",)),
    *dense("text_projection", "projection"),
)
# [UNC] and the class token have positions, see `prolip`.
PROLIP_IMAGE: Table = (*OPEN_CLIP_IMAGE, *dense("uncertainty_proj", "uncertainty"))
PROLIP_TEXT: Table = (*OPEN_CLIP_TEXT, *dense("text_uncertainty_projection", "uncertainty"))
# timm's names, of a ViT with attention pooling; the norm before the blocks is the Perception Encoder's.
TIMM_IMAGE: Table = (
    *_block(
        "blocks.#",
        layers={"attn.proj": "attention/out", "mlp.fc1": "mlp/up", "mlp.fc2": "mlp/down"},
        norms={"norm1": "attention_norm", "norm2": "mlp_norm"},
    ),
    Match("blocks.#.attn.qkv.weight", _joined("kernel"), TRANSPOSED),
    Match("blocks.#.attn.qkv.bias", _joined("bias")),
    *norm("norm_pre", "input_norm"),
    *norm("norm", "encoder/norm"),
    Match("attn_pool.latent", ("pooling/probe",), PROBE),
    *dense("attn_pool.q", "pooling/attention/query"),
    *dense("attn_pool.kv", "pooling/attention/key", "pooling/attention/value"),
    *dense("attn_pool.proj", "pooling/attention/out"),
    *norm("attn_pool.norm", "pooling/norm"),
    *dense("attn_pool.mlp.fc1", "pooling/mlp/up"),
    *dense("attn_pool.mlp.fc2", "pooling/mlp/down"),
    *dense("head", "projection"),
)
# transformers 5 has new names for the layers of a ViT; it also reads those of version 4, which are written.
VIT: Table = (
    *_block("encoder.layer.#", layers=_VIT_ATTENTION | _DENSE_MLP, norms=_VIT_NORMS),
    *_block("layers.#", layers=_NEW_ATTENTION | _FULLY_CONNECTED, norms=_VIT_NORMS),
    *norm("layernorm", "encoder/norm"),
    *dense("pooler.dense", "pre_logits"),
)
_DINO_SWIGLU: Table = (
    # silu(first half) times the second half.
    *dense("encoder.layer.#.mlp.weights_in", "encoder/blocks/#/mlp/gate", "encoder/blocks/#/mlp/up"),
    *dense("encoder.layer.#.mlp.weights_out", "encoder/blocks/#/mlp/down"),
)
DINO: Table = (
    *_block("encoder.layer.#", layers=_VIT_ATTENTION | _NEW_ATTENTION | _FULLY_CONNECTED, norms=_DINO_NORMS),
    *_DINO_SWIGLU,
    *dense("encoder.layer.#.mlp.gate_proj", "encoder/blocks/#/mlp/gate"),
    *dense("encoder.layer.#.mlp.up_proj", "encoder/blocks/#/mlp/up"),
    *dense("encoder.layer.#.mlp.down_proj", "encoder/blocks/#/mlp/down"),
    Match("encoder.layer.#.layer_scale1.lambda1", ("encoder/blocks/#/attention_scale",)),
    Match("encoder.layer.#.layer_scale2.lambda1", ("encoder/blocks/#/mlp_scale",)),
    Match("embeddings.register_tokens", ("registers",), ROWS),
    *norm("layernorm", "encoder/norm"),
)
# To write a tower with gated MLPs, whose layers have other names.
GATED_DINO: Table = _DINO_SWIGLU + DINO
DINO_V3: Table = (
    *_block(
        "layer.#",
        layers=_NEW_ATTENTION | {f"mlp.{name}_proj": f"mlp/{name}" for name in ("gate", "up", "down")},
        norms=_DINO_NORMS,
    ),
    Match("layer.#.layer_scale1.lambda1", ("encoder/blocks/#/attention_scale",)),
    Match("layer.#.layer_scale2.lambda1", ("encoder/blocks/#/mlp_scale",)),
    Match("embeddings.register_tokens", ("registers",), ROWS),
    *norm("norm", "encoder/norm"),
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
# GELU(first half) times the second half. The first block has no norm before its attention.
MODERN_BERT: Table = (
    Match("embeddings.tok_embeddings.weight", ("tokens/embedding",)),
    *norm("embeddings.norm", "input_norm"),
    *dense("layers.#.attn.Wqkv", *(f"encoder/blocks/#/attention/{layer}" for layer in ("query", "key", "value"))),
    *_block(
        "layers.#",
        layers={"attn.Wo": "attention/out", "mlp.Wo": "mlp/down"},
        norms={"attn_norm": "attention_norm", "mlp_norm": "mlp_norm"},
    ),
    *dense("layers.#.mlp.Wi", "encoder/blocks/#/mlp/gate", "encoder/blocks/#/mlp/up"),
    *norm("final_norm", "encoder/norm"),
)
# Gated MLPs have two first layers.
T5: Table = (
    Match("shared.weight", ("tokens/embedding",)),
    Match("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", ("distances",)),
    *(
        Match(f"encoder.block.#.layer.{name}.weight", (f"encoder/blocks/#/{path}/kernel",), TRANSPOSED)
        for name, path in {
            "0.SelfAttention.q": "attention/query",
            "0.SelfAttention.k": "attention/key",
            "0.SelfAttention.v": "attention/value",
            "0.SelfAttention.o": "attention/out",
            "1.DenseReluDense.wi": "mlp/up",
            "1.DenseReluDense.wi_0": "mlp/gate",
            "1.DenseReluDense.wi_1": "mlp/up",
            "1.DenseReluDense.wo": "mlp/down",
        }.items()
    ),
    Match("encoder.block.#.layer.0.layer_norm.weight", ("encoder/blocks/#/attention_norm/scale",)),
    Match("encoder.block.#.layer.1.layer_norm.weight", ("encoder/blocks/#/mlp_norm/scale",)),
    Match("encoder.final_layer_norm.weight", ("encoder/norm/scale",)),
)
# Norms are before layers, so that they have other names; the last one is the encoder's.
MEGATRON_BERT: Table = (
    *(match for match in _BERT if "LayerNorm" not in match.theirs and not match.theirs.startswith(("pooler", "emb"))),
    Match("embeddings.word_embeddings.weight", ("tokens/embedding",)),
    *_block("encoder.layer.#", layers={}, norms={"attention.ln": "attention_norm", "ln": "mlp_norm"}),
    *norm("encoder.ln", "encoder/norm"),
)

# With attention to another model. Its logits have no bias.
GPT2: Table = (
    Match("transformer.wte.weight", ("tokens/embedding",)),
    Match("transformer.wpe.weight", ("positions",)),
    *norm("transformer.ln_f", "norm"),
    *norm("transformer.h.#.ln_1", "blocks/#/attention_norm"),
    *norm("transformer.h.#.ln_cross_attn", "blocks/#/source_norm"),
    *norm("transformer.h.#.ln_2", "blocks/#/mlp_norm"),
    *_conv1d("transformer.h.#.attn.c_attn", *(f"blocks/#/attention/{layer}" for layer in ("query", "key", "value"))),
    *_conv1d("transformer.h.#.attn.c_proj", "blocks/#/attention/out"),
    *_conv1d("transformer.h.#.crossattention.q_attn", "blocks/#/source_attention/query"),
    *_conv1d(
        "transformer.h.#.crossattention.c_attn", "blocks/#/source_attention/key", "blocks/#/source_attention/value"
    ),
    *_conv1d("transformer.h.#.crossattention.c_proj", "blocks/#/source_attention/out"),
    *_conv1d("transformer.h.#.mlp.c_fc", "blocks/#/mlp/up"),
    *_conv1d("transformer.h.#.mlp.c_proj", "blocks/#/mlp/down"),
    Match("lm_head.weight", ("logits/kernel",), TRANSPOSED),
)
# Files converted from the original TensorFlow ones call scale and bias of a norm gamma and beta.
_OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
BERT: Table = _BERT + tuple(
    dataclasses.replace(match, theirs=match.theirs.replace(new, old))
    for match in _BERT
    for new, old in _OLD_NORMS.items()
    if match.theirs.endswith(new)
)
