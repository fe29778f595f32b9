"""Each operation equals Pillow's, or a slow reference warp."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from lit_het.data_pipelines.images import rand_augment
from lit_het.data_pipelines.images.augment import StreamRandom
from lit_het.data_pipelines.images.rand_augment import CHANGES, RandAugment
from tests.refusals import assert_refused

AMOUNTS = (-1.0, -0.3, 0.0, 0.5, 1.0)


def scene(height: int = 24, width: int = 32) -> np.ndarray:
    """A smooth image with an own range of levels in each channel."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 5), np.cos(y / 4), np.sin((x + y) / 6)], axis=-1)
    noise = np.random.default_rng(0).normal(0, 4, (height, width, 3))
    return np.clip([120, 140, 100] + waves * [90, 60, 70] + noise, 0, 255).astype(np.uint8)


def pillow(operation: Callable[[Image.Image], Image.Image]) -> np.ndarray:
    return np.asarray(operation(Image.fromarray(scene())))


def largest_difference(one: np.ndarray, other: np.ndarray) -> int:
    assert one.dtype == other.dtype == np.uint8
    return int(np.abs(one.astype(int) - other).max())


def test_autocontrast_stretches_each_channel_to_all_levels():
    image = scene()
    levels, low, high = image.astype(float), image.min((0, 1)), image.max((0, 1))
    expected = (255 * (levels - low) / (high - low)).astype(np.uint8)
    assert largest_difference(rand_augment.autocontrast(image, 1.0), expected) <= 1


def test_equalize_gives_all_parts_of_the_range_as_many_pixels():
    shares = np.histogram(rand_augment.equalize(scene(), 1.0), bins=4, range=(0, 256))[0] / scene().size
    np.testing.assert_allclose(shares, 0.25, atol=0.03)
    assert np.ptp(np.histogram(scene(), bins=4, range=(0, 256))[0] / scene().size) > 0.2


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_an_image_of_one_colour_stays_as_it_is(name: str):
    image = np.full((4, 4, 3), 7, np.uint8)
    np.testing.assert_array_equal(getattr(rand_augment, name)(image, 1.0), image)


@pytest.mark.parametrize("amount", AMOUNTS)
def test_solarize_and_posterize_equal_pillows(amount: float):
    expected = pillow(lambda image: ImageOps.solarize(image, round(256 * (1 - abs(amount)) + 0.49)))
    np.testing.assert_array_equal(rand_augment.solarize(scene(), amount), expected)
    expected = pillow(lambda image: ImageOps.posterize(image, 8 - round(4 * abs(amount))))
    np.testing.assert_array_equal(rand_augment.posterize(scene(), amount), expected)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("name", ["brightness", "contrast", "colour", "sharpness"])
def test_enhancements_equal_pillows_within_one_level(name: str, amount: float):
    enhancer = getattr(ImageEnhance, "Color" if name == "colour" else name.capitalize())
    expected = pillow(lambda image: enhancer(image).enhance(1 + 0.9 * amount))
    assert largest_difference(getattr(rand_augment, name)(scene(), amount), expected) <= 2  # Pillow cuts, we round


def slow_warp(image: np.ndarray, inverse: Callable[[float, float], tuple[float, float]]) -> np.ndarray:
    """Looks up where each pixel comes from, bilinearly, over grey."""
    height, width = image.shape[:2]
    padded = np.full((height + 2, width + 2, 3), 128.0)
    padded[1:-1, 1:-1] = image
    result = np.full(image.shape, 128.0)
    for row in range(height):
        for column in range(width):
            x, y = inverse(column - (width - 1) / 2, row - (height - 1) / 2)
            x, y = x + (width - 1) / 2 + 1, y + (height - 1) / 2 + 1
            if 0 <= x < width + 1 and 0 <= y < height + 1:
                i, j = int(y), int(x)
                v, u = y - i, x - j
                upper = (1 - u) * padded[i, j] + u * padded[i, j + 1]
                lower = (1 - u) * padded[i + 1, j] + u * padded[i + 1, j + 1]
                result[row, column] = (1 - v) * upper + v * lower
    return np.round(result).astype(np.uint8)


