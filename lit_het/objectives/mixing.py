"""Mixup and CutMix for image-text pairs: an image with a part of another has a label for both texts (PCME++ Sec. 2.4).

As in `lit_het.objectives.mixup` an image is mixed with that of the row before, on the global batch.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, UInt8, UInt32

from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.mixtures import MixedImages
from lit_het.objectives import mixup
from lit_het.objectives.base import Objective, Setup
from lit_het.random import Keys
from lit_het.types import Batch


@dataclasses.dataclass(frozen=True)
class Mixing(Objective):
    """Which images of a batch are mixed, and how; the defaults are those of PCME++.

    Attributes:
        fraction: probability with which an image is mixed.
        alpha: α; a mixed image keeps the share max(λ, 1 - λ) of itself, with its own λ ~ Beta(α, α).
        cutmix: probability with which a mixed image has a box of the other (CutMix, Yun et al. 2019), instead of the
            mean of both (Mixup).
    """

    fraction: float = 0.25
    alpha: float = 2.0
    cutmix: float = 0.5

    mixes_images = changes_squares = True

    def __post_init__(self) -> None:
        require_at_least(0, self, "fraction", "cutmix")
        for field in ("fraction", "cutmix"):
            if getattr(self, field) > 1:
                raise FieldError(self, field, f"{getattr(self, field)} must be at most 1")
        if not self.alpha > 0:
            raise FieldError(self, "alpha", f"{self.alpha} must be positive")

    def check(self, setup: Setup) -> None:
        """Checks that the loss takes shares of texts, and that images are not stored embeddings."""
        setup.require_captions("mixing")
        if not setup.task.loss.has_class_probabilities:
            raise UserError(
                "task.mixing gives an image a share of two texts, and a softmax loss takes only one; set --task.loss "
                "sigmoid, or --task.mixing None"
            )
        if setup.tokenizer is not None and setup.run.data.embeddings is not None:
            raise UserError("--task.mixing mixes the pixels of images; leave it out, or leave out --data.embeddings")

    def prepare(self, batch: Batch, keys: Keys) -> Batch:
        """Returns the batch with mixed images, and what they are mixed of."""
        assert batch.image is not None
        image, mixed = self(batch.image, batch.valid, batch.ids, keys("mixing"))
        return dataclasses.replace(batch, image=image, mixed=mixed)

    def __call__(
        self,
        image: UInt8[Array, "b h w c"],
        valid: Bool[Array, " b"],
        ids: Sequence[UInt32[Array, "b 2"]],
        key: Key[Array, ""],
    ) -> tuple[UInt8[Array, "b h w c"], MixedImages]:
        """Returns the images, some of them mixed, and what they are mixed of.

        Args:
            image: pixels.
            valid: which rows may be mixed.
            ids: hashes of images or of texts.
            key: random key.
        """
        select_key, weight_key, form_key, box_key = jax.random.split(key, 4)
        is_chosen = jax.random.bernoulli(select_key, self.fraction, valid.shape)
        share = jnp.where(is_chosen, mixup.draw_weight(weight_key, self.alpha, valid, valid.shape), 1.0)
        in_box = boxes(box_key, 1 - share, image.shape[1], image.shape[2])
        is_cut = jax.random.bernoulli(form_key, self.cutmix, valid.shape)
        # A box at the border is smaller than 1 - λ: the share is that of the pixels.
        share = jnp.where(is_cut, 1 - jnp.mean(in_box, axis=(1, 2)), share)
        of_pixels = jnp.where(is_cut[:, None, None], 1.0 - in_box, share[:, None, None])
        other = mixup.before(jnp.arange(len(valid)))
        return mixup.mix_pixels(image, of_pixels), MixedImages(share, other, tuple(map(mixup.before, ids)))


def boxes(key: Key[Array, ""], area: Float[Array, " b"], height: int, width: int) -> Bool[Array, "b {height} {width}"]:
    """Returns which pixels are in a box around a random pixel, with a share of the image's area and its form.

    A box that reaches over the border is cut there, as in CutMix.
    """

    def along(key: Key[Array, ""], size: int) -> Bool[Array, "b _"]:
        length = jnp.floor(size * jnp.sqrt(area)).astype(jnp.int32)
        first = jax.random.randint(key, area.shape, 0, size) - length // 2
        position = jnp.arange(size)[None]
        return (position >= first[:, None]) & (position < (first + length)[:, None])

    of_rows, of_columns = jax.random.split(key)
    return along(of_rows, height)[:, :, None] & along(of_columns, width)[:, None]
