"""Resamples the positions and the first layer of a trained ViT for another image or patch size."""

import numpy as np
import scipy.ndimage
from jaxtyping import Float

from lit_het.errors import UserError
from lit_het.towers.vit import ViTConfig


def resample(
    path: str, param: Float[np.ndarray, "..."], source: ViTConfig, target: ViTConfig
) -> Float[np.ndarray, "..."]:
    """Returns a parameter of an image tower, resampled for another image and patch size.

    Args:
        path: of the parameter within the tower.
        param: its value.
        source: the tower of ``param``.
        target: the tower with the new sizes.
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
    """Returns positions for ``side`` x ``side`` patches, by bilinear interpolation of the old square grid.

    Args:
        positions: of the old grid, in row-major order.
        side: number of rows of the new grid.
        keeps_corners: True aligns the centres of the corner patches (Dosovitskiy et al. 2021, Sec. 3.2, and
            big_vision). False aligns the edges of the image, with antialiasing for a coarser grid (FlexiViT).

    Raises:
        UserError: the old grid is not square.
    """
    old = round(len(positions) ** 0.5)
    if old * old != len(positions):
        raise UserError(f"{len(positions)} positions form no square grid, so they cannot be resampled")
    if old == side:
        return positions
    # Two conventions: see docs/paper_map.md, 31.
    grid = positions.reshape(old, old, -1)
    if keeps_corners:
        resampled = np.asarray(scipy.ndimage.zoom(grid, (side / old, side / old, 1), order=1))
    else:
        resize = _bilinear(old, side, smooth=True).astype(np.float32)
        resampled = np.einsum("ah,bw,hwd->abd", resize, resize, grid)
    return resampled.reshape(side * side, -1)


def resample_patches(kernel: Float[np.ndarray, "p p c d"], size: int) -> Float[np.ndarray, "q q c d"]:
    """Returns the first layer for patches of ``size`` pixels: ``pinv(Bᵀ) w``, where B resizes a patch bilinearly.

    A larger patch of the resized image then gives the same token (FlexiViT, Beyer et al. 2023, Eq. 3-5).
    """
    old_height, old_width, channels, width = kernel.shape
    if (old_height, old_width) == (size, size):
        return kernel
    resize = np.kron(_bilinear(old_height, size), _bilinear(old_width, size))
    # In float64: a pseudo-inverse magnifies rounding errors.
    flat = np.linalg.pinv(resize.T) @ kernel.reshape(old_height * old_width, channels * width).astype(np.float64)
    return flat.reshape(size, size, channels, width).astype(np.float32)


def _bilinear(old: int, new: int, *, smooth: bool = False) -> Float[np.ndarray, "new old"]:
    """Returns the matrix of linear interpolation between pixel centres; ``smooth`` antialiases when shrinking."""
    position = (np.arange(new) + 0.5) * old / new - 0.5
    reach = max(old / new, 1.0) if smooth else 1.0
    # At the edges, where a neighbour is missing, the weights are renormalised: this repeats the edge.
    weights = np.maximum(1 - np.abs(position[:, None] - np.arange(old)) / reach, 0)
    return weights / weights.sum(axis=1, keepdims=True)
