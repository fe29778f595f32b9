"""Contrastive losses over one batch, both directions, with noisy queries and noiseless keys (HET-XL Sec. 5.2).

Rows that are not valid are neither queries nor keys. Logits between a batch and itself never exist whole, unless the
form is "dense": every device scores blocks of its own queries against keys that are gathered from all devices or travel
around them, and takes the gradient of a block with its value (`lit_het.blocks`).
"""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lit_het import sharding
from lit_het.errors import require_at_least, require_choice
from lit_het.losses import pairs
from lit_het.losses.base import weights
from lit_het.losses.pairs import Side
from lit_het.types import EmbeddingSamples


@dataclasses.dataclass(frozen=True)
class SoftmaxLoss:
    """``-log p`` of the right partner among the batch, half the sum of both directions.

    ``p(b_n|a_n) = 1/S Σ_s softmax_i(β_i · (α_n + ε_s(a_n)) / τ)_n``, and with α and β exchanged for ``p(a_n|b_n)``.

    Attributes:
        form: "gather" brings all keys to every device, O(b d) memory; "ring" passes them around, O(b d / devices), for
            one product of logits more; "dense" holds all logits, O(b²). All are equal.
        block_size: vectors of logits that exist at a time on a device: one for every query, or factor of queries.

    Raises:
        UserError: a form that there is not, or a block without queries.
    """

    form: pairs.Form = "gather"
    block_size: int = 1024

    def __post_init__(self) -> None:
        require_at_least(1, self, "block_size")
        require_choice(self, "form")

    def __call__(self, samples: EmbeddingSamples, valid: Bool[Array, " b"]) -> Float[Array, ""]:
        """Returns the mean loss over valid rows."""
        direction = pairs.softmax_both_ways if _is_noiseless(samples) else pairs.softmax
        return _average(direction, self, samples, valid)


@dataclasses.dataclass(frozen=True)
class SigmoidLoss:
    """``-log σ(z_ij (logit_ij + bias))``, z = 1 for partners and -1 otherwise (SigLIP; SoViT Table 7).

    Each query's terms are summed over keys and averaged over queries; with noise σ is averaged over samples.
    The loss is half the sum of both directions, which agree when there is no noise.

    Attributes:
        form, block_size: as in `SoftmaxLoss`; the ring costs no product more.

    Raises:
        UserError: a form that there is not, or a block without queries.
    """

    form: pairs.Form = "gather"
    block_size: int = 1024

    def __post_init__(self) -> None:
        require_at_least(1, self, "block_size")
        require_choice(self, "form")

    def __call__(self, samples: EmbeddingSamples, valid: Bool[Array, " b"]) -> Float[Array, ""]:
        """Returns the mean loss over valid rows."""
        return _average(pairs.sigmoid, self, samples, valid)


ContrastiveLoss: TypeAlias = SoftmaxLoss | SigmoidLoss


def _is_noiseless(samples: EmbeddingSamples) -> bool:
    return samples.image_queries is None and samples.text_queries is None


def _average(
    direction: pairs.Direction, loss: ContrastiveLoss, samples: EmbeddingSamples, valid: Bool[Array, " b"]
) -> Float[Array, ""]:
    """Returns half the sum of both directions, or the one that stands for both where there is no noise."""
    both = _is_noiseless(samples)

    def of_share(rows: Any, shared: Any, axes: tuple[str, ...]) -> Float[Array, ""]:
        (image_keys, image_queries), (text_keys, text_queries), weight = rows
        image, text = Side(image_keys, image_queries, weight), Side(text_keys, text_queries, weight)
        exchange = pairs.Exchange(loss.form, axes, loss.block_size)
        total = direction(image, text, *shared, exchange)
        return total if both else (total + direction(text, image, *shared, exchange)) / 2

    sides = ((samples.image, samples.image_queries), (samples.text, samples.text_queries))
    rows = (*jax.tree.map(lambda x: x.astype(jnp.float32), sides), weights(valid))
    shared = (samples.temperature, jnp.zeros(()) if samples.bias is None else samples.bias)
    if loss.form == "dense":
        return of_share(rows, shared, ())
    return jnp.sum(sharding.map_shares(of_share, rows, shared))
