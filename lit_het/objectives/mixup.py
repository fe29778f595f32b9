"""Mixup: every example of a batch is averaged with the previous one (Zhang et al. 2018, Sec. 2).

It is computed on the global batch, so that the result does not depend on the number of hosts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt8

from lit_het.mixtures import LabelMixture
from lit_het.objectives.base import Objective
from lit_het.random import Keys
from lit_het.types import Batch


@dataclasses.dataclass(frozen=True)
class Mixup(Objective):
    """Mixup of images and labels.

    Attributes:
        alpha: α of the Beta(α, α) distribution of weights.
    """

    alpha: float

    mixes_images = changes_squares = True

    def prepare(self, batch: Batch, keys: Keys) -> Batch:
        """Returns the batch with mixed images, targets and weights."""
        assert batch.image is not None
        assert batch.label is not None
        assert not isinstance(batch.label, LabelMixture), "once"
        own = draw_weight(keys("mixup"), self.alpha, batch.valid)
        weight = None if batch.weight is None else mix_weights(batch.weight, own)
        image, label = mix_pixels(batch.image, own), mix_labels(batch.label, own)
        return dataclasses.replace(batch, image=image, label=label, weight=weight)


def draw_weight(
    key: Key[Array, ""], alpha: float, valid: Bool[Array, " b"], shape: tuple[int, ...] = ()
) -> Float[Array, " b"]:
    """Returns the weight of each example in its own mixture: max(λ, 1 - λ) with λ ~ Beta(α, α).

    Args:
        key: random key.
        alpha: α.
        valid: which examples may be mixed.
        shape: () for one λ of the whole batch, or ``valid.shape`` for one of each example.
    """
    # Not in the paper: an invalid example and the one after it are not mixed, so that no invalid pixels enter a valid
    # example.
    drawn = jax.random.beta(key, alpha, alpha, shape)
    return jnp.where(valid & before(valid), jnp.maximum(drawn, 1 - drawn), 1.0)


def mix_pixels(
    image: UInt8[Array, "b h w c"], weight: Float[Array, " b"] | Float[Array, "b h w"]
) -> UInt8[Array, "b h w c"]:
    """Returns the mixed images, by weights of images or of pixels, rounded to uint8 as towers take them."""
    return jnp.round(_mean(image, jnp.expand_dims(weight, range(weight.ndim, 4)))).astype(jnp.uint8)


def mix_labels(
    label: Int[Array, " b"] | Float[Array, "b k"], weight: Float[Array, " b"]
) -> LabelMixture | Float[Array, "b k"]:
    """Returns both classes of every example with their weights, or mixed target probabilities."""
    if label.ndim == 1:
        return LabelMixture(jnp.stack([label, before(label)], axis=1), jnp.stack([weight, 1 - weight], axis=1))
    return _mean(label, weight[:, None])


def mix_weights(of_loss: Float[Array, " b"], weight: Float[Array, " b"]) -> Float[Array, " b"]:
    """Returns the weight of every mixed example in the loss: the mean of those of both examples."""
    return _mean(of_loss, weight)


def before(rows: Shaped[Array, "b *rest"]) -> Shaped[Array, "b *rest"]:
    """Returns the row before each row, with which it is mixed; that of the first is the last."""
    # If rows are split over devices, each device sends one row to the next.
    return jnp.roll(rows, 1, axis=0)


def _mean(rows: Shaped[Array, "b *rest"], weight: Float[Array, "b *ones"]) -> Float[Array, "b *rest"]:
    return weight * rows + (1 - weight) * before(rows)
