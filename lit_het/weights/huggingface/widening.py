"""Gives the tokens of a pre-norm Transformer more dimensions without changing what its layers compute, up to rounding.

LayerNorm ignores the mean of its input, so everything written to the tokens is centred. Where the new dimensions are 0,
LayerNorm over ``d'`` dimensions is then that over ``d`` with the scale ``sqrt(d / d') γ`` and ``d / d' ε``.

Parameters are given by path; the last axes are those of a layer, others may stack blocks.
"""

from typing import TypeAlias

import numpy as np

Flat: TypeAlias = dict[str, np.ndarray]


def centred(array: np.ndarray) -> np.ndarray:
    """Returns the array without the mean over its last axis."""
    return array - array.mean(axis=-1, keepdims=True)


def padded(array: np.ndarray, *sizes: int) -> np.ndarray:
    """Returns the array with zeros behind its last axes, up to these sizes."""
    first = array.ndim - len(sizes)
    missing = [(0, size - array.shape[first + axis]) for axis, size in enumerate(sizes)]
    return np.pad(array, [(0, 0)] * first + missing)


def widened_norm(params: Flat, path: str, width: int) -> Flat:
    """Returns scale and bias of a LayerNorm that normalises the token's own dimensions as before, and scales others."""
    scale, bias = (params[f"{path}/{leaf}"] for leaf in ("scale", "bias"))
    old = scale.shape[-1]
    ones = np.ones((*scale.shape[:-1], width - old))
    return {"scale": np.concatenate([scale * np.sqrt(old / width), ones], axis=-1), "bias": padded(bias, width)}


def widened_attention(params: Flat, path: str, num_heads: int, width: int) -> Flat:
    """Returns attention to tokens of ``width`` dimensions, which reads and writes their own; heads are larger."""
    old = params[f"{path}/out/bias"].shape[-1]
    size, new = old // num_heads, width // num_heads

    def heads(array: np.ndarray) -> np.ndarray:
        """Returns an array whose last axis holds the heads, each with zeros behind its dimensions."""
        split = array.reshape(*array.shape[:-1], num_heads, size)
        return padded(split, new).reshape(*array.shape[:-1], width)

    found = {}
    for name in ("query", "key", "value"):
        # Logits are divided by the square root of a head's size, which has grown.
        factor = np.sqrt(new / size) if name == "query" else 1.0
        found[f"{name}/kernel"] = factor * padded(heads(params[f"{path}/{name}/kernel"]), width, width)
        found[f"{name}/bias"] = factor * heads(params[f"{path}/{name}/bias"])
    out = heads(centred(params[f"{path}/out/kernel"]).swapaxes(-1, -2)).swapaxes(-1, -2)
    return found | {
        "out/kernel": padded(out, width, width),
        "out/bias": padded(centred(params[f"{path}/out/bias"]), width),
    }


def widened_mlp(params: Flat, path: str, width: int) -> Flat:
    """Returns an MLP that reads and writes the own dimensions of tokens."""
    up = params[f"{path}/up/kernel"]
    return {
        "up/kernel": padded(up, width, up.shape[-1]),
        "up/bias": params[f"{path}/up/bias"],
        "down/kernel": padded(centred(params[f"{path}/down/kernel"]), width),
        "down/bias": padded(centred(params[f"{path}/down/bias"]), width),
    }


def below(path: str, params: Flat) -> Flat:
    """Returns parameters by the path below which they lie."""
    return {f"{path}/{name}": array for name, array in params.items()}
