"""Preprocessing: decodes an image and resizes it to the input of a tower, in evaluation and training."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import UInt8

from lit_het.data_pipelines.images.augment import HorizontalFlip, RandAugment, RandomAffine
from lit_het.errors import UserError, require_choice
from lit_het.patches_config import Patches

Filter: TypeAlias = Literal["fast", "area", "bilinear", "bicubic"]

Transparency: TypeAlias = Literal["white", "dropped"]
"""What becomes of transparent pixels: they lie over white, or show the colour that transparency hides, as in Pillow's
``convert("RGB")`` and TensorFlow's three channels."""

Box: TypeAlias = tuple[float, float, float, float]
"""A part of an image in its pixels: left, top, right, bottom."""

Size: TypeAlias = int | Callable[[float, float], tuple[int, int]]
"""Pixels along each side of a square, or what gives height and width from those of the part that is resized."""

_MAX_TRIES = 10
_ASPECT_RATIOS = 3 / 4, 4 / 3  # width over height

Augmentation: TypeAlias = RandomAffine | HorizontalFlip | RandAugment
"""A change of a training image after it was resized."""


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Evaluation preprocessing. It belongs to a tower: with another one its accuracy drops.

    Attributes:
        fit: ``"squash"`` resizes the whole image and ignores its aspect ratio; ``"crop"`` takes the central square.
        crop_fraction: side of the central square over the shorter side of the image, usually 1 or 0.875.
        filter: see `lit_het.data_pipelines.images.decoding`.
        transparency: white in training here; imported models take what their own preprocessing does, "dropped".
        patches: the patches that an image becomes, whose part by ``fit`` keeps its aspect ratio; None for squares.
    """

    fit: Literal["squash", "crop"] = "squash"
    crop_fraction: float = 1.0
    filter: Filter = "area"
    transparency: Transparency = "white"
    patches: Patches | None = None

    def __post_init__(self) -> None:
        require_choice(self, "fit", "filter", "transparency")
        if not 0 < self.crop_fraction <= 1:
            raise UserError(f"Preprocessing: crop_fraction = {self.crop_fraction} must be above 0 and at most 1")

    def apply(self, data: bytes, size: int) -> UInt8[np.ndarray, "*input"]:
        """Decodes an image to the input of a tower; raises as `decode` does."""
        return self.finish(self.apply_to_box(data, size, self.box(size)))

    def apply_to_box(
        self, data: bytes, size: int, choose_box: Callable[[int, int], Box]
    ) -> UInt8[np.ndarray, "height width 3"]:
        """Decodes a part of an image to RGB, as in training; raises as `decode` does."""
        # With the first image, as it loads libraries that a configuration does not need.
        from lit_het.data_pipelines.images.decoding import decode

        return decode(data, self._size(size), choose_box, self.filter, transparency=self.transparency)

    def apply_to_pixels(self, pixels: UInt8[np.ndarray, "h w 3"], size: int) -> UInt8[np.ndarray, "*input"]:
        """Resizes an image that is already decoded, with the result that `apply` has for a PNG of it."""
        from lit_het.data_pipelines.images.decoding import resize

        return self.finish(resize(pixels, self._size(size), self.filter, self.box(size)(*pixels.shape[:2])))

    def finish(self, pixels: UInt8[np.ndarray, "height width 3"]) -> UInt8[np.ndarray, "*input"]:
        """Returns a resized image as a tower takes it."""
        if self.patches is None:
            return pixels
        from lit_het.patches import cut

        return cut(self.patches, pixels)

    def picture(self, seen: UInt8[np.ndarray, "*input"]) -> UInt8[np.ndarray, "height width 3"]:
        """Returns the input of a tower as a picture."""
        if self.patches is None:
            return seen
        from lit_het.patches import join

        return join(self.patches, seen)

    def shape(self, size: int) -> tuple[int, ...]:
        """Returns the shape of the input of a tower."""
        return (size, size, 3) if self.patches is None else self.patches.shape

    def shorter_side(self, size: int) -> int:
        """Returns the pixels to which a crop of ``size`` pixels resizes the shorter side of the image."""
        return max(size, round(size / self.crop_fraction))

    def box(self, size: int) -> Callable[[int, int], Box]:
        """Returns what chooses the part of an image by its height and width."""
        return whole if self.fit == "squash" else functools.partial(self._central_square, size)

    def _size(self, size: int) -> Size:
        if self.patches is None:
            return size
        from lit_het.patches import sides

        return functools.partial(sides, self.patches)

    def _central_square(self, size: int, height: int, width: int) -> Box:
        """Returns the box equivalent to resizing the shorter side to size / crop_fraction and cropping the centre.

        Sides and offsets are rounded as in torchvision's ``Resize`` and ``CenterCrop``.
        """
        shorter = self.shorter_side(size)
        rows, columns = (int(shorter * side / min(height, width)) for side in (height, width))
        top, left = round((rows - size) / 2), round((columns - size) / 2)
        # Multiply before dividing: then a box of the whole image has exactly its width and height.
        right, bottom = (left + size) * width / columns, (top + size) * height / rows
        return left * width / columns, top * height / rows, right, bottom


@dataclasses.dataclass(frozen=True)
class InceptionCrop:
    """A random crop (Szegedy et al. 2015, Sec. 6).

    Its fraction of the image's area is uniform, and its aspect ratio is log-uniform over [3/4, 4/3]. A crop that does
    not fit into the image is drawn again; after ten attempts the largest central crop with an aspect ratio in that
    range is taken, as in torchvision's ``RandomResizedCrop``.

    Attributes:
        min_area, max_area: fractions of the image's area.
    """

    min_area: float = 0.08
    max_area: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.min_area <= self.max_area <= 1:
            raise UserError(
                f"InceptionCrop: areas from {self.min_area} to {self.max_area} must be above 0, at most 1 and in order"
            )

    def box(self, size: int, generator: np.random.Generator) -> Callable[[int, int], Box]:
        """Returns what draws the part of an image by its height and width."""
        return functools.partial(self.draw, generator)

    def draw(self, generator: np.random.Generator, height: int, width: int) -> Box:
        """Draws a crop of one image, in whole pixels."""
        low, high = _ASPECT_RATIOS
        for _ in range(_MAX_TRIES):
            u = generator.random(4).tolist()
            area = height * width * (self.min_area + (self.max_area - self.min_area) * u[0])
            # Log-uniform: 3/4 and 4/3 are then equally likely, as mirror images of each other.
            ratio = low * (high / low) ** u[1]
            columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 1 <= columns <= width and 1 <= rows <= height:
                left, top = int(u[2] * (width - columns + 1)), int(u[3] * (height - rows + 1))
                return float(left), float(top), float(left + columns), float(top + rows)
        columns, rows = min(width, max(1, round(height * high))), min(height, max(1, round(width / low)))
        left, top = (width - columns) // 2, (height - rows) // 2
        return float(left), float(top), float(left + columns), float(top + rows)


@dataclasses.dataclass(frozen=True)
class RandomCrop:
    """A random square crop of the image after resizing to a larger square, such as 224 of 256 pixels.

    Attributes:
        fraction: side of the crop over the side of the larger square.
    """

    fraction: float = 0.875

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise UserError(f"RandomCrop: fraction = {self.fraction} must be above 0 and at most 1")

    def box(self, size: int, generator: np.random.Generator) -> Callable[[int, int], Box]:
        """Returns what draws the part of an image by its height and width."""
        return functools.partial(self.draw, generator, size)

    def draw(self, generator: np.random.Generator, size: int, height: int, width: int) -> Box:
        """Draws a crop of one image, in whole pixels of the larger square."""
        larger = max(size, round(size / self.fraction))
        left, top = generator.integers(0, larger - size, 2, endpoint=True).tolist()
        pixel_width, pixel_height = width / larger, height / larger
        return left * pixel_width, top * pixel_height, (left + size) * pixel_width, (top + size) * pixel_height


@dataclasses.dataclass(frozen=True)
class Training:
    """Training preprocessing.

    Attributes:
        preprocessing: of evaluation; training uses its filter and its rule for transparency.
        crop: the random crop; None uses the evaluation preprocessing.
        augmentations: changes of the resized image, in order.
    """

    preprocessing: Preprocessing
    crop: InceptionCrop | RandomCrop | None = None
    augmentations: tuple[Augmentation, ...] = ()

    def apply(self, data: bytes, size: int, generator: np.random.Generator) -> UInt8[np.ndarray, "*input"]:
        """Decodes an image to the input of a tower; all random draws come from the generator.

        Raises:
            BrokenImage: as `lit_het.data_pipelines.images.decoding.decode`.
        """
        pixels = self.preprocessing.apply_to_box(data, size, self.box(size, generator))
        for augmentation in self.augmentations:
            pixels = augmentation.apply(pixels, generator)
        return self.preprocessing.finish(pixels)

    def box(self, size: int, generator: np.random.Generator) -> Callable[[int, int], Box]:
        """Returns what chooses the part of an image by its height and width; draws from the generator when called."""
        return self.preprocessing.box(size) if self.crop is None else self.crop.box(size, generator)


def whole(height: int, width: int) -> Box:
    """Returns the box of the whole image."""
    return 0.0, 0.0, float(width), float(height)
