"""Common corruptions of images in five severities.

Hendrycks & Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations", ICLR 2019.
Severities are those published for images of 224 pixels. Departures: lengths (radii, standard deviations, displacements,
flakes) scale with the shorter side, with a lower bound for blurs so that they stay visible. Larger images are first
shrunk to 224 pixels, because an evaluation that shrinks an image averages out the noise of single pixels. All
severities of a corruption use the same random draws. Frost is drawn, where the authors blend in photographs of it.

Functions map float32 levels ``[h w 3]`` from 0 to 1, the strength of a severity, the scale (shorter side / 224) and a
generator to levels that `corrupt` clips.
"""

import math
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import simplejpeg
from jaxtyping import Float, UInt8
from PIL import Image

EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
PUBLISHED_SIZE = 224
NUM_SEVERITIES = 5

# The limit of a blur for images of size zero, in pixels. It makes severities 1 to 5 of a Gaussian blur 0.5 to 1.2 at 32
# pixels; those published for CIFAR are 0.4 to 1.
_MIN_BLUR = 0.4

_WATER = np.array([175, 238, 238], np.float32) / 255
_MUD = np.array([63, 42, 20], np.float32) / 255
# The mean colour of the first five photographs of frost that the authors blend in, and the deviation within a cut.
_ICE_COLOUR, _ICE_DEVIATION = np.array([0.57, 0.66, 0.70], np.float32), 0.1


def corrupt(
    image: UInt8[np.ndarray, "h w 3"], name: str, severity: int, generator: np.random.Generator
) -> UInt8[np.ndarray, "h2 w2 3"]:
    """Corrupts an image; its shorter side becomes at most 224 pixels.

    Args:
        image: RGB.
        name: one of `CORRUPTIONS`.
        severity: 1 to 5.
        generator: of all random draws.
    """
    function, strengths = CORRUPTIONS[name]
    image = _shrunk(image)
    scale = min(image.shape[:2]) / PUBLISHED_SIZE
    levels = function(image.astype(np.float32) / 255, strengths[severity - 1], scale, generator)
    # Truncated as published, but for the rounding of float32.
    return (np.clip(levels, 0, 1) * 255 + 1e-3).astype(np.uint8)


def _shrunk(image: np.ndarray) -> np.ndarray:
    height, width = image.shape[:2]
    ratio = PUBLISHED_SIZE / min(height, width)
    if ratio >= 1:
        return image
    return cv2.resize(image, (round(width * ratio), round(height * ratio)), interpolation=cv2.INTER_AREA)


def gaussian_noise(image: np.ndarray, deviation: float, scale: float, generator: np.random.Generator) -> np.ndarray:
    """Gaussian noise, as of a sensor in low light."""
    return image + deviation * generator.standard_normal(image.shape, np.float32)


def shot_noise(image: np.ndarray, photons: float, scale: float, generator: np.random.Generator) -> np.ndarray:
    """Poisson noise of a given number of photons for white."""
    # The variance of Poisson noise is its mean: fewer photons give more relative noise.
    return generator.poisson(image * photons).astype(np.float32) / photons


def impulse_noise(image: np.ndarray, fraction: float, scale: float, generator: np.random.Generator) -> np.ndarray:
    """Salt-and-pepper noise: a fraction of the levels become 0 or 1."""
    chance, white = generator.random(image.shape, np.float32), generator.random(image.shape, np.float32) < 0.5
    return np.where(chance < fraction, white.astype(np.float32), image)


def speckle_noise(image: np.ndarray, deviation: float, scale: float, generator: np.random.Generator) -> np.ndarray:
    """Gaussian noise proportional to the level."""
    return image * (1 + deviation * generator.standard_normal(image.shape, np.float32))


def gaussian_blur(image: np.ndarray, deviation: float, scale: float, generator: np.random.Generator) -> np.ndarray:
    """Gaussian blur."""
    return _blur(image, _scaled(deviation, scale))


