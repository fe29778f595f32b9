"""Losses at several patch sizes of an image tower, of which each training step draws one.

The tower's parameters are those of ``patch_size``. At another size, the first layer and the positions are linear
functions of them, so that their gradient is exact: FlexiViT (Beyer et al. 2023), as used by SoViT (Sec. 5.5).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lit_het.errors import UserError
from lit_het.random import Keys
from lit_het.tasks.base import Loss
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.union import TaskConfig
from lit_het.towers.resizing import bilinear, patch_resize
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch, Metrics, Params


def losses(config: TaskConfig) -> tuple[Loss, ...]:
    """Returns the task's loss at each of its image tower's ``patch_sizes``, the smallest first; none without them.

    Raises:
        UserError: the task has other losses that depend on the patches.
    """
    if not isinstance(config, ClassificationConfig | ContrastiveConfig):
        return ()  # a decoder reads a fixed number of tokens
    tower = config.image_tower
    if not isinstance(tower, ViTConfig) or not tower.patch_sizes:
        return ()
    if isinstance(config, ContrastiveConfig) and config.distillation is not None:
        raise UserError("task.distillation has views of its own: leave out task.image_tower.patch_sizes")
    return tuple(_loss(config, tower, size) for size in sorted({*tower.patch_sizes}))


def _loss(config: ClassificationConfig | ContrastiveConfig, tower: ViTConfig, size: int) -> Loss:
    resized = dataclasses.replace(tower, patch_size=size, patch_sizes=())
    task = dataclasses.replace(config, image_tower=resized).build()

    def loss(params: Params, batch: Batch, keys: Keys) -> tuple[Float[Array, ""], Metrics]:
        return task.loss(params | {"image_tower": resize_tower(params["image_tower"], tower, resized)}, batch, keys)

    return loss


def resize_tower(params: Params, source: ViTConfig, target: ViTConfig) -> Params:
    """Returns the parameters of a tower for another patch size, differentiably.

    Args:
        params: of ``source``, which has learned positions.
        source: the tower.
        target: the same tower with another patch size.
    """
    if source.patch_size == target.patch_size:
        return params
    kernel, grid = params["patches"]["kernel"], params["positions"].reshape(source.side, source.side, -1)
    pixels = jnp.asarray(patch_resize(source.patch_size, target.patch_size), jnp.float32)
    sides = jnp.asarray(bilinear(source.side, target.side, smooth=True), jnp.float32)
    # A pseudo-inverse magnifies rounding errors.
    with jax.default_matmul_precision("highest"):
        kernel = jnp.einsum("qp,pn->qn", pixels, kernel.reshape(pixels.shape[1], -1)).reshape(-1, kernel.shape[-1])
        grid = jnp.einsum("ah,bw,hwd->abd", sides, sides, grid)
    return params | {"patches": params["patches"] | {"kernel": kernel}, "positions": grid.reshape(-1, grid.shape[-1])}
