"""The loss of the class and the instance of every pixel (UViM, Kolesnikov et al. 2022), and the masks of logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class PixelLoss(NamedTuple):
    """Means over the pixels of valid images.

    Attributes:
        loss: ``-log p`` of the labels.
        accuracy: share of the pixels whose label has the largest logit.
    """

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]


def pixel_loss(
    logits: Float[Array, "b *pixels k"], labels: Int[Array, "b *pixels"], share: Float[Array, " b"]
) -> PixelLoss:
    """Returns the softmax cross-entropy of labels; one without a logit, such as of too many instances, adds none.

    Args:
        logits: of each pixel.
        labels: of each pixel, from 0.
        share: of each image in the mean, see `lit_het.losses.base.weights`.
    """
    known = labels < logits.shape[-1]
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    of_label = jnp.take_along_axis(log_p, jnp.where(known, labels, 0)[..., None], axis=-1)[..., 0]
    is_right = jnp.argmax(logits, axis=-1) == labels
    return PixelLoss(*(_mean(x, share) for x in (jnp.where(known, -of_label, 0.0), is_right)))


def _mean(values: Float[Array, "b *pixels"] | Bool[Array, "b *pixels"], share: Float[Array, " b"]) -> Float[Array, ""]:
    of_images = values.reshape(len(values), -1).mean(axis=1)
    # `where`, as the value of an invalid row may be NaN.
    return jnp.sum(of_images * share, where=share > 0)


def merged(
    classes: Float[Array, "b n k"], instances: Float[Array, "b n i"], least_share: float = 0.0
) -> Int[Array, "b n 2"]:
    """Returns the masks of logits: each instance has one class, that of the largest sum of its pixels' logits.

    Without it every pixel of another class would be a segment of its own, and count as an error (big_vision's
    ``panoptic_predictions_from_logits``). Pixels of no instance, 0, keep their own classes.

    Args:
        classes: of all pixels of an image, with void.
        instances: of the number of the instance, with 0 for none.
        least_share: of an image; instances of no more become void.
    """
    numbers = jnp.argmax(instances, axis=2)

    def of_image(logits: Float[Array, "n k"], numbers: Int[Array, " n"]) -> tuple[Int[Array, " n"], Float[Array, " n"]]:
        sums = jnp.zeros((instances.shape[2], logits.shape[1])).at[numbers].add(logits)
        sizes = jnp.zeros(instances.shape[2]).at[numbers].add(1.0)
        return jnp.argmax(sums, axis=1)[numbers], sizes[numbers] / len(numbers)

    of_instance, share = jax.vmap(of_image)(classes, numbers)
    label = jnp.where(numbers > 0, of_instance, jnp.argmax(classes, axis=2))
    label = jnp.where((numbers > 0) & (share <= least_share), 0, label)
    return jnp.stack([label, jnp.where(label > 0, numbers, 0)], axis=2).astype(jnp.int32)
