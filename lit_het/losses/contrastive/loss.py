"""Contrastive losses over one batch, both directions, with noisy queries and noiseless keys (HET-XL Sec. 5.2).

Invalid rows are neither queries nor keys. Unless the form is "dense", the matrix of logits never exists whole: every
device scores blocks of its own queries against the keys of all devices, and takes the gradient of a block with its
value (`lit_het.losses.blocks`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from lit_het import sharding
from lit_het.errors import UserError
from lit_het.losses.base import weights
from lit_het.losses.contrastive import dense, normalizers, pseudo_positives, sample_free
from lit_het.losses.contrastive.blocks import Layout, sum_over_pairs
from lit_het.losses.contrastive.loss_config import ContrastiveLoss, SigmoidLoss, SoftmaxLoss
from lit_het.losses.contrastive.pairs import Examples, Pairs
from lit_het.mixtures import MixedImages
from lit_het.types import EmbeddingSamples, Queries


class Rows(NamedTuple):
    """What a loss knows of a batch's rows: which count, hashes, weights, and what images are mixed of (or None)."""

    valid: Bool[Array, " b"] | None
    ids: tuple[UInt32[Array, "b 2"], ...]
    weight: Float[Array, " b"] | None
    mixed: MixedImages | None = None


# Pairs of this device's queries and keys to the weighted sum over its queries.
Direction: TypeAlias = Callable[[Pairs, Layout], Float[Array, ""]]
_SAMPLE_FREE: dict[str, Callable[[Pairs], Float[Array, ""]]] = {
    "delta": sample_free.delta,
    "mean_field": sample_free.mean_field,
    "pairwise_probit": sample_free.pairwise_probit,
    "tilted": sample_free.tilted,
}


def softmax_loss(loss: SoftmaxLoss, samples: EmbeddingSamples, rows: Rows) -> Float[Array, ""]:
    """Computes a `SoftmaxLoss`.

    With noise and label smoothing α it is ``(1 - α)`` times the loss without smoothing and α times the cross-entropy of
    the uniform distribution over keys and the prediction without noise: the mean over samples can become flat by more
    noise, in place of smaller logits (docs/noise.md).
    """
    share, mean = loss.label_smoothing, functools.partial(_mean, _softmax, _symmetric_softmax, loss)
    if not share or _is_noiseless(samples):
        return mean(samples, rows, share)
    noiseless = dataclasses.replace(samples, image_queries=None, text_queries=None)
    return (1 - share) * mean(samples, rows, 0.0) + share * mean(noiseless, rows, 1.0)


def sigmoid_loss(loss: SigmoidLoss, samples: EmbeddingSamples, rows: Rows) -> Float[Array, ""]:
    """Computes a `SigmoidLoss`."""

    def direction(pairs: Pairs, layout: Layout) -> Float[Array, ""]:
        return _sigmoid(loss, pairs, layout, symmetric=False)

    def both_directions(pairs: Pairs, layout: Layout) -> Float[Array, ""]:
        # Half the sum of both is either of them, where rows have equal weights and their labels are symmetric.
        return _sigmoid(loss, pairs, layout, symmetric=rows.weight is not None or loss.pseudo_positives > 0)

    return _mean(direction, both_directions, loss, samples, rows, loss.label_smoothing)


def _is_noiseless(samples: EmbeddingSamples) -> bool:
    return samples.image_queries is None and samples.text_queries is None


def _softmax(pairs: Pairs, layout: Layout) -> Float[Array, ""]:
    match layout.form:
        case "dense":
            return dense.softmax(pairs)
        case "gather":
            return sum_over_pairs(lambda block, *_: dense.softmax(block), pairs, layout)
        case "ring":
            return normalizers.softmax(pairs, layout, symmetric=False)


def _symmetric_softmax(pairs: Pairs, layout: Layout) -> Float[Array, ""]:
    if layout.form == "dense":
        return dense.symmetric_softmax(pairs)
    return normalizers.softmax(pairs, layout, symmetric=True)


def _sigmoid(loss: SigmoidLoss, pairs: Pairs, layout: Layout, *, symmetric: bool) -> Float[Array, ""]:
    # Without factors there is no noise: with ``noisy = "image"`` one direction has none.
    is_sample_free = loss.likelihood == "probit" and pairs.queries.factors is not None
    pair_loss = sample_free.probit if is_sample_free else dense.log_loss
    if loss.pseudo_positives:
        return pseudo_positives.sigmoid(pairs, layout, pair_loss, loss.pseudo_positives, symmetric=symmetric)
    function = dense.symmetric_sigmoid if symmetric else dense.sigmoid
    return _sum_over_blocks(lambda block: function(block, pair_loss), pairs, layout)