def defocus_blur(
    image: np.ndarray, disk: tuple[float, float], scale: float, generator: np.random.Generator
) -> np.ndarray:
    """Blur out of focus: each point becomes a disk (radius, standard deviation of its soft edge)."""
    radius, softness = disk[0] * scale, _scaled(disk[1], scale)
    reach = math.ceil(radius + 3 * softness)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    # Approximately the fraction of each pixel that the disk covers.
    kernel = _blur(np.clip(radius + 0.5 - np.hypot(x, y), 0, 1).astype(np.float32), softness)
    return cv2.filter2D(image, -1, kernel / kernel.sum(), borderType=cv2.BORDER_REFLECT_101)


def glass_blur(
    image: np.ndarray, glass: tuple[float, int, int], scale: float, generator: np.random.Generator
) -> np.ndarray:
    """Frosted glass: nearby pixels are shuffled (standard deviation of two blurs, largest displacement, rounds)."""
    deviation, farthest, rounds = glass
    rows, columns = np.indices(image.shape[:2], np.float32)
    image = _blur(image, _scaled(deviation, scale))
    for _ in range(rounds):
        # Uniform draws that are scaled afterwards, so that all severities use the same directions.
        displacements = np.rint(_scaled(farthest, scale) * generator.uniform(-1, 1, (2, *image.shape[:2]))).astype(
            np.float32
        )
        places = columns + displacements[0], rows + displacements[1]
        image = cv2.remap(image, *places, cv2.INTER_NEAREST, borderMode=cv2.BORDER_REFLECT_101)
    return _blur(image, _scaled(deviation, scale))


def motion_blur(
    image: np.ndarray, motion: tuple[float, float], scale: float, generator: np.random.Generator
) -> np.ndarray:
    """Camera motion (radius, standard deviation) in a direction within 45° of horizontal."""
    return _motion_blurred(image, motion[0] * scale, motion[1] * scale, generator.uniform(-45, 45))


def zoom_blur(image: np.ndarray, zoom: tuple[float, float], scale: float, generator: np.random.Generator) -> np.ndarray:
    """Camera motion towards the scene: the mean over zoom factors (largest, step)."""
    largest, step = zoom
    factors = np.arange(1, largest, step)
    return (image + np.sum([_enlarged(image, factor) for factor in factors], axis=0)) / (len(factors) + 1)


def snow(image: np.ndarray, snow: tuple[float, ...], scale: float, generator: np.random.Generator) -> np.ndarray:
    """Falling snowflakes over a whitened image.

    The strength is the mean and standard deviation of the noise, the size of flakes, the threshold above which noise
    is a flake, the radius and standard deviation of their motion blur, and the weight of the original colours.
    """
    mean, deviation, size, threshold, radius, spread, colour = snow
    flakes = mean + deviation * generator.standard_normal(image.shape[:2], np.float32)
    angle = generator.uniform(-135, -45)
    # Enlarged noise makes flakes of several pixels.
    flakes = _enlarged(flakes, max(size * scale, 1.0))
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1)).astype(np.float32)
    flakes = _motion_blurred(flakes, radius * scale, spread * scale, angle)[:, :, None]
    pale = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[:, :, None] * 1.5 + 0.5
    return colour * image + (1 - colour) * np.maximum(image, pale) + flakes + flakes[::-1, ::-1]


def frost(image: np.ndarray, weights: tuple[float, float], scale: float, generator: np.random.Generator) -> np.ndarray:
    """A frosted window before the image (weights of the image and of the frost)."""
    of_image, of_frost = weights
    height, width = image.shape[:2]
    return of_image * image + of_frost * _ice(max(height, width), generator)[:height, :width]


