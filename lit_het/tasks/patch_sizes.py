"""Losses at several patch sizes of an image tower, of which each training step draws one.

The tower's parameters are those of ``patch_size``. At another size, the first layer and the positions are linear
functions of them, so that their gradient is exact: FlexiViT (Beyer et al. 2023), as used by SoViT (Sec. 5.5).
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from lit_het.towers.image_config import ViTConfig
from lit_het.towers.resizing import bilinear, patch_resize
from lit_het.types import Params

_Loss = TypeVar("_Loss", bound=Any)


def at_patch_sizes(loss: _Loss, tower: Any) -> list[_Loss]:
    """Returns a task's loss at each of its image tower's ``patch_sizes``, the smallest first; itself without them.

    Args:
        loss: its first argument are all parameters.
        tower: configuration of the image tower.
    """
    return [_at(size, loss, tower) for size in sorted({*tower.patch_sizes})] or [loss]


def _at(size: int, loss: _Loss, tower: ViTConfig) -> _Loss:
    resized = dataclasses.replace(tower, patch_size=size, patch_sizes=())

    def at_size(params: Params, *others: Any) -> Any:
        return loss(params | {"image_tower": resize_tower(params["image_tower"], tower, resized)}, *others)

    return at_size  # pyright: ignore[reportReturnType]


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
