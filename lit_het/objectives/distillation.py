"""Self-distillation and masked prediction beside a contrastive loss (SigLIP 2, Sec. 2.3; SILC; DINO; iBOT)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het.errors import UserError
from lit_het.losses.base import weights
from lit_het.losses.distillation import prototype_cross_entropy
from lit_het.objectives.distillation_config import DistillationConfig
from lit_het.objectives.masking import random_patches
from lit_het.objectives.views import random_views
from lit_het.random import Keys
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.layers import linear
from lit_het.towers.vit import ViT
from lit_het.types import Batch, Metrics


class PrototypeHead(nnx.Module):
    """Features to unit vectors, and unit prototypes to compare them with (DINO, App. C)."""

    def __init__(self, width: int, config: DistillationConfig, rngs: nnx.Rngs):
        self.first = linear(width, config.hidden, "float32", rngs)
        self.second = linear(config.hidden, config.hidden, "float32", rngs)
        self.bottleneck = linear(config.hidden, config.bottleneck, "float32", rngs)
        normal = nnx.initializers.normal(1.0)
        self.prototypes = nnx.Param(normal(rngs.params(), (config.bottleneck, config.num_prototypes), jnp.float32))

    def __call__(self, features: Float[Array, "n width"]) -> Float[Array, "n d"]:
        """Returns unit vectors."""
        hidden = nnx.gelu(self.first(features.astype(jnp.float32)), approximate=False)
        return _unit(self.bottleneck(nnx.gelu(self.second(hidden), approximate=False)), axis=1)

    def unit_prototypes(self) -> Float[Array, "d k"]:
        """Returns the directions of the prototypes: their lengths do not count (DINO's weight norm of length 1)."""
        return _unit(self.prototypes[...], axis=0)


class Distillation(nnx.Module):
    """What the losses of a `DistillationConfig` need besides the image tower."""

    def __init__(self, config: DistillationConfig, tower: ViTConfig, rngs: nnx.Rngs):
        self.config = config
        width = tower.encoder.width
        if config.weight:
            self.image_head = PrototypeHead(tower.embedding_size, config, rngs)
        if config.masked_weight:
            self.patch_head = PrototypeHead(width, config, rngs)
            self.mask_token = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (width,), jnp.float32))


def distillation_loss(
    student: tuple[ViT, Distillation], teacher: tuple[ViT, Distillation], batch: Batch, keys: Keys
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the weighted sum of both losses, and metrics.

    Args:
        student: image tower and heads to differentiate.
        teacher: the moving average of both.
        batch: with images.
        keys: random keys of views and masks.

    Raises:
        UserError: the batch has stored embeddings instead of images.
    """
    if batch.image is None:
        raise UserError("task.distillation needs images, not their stored embeddings; leave out data.embeddings")
    config, tower = student[1].config, student[0].config
    of_whole, of_parts, of_mask = jax.random.split(keys("distillation"), 3)
    whole = random_views(of_whole, batch.image, 1, tower.image_size, config.global_areas)
    target = teacher[0](whole)
    share = weights(batch.valid, batch.weight)
    loss, metrics = jnp.zeros(()), {}
    if config.weight:
        parts = random_views(of_parts, batch.image, config.num_views, config.view_size, config.view_areas)
        heads = student[1].image_head, teacher[1].image_head
        value, found = _compared(config, heads, (student[0](parts).embedding, target.embedding), share)
        metrics |= {"distillation_loss": value, **found}
        loss = loss + config.weight * value
    if config.masked_weight:
        masked = masked_patches(of_mask, config.masked, len(whole), tower.num_patches)
        is_masked = (masked[:, :, None] == jnp.arange(tower.num_patches)[None, None]).any(axis=1)
        tokens = student[0](whole, masked=is_masked, mask_token=student[1].mask_token[...]).tokens
        heads = student[1].patch_head, teacher[1].patch_head
        of_patches = (x[:, -tower.num_patches :] for x in (tokens, target.tokens))
        at_mask = tuple(jnp.take_along_axis(x, masked[:, :, None], axis=1) for x in of_patches)
        value, found = _compared(config, heads, at_mask, share)
        metrics |= {"masked_prediction_loss": value, **{f"patch_{name}": figure for name, figure in found.items()}}
        loss = loss + config.masked_weight * value
    return loss, metrics


def masked_patches(key: Key[Array, ""], share: float, num_images: int, num_patches: int) -> Int[Array, "b v"]:
    """Returns the numbers of the patches of each image that are masked, equally many of each."""
    return random_patches(key, num_images, num_patches, max(1, int(share * num_patches)))


def _compared(
    config: DistillationConfig,
    heads: tuple[PrototypeHead, PrototypeHead],
    features: tuple[Float[Array, "..."], ...],
    share: Float[Array, " b"],
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the loss of the features of several views or patches of each image, of student and teacher."""
    student, teacher = (
        head(x.reshape(-1, x.shape[-1])).reshape(len(share), -1, config.bottleneck)
        for head, x in zip(heads, features, strict=True)
    )
    return prototype_cross_entropy(
        student,
        teacher,
        heads[0].unit_prototypes(),
        heads[1].unit_prototypes(),
        share,
        student_temperature=config.student_temperature,
        teacher_temperature=config.teacher_temperature,
    )


def _unit(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    # The square root has no gradient at 0, where a row may be.
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=axis, keepdims=True), 1e-12))