def spatter(
    image: np.ndarray, spatter: tuple[float, float, float, float, float], scale: float, generator: np.random.Generator
) -> np.ndarray:
    """Drops of water (severities 1 to 3) or of mud on the lens.

    The strength is the mean and standard deviation of the noise, the standard deviation of its blur, the threshold
    above which noise is liquid, and the opacity of water (below 1) or the standard deviation of the blur of mud.
    """
    mean, deviation, softness, threshold, last = spatter
    noise = generator.standard_normal(image.shape[:2])
    # The blurred noise has the variance published for this blur, so that liquid covers as much of a small image.
    share = _kernel_power(softness) / _kernel_power(_scaled(softness, scale))
    liquid = mean + deviation * share * _smoothed(noise, _scaled(softness, scale))
    liquid[liquid < threshold] = 0
    if last >= 1:
        mud = _smoothed((liquid > threshold).astype(np.float32), _scaled(last, scale))[:, :, None]
        mud[mud < 0.8] = 0
        return (1 - mud) * image + mud * _MUD
    # Two steps: levels above 255, which corners may have, begin again at 0, as published.
    levels = (liquid * 255).astype(np.int64).astype(np.uint8)
    drops = levels * _relief(levels, scale)
    return image + last * drops[:, :, None] / max(drops.max(), 1e-6) * _WATER


def fog(image: np.ndarray, fog: tuple[float, float], scale: float, generator: np.random.Generator) -> np.ndarray:
    """Fractal fog (density, decay of small clouds)."""
    density, decay = fog
    height, width = image.shape[:2]
    clouds = _clouds(max(height, width), decay, generator)[:height, :width, None]
    # Rescaled to the brightness of the image, as its authors do.
    brightest = image.max()
    return (image + density * clouds) * brightest / (brightest + density)


def brightness(image: np.ndarray, added: float, scale: float, generator: np.random.Generator) -> np.ndarray:
    """A larger value in HSV."""
    return _with_hsv(image, lambda hsv: hsv + np.array([0, 0, added], np.float32))


def saturate(
    image: np.ndarray, saturation: tuple[float, float], scale: float, generator: np.random.Generator
) -> np.ndarray:
    """Lower (severities 1 and 2) or higher saturation (factor, addition)."""
    factor, added = saturation
    return _with_hsv(
        image, lambda hsv: hsv * np.array([1, factor, 1], np.float32) + np.array([0, added, 0], np.float32)
    )


def contrast(image: np.ndarray, factor: float, scale: float, generator: np.random.Generator) -> np.ndarray:
    """Reduces the distance of levels to the mean of their channel."""
    mean = image.mean(axis=(0, 1), keepdims=True)
    return mean + factor * (image - mean)


