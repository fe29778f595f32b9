"""Gives a text Transformer more positions, and pooling of the last one, without changing its unit embeddings.

SigLIP's text model attends to every position and pools the last one, and `transformers` pads its texts to 64 tokens, or
to the longest text at hand. A tower that was trained with ``l`` tokens is therefore written as a larger one that reads
the first ``l`` positions only. A pre-norm Transformer allows this exactly, up to rounding, by a few more dimensions of
its tokens, called flags below (``d`` is the width and ``d' = d + 8 heads`` the new one):

* LayerNorm ignores the mean of its input, so everything written to the tokens is centred. Flags of visible positions
  are 0; then LayerNorm over ``d'`` dimensions is that over ``d`` with the scale ``sqrt(d / d') γ`` and ``d / d' ε``.
* Positions from ``l`` on carry the flags ``(c, -c)``. One more dimension of every head holds their difference in keys
  and a negative constant in queries, so that attention to them is ``exp(-large) = 0``.
* One more block replaces every token by ``K`` times what the tower pools: its queries are constant, and its values are
  the normalised tokens. It also writes their mean and the constant 1 to flags, as the last LayerNorm would remove them.
  That norm then only divides by a positive number, which unit embeddings do not depend on.
"""

import dataclasses
from typing import Any, TypeAlias

import numpy as np

from lit_het.towers.positions import sinusoidal_positions
from lit_het.towers.text import TextConfig

Flat: TypeAlias = dict[str, np.ndarray]

POOLINGS = ("last", "first", "mean")
"""The poolings that one block of attention can express."""

# More dimensions of each head: a multiple of 8, as fast attention of GPUs wants.
_EXTRA = 8
# Pairs (v, -v) of flags, by their place behind the token's own dimensions; LayerNorm keeps the mean of a pair at 0.
_HIDDEN, _PICKED, _MEAN, _ONE = ((place, place + 1) for place in (0, 2, 4, 6))
# Powers of two, so that products with them are exact. A pick is so small that LayerNorm does not notice it.
_HIDE, _PICK, _LARGE = 2.0**14, 2.0**-11, 2.0**40
_HIDE_LOGIT, _PICK_LOGIT = 2.0**10, 2.0**36


def lengthened(tower: TextConfig, params: Flat, length: int) -> tuple[TextConfig, Flat]:
    """Returns a tower for texts of ``length`` tokens that reads the first ``tower.length`` ones, and its parameters.

    Args:
        tower: a pre-norm Transformer with a pooling of `POOLINGS`.
        params: of the tower, by path.
        length: number of positions, above ``tower.length``.
    """
    encoder = tower.encoder
    old, width = encoder.width, encoder.width + _EXTRA * encoder.num_heads
    wide = dataclasses.replace(
        encoder, width=width, depth=encoder.depth + 1, norm_epsilon=encoder.norm_epsilon * old / width
    )
    exact = {path: array.astype(np.float64) for path, array in params.items()}
    blocks = _widened_blocks(exact, encoder.num_heads, old, width)
    last = _reading_block(exact, tower, blocks, old, width)
    found = {
        "tokens/embedding": _padded(_centred(exact["tokens/embedding"]), width),
        "positions": _positions(exact, tower, length, width),
        **{f"encoder/blocks/{path}": np.concatenate([array, last[path][None]]) for path, array in blocks.items()},
        "encoder/norm/scale": np.ones(width),
        "encoder/norm/bias": np.zeros(width),
        **_projection(exact, old, width),
    }
    longer = dataclasses.replace(tower, length=length, encoder=wide, pooling="last", positions="learned")
    return longer, {path: array.astype(np.float32) for path, array in found.items()}


def _centred(array: np.ndarray) -> np.ndarray:
    return array - array.mean(axis=-1, keepdims=True)


def _padded(array: np.ndarray, *sizes: int) -> np.ndarray:
    """Returns the array with zeros behind its last axes, up to these sizes."""
    first = array.ndim - len(sizes)
    missing = [(0, size - array.shape[first + axis]) for axis, size in enumerate(sizes)]
    return np.pad(array, [(0, 0)] * first + missing)


def _positions(params: Flat, tower: TextConfig, length: int, width: int) -> np.ndarray:
    old = tower.encoder.width
    own = params.get("positions")
    own = sinusoidal_positions(tower.length, old).astype(np.float64) if own is None else own
    found = _padded(_centred(own), length, width)
    found[tower.length :, [old + place for place in _HIDDEN]] = _HIDE, -_HIDE
    if tower.pooling != "mean":
        size = np.sqrt(np.mean(np.square(own)) + np.mean(np.square(params["tokens/embedding"])))
        picked = tower.length - 1 if tower.pooling == "last" else 0
        found[picked, [old + place for place in _PICKED]] = _PICK * size, -_PICK * size
    return found