def _sum_over_blocks(function: Callable[[Pairs], Float[Array, ""]], pairs: Pairs, layout: Layout) -> Float[Array, ""]:
    if layout.form == "dense":
        return function(pairs)
    return sum_over_pairs(lambda block, *_: function(block), pairs, layout)


def _mean(
    direction: Direction,
    both_directions: Direction,
    loss: ContrastiveLoss,
    samples: EmbeddingSamples,
    batch: Rows,
    smoothing: float,
) -> Float[Array, ""]:
    """Returns the mean over valid examples of half the sum of both directions.

    Args:
        direction: the loss of one direction, for noisy queries.
        both_directions: half the sum of both, for queries without noise, whose logits both directions share.
        loss: the form and the size of blocks.
        samples: queries and keys of the whole batch.
        batch: which examples count and how much, and which are duplicates.
        smoothing: share of the uniform distribution in the targets.

    Raises:
        UserError: images have several keys, and the loss is another than the softmax loss of samples.
    """
    if loss.likelihood == "unscented":
        samples = sample_free.at_sigma_points(samples)
    if samples.image.ndim == 3 and not loss.takes_members:
        raise UserError("images with several keys need the softmax loss with likelihood = 'samples'")

    def directed(pairs: Pairs, layout: Layout) -> Float[Array, ""]:
        # Without factors there is no noise: with ``noisy = "image"`` one direction has none.
        if loss.likelihood in _SAMPLE_FREE and pairs.queries.factors is not None:
            return _sum_over_blocks(_SAMPLE_FREE[loss.likelihood], pairs, layout)
        return direction(pairs, layout)

    def device_sum(rows: Any, shared: Any, axes: tuple[str, ...]) -> Float[Array, ""]:
        (image, image_queries), (text, text_queries), weight, ids, mixed = rows
        layout = Layout(loss.form, axes, loss.block_size)
        texts = Examples(weight, layout.global_index(weight.shape[0]), ids)
        images = dataclasses.replace(texts, mixed=mixed, members=image.shape[1] if image.ndim == 3 else 1)
        queries = _queries(image, image_queries)
        image_to_text = Pairs(queries, images, text, texts, *shared, smoothing=smoothing)
        if _is_noiseless(samples):
            return both_directions(image_to_text, layout)
        total = directed(image_to_text, layout)
        # A matrix of its own: the noise is on the queries, so the logits of both directions differ (docs/paper_map.md,
        # 2).
        keys, key_examples = _flat(image, images)
        text_to_image = image_to_text.block(_queries(text, text_queries), texts, keys, key_examples)
        return (total + directed(text_to_image, layout)) / 2

    valid = jnp.ones(len(samples.image), bool) if batch.valid is None else batch.valid
    sides = ((samples.image, samples.image_queries), (samples.text, samples.text_queries))
    # Always float32: dividing by a small τ and summing exponentials over a batch would magnify rounding in bfloat16.
    ids, mixed = batch.ids, batch.mixed
    if loss.duplicates == "negatives":
        ids, mixed = (), mixed and dataclasses.replace(mixed, ids=())
    rows = (*jax.tree.map(lambda x: x.astype(jnp.float32), sides), weights(valid, batch.weight), ids, mixed)
    shared = (samples.temperature, jnp.zeros(()) if samples.bias is None else samples.bias)
    if loss.form == "dense":
        # Whole arrays, without a map over devices: the reference that other forms are tested against.
        return device_sum(rows, shared, ())
    # Every device sums over its own queries; one sum over devices follows.
    return jnp.sum(sharding.map_shards(device_sum, rows, shared))


def _queries(keys: Float[Array, "n *m d"], queries: Queries | None) -> Queries:
    """Returns the queries; without noise they are the keys."""
    return Queries(keys.reshape(len(keys), -1, keys.shape[-1])) if queries is None else queries


def _flat(keys: Float[Array, "n *m d"], examples: Examples) -> tuple[Float[Array, "nm d"], Examples]:
    """Returns the keys of all members, each an example."""
    return keys.reshape(-1, keys.shape[-1]), jax.tree.map(lambda x: jnp.repeat(x, examples.members, axis=0), examples)
