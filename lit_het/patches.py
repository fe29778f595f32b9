"""Images of any shape as rows of as many patches (NaFlex; SigLIP 2, Tschannen et al. 2025, Sec. 2.4.2).

A patch is its pixels, row by row, followed by its row and its column, counted from 1, of two bytes each; zeros are
padding. A batch of images is then one array of bytes, as a batch of squares is.
"""

import bisect
import functools
import math
from typing import Any

import einops
import numpy as np
from jaxtyping import UInt8

from lit_het.patches_config import PLACE_BYTES, Patches


def grid(patches: Patches, height: float, width: float) -> tuple[int, int]:
    """Returns the rows and columns of the patches of an image.

    The image is scaled as much as ``⌈s h / p⌉ ⌈s w / p⌉ ≤ N`` allows, for patches of p pixels, N at most. The largest s
    has a whole number of rows or of columns; the published code approaches it by bisection.
    """
    (rows, of_rows), (columns, of_columns) = _most(patches, height, width), _most(patches, width, height)
    return (rows, of_rows) if rows * width > columns * height else (of_columns, columns)


def _most(patches: Patches, side: float, other: float) -> tuple[int, int]:
    """Returns how many patches a side has at most, at a scale where that is a whole number; and the other side."""
    numbers = range(1, patches.most + 1)
    count = bisect.bisect_right(numbers, patches.most, key=lambda number: number * math.ceil(number * other / side))
    return count, math.ceil(count * other / side)


def sides(patches: Patches, height: float, width: float) -> tuple[int, int]:
    """Returns the height and the width in pixels to which an image is resized."""
    rows, columns = grid(patches, height, width)
    return rows * patches.size, columns * patches.size


def cut(patches: Patches, image: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "n c"]:
    """Returns the patches of an image whose sides are whole patches."""
    size = patches.size
    rows, columns = image.shape[0] // size, image.shape[1] // size
    found = np.zeros(patches.shape, np.uint8)
    filled = found[: rows * columns]
    # Each line of a patch is copied as one item: half the time of bytes.
    line = np.dtype((np.void, 3 * size))
    lines = filled[:, :-PLACE_BYTES].reshape(rows, columns, size, 3 * size).view(line)
    lines[...] = image.reshape(rows, size, columns, 3 * size).view(line).swapaxes(1, 2)
    filled[:, -PLACE_BYTES:] = _places(rows, columns)
    return found


@functools.lru_cache(1024)
def _places(rows: int, columns: int) -> UInt8[np.ndarray, "n 4"]:
    places = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1) + 1
    return places.astype(">u2").view(np.uint8)


def join(patches: Patches, image: UInt8[np.ndarray, "n c"]) -> UInt8[np.ndarray, "h w 3"]:
    """Returns the image of its patches."""
    pixels, places = split(image)
    rows, columns = places.max(axis=0)
    size = {"p": patches.size, "q": patches.size}
    return einops.rearrange(pixels[: rows * columns], "(h w) (p q c) -> (h p) (w q) c", h=rows, w=columns, **size)


def split(image: Any) -> tuple[Any, Any]:
    """Returns the pixels ``[... n c]`` and the places ``[... n 2]`` of patches, of NumPy or JAX."""
    places = image[..., -PLACE_BYTES:].astype("int32")
    return image[..., :-PLACE_BYTES], 256 * places[..., ::2] + places[..., 1::2]
