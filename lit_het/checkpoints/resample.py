"""A trained ViT at another image size or with other patches: what its positions and its first layer become."""

import numpy as np
import scipy.ndimage
from jaxtyping import Float

from lit_het.errors import UserError
from lit_het.towers.vit import ViTConfig


def resample(
    path: str, param: Float[np.ndarray, "..."], source: ViTConfig, target: ViTConfig
) -> Float[np.ndarray, "..."]:
    """Returns a parameter of one of our towers for another image size and other patches.

    Args:
        path: of the parameter within the tower.
        param: its value.
        source: the tower that it comes from.
        target: the tower that it goes to.
    """
    if path == "positions":
        return resample_positions(param, target.side, keeps_corners=source.patch_size == target.patch_size)
    if path == "patches/kernel":
        kernel = param.reshape(source.patch_size, source.patch_size, 3, -1)
        return resample_patches(kernel, target.patch_size).reshape(-1, param.shape[-1])
    return param


def resample_positions(
    positions: Float[np.ndarray, "n d"], side: int, *, keeps_corners: bool = True
) -> Float[np.ndarray, "m d"]:
    """Returns the positions of a grid of ``side`` x ``side`` patches, bilinear between those of the old square grid.

    Args:
        positions: row by row.
        side: of the new grid.
        keeps_corners: True puts corners on corners (Dosovitskiy et al. 2021, Sec. 3.2; big_vision does the same); False
            the edges of the image on its edges, smoothing where the grid gets coarser (FlexiViT's model).

    Raises:
        UserError: the old positions form no square.
    """
    old = round(len(positions) ** 0.5)
    if old * old != len(positions):
        raise UserError(f"{len(positions)} positions form no square grid, so they cannot be resampled")
    if old == side:
        return positions
    grid = positions.reshape(old, old, -1)
    if keeps_corners:
        resampled = np.asarray(scipy.ndimage.zoom(grid, (side / old, side / old, 1), order=1))
    else:
        resize = _bilinear(old, side, smooth=True).astype(np.float32)
        resampled = np.einsum("ah,bw,hwd->abd", resize, resize, grid)
    return resampled.reshape(side * side, -1)


def resample_patches(kernel: Float[np.ndarray, "p p c d"], size: int) -> Float[np.ndarray, "q q c d"]:
    """Returns the first layer for patches of ``size`` pixels: ``pinv(Bᵀ) w``, B the bilinear resizing of a patch.

    A larger patch then gives the same token for the resized image (FlexiViT, Beyer et al. 2023, Eq. 3-5).
    """
    old_height, old_width, channels, width = kernel.shape
    if (old_height, old_width) == (size, size):
        return kernel
    resize = np.kron(_bilinear(old_height, size), _bilinear(old_width, size))
    flat = np.linalg.pinv(resize.T) @ kernel.reshape(old_height * old_width, channels * width).astype(np.float64)
    return flat.reshape(size, size, channels, width).astype(np.float32)


def _bilinear(old: int, new: int, *, smooth: bool = False) -> Float[np.ndarray, "new old"]:
    """Returns linear interpolation between pixel centres with edges repeated; ``smooth`` widens it to shrink."""
    position = (np.arange(new) + 0.5) * old / new - 0.5
    reach = max(old / new, 1.0) if smooth else 1.0
    weights = np.maximum(1 - np.abs(position[:, None] - np.arange(old)) / reach, 0)
    return weights / weights.sum(axis=1, keepdims=True)
