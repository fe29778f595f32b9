"""Masked images and texts, whose Gaussians are to contain those of the whole ones (ProLIP)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, Shaped

from lit_het import sharding
from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.towers.vit import ViTConfig


@dataclasses.dataclass(frozen=True)
class MaskingConfig:
    """The second inclusion loss of ProLIP: an image, or a text, is included in itself with parts masked.

    Its defaults are ProLIP's. Both towers run once more on the masked rows.

    Attributes:
        weight: of the loss, the sum of images and texts.
        masked: the share of patches that is left out, and the probability with which a word is replaced.
        every: one of so many rows of a batch is masked.
        mask_token: the id that replaces words, in the vocabulary of the text tower.
        padding_token: the id that is never replaced.

    Raises:
        UserError: a weight that is not positive, a share that is not between 0 and 1, or a number out of range.
    """

    weight: float = 1e-3
    masked: float = 0.75
    every: int = 8
    mask_token: int = 32_000
    padding_token: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, self, "every")
        require_at_least(0, self, "mask_token", "padding_token")
        if not self.weight > 0:
            raise FieldError(self, "weight", f"{self.weight} must be above 0; task.masking None leaves the loss out")
        if not 0 < self.masked < 1:
            raise FieldError(self, "masked", f"{self.masked} must be between 0 and 1")

    def check(self, head: object, image_tower: object, vocabulary_size: int) -> None:
        """Checks that a model has Gaussians, patches and the tokens.

        Raises:
            UserError: it has not.
        """
        if not isinstance(head, GaussianContrastiveConfig) or not isinstance(image_tower, ViTConfig):
            raise UserError("task.masking needs the head 'gaussian' and a ViT as image tower; leave it out")
        for field in ("mask_token", "padding_token"):
            if getattr(self, field) >= vocabulary_size:
                raise UserError(
                    f"task.masking.{field} = {getattr(self, field)} is not below the vocabulary of {vocabulary_size} "
                    "tokens"
                )

    def rows(self, x: Shaped[Array, "b *rest"]) -> Shaped[Array, "n *rest"]:
        """Returns the rows that are masked: the first of every group, so that no row moves between devices.

        Raises:
            UserError: the batch has no whole groups on every device.
        """
        shares = sharding.num_automatic_shards()
        if len(x) % (self.every * shares):
            raise UserError(
                f"a batch of {len(x)} rows on {shares} devices is no multiple of {self.every * shares}; change "
                "--task.masking.every or --data.batch-size"
            )
        return sharding.as_batch(x.reshape(-1, self.every, *x.shape[1:])[:, 0])

    def kept_patches(self, key: Key[Array, ""], num_images: int, num_patches: int) -> Int[Array, "n _"]:
        """Returns random numbers of the patches of each image that are left."""
        count = max(1, num_patches - int(self.masked * num_patches))
        return random_patches(key, num_images, num_patches, count)

    def masked_text(self, key: Key[Array, ""], text: Int[Array, "n l"]) -> Int[Array, "n l"]:
        """Returns token ids with random words replaced; padding stays."""
        chosen = jax.random.bernoulli(key, self.masked, text.shape) & (text != self.padding_token)
        return jnp.where(chosen, self.mask_token, text)


def random_patches(key: Key[Array, ""], num_images: int, num_patches: int, count: int) -> Int[Array, "n count"]:
    """Returns random numbers of ``count`` patches of each image, in ascending order."""
    order = jnp.argsort(jax.random.uniform(key, (num_images, num_patches)), axis=1)
    return sharding.as_batch(jnp.sort(order[:, :count], axis=1))