def elastic_transform(
    image: np.ndarray, elastic: tuple[float, float, float], scale: float, generator: np.random.Generator
) -> np.ndarray:
    """Local distortions (displacement, size of a region, affine jitter; for 224 pixels)."""
    displacement, region, jitter = (length * scale for length in elastic)
    height, width = image.shape[:2]
    third = min(height, width) // 3
    corners = np.array([[third, third], [third, -third], [-third, -third]], np.float32)
    corners += np.array([width // 2, height // 2], np.float32)
    shifted = corners + generator.uniform(-jitter, jitter, corners.shape).astype(np.float32)
    if third:  # three corners in one place define no map
        affine = cv2.getAffineTransform(corners, shifted)
        image = cv2.warpAffine(image, affine, (width, height), borderMode=cv2.BORDER_REFLECT_101)
    side = 2 * int(3 * region + 0.5) + 1
    noise = generator.uniform(-1, 1, (height, width, 2)).astype(np.float32)
    moved = cv2.GaussianBlur(noise, (side, side), region, borderType=cv2.BORDER_REFLECT) * displacement
    rows, columns = np.indices((height, width), np.float32)
    places = columns + moved[:, :, 0], rows + moved[:, :, 1]
    # Interpolated a second time, as published, which takes some of the sharpness.
    return cv2.remap(image, *places, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT)


def pixelate(image: np.ndarray, fraction: float, scale: float, generator: np.random.Generator) -> np.ndarray:
    """Lower resolution."""
    height, width = image.shape[:2]
    whole = Image.fromarray(np.rint(image * 255).astype(np.uint8))
    small = whole.resize((max(1, int(width * fraction)), max(1, int(height * fraction))), Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX), np.float32) / 255


def jpeg_compression(image: np.ndarray, quality: int, scale: float, generator: np.random.Generator) -> np.ndarray:
    """Artefacts of JPEG at low quality."""
    # OpenCV encodes BGR.
    pixels = np.ascontiguousarray(np.rint(image[:, :, ::-1] * 255).astype(np.uint8))
    data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
    return simplejpeg.decode_jpeg(data.tobytes(), "RGB").astype(np.float32) / 255


Corruption = Callable[[np.ndarray, Any, float, np.random.Generator], np.ndarray]

CORRUPTIONS: dict[str, tuple[Corruption, tuple[Any, ...]]] = {
    "gaussian_noise": (gaussian_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": (shot_noise, (60.0, 25.0, 12.0, 5.0, 3.0)),
    "impulse_noise": (impulse_noise, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": (defocus_blur, ((3.0, 0.1), (4.0, 0.5), (6.0, 0.5), (8.0, 0.5), (10.0, 0.5))),
    "glass_blur": (glass_blur, ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2))),
    "motion_blur": (motion_blur, ((10.0, 3.0), (15.0, 5.0), (15.0, 8.0), (15.0, 12.0), (20.0, 15.0))),
    "zoom_blur": (zoom_blur, ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))),
    "snow": (
        snow,
        (
            (0.1, 0.3, 3.0, 0.5, 10.0, 4.0, 0.8),
            (0.2, 0.3, 2.0, 0.5, 12.0, 4.0, 0.7),
            (0.55, 0.3, 4.0, 0.9, 12.0, 8.0, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12.0, 8.0, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12.0, 12.0, 0.55),
        ),
    ),
    "frost": (frost, ((1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))),
    "fog": (fog, ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))),
    "brightness": (brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (contrast, (0.4, 0.3, 0.2, 0.1, 0.05)),
    "elastic_transform": (
        elastic_transform,
        (
            (488.0, 170.8, 24.4),
            (488.0, 19.52, 48.8),
            (12.2, 2.44, 4.88),
            (17.08, 2.44, 4.88),
            (29.28, 2.44, 4.88),
        ),
    ),
    "pixelate": (pixelate, (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": (jpeg_compression, (25, 18, 15, 10, 7)),
    "speckle_noise": (speckle_noise, (0.15, 0.2, 0.35, 0.45, 0.6)),
    "spatter": (
        spatter,
        (
            (0.65, 0.3, 4.0, 0.69, 0.6),
            (0.65, 0.3, 3.0, 0.68, 0.6),
            (0.65, 0.3, 2.0, 0.68, 0.5),
            (0.65, 0.3, 1.0, 0.65, 1.5),
            (0.67, 0.4, 1.0, 0.65, 1.5),
        ),
    ),
    "gaussian_blur": (gaussian_blur, (1.0, 2.0, 3.0, 4.0, 6.0)),
    "saturate": (saturate, ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2))),
}
"""Corruptions by name, with the strengths of severities 1 to 5; the last four are from the paper's extra set."""


def _scaled(length: int | float, scale: float) -> float:
    return length * scale + _MIN_BLUR * (1 - scale)


def _blur(image: np.ndarray, deviation: float) -> np.ndarray:
    if deviation < 0.1:  # no level would change
        return image
    reach = math.ceil(4 * deviation)
    return cv2.GaussianBlur(image, (2 * reach + 1,) * 2, deviation, borderType=cv2.BORDER_REFLECT_101)


def _smoothed(field: np.ndarray, deviation: float) -> np.ndarray:
    """Blurs as scikit-image does: cut off at 4 deviations, edges repeated."""
    side = 2 * int(4 * deviation + 0.5) + 1
    return cv2.GaussianBlur(field, (side, side), deviation, borderType=cv2.BORDER_REPLICATE)


def _kernel_power(deviation: float) -> float:
    """Returns the standard deviation of white noise of deviation 1 that `_smoothed` has blurred."""
    kernel = cv2.getGaussianKernel(2 * int(4 * deviation + 0.5) + 1, deviation)
    return float((kernel**2).sum())


