"""A trained ViT at another image size or with other patches: what its positions and its first layer become."""

import numpy as np
import scipy.ndimage
from jaxtyping import Float

from lit_het.errors import UserError


def resample_positions(positions: Float[np.ndarray, "n d"], side: int) -> Float[np.ndarray, "m d"]:
    """Returns the positions of a grid of ``side`` x ``side`` patches, bilinear between those of the old square grid.

    Corners stay corners (Dosovitskiy et al. 2021, Sec. 3.2; big_vision does the same).

    Raises:
        UserError: the old positions form no square.
    """
    old = round(len(positions) ** 0.5)
    if old * old != len(positions):
        raise UserError(f"{len(positions)} positions form no square grid, so they cannot be resampled")
    if old == side:
        return positions
    grid = positions.reshape(old, old, -1)
    zoomed = np.asarray(scipy.ndimage.zoom(grid, (side / old, side / old, 1), order=1))
    return zoomed.reshape(side * side, -1)


def resample_patches(kernel: Float[np.ndarray, "p p c d"], size: int) -> Float[np.ndarray, "q q c d"]:
    """Returns the first layer for patches of ``size`` pixels: ``pinv(Bᵀ) w``, B the bilinear resizing of a patch.

    A larger patch then gives the same token for the resized picture (FlexiViT, Beyer et al. 2023, Eq. 3-5).
    """
    old_height, old_width, channels, width = kernel.shape
    if (old_height, old_width) == (size, size):
        return kernel
    resize = np.kron(_bilinear(old_height, size), _bilinear(old_width, size))
    flat = np.linalg.pinv(resize.T) @ kernel.reshape(old_height * old_width, channels * width).astype(np.float64)
    return flat.reshape(size, size, channels, width).astype(np.float32)


def _bilinear(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Returns linear interpolation between pixel centres, with edges repeated and without smoothing."""
    position = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    below = np.minimum(position.astype(int), max(old - 2, 0))
    above = np.minimum(below + 1, old - 1)
    matrix = np.zeros((new, old))
    np.add.at(matrix, (np.arange(new), below), 1 - (position - below))
    np.add.at(matrix, (np.arange(new), above), position - below)
    return matrix
