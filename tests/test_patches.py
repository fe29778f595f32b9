"""Images of any shape as patches: the size rule of NaFlex, and the bytes of a patch."""

import math

import numpy as np
import pytest

from lit_het.errors import FieldError
from lit_het.patches import cut, grid, join, sides, split
from lit_het.patches_config import Patches


def by_bisection(height, width, size, most):
    """The size rule as big_vision and transformers have it, to a finer tolerance than their 1e-5."""
    low, high = 1e-6, 100.0
    while high - low >= 1e-12:
        scale = (low + high) / 2
        rows, columns = (max(1, math.ceil(scale * side / size)) for side in (height, width))
        low, high = (scale, high) if rows * columns <= most else (low, scale)
    return tuple(max(1, math.ceil(low * side / size)) for side in (height, width))


def test_the_grid_is_that_of_the_published_bisection():
    random = np.random.default_rng(0)
    for height, width in random.integers(8, 5000, (200, 2)).astype(float).tolist():
        size, most = int(random.choice([14, 16, 32])), int(random.choice([128, 256, 576, 784, 1024]))
        assert grid(Patches(size, most), height, width) == by_bisection(height, width, size, most)


def test_a_square_fills_a_square_grid_and_a_line_has_one_row():
    patches = Patches(16, 256)
    assert grid(patches, 256.0, 256.0) == grid(patches, 3.0, 3.0) == (16, 16)
    assert grid(patches, 1.0, 4000.0) == (1, 256)
    assert grid(patches, 4000.0, 1.0) == (256, 1)
    assert sides(patches, 480.0, 640.0) == (14 * 16, 18 * 16)
    assert grid(Patches(16, 1), 480.0, 640.0) == (1, 1)


def test_hardly_any_patches_are_padding():
    """Which is why images are not packed several to a row: it would gain as little."""
    ratios = np.exp(np.random.default_rng(0).uniform(np.log(1 / 2), np.log(2), 1000))
    filled = [math.prod(grid(Patches(16, 256), 1000.0, 1000 * float(ratio))) / 256 for ratio in ratios]
    assert 0.97 < np.mean(filled) < 1


def test_patches_are_numbered_from_one_and_joined_to_the_image_again():
    patches = Patches(2, 700)
    image = np.random.default_rng(0).integers(0, 256, (4, 600, 3), np.uint8)
    found = cut(patches, image)
    assert found.shape == patches.shape == (700, 16)
    np.testing.assert_array_equal(join(patches, found), image)
    pixels, places = split(found)
    np.testing.assert_array_equal(pixels[301].reshape(2, 2, 3), image[2:, 2:4])
    assert places[[0, 299, 300, 599, 600]].tolist() == [[1, 1], [1, 300], [2, 1], [2, 300], [0, 0]]


@pytest.mark.parametrize(("size", "most"), [(0, 256), (16, 0), (1, 2**16), (8192, 2)])
def test_sizes_beyond_any_image_are_refused(size, most):
    with pytest.raises(FieldError, match="must be at"):
        Patches(size, most)