def _relief(liquid: UInt8[np.ndarray, "h w"], scale: float) -> Float[np.ndarray, "h w"]:
    """Returns the shading of drops, from the distance to their outlines."""
    distance = cv2.distanceTransform(255 - cv2.Canny(liquid, 50, 150), cv2.DIST_L2, 5)
    distance = cv2.blur(np.minimum(distance, np.float32(20 * scale)), (3, 3)).astype(np.uint8)
    light = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    lit = cv2.filter2D(cv2.equalizeHist(distance), cv2.CV_8U, light)
    return cv2.blur(lit, (3, 3)).astype(np.float32)


def _ice(size: int, generator: np.random.Generator) -> Float[np.ndarray, "side side rgb"]:
    """Crystals on a window: bright veins where fractal noise crosses its middle, on ice of varying thickness."""
    veins = 1 - np.abs(2 * _clouds(size, 1.15, generator) - 1)
    grey = veins**4 + 0.5 * _clouds(size, 1.5, generator)
    grey = (grey - grey.mean()) / max(float(grey.std()), 1e-6)
    return _ICE_COLOUR + _ICE_DEVIATION * grey[:, :, None]


def _enlarged(image: np.ndarray, factor: float) -> np.ndarray:
    """Enlarges the centre to the size of the image."""
    height, width = image.shape[:2]
    centre = ((width - 1) / 2, (height - 1) / 2)
    matrix = cv2.getRotationMatrix2D(centre, 0, factor)
    return cv2.warpAffine(image, matrix, (width, height), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101)


def _motion_blurred(image: np.ndarray, radius: float, deviation: float, angle: float) -> np.ndarray:
    """Convolves with half a Gaussian along a line of length 2 x radius, at an angle in degrees."""
    reach = max(1, math.ceil(2 * radius))
    steps = np.linspace(0, 2 * radius, 8 * reach + 1)
    weights = np.exp(-0.5 * (steps / max(deviation, 1e-3)) ** 2)
    x, y = steps * math.cos(math.radians(angle)), steps * math.sin(math.radians(angle))
    kernel = np.zeros((2 * reach + 3,) * 2, np.float32)
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    # Bilinear weights: each point of the line lies between four pixels.
    for right, bottom in ((0, 0), (0, 1), (1, 0), (1, 1)):
        share = (1 - abs(x - left - right)) * (1 - abs(y - top - bottom))
        np.add.at(kernel, (top + bottom + reach + 1, left + right + reach + 1), weights * share)
    return cv2.filter2D(image, -1, kernel / kernel.sum(), borderType=cv2.BORDER_REFLECT_101)


def _with_hsv(image: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    hsv = change(cv2.cvtColor(image, cv2.COLOR_RGB2HSV)).astype(np.float32)
    hsv[:, :, 1:] = np.clip(hsv[:, :, 1:], 0, 1)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)


def _clouds(size: int, decay: float, generator: np.random.Generator) -> Float[np.ndarray, "side side"]:
    """Fractal noise from 0 to 1 on a square of at least ``size`` pixels, by the diamond-square algorithm.

    The noise shrinks by ``decay²`` with each halving of the step.
    """
    step = max(2, 2 ** math.ceil(math.log2(size)))
    field, amplitude = np.zeros((step, step), np.float32), 1.0

    def noise(shape: tuple[int, ...]) -> np.ndarray:
        return amplitude * generator.uniform(-1, 1, shape)

    while step > 1:
        half = step // 2
        corners = field[::step, ::step]
        of_rows = corners + np.roll(corners, -1, 0)
        field[half::step, half::step] = (of_rows + np.roll(of_rows, -1, 1)) / 4 + noise(corners.shape)
        centres = field[half::step, half::step]
        beside, below = corners + np.roll(corners, -1, 1), corners + np.roll(corners, -1, 0)
        field[::step, half::step] = (beside + centres + np.roll(centres, 1, 0)) / 4 + noise(corners.shape)
        field[half::step, ::step] = (below + centres + np.roll(centres, 1, 1)) / 4 + noise(corners.shape)
        step, amplitude = half, amplitude / decay**2
    field -= field.min()
    return field / max(field.max(), 1e-6)


BENCHMARK = tuple(name for name in CORRUPTIONS if name not in EXTRA)
"""The 15 corruptions whose mean papers report; those in `EXTRA` are for validation."""
