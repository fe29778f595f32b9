"""Common corruptions change images more with each severity."""

import cv2
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage, special

from lit_het.data_pipelines.images.corruptions import CORRUPTIONS, NUM_SEVERITIES, corrupt

# As published these are not in order: the severities of an elastic transform and of saturation are of different kinds,
# the second and third of snow differ in the size of flakes, a grid of 0.5 meets pixels where one of 0.6 does not, frost
# hides more of the image as it gets darker, and the third of spatter has fainter drops than the second.
UNORDERED = {"elastic_transform", "saturate", "snow", "pixelate", "frost", "spatter"}


def photograph(height: int = 128, width: int = 160) -> np.ndarray:
    """Smooth areas, edges and texture in colour."""
    random = np.random.default_rng(0)
    coarse = cv2.resize(random.integers(0, 256, (6, 8, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
    fine = cv2.resize(random.integers(-30, 30, (height // 2, width // 2, 3)).astype(np.int16), (width, height))
    return np.clip(0.6 * coarse.astype(np.int16) + 40 + fine, 0, 255).astype(np.uint8)


def distance(image: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(image.astype(float) - other).mean())


def corrupted(image: np.ndarray, name: str, severity: int, seed: int = 0) -> np.ndarray:
    return corrupt(image, name, severity, np.random.default_rng(seed))


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("size", [(128, 160), (32, 32)], ids=str)
def test_the_distance_to_the_image_rises_with_severity(name, size):
    image = photograph(*size)
    distances = [distance(image, corrupted(image, name, severity)) for severity in range(1, NUM_SEVERITIES + 1)]
    assert distances[0] > 0.1
    if name in UNORDERED:
        assert len({round(value, 3) for value in distances}) == NUM_SEVERITIES
    else:
        assert distances == sorted(distances), distances


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (7, 5), (40, 64), (300, 90)], ids=str)
def test_corrupted_images_keep_their_size(name, shape):
    image = photograph(max(shape[0], 2), max(shape[1], 2))[: shape[0], : shape[1]]
    for severity in (1, 5):
        changed = corrupted(image, name, severity)
        assert (changed.shape, changed.dtype) == (image.shape, np.uint8)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_grey_black_and_white_images_are_corrupted_without_a_warning(name):
    grey = np.repeat(photograph(48, 48)[:, :, :1], 3, axis=2)
    for image in (grey, np.zeros_like(grey), np.full_like(grey, 255)):
        assert corrupted(image, name, 5).shape == grey.shape


def test_large_images_are_shrunk_to_the_size_of_the_published_severities():
    assert corrupted(photograph(448, 600), "fog", 3).shape == (224, 300, 3)
    assert corrupted(photograph(900, 225), "gaussian_noise", 1).shape == (896, 224, 3)


RANDOM = {"gaussian_noise", "motion_blur", "fog", "frost", "snow", "spatter", "glass_blur", "elastic_transform"}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_equal_seeds_give_equal_images_and_other_seeds_others(name):
    image = photograph(64, 48)
    before = image.copy()
    one, same, other = (corrupted(image, name, 3, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    np.testing.assert_array_equal(image, before)
    assert name not in RANDOM or distance(one, other) > 0.1


def test_noise_has_the_published_strength():
    grey = np.full((200, 200, 3), 128, np.uint8)
    noise = (corrupted(grey, "gaussian_noise", 1).astype(float) - 128) / 255
    assert noise.std() == pytest.approx(0.08, rel=0.02)
    photons = corrupted(grey, "shot_noise", 1) / 255
    assert photons.std() == pytest.approx(np.sqrt(128 / 255 / 60), rel=0.02)
    assert (corrupted(grey, "impulse_noise", 3) != 128).mean() == pytest.approx(0.09, rel=0.1)


@pytest.mark.parametrize("name", ["gaussian_blur", "defocus_blur", "motion_blur", "zoom_blur", "pixelate"])
def test_a_blur_does_not_change_a_uniform_area(name):
    even = np.full((50, 70, 3), 77, np.uint8)
    np.testing.assert_array_equal(corrupted(even, name, 5), even)


def test_a_defocused_point_becomes_a_disk_of_the_published_radius():
    point = np.zeros((224, 224, 3), np.uint8)
    point[108:116, 108:116] = 255
    rows = np.flatnonzero(corrupted(point, "defocus_blur", 5)[:, 112, 0] > 3)
    assert len(rows) == pytest.approx(2 * 10 + 8, abs=2)


def test_contrast_keeps_the_mean_and_scales_the_deviation():
    image = photograph()
    changed = corrupted(image, "contrast", 1)
    np.testing.assert_allclose(changed.mean(axis=(0, 1)) + 0.5, image.mean(axis=(0, 1)), atol=0.5)
    np.testing.assert_allclose(changed.std(axis=(0, 1)), 0.4 * image.std(axis=(0, 1)), rtol=0.03)


def published_spatter(image: np.ndarray, severity: int, noise: np.ndarray) -> np.ndarray:
    """The generator of ImageNet-C (make_imagenet_c.py) on given standard normal noise, step by step; levels to 255."""
    mean, deviation, blur, threshold, last, is_mud = [
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ][severity - 1]
    levels = image / 255
    liquid = ndimage.gaussian_filter(mean + deviation * noise, blur, mode="nearest", truncate=4)
    liquid = np.where(liquid < threshold, 0, liquid)
    if is_mud:
        covered = ndimage.gaussian_filter(np.where(liquid > threshold, 1.0, 0.0), last, mode="nearest", truncate=4)
        covered = np.where(covered < 0.8, 0, covered)[:, :, None]
        return 255 * np.clip((1 - covered) * levels + covered * np.array([63, 42, 20]) / 255, 0, 1)
    grey = (liquid * 255).astype(np.int64).astype(np.uint8)
    distance = cv2.distanceTransform(255 - cv2.Canny(grey, 50, 150), cv2.DIST_L2, 5)
    distance = cv2.blur(np.where(distance > 20, 20, distance).astype(np.float32), (3, 3)).astype(np.uint8)
    relief = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    lit = cv2.filter2D(cv2.equalizeHist(distance), cv2.CV_8U, relief)
    drops = grey * cv2.blur(lit, (3, 3)).astype(float)
    return 255 * np.clip(levels + last * (drops / drops.max())[:, :, None] * np.array([175, 238, 238]) / 255, 0, 1)


@pytest.mark.parametrize("severity", range(1, NUM_SEVERITIES + 1))
@pytest.mark.parametrize("seed", range(3))
def test_spatter_equals_the_published_generator_on_the_same_noise(severity, seed):
    """To a level of 255, below which images are truncated."""
    image = photograph(224, 224)
    noise = np.random.default_rng(seed).standard_normal((224, 224))
    expected = published_spatter(image, severity, noise)
    assert distance(image, expected) > 0.1
    np.testing.assert_allclose(corrupted(image, "spatter", severity, seed), expected - 0.5, atol=0.502)


@pytest.mark.parametrize("fraction", [0.6, 0.5, 0.4, 0.3, 0.25])
def test_pixelate_is_the_published_one(fraction):
    image = photograph(224, 224)
    severity = 1 + [0.6, 0.5, 0.4, 0.3, 0.25].index(fraction)
    box = Image.Resampling.BOX
    side = int(224 * fraction)
    expected = Image.fromarray(image).resize((side, side), box).resize((224, 224), box)
    np.testing.assert_array_equal(corrupted(image, "pixelate", severity), expected)


@pytest.mark.parametrize("severity", range(1, NUM_SEVERITIES + 1))
def test_elastic_transform_equals_the_published_generator_on_the_same_draws(severity):
    """The generator of ImageNet-C (make_imagenet_c.py); OpenCV places pixels to 1/32, SciPy exactly."""
    image, draws = photograph(224, 224), np.random.default_rng(0)
    factor, spread, jitter = [
        (2, 0.7, 0.1),
        (2, 0.08, 0.2),
        (0.05, 0.01, 0.02),
        (0.07, 0.01, 0.02),
        (0.12, 0.01, 0.02),
    ][severity - 1]
    square = 224 // 3
    one = np.array([[square, square], [square, -square], [-square, -square]], np.float32) + 112
    other = one + draws.uniform(-244 * jitter, 244 * jitter, one.shape).astype(np.float32)
    moved = cv2.warpAffine(
        image.astype(np.float32) / 255,
        cv2.getAffineTransform(one, other),
        (224, 224),
        borderMode=cv2.BORDER_REFLECT_101,
    )
    noise = draws.uniform(-1, 1, (224, 224, 2))
    blurred = [ndimage.gaussian_filter(noise[:, :, i], 244 * spread, mode="reflect", truncate=3) for i in (1, 0)]
    places = np.indices((224, 224)) + 244 * factor * np.array(blurred)
    channels = [ndimage.map_coordinates(moved[:, :, i], places, order=1, mode="reflect") for i in range(3)]
    expected = np.clip(np.stack(channels, axis=2), 0, 1) * 255
    found = corrupted(image, "elastic_transform", severity)
    assert distance(found, expected - 0.5) < 0.4
    np.testing.assert_allclose(found, expected, atol=4)


@pytest.mark.parametrize(("severity", "threshold", "blur"), [(1, 0.69, 4), (2, 0.68, 3)])
def test_drops_cover_the_same_share_of_images_of_any_size(severity, threshold, blur):
    """White noise of deviation 0.3 has, blurred, the deviation 0.3 / (2 √π blur): the share above the threshold."""
    share = special.ndtr(-(threshold - 0.65) * 2 * np.sqrt(np.pi) * blur / 0.3)
    for size in (224, 96, 32):
        black = np.zeros((size, size, 3), np.uint8)
        seeds = range(6400 // size)
        drops = [(corrupted(black, "spatter", severity, seed) > 0).any(axis=2).mean() for seed in seeds]
        # A part of each drop lies in the shade.
        assert 0.5 * share < np.mean(drops) < 1.5 * share


def test_frost_has_the_published_weights_and_the_mean_colour_of_photographs_of_frost():
    black, grey = np.zeros((224, 224, 3), np.uint8), np.full((224, 224, 3), 100, np.uint8)
    for severity, (of_image, of_frost) in enumerate([(1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)], 1):
        frost = corrupted(black, "frost", severity).astype(float)
        np.testing.assert_allclose(frost.mean(axis=(0, 1)) / 255 / of_frost, [0.57, 0.66, 0.70], atol=0.02)
        assert frost[:, :, 1].std() / 255 / of_frost == pytest.approx(0.1, abs=0.02)
        both = corrupted(grey, "frost", severity).astype(float)
        np.testing.assert_allclose(both[both < 255], (frost + of_image * 100)[both < 255], atol=1.01)
