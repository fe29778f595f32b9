"""Metrics of the noise of an image-text model."""

from jaxtyping import Array, Bool, Float, Shaped

from lit_het import sharding
from lit_het.heads.base import ContrastiveHead
from lit_het.losses.base import masked_mean
from lit_het.types import Metrics

_EXAMPLES = 16


def noise_metrics(
    head: ContrastiveHead, image: Float[Array, "n d"], text: Float[Array, "n d"], valid: Bool[Array, " n"]
) -> Metrics:
    """Returns the norms of the noise of some pairs, and what shows its form."""
    image, text, valid = (_some_rows(x) for x in (image, text, valid))
    found = {"image_noise_norm": head.image_noise_norm(image), "text_noise_norm": head.text_noise_norm(text)}
    found |= head.noise_metrics(image, text, valid)
    return {name: masked_mean(values, valid) for name, values in found.items()}


def _some_rows(x: Shaped[Array, "b *rest"]) -> Shaped[Array, "n *rest"]:
    """Returns evenly spread rows of a batch: records average steps, so that a part of each batch tells as much."""
    count = max(_EXAMPLES, sharding.num_automatic_shards())
    if len(x) % count:
        return x
    # The first row of each part: a device has whole parts, where a slice with a step would move rows between devices.
    return sharding.as_batch(x.reshape(count, -1, *x.shape[1:])[:, 0])
