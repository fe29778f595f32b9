"""Common corruptions change images more with each severity."""

import cv2
import numpy as np
import pytest

from lit_het.data_pipelines.corruptions import CORRUPTIONS, NUM_SEVERITIES, corrupt

# As published these are not in order: the severities of an elastic transform and of saturation are of different kinds,
# the second and third of snow differ in the size of flakes, and a grid of 0.5 meets pixels where one of 0.6 does not.
UNORDERED = {"elastic_transform", "saturate", "snow", "pixelate"}


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
        assert changed.shape == image.shape
        assert changed.dtype == np.uint8


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_grey_black_and_white_images_are_corrupted_without_a_warning(name):
    grey = np.repeat(photograph(48, 48)[:, :, :1], 3, axis=2)
    for image in (grey, np.zeros_like(grey), np.full_like(grey, 255)):
        assert corrupted(image, name, 5).shape == grey.shape


def test_large_images_are_shrunk_to_the_size_of_the_published_severities():
    assert corrupted(photograph(448, 600), "fog", 3).shape == (224, 300, 3)
    assert corrupted(photograph(900, 225), "gaussian_noise", 1).shape == (896, 224, 3)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_equal_seeds_give_equal_images(name):
    image = photograph(64, 48)
    before = image.copy()
    np.testing.assert_array_equal(corrupted(image, name, 3), corrupted(image, name, 3))
    np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize("name", ["gaussian_noise", "motion_blur", "fog", "snow", "glass_blur", "elastic_transform"])
def test_other_seeds_give_other_images(name):
    image = photograph(64, 48)
    assert distance(corrupted(image, name, 3, seed=0), corrupted(image, name, 3, seed=1)) > 0.1


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
    np.testing.assert_allclose(changed.mean(axis=(0, 1)), image.mean(axis=(0, 1)), atol=0.5)
    np.testing.assert_allclose(changed.std(axis=(0, 1)), 0.4 * image.std(axis=(0, 1)), rtol=0.03)
