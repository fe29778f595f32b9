"""RandAugment: a few of 14 operations, drawn for every image (Cubuk et al. 2020)."""

import math
from collections.abc import Callable
from typing import TypeAlias

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from lit_het.data_pipelines.images.augment import RandAugment

FULL_MAGNITUDE = 10.0
"""The magnitude at which operations reach the ends of AutoAugment's ranges."""
_GREY = (128, 128, 128)
_LEVELS = np.arange(256)
_LUMA = np.array([[299, 587, 114]]) / 1000  # ITU-R 601-2, as Pillow's mode L
_IDENTITY = ((1.0, 0.0), (0.0, 1.0))
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13  # Pillow's SMOOTH

# An image [h w 3] and an amount to an image of the same size.
_Change: TypeAlias = Callable[[np.ndarray, float], np.ndarray]


def rand_augment(
    config: RandAugment, image: UInt8[np.ndarray, "h w 3"], generator: np.random.Generator
) -> UInt8[np.ndarray, "h w 3"]:
    """Returns a changed image; always draws two numbers per layer from the generator."""
    for choice, sign in generator.random((config.num_layers, 2)).tolist():
        change = CHANGES[int(choice * len(CHANGES))]
        amount = config.magnitude / FULL_MAGNITUDE
        image = change(image, amount if sign < 0.5 else -amount)
    return image


def identity(image: np.ndarray, amount: float) -> np.ndarray:
    """Changes nothing."""
    del amount
    return image


def autocontrast(image: np.ndarray, amount: float) -> np.ndarray:
    """Stretches each channel to all levels."""
    del amount
    return np.array(ImageOps.autocontrast(Image.fromarray(image)))


def equalize(image: np.ndarray, amount: float) -> np.ndarray:
    """Spreads the levels of each channel evenly."""
    del amount
    return np.array(ImageOps.equalize(Image.fromarray(image)))


def solarize(image: np.ndarray, amount: float) -> np.ndarray:
    """Inverts the levels from 256 (1 - |amount|) on."""
    inverted = np.where(256 * (1 - abs(amount)) <= _LEVELS, 255 - _LEVELS, _LEVELS)
    return cv2.LUT(image, inverted.astype(np.uint8))


def posterize(image: np.ndarray, amount: float) -> np.ndarray:
    """Keeps the upper 8 - 4 |amount| bits, rounded."""
    dropped = round(4 * abs(amount))
    return image & np.uint8(256 - (1 << dropped))


def brightness(image: np.ndarray, amount: float) -> np.ndarray:
    """Multiplies by 1 + 0.9 amount, at least 0.1."""
    return _blend_levels(image, 0, amount)


def contrast(image: np.ndarray, amount: float) -> np.ndarray:
    """Multiplies distances to the mean grey level by 1 + 0.9 amount, at least 0.1."""
    return _blend_levels(image, round(cv2.mean(cv2.transform(image, _LUMA))[0]), amount)


def colour(image: np.ndarray, amount: float) -> np.ndarray:
    """Multiplies distances to the grey image by 1 + 0.9 amount, at least 0.1."""
    return _blend(image, cv2.merge([cv2.transform(image, _LUMA)] * 3), amount)


def sharpness(image: np.ndarray, amount: float) -> np.ndarray:
    """Multiplies distances to a smoothed image by 1 + 0.9 amount, at least 0.1; the edge stays as it is."""
    smooth = image.copy()
    smooth[1:-1, 1:-1] = cv2.filter2D(image, -1, _SMOOTH)[1:-1, 1:-1]
    return _blend(image, smooth, amount)


def rotate(image: np.ndarray, amount: float) -> np.ndarray:
    """Turns about the centre by 30 amount degrees, anticlockwise."""
    angle = math.radians(30 * amount)
    cosine, sine = math.cos(angle), math.sin(angle)
    return _map_about_centre(image, ((cosine, sine), (-sine, cosine)))


def shear_x(image: np.ndarray, amount: float) -> np.ndarray:
    """Slants columns by 0.3 amount."""
    return _map_about_centre(image, ((1.0, 0.3 * amount), (0.0, 1.0)))


def shear_y(image: np.ndarray, amount: float) -> np.ndarray:
    """Slants rows by 0.3 amount."""
    return _map_about_centre(image, ((1.0, 0.0), (0.3 * amount, 1.0)))


def translate_x(image: np.ndarray, amount: float) -> np.ndarray:
    """Shifts to the right by 150/331 amount of the width."""
    return _map_about_centre(image, _IDENTITY, right=150 / 331 * amount * image.shape[1])


def translate_y(image: np.ndarray, amount: float) -> np.ndarray:
    """Shifts down by 150/331 amount of the height."""
    return _map_about_centre(image, _IDENTITY, down=150 / 331 * amount * image.shape[0])


CHANGES: tuple[_Change, ...] = (
    *(identity, autocontrast, equalize, rotate, solarize, colour, posterize),
    *(contrast, brightness, sharpness, shear_x, shear_y, translate_x, translate_y),
)
"""The operations of the paper (Fig. 2), in its order."""


def _share(amount: float) -> float:
    """Returns the weight of the image: at least 0.1, as magnitudes above 10 would give zero or a negative image."""
    return max(0.1, 1 + 0.9 * amount)


def _blend(image: np.ndarray, other: np.ndarray, amount: float) -> np.ndarray:
    factor = _share(amount)
    return cv2.addWeighted(image, factor, other, 1 - factor, 0)


def _blend_levels(image: np.ndarray, level: int, amount: float) -> np.ndarray:
    table = level + _share(amount) * (_LEVELS - level)
    return cv2.LUT(image, np.clip(np.round(table), 0, 255).astype(np.uint8))


def _map_about_centre(
    image: np.ndarray, matrix: tuple[tuple[float, float], tuple[float, float]], right: float = 0.0, down: float = 0.0
) -> np.ndarray:
    height, width = image.shape[:2]
    linear, centre = np.array(matrix), np.array([width - 1, height - 1]) / 2
    shift = centre - linear @ centre + (right, down)
    return cv2.warpAffine(
        image, np.column_stack([linear, shift]), (width, height), flags=cv2.INTER_LINEAR, borderValue=_GREY
    )
