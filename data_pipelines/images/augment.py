"""Random augmentations of training images, reproducible from the seed and the sample's position in the stream."""

import dataclasses
import math
from typing import Literal

import numpy as np
from jaxtyping import Shaped, UInt8

from lit_het.errors import UserError, require_at_least

MAX_MAGNITUDE = 20.0  # of RandAugment, at which posterize leaves no bit


class StreamRandom:
    """Random numbers that depend only on a seed and a position, not on earlier draws.

    Philox is counter-based: each position has 2^64 draws of one stream. Setting the counter takes 2 µs, a new generator
    30 µs. Not safe to share between threads.
    """

    def __init__(self, seed: int):
        self._bits = np.random.Philox(np.random.SeedSequence(seed))
        self._state = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def at(self, position: int, purpose: int = 0) -> np.random.Generator:
        """Returns the generator of one position and purpose, valid until the next call."""
        # The counter has 256 bits in four words; draws advance the lowest, so positions and purposes never overlap.
        self._state["state"]["counter"][1:3] = position, purpose
        self._bits.state = self._state
        return self._generator


@dataclasses.dataclass(frozen=True)
class RandomAffine:
    """Translates, scales, rotates and shears an image about its centre, each by a uniformly drawn amount.

    Attributes:
        max_shift_pixels: along each axis, in either direction.
        min_scale, max_scale: scale factor, the same for both axes.
        max_rotation_degrees: in either direction.
        max_shear_degrees: horizontal shear, in either direction.
        border: fills the uncovered area: white, or the replicated edge pixels.
    """

    max_shift_pixels: float = 2.0
    min_scale: float = 0.9
    max_scale: float = 1.1
    max_rotation_degrees: float = 5.0
    max_shear_degrees: float = 5.0
    border: Literal["white", "edge"] = "white"

    def apply(self, image: UInt8[np.ndarray, "h w 3"], generator: np.random.Generator) -> UInt8[np.ndarray, "h w 3"]:
        """Returns a transformed copy of the image; always draws five numbers from the generator."""
        import cv2

        u = generator.random(5).tolist()  # Python floats: arithmetic on NumPy scalars is slow
        angle = math.radians(self.max_rotation_degrees) * (2 * u[0] - 1)
        slant = math.tan(math.radians(self.max_shear_degrees) * (2 * u[1] - 1))
        scale = self.min_scale + (self.max_scale - self.min_scale) * u[2]
        cosine, sine = scale * math.cos(angle), scale * math.sin(angle)
        height, width = image.shape[:2]
        x, y = (width - 1) / 2, (height - 1) / 2
        # rotation times shear, fixing the centre, then the shift
        a, b = cosine, cosine * slant - sine
        c, d = sine, sine * slant + cosine
        shift_x, shift_y = self.max_shift_pixels * (2 * u[3] - 1), self.max_shift_pixels * (2 * u[4] - 1)
        matrix = np.array([[a, b, x - a * x - b * y + shift_x], [c, d, y - c * x - d * y + shift_y]])
        return cv2.warpAffine(
            image,
            matrix,
            (width, height),
            flags=cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_CONSTANT if self.border == "white" else cv2.BORDER_REPLICATE,
            borderValue=(255, 255, 255),
        )


@dataclasses.dataclass(frozen=True)
class HorizontalFlip:
    """Mirrors an image horizontally.

    Attributes:
        probability: of mirroring.
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise UserError(f"HorizontalFlip: probability = {self.probability} must be from 0 to 1")

    def apply(
        self, image: Shaped[np.ndarray, "h w *c"], generator: np.random.Generator
    ) -> Shaped[np.ndarray, "h w *c"]:
        """Returns the image or its mirror image; always draws one number from the generator."""
        import cv2

        return cv2.flip(image, 1) if generator.random() < self.probability else image


@dataclasses.dataclass(frozen=True)
class RandAugment:
    """Applies some operations, drawn with replacement from the 14 of the paper, all at one magnitude.

    Ranges are AutoAugment's (Cubuk et al. 2019, Table 6), reached at magnitude 10: shears of 0.3, shifts of 150/331 of
    a side and rotations of 30 degrees in either direction, with grey borders; colour, contrast, brightness and
    sharpness times 1 - 0.9 or 1 + 0.9; posterize to 4 bits; solarize all levels. A larger magnitude always changes
    more, as in torchvision; in the original code posterize and solarize then change less.

    Attributes:
        num_layers: operations per image, the paper's N.
        magnitude: the paper's M, from 0 to 20; above 10 the ranges are extended proportionally.
    """

    num_layers: int = 2
    magnitude: float = 10.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "num_layers", "magnitude")
        if self.magnitude > MAX_MAGNITUDE:
            raise UserError(f"RandAugment: magnitude = {self.magnitude} must be at most {MAX_MAGNITUDE:g}")

    def apply(self, image: UInt8[np.ndarray, "h w 3"], generator: np.random.Generator) -> UInt8[np.ndarray, "h w 3"]:
        """Returns a changed image; always draws two numbers per layer from the generator."""
        from lit_het.data_pipelines.images.rand_augment import rand_augment

        return rand_augment(self, image, generator)
