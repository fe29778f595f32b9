"""The configuration of a ResNet below the patches of a ViT."""

import dataclasses
import math
from typing import TYPE_CHECKING

from lit_het.errors import FieldError

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.towers.encoder_config import ComputeType
    from lit_het.towers.stem import Stem

NUM_GROUPS = 32
"""Groups of channels of every norm."""


@dataclasses.dataclass(frozen=True)
class StemConfig:
    """A ResNet whose feature map a ViT sees in the place of pixels (hybrid, Dosovitskiy et al. 2021, Sec. 3.1).

    Attributes:
        blocks: of each stage: (3, 4, 9) of R50 + ViT-B/16, (3, 4, 6, 3) of R50 + ViT-L/32, (1, 1, 1, 1) of a ResNet14.
        width: channels after the first convolution; a stage has 4 times as many, each further one twice those before.
    """

    blocks: tuple[int, ...] = (3, 4, 9)
    width: int = 64

    def __post_init__(self) -> None:
        if not self.blocks or min(self.blocks) < 1:
            raise FieldError(self, "blocks", f"{self.blocks} must have a number of at least 1 for each stage")
        if self.width < 1 or self.width % NUM_GROUPS:
            raise FieldError(self, "width", f"{self.width} must be a multiple of {NUM_GROUPS}, the groups of a norm")

    @property
    def stride(self) -> int:
        """Pixels of an image along a side of a cell of the feature map."""
        return 4 * 2 ** (len(self.blocks) - 1)

    @property
    def num_channels(self) -> int:
        """Channels of the feature map."""
        return self.width * self.stride

    def length(self, pixels: int) -> int:
        """Returns the cells of the feature map along a side of an image."""
        return math.ceil(pixels / self.stride)

    def build(self, num_channels: int, dtype: "ComputeType", rngs: "nnx.Rngs") -> "Stem":
        """Returns the stem of images of so many channels."""
        from lit_het.towers.stem import Stem

        return Stem(self, num_channels, dtype, rngs)
