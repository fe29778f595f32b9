"""Gives a text Transformer more positions, and pooling of the last one, without changing its unit embeddings.

SigLIP's text model attends to every position and pools the last one, and `transformers` pads its texts to 64 tokens, or
to the longest text at hand. A tower that was trained with ``l`` tokens is therefore written as a larger one that reads
the first ``l`` positions only. A pre-norm Transformer allows this exactly, up to rounding, by a few more dimensions of
its tokens, called flags below (``d`` is the width and ``d' = d + 8 heads`` the new one):

* Flags of visible positions are 0, so that the blocks compute what they did, see `widening`.
* Positions from ``l`` on carry the flags ``(c, -c)``. One more dimension of every head holds their difference in keys
  and a negative constant in queries, so that attention to them is ``exp(-large) = 0``.
* One more block replaces every token by ``K`` times what the tower pools: its queries are constant, and its values are
  the normalised tokens. It also writes their mean and the constant 1 to flags, as the last LayerNorm would remove them.
  That norm then only divides by a positive number, which unit embeddings do not depend on.
"""

import dataclasses
from typing import Any

import numpy as np

from lit_het.towers.positions import sinusoidal_positions
from lit_het.towers.text_config import TextConfig
from lit_het.weights.huggingface.widening import (
    Flat,
    below,
    centred,
    padded,
    widened_attention,
    widened_mlp,
    widened_norm,
)

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
    blocks = _widened_blocks(exact, encoder.num_heads, width)
    last = _reading_block(exact, tower, blocks, old, width)
    found = {
        "tokens/embedding": padded(centred(exact["tokens/embedding"]), width),
        "positions": _positions(exact, tower, length, width),
        **{f"encoder/blocks/{path}": np.concatenate([array, last[path][None]]) for path, array in blocks.items()},
        "encoder/norm/scale": np.ones(width),
        "encoder/norm/bias": np.zeros(width),
        **_projection(exact, old, width),
    }
    longer = dataclasses.replace(tower, length=length, encoder=wide, pooling="last", positions="learned")
    return longer, {path: array.astype(np.float32) for path, array in found.items()}


def _positions(params: Flat, tower: TextConfig, length: int, width: int) -> np.ndarray:
    old = tower.encoder.width
    own = params.get("positions")
    own = sinusoidal_positions(tower.length, old).astype(np.float64) if own is None else own
    found = padded(centred(own), length, width)
    found[tower.length :, [old + place for place in _HIDDEN]] = _HIDE, -_HIDE
    if tower.pooling != "mean":
        size = np.sqrt(np.mean(np.square(own)) + np.mean(np.square(params["tokens/embedding"])))
        picked = tower.length - 1 if tower.pooling == "last" else 0
        found[picked, [old + place for place in _PICKED]] = _PICK * size, -_PICK * size
    return found


def _widened_blocks(params: Flat, num_heads: int, width: int) -> Flat:
    """Returns the stacked parameters of the blocks, by path below ``encoder/blocks/``."""
    found = below("attention", widened_attention(params, "encoder/blocks/attention", num_heads, width))
    _add_flag(found, 0, _HIDDEN, -_HIDE_LOGIT, params["encoder/norm/bias"].size, num_heads)
    found |= below("mlp", widened_mlp(params, "encoder/blocks/mlp", width))
    for norm in ("attention_norm", "mlp_norm"):
        found |= below(norm, widened_norm(params, f"encoder/blocks/{norm}", width))
    return found


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
    found |= below("attention_norm", widened_norm(params, "encoder/norm", width))
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
    kernel = padded(params["projection/kernel"], width, params["projection/kernel"].shape[-1])
    # Half of the difference of a pair, which no common shift of all dimensions changes.
    for pair, row in ((_MEAN, params["projection/kernel"].sum(axis=0)), (_ONE, params["projection/bias"])):
        kernel[old + pair[0]], kernel[old + pair[1]] = row / 2, -row / 2
    return {"projection/kernel": kernel, "projection/bias": np.zeros(kernel.shape[-1])}
