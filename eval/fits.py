"""Options of the fits to frozen features: few-shot classification and the linear probe."""

import dataclasses
import math
from typing import Literal, TypeAlias, get_args

from lit_het.errors import UserError, require_at_least, require_choice

Crop: TypeAlias = Literal["whole", "random", "inception"]
"""The views that a probe is trained on: those of evaluation, or new ones in every epoch, flipped at random: a random
square with 7/8 of the side of the resized image (224 of 256 pixels), or an `InceptionCrop`."""


@dataclasses.dataclass(frozen=True)
class FewShotOptions:
    """Options of the fits.

    Attributes:
        shots: numbers of images per class.
        seeds: seeds that draw the images.
        l2: regularisation strengths to choose from, ascending.
        ensemble: one classifier on the concatenated features of all members (``"joint"``, as in the paper), or one
            classifier per member with averaged scores (``"disjoint"``; e3 App. A.5.1, Table 9).
    """

    shots: tuple[int, ...] = (1, 5, 10, 25)
    seeds: tuple[int, ...] = (0, 1, 2)
    l2: tuple[float, ...] = tuple(2.0**power for power in range(-10, 21))
    ensemble: Literal["joint", "disjoint"] = "joint"

    def __post_init__(self) -> None:
        require_choice(self, "ensemble")
        for name in ("shots", "seeds", "l2"):
            if not getattr(self, name):
                raise UserError(f"few-shot: {name} is empty; name at least one")
        if min(self.shots) < 1:
            raise UserError(f"few-shot: shots = {min(self.shots)} must be at least 1")
        if min(self.seeds) < 0:
            raise UserError(f"few-shot: seeds = {min(self.seeds)} must be at least 0")
        if min(self.l2) <= 0:
            raise UserError(f"few-shot: l2 = {min(self.l2)} must be positive")


@dataclasses.dataclass(frozen=True)
class LinearProbeOptions:
    """The grid, and options that all its settings share.

    Attributes:
        learning_rates: peak values of the schedules.
        weight_decays: the fraction of the kernel that a step at the peak removes; not scaled by the learning rate.
        epochs: passes over the training images.
        crops: views of the training images. Those of evaluation are stored; others need a pass of the tower in every
            epoch, of the largest number.
        mixup: α of the Beta(α, α) distribution of the weights of two images in random views; 0 does not mix them.
        images_per_step: the batch size; at most the number of training images.
        minival: the fraction of the training images that chooses the setting.
        initial_bias: of every class; the kernel is initialised to 0.
        seed: of the minival split and of the order of images.
    """

    learning_rates: tuple[float, ...] = (1e-3, 3e-4, 1e-4)
    weight_decays: tuple[float, ...] = (1e-4, 0.0)
    epochs: tuple[int, ...] = (1, 3, 10)
    crops: tuple[Crop, ...] = ("whole",)
    mixup: float = 0.1
    images_per_step: int = 512
    minival: float = 0.02
    initial_bias: float = -6.9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("learning_rates", "weight_decays", "epochs", "crops"):
            values = getattr(self, name)
            if not values:
                raise UserError(f"linear probe: {name} is empty; name at least one")
            if len({*values}) < len(values):
                raise UserError(f"linear probe: {name} = {values} names a value twice; leave one out")
        for name, least in (("learning_rates", 0.0), ("weight_decays", 0.0), ("epochs", 1)):
            for value in getattr(self, name):
                if not least <= value < math.inf:
                    raise UserError(f"linear probe: {name} = {value} must be at least {least}, and finite")
        for name in ("mixup", "initial_bias"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"linear probe: {name} = {getattr(self, name)} must be finite")
        if not 0 < self.minival < 1:
            raise UserError(f"linear probe: minival = {self.minival} must lie between 0 and 1")
        if unknown := [crop for crop in self.crops if crop not in get_args(Crop)]:
            raise UserError(f"linear probe: crops = {unknown[0]!r} must be one of {', '.join(get_args(Crop))}")
        require_at_least(0, self, "mixup", "seed")
        require_at_least(1, self, "images_per_step")

    @property
    def random_crops(self) -> tuple[Crop, ...]:
        """The crops for which the tower sees all images again."""
        return tuple(crop for crop in self.crops if crop != "whole")

    def num_steps(self, num_images: int) -> int:
        """Returns the total of the counts passed to ``advance``: the steps of all epochs and crops of the grid."""
        num_train = num_images - self.num_minival(num_images)
        return len(self.crops) * sum(self.epochs) * (num_train // min(self.images_per_step, num_train))

    def num_minival(self, num_images: int) -> int:
        """Returns the number of images in minival."""
        return min(max(1, round(self.minival * num_images)), num_images - 1)
