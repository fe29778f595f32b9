"""The sampled softmax: in training the label's logit among those of a few classes that are drawn at each step.

With the distinct classes c that a step draws and the probability Q that a class is among them, the loss is the softmax
cross-entropy of the logits ``u_y - log Q(y)`` and ``u_c - log Q(c)``, without the label among the drawn (an accidental
hit): the definition of ``tf.nn.sampled_softmax_loss`` (Jean et al. 2015, Sec. 3).

The estimate is biased, as its value is that of a smaller problem: about ``log (1 + Q(y) (1 / p_y - 1))``, below the
full loss where Q(y) < 1. Its best logits are nearly those of the full loss, up to a constant of the input: exactly, if
classes were drawn independently of one another.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from lit_het.heads.logits_config import SampledSoftmax
from lit_het.types import MASKED, LogitSamples

_PARTS = 4096
"""Equal parts of the logarithm of classes, of which one is drawn, then a place in it."""


def draw(config: SampledSoftmax, num_classes: int, key: Key[Array, ""]) -> Int[Array, " c"]:
    """Returns the draws of a step, in ascending order and with repetitions."""
    if config.distribution == "uniform":
        return jnp.sort(jax.random.randint(key, (config.num_candidates,), 0, num_classes))
    # The inverse of the distribution function log(c + 1) / log(k + 1). A share of one float32 would miss two of five
    # rare classes of a million: it is a part, whose power float64 computes, and a place within the part.
    of_part, of_place = jax.random.split(key)
    part = jax.random.randint(of_part, (config.num_candidates,), 0, _PARTS)
    place = jax.random.uniform(of_place, (config.num_candidates,))
    whole = jnp.asarray(np.exp(np.arange(_PARTS) / _PARTS * math.log(num_classes + 1)), jnp.float32)
    found = whole[part] * jnp.exp(place * (math.log(num_classes + 1) / _PARTS))
    # Rounding may reach k.
    return jnp.sort(jnp.clip(found.astype(jnp.int32) - 1, 0, num_classes - 1))


def log_inclusion(config: SampledSoftmax, num_classes: int, classes: Int[Array, " n"]) -> Float[Array, " n"]:
    """Returns ``log Q = log(1 - (1 - q)^C)`` of classes, each of which is drawn with the probability q."""
    if config.distribution == "uniform":
        q = jnp.full(classes.shape, 1 / num_classes, jnp.float32)
    else:
        q = jnp.log1p(1 / (classes.astype(jnp.float32) + 1)) / math.log(num_classes + 1)
    return jnp.log(-jnp.expm1(config.num_candidates * jnp.log1p(-q)))


def of_labels(
    embeddings: LogitSamples,
    layer: Any,
    temperature: Float[Array, ""],
    config: SampledSoftmax,
    key: Key[Array, ""],
    label: Int[Array, " b"],
) -> LogitSamples:
    """Returns samples of the corrected logits of the label, the first, and of the candidates.

    Args:
        embeddings: samples of the noisy embeddings φ + ε'(x), in the place of logits.
        layer: with the kernel and the biases of all classes.
        temperature: τ.
        config: the number of candidates.
        key: random key of the step.
        label: class of each row.
    """
    num_classes = layer.kernel.shape[1]

    def columns(classes: Int[Array, " n"]) -> tuple[Float[Array, "n d"], Float[Array, " n"], Float[Array, " n"]]:
        bias = jnp.zeros(len(classes)) if layer.bias is None else layer.bias[...][classes]
        return layer.kernel[...][:, classes].T, bias, log_inclusion(config, num_classes, classes)

    candidates = draw(config, num_classes, key)
    is_again = jnp.concatenate([jnp.zeros(1, bool), candidates[1:] == candidates[:-1]])
    # Outside of blocks and devices, which so hold the columns of few classes, and none of the others.
    kernel, bias, shift = columns(candidates)

    def prepare(rows: tuple[Any, ...]) -> tuple[Any, ...]:
        features, *of_label = rows
        return embeddings.prepare(features), *of_label

    def logits(common: tuple[Any, ...], constants: Any, indices: Int[Array, " t"]) -> Float[Array, "n t outcomes"]:
        state, own_kernel, own_bias, own_shift = common
        keys, is_left_out = constants
        embedding = embeddings.logits(state, keys, indices)
        n, t, d = embedding.shape
        own = jnp.einsum("ntd,nd->nt", embedding, own_kernel) + own_bias[:, None]
        others = (embedding.reshape(n * t, d) @ kernel.T + bias[None]) / temperature - shift[None]
        others = jnp.where(is_left_out[:, None], MASKED, others.reshape(n, t, -1))
        return jnp.concatenate([(own / temperature - own_shift[:, None])[..., None], others], axis=-1)

    return dataclasses.replace(
        embeddings,
        features=(embeddings.features, *columns(label)),
        keys=(embeddings.keys, (label[:, None] == candidates[None]) | is_again[None]),
        prepare=prepare,
        logits=logits,
    )