def _widened_blocks(params: Flat, num_heads: int, old: int, width: int) -> Flat:
    """Returns the stacked parameters of the blocks, by path below ``encoder/blocks/``."""
    blocks = {path.removeprefix("encoder/blocks/"): a for path, a in params.items() if path.startswith("encoder/block")}
    size, new = old // num_heads, width // num_heads
    depth = len(blocks["attention/query/kernel"])

    def heads(array: np.ndarray) -> np.ndarray:
        """Returns an array whose last axis holds the heads, each with zeros behind its dimensions."""
        split = array.reshape(*array.shape[:-1], num_heads, size)
        return _padded(split, new).reshape(*array.shape[:-1], width)

    found = {}
    for name in ("query", "key", "value"):
        # Logits are divided by the square root of a head's size, which has grown.
        factor = np.sqrt(new / size) if name == "query" else 1.0
        found[f"attention/{name}/kernel"] = factor * _padded(heads(blocks[f"attention/{name}/kernel"]), width, width)
        found[f"attention/{name}/bias"] = factor * heads(blocks[f"attention/{name}/bias"])
    _add_flag(found, 0, _HIDDEN, -_HIDE_LOGIT, old, num_heads)
    out = heads(_centred(blocks["attention/out/kernel"]).swapaxes(1, 2)).swapaxes(1, 2)
    found |= {
        "attention/out/kernel": _padded(out, width, width),
        "attention/out/bias": _padded(_centred(blocks["attention/out/bias"]), width),
        "mlp/up/kernel": _padded(blocks["mlp/up/kernel"], width, blocks["mlp/up/kernel"].shape[-1]),
        "mlp/up/bias": blocks["mlp/up/bias"],
        "mlp/down/kernel": _padded(_centred(blocks["mlp/down/kernel"]), width),
        "mlp/down/bias": _padded(_centred(blocks["mlp/down/bias"]), width),
    }
    for norm in ("attention_norm", "mlp_norm"):
        found |= _norm(blocks, norm, norm, old, width, (depth,))
    return found


def _norm(params: Flat, theirs: str, ours: str, old: int, width: int, stack: tuple[int, ...] = ()) -> Flat:
    """Returns a LayerNorm of all dimensions that normalises the token's own as before, and only scales flags."""
    scale = np.concatenate([params[f"{theirs}/scale"] * np.sqrt(old / width), np.ones((*stack, width - old))], axis=-1)
    return {f"{ours}/scale": scale, f"{ours}/bias": _padded(params[f"{theirs}/bias"], width)}


def _add_flag(found: Flat, number: int, pair: tuple[int, int], logit: float, old: int, num_heads: int) -> None:
    """Makes each head's logits depend on a pair of flags of the keys: one more dimension of queries and keys.

    Args:
        found: parameters of attention, changed in place.
        number: of the new dimension.
        pair: of flags.
        logit: what a difference of 1 adds to the logit.
        old: the number of a token's own dimensions.
        num_heads: number of heads.
    """
    kernel, bias = found["attention/key/kernel"], found["attention/query/bias"]
    new, width = kernel.shape[-1] // num_heads, kernel.shape[-1]
    places = np.arange(old // num_heads + number, width, new)
    bias[..., places] = logit * np.sqrt(new)
    kernel[..., old + pair[0], places] = 1.0
    kernel[..., old + pair[1], places] = -1.0


def _reading_block(params: Flat, tower: TextConfig, blocks: Flat, old: int, width: int) -> Flat:
    """Returns the parameters of the last block, which reads what the tower pools."""
    found: dict[str, Any] = {path: np.zeros(array.shape[1:]) for path, array in blocks.items()}
    found |= _norm(params, "encoder/norm", "attention_norm", old, width)
    found["mlp_norm/scale"] = np.ones(width)
    found["attention/value/kernel"] = np.eye(width)
    _add_flag(found, 0, _HIDDEN, -_HIDE_LOGIT, old, tower.encoder.num_heads)
    if tower.pooling != "mean":
        _add_flag(found, 1, _PICKED, _PICK_LOGIT, old, tower.encoder.num_heads)
    out, bias = found["attention/out/kernel"], found["attention/out/bias"]
    out[:old, :old] = _LARGE * (np.eye(old) - 1 / old)
    for place, sign in zip(_MEAN, (1, -1), strict=True):
        out[:old, old + place] = sign * _LARGE / old
    bias[[old + place for place in _ONE]] = _LARGE, -_LARGE
    return found


def _projection(params: Flat, old: int, width: int) -> Flat:
    """Returns the dense layer, which takes the mean and its bias from flags."""
    kernel = _padded(params["projection/kernel"], width, params["projection/kernel"].shape[-1])
    # Half of the difference of a pair, which no common shift of all dimensions changes.
    for pair, row in ((_MEAN, params["projection/kernel"].sum(axis=0)), (_ONE, params["projection/bias"])):
        kernel[old + pair[0]], kernel[old + pair[1]] = row / 2, -row / 2
    return {"projection/kernel": kernel, "projection/bias": np.zeros(kernel.shape[-1])}
