"""Mixup: every example of a batch becomes a weighted mean with the one before it (Zhang et al. 2018, Sec. 2).

It acts on the global batch, on the devices, so that neither hosts nor their number matter.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt8

from lit_het.losses.classification import LabelMixture


def draw_share(key: Key[Array, ""], alpha: float, valid: Bool[Array, " b"]) -> Float[Array, " b"]:
    """Returns what each example keeps of itself: one λ ~ Beta(α, α) for all, or 1 - λ if that is more.

    An invalid example keeps itself, and so does the one after it: nothing of it may show elsewhere.
    """
    drawn = jax.random.beta(key, alpha, alpha)
    return jnp.where(valid & _before(valid), jnp.maximum(drawn, 1 - drawn), 1.0)


def mix_pixels(image: UInt8[Array, "b h w c"], share: Float[Array, " b"]) -> UInt8[Array, "b h w c"]:
    """Returns the mixed images, rounded to whole levels as towers take them."""
    return jnp.round(_mean(image, share[:, None, None, None])).astype(jnp.uint8)


def mix_labels(
    label: Int[Array, " b"] | Float[Array, "b k"], share: Float[Array, " b"]
) -> LabelMixture | Float[Array, "b k"]:
    """Returns both classes of every example with their shares, or the mean of its target probabilities."""
    if label.ndim == 1:
        return LabelMixture(jnp.stack([label, _before(label)], axis=1), jnp.stack([share, 1 - share], axis=1))
    return _mean(label, share[:, None])


def _mean(rows: Shaped[Array, "b *rest"], share: Float[Array, "b *ones"]) -> Float[Array, "b *rest"]:
    return share * rows + (1 - share) * _before(rows)


def _before(rows: Shaped[Array, "b *rest"]) -> Shaped[Array, "b *rest"]:
    # Where rows are split over devices, one row of each travels.
    return jnp.roll(rows, 1, axis=0)
