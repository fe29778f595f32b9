"""Masked images and texts, whose Gaussians are to contain those of the whole ones (ProLIP)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, Shaped

from lit_het import sharding
from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.losses.base import finite, masked_mean, weights
from lit_het.objectives.base import Context, Objective, Setup
from lit_het.types import Metrics


@dataclasses.dataclass(frozen=True)
class MaskingConfig(Objective):
    """The second inclusion loss of ProLIP: an image, or a text, is included in itself with parts masked.

    Its defaults are ProLIP's. Both towers run once more on the masked rows.

    Attributes:
        weight: of the loss, the sum of images and texts.
        masked: the share of patches that is left out, and the probability with which a word is replaced.
        every: one row of a batch in this many is masked.
        mask_token: the id that replaces words, in the vocabulary of the text tower.
        padding_token: the id that is never replaced.
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

    def check(self, setup: Setup) -> None:
        """Checks that the model has Gaussians, patches and the tokens, and that padding has its own token."""
        setup.require_captions("masking")
        if setup.task.head.text_variances is None or not setup.task.image_tower.pools_tokens:
            raise UserError("task.masking needs the head 'gaussian' and a ViT as image tower; leave it out")
        for field in ("mask_token", "padding_token"):
            if getattr(self, field) >= (size := setup.task.text_tower.vocabulary_size):
                raise UserError(
                    f"task.masking.{field} = {getattr(self, field)} is not below the vocabulary of {size} tokens"
                )
        if setup.tokenizer is not None:
            self._check_data(setup.run.data, setup.tokenizer)

    def _check_data(self, data: Any, tokenizer: Any) -> None:
        for field in ("embeddings", "text_embeddings"):
            if getattr(data, field) is not None:
                flag = field.replace("_", "-")
                raise UserError(f"--task.masking masks patches and words; leave it out, or leave out --data.{flag}")
        if self.padding_token != tokenizer.padding_id:
            raise UserError(
                f"--task.masking.padding-token {self.padding_token} is not the padding of the tokenizer, "
                f"{tokenizer.padding_id}; make it equal, or set --tokenizer.padding-id"
            )

    def term(self, context: Context) -> tuple[Float[Array, ""], Metrics]:
        """Returns the weighted inclusion loss of the masked rows."""
        batch, model = context.batch, context.model
        if batch.image is None or batch.text is None or batch.text_embedding is not None:
            raise UserError("task.masking needs images and captions, not their stored embeddings; leave one out")
        assert context.image is not None
        assert context.text is not None
        pixels, words, valid = (self.rows(x) for x in (batch.image, batch.text, batch.valid))
        of_images, of_texts = jax.random.split(context.keys("masking"))
        kept = self.kept_patches(of_images, len(pixels), model.image_tower.num_patches(pixels))
        masked_image = model.image_tower(pixels, None, kept).embedding
        masked_text = model.text_tower(self.masked_text(of_texts, words)).embedding
        masked = (finite(side, valid) for side in (masked_image, masked_text))
        values = self.weight * model.head.masked_inclusion(self.rows(context.image), self.rows(context.text), *masked)
        share = weights(valid, None if batch.weight is None else self.rows(batch.weight))
        return jnp.sum(share * values), {"masked_inclusion_loss": masked_mean(values, valid)}

    def rows(self, x: Shaped[Array, "b *rest"]) -> Shaped[Array, "n *rest"]:
        """Returns the rows that are masked: the first of every group, so that no row moves between devices."""
        shares = sharding.num_automatic_shards()
        if len(x) % (self.every * shares):
            raise UserError(
                f"a batch of {len(x)} rows on {shares} devices is not a multiple of {self.every * shares}; change "
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