def turned(x: float, y: float, amount: float) -> tuple[float, float]:
    c, s = np.cos(np.radians(30 * amount)), np.sin(np.radians(30 * amount))
    return c * x - s * y, s * x + c * y


# Where the pixel at (x, y) from the centre comes from, in an image 32 wide and 24 high.
ORIGINS = {
    "rotate": turned,
    "shear_x": lambda x, y, amount: (x - 0.3 * amount * y, y),
    "shear_y": lambda x, y, amount: (x, y - 0.3 * amount * x),
    "translate_x": lambda x, y, amount: (x - 32 * 150 / 331 * amount, y),
    "translate_y": lambda x, y, amount: (x, y - 24 * 150 / 331 * amount),
}


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("name", ORIGINS)
def test_geometric_operations_equal_slow_warps(name: str, amount: float):
    expected = slow_warp(scene(), lambda x, y: ORIGINS[name](x, y, amount))
    # OpenCV looks up at 1/32 of a pixel
    assert largest_difference(getattr(rand_augment, name)(scene(), amount), expected) <= 5


def test_a_positive_rotation_is_pillows_rotation():
    ours = rand_augment.rotate(scene(), 1.0)[6:-6, 8:-8].astype(int)
    theirs = pillow(lambda image: image.rotate(30, Image.Resampling.BILINEAR))[6:-6, 8:-8]
    assert np.abs(ours - theirs).mean() < 1


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_operations_change_a_copy_that_remains_visible_and_at_magnitude_0_nothing_but_histograms(change: Callable):
    given = scene()
    changed = change(given, 0.7)
    assert (changed.shape, changed.dtype) == (given.shape, np.uint8)
    np.testing.assert_array_equal(given, scene())
    if change.__name__ not in ("autocontrast", "equalize"):
        np.testing.assert_array_equal(change(given, 0.0), given)
    for amount in (-1.5, 1.5):  # magnitude 15
        assert change(given, amount).std() > 1, "the image remains visible"


def test_layers_are_drawn_with_replacement_and_signs_uniformly(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[int, float]] = []

    def recorder(number: int):
        def change(image: np.ndarray, amount: float) -> np.ndarray:
            calls.append((number, amount))
            return image

        return change

    monkeypatch.setattr(rand_augment, "CHANGES", tuple(recorder(number) for number in range(14)))
    random = StreamRandom(0)
    for position in range(2000):
        RandAugment(3, 5.0).apply(scene(2, 2), random.at(position))
    numbers, amounts = np.array(calls).T
    assert len(calls) == 6000
    counts = np.bincount(numbers.astype(int), minlength=14)
    assert np.abs(counts - 6000 / 14).max() < 5 * np.sqrt(6000 / 14)
    assert set(amounts) == {0.5, -0.5}
    assert abs((amounts > 0).mean() - 0.5) < 0.03


def test_augmentation_depends_only_on_the_position_in_the_stream():
    random, policy = StreamRandom(3), RandAugment()
    first = [policy.apply(scene(), random.at(position)) for position in range(8)]
    for position in (5, 2):
        np.testing.assert_array_equal(policy.apply(scene(), StreamRandom(3).at(position)), first[position])
    assert len({image.tobytes() for image in first}) > 4


def test_magnitude_15_changes_1_5_times_as_much_as_10():
    """The recipe of e3 App. K takes 15."""
    image = scene()
    choice, sign = StreamRandom(0).at(0).random(2).tolist()
    expected = CHANGES[int(choice * len(CHANGES))](image, 1.5 if sign < 0.5 else -1.5)
    np.testing.assert_array_equal(RandAugment(1, 15.0).apply(image, StreamRandom(0).at(0)), expected)
    for change in CHANGES:
        assert change(image, 2.0).shape == change(image, -2.0).shape == image.shape


def test_invalid_magnitudes_and_layers_are_refused():
    assert_refused(r"magnitude = 25\.0 must be at most 20", RandAugment, 2, 25.0)
    assert_refused("num_layers = -1", dataclasses.replace, RandAugment(), num_layers=-1)
