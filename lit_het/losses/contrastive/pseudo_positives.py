"""Pseudo-positives: keys that fit a query at least as well as its partner does, for the sigmoid loss (PCME++ Sec. 2.3).

A caption may fit images other than its own. A second loss takes such pairs for positives, so that a model is not
taught the contrary alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lit_het.losses.contrastive.blocks import Layout, sum_over_pairs
from lit_het.losses.contrastive.dense import PairLoss, of_label
from lit_het.losses.contrastive.pairs import Examples, Pairs
from lit_het.types import Queries


class _Partners(NamedTuple):
    """The loss of each example with its partner as a positive, and their label."""

    right: Float[Array, " n"]
    label: Float[Array, " n"]


def sigmoid(pairs: Pairs, layout: Layout, pair_loss: PairLoss, weight: float, *, symmetric: bool) -> Float[Array, ""]:
    """Returns ``Σ_n w_n Σ_m (l_nm(y_nm) + α l_nm(y'_nm))``, the sigmoid loss and α times that with pseudo-positives.

    ``l(y) = -(y log p + (1 - y) log (1 - p))``, and ``y'_nm = max(y_nm, y_nn)`` where ``p_nm >= p_nn``, else y_nm. The
    comparison has no gradient.

    Args:
        pairs: this device's queries and keys.
        layout: how they are split.
        pair_loss: the loss -log p of each pair.
        weight: α.
        symmetric: whether to return half the sum of both directions, for queries without noise; in the other one p_nm
            is compared with p_mm.
    """
    partners = jax.lax.stop_gradient(_partners(pairs, pair_loss))

    def block_sum(block: Pairs, of_queries: _Partners, of_keys: _Partners | None) -> Float[Array, ""]:
        one = jnp.ones((1, 1))
        label, right, wrong = block.label, pair_loss(block, one), pair_loss(block, -one)
        query, key = block.query_examples.weight[:, None], block.key_examples.weight[None]

        def losses(of_partner: Float[Array, "_ _"], partner_label: Float[Array, "_ _"]) -> Float[Array, "n m"]:
            # p_nm >= p_nn, written in losses.
            raised = jnp.where(right <= of_partner, jnp.maximum(label, partner_label), label)
            found = of_label(label, right, wrong) + weight * of_label(raised, right, wrong)
            return jnp.where((query > 0) & (key > 0), found, 0.0)

        total = jnp.sum(query * losses(of_queries.right[:, None], of_queries.label[:, None]))
        if of_keys is None:
            return total
        return (total + jnp.sum(key * losses(of_keys.right[None], of_keys.label[None]))) / 2

    of_keys = partners if symmetric else None
    if layout.form == "dense":
        return block_sum(pairs, partners, of_keys)
    return sum_over_pairs(block_sum, pairs, layout, partners, of_keys)


def _partners(pairs: Pairs, pair_loss: PairLoss) -> _Partners:
    """Returns what each query has with its partner, which is in the same row on the same device."""

    def of_row(row: tuple[Queries, Examples, Array, Examples]) -> _Partners:
        queries, query_examples, keys, key_examples = jax.tree.map(lambda x: x[None], row)
        one = pairs.block(queries, query_examples, keys, key_examples)
        return _Partners(pair_loss(one, jnp.ones((1, 1)))[0, 0], one.label[0, 0])

    return jax.vmap(of_row)((pairs.queries, pairs.query_examples, pairs.keys, pairs.key_examples))
