"""Resamples positions of a trained tower for another image, patch or text size, and the first layer of a ViT."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy
from jaxtyping import Float

from lit_het.errors import UserError
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.resizing import bilinear, patch_resize
from lit_het.weights.rename import ParameterSource


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
        of_grids = np.split(param, source.num_grids)
        keeps_corners = source.patch_size == target.patch_size
        return np.concatenate([resample_positions(one, target.side, keeps_corners=keeps_corners) for one in of_grids])
    if path == "patches/kernel":
        kernel = param.reshape(source.cells, source.cells, source.num_channels, -1)
        return resample_patches(kernel, target.cells).reshape(-1, param.shape[-1])
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
        resize = bilinear(old, side, smooth=True).astype(np.float32)
        resampled = np.einsum("ah,bw,hwd->abd", resize, resize, grid)
    return resampled.reshape(side * side, -1)


def with_length(positions: Float[np.ndarray, "n d"], length: int) -> Float[np.ndarray, "l d"]:
    """Returns positions of texts: the first ``length``, or if there are fewer, as many by linear interpolation.

    As ``jax.image.resize(positions, (length, d), "linear")``: with positions at the centres of equal intervals.
    """
    if length <= len(positions):
        return positions[:length]
    return (bilinear(len(positions), length) @ positions).astype(np.float32)


def length_of_texts(positions: str, stored: int, length: int | None, why: str = "") -> int:
    """Returns the length of texts that padding is part of: that of the file, or a larger one.

    Args:
        positions: name of their array.
        stored: its length.
        length: the length that is asked for; None for that of the file.
        why: why there cannot be fewer, after the number of positions.
    """
    length = stored if length is None else length
    if length < stored:
        raise UserError(
            f"{positions} holds {stored} positions{why}; it cannot be read with fewer: text_length = {length}"
        )
    return length


def texts_of_length(sources: Sequence[ParameterSource], length: int) -> list[ParameterSource]:
    """Returns sources of which those of a text tower's positions give ``length`` of them, see `with_length`."""
    return [
        dataclasses.replace(source, combine=lambda *arrays, read=source.combine: with_length(read(*arrays), length))
        if source.target == "text_tower/positions"
        else source
        for source in sources
    ]


def resample_patches(kernel: Float[np.ndarray, "p p c d"], size: int) -> Float[np.ndarray, "q q c d"]:
    """Returns the first layer for patches of ``size`` pixels, see `lit_het.towers.resizing`."""
    old_height, old_width, channels, width = kernel.shape
    if (old_height, old_width) == (size, size):
        return kernel
    flat = patch_resize(old_height, size) @ kernel.reshape(-1, channels * width).astype(np.float64)
    return flat.reshape(size, size, channels, width).astype(np.float32)
