"""The configuration of the restricted oracle of UViM: masks to a short code of discrete words, and back."""

import dataclasses
import math
from typing import TYPE_CHECKING

from lit_het.errors import FieldError, require_at_least, require_share
from lit_het.towers.encoder_config import EncoderConfig

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.towers.oracle import Oracle


@dataclasses.dataclass(frozen=True)
class CodebookConfig:
    """The words of a code, which follow what they stand for (VQ-VAE, van den Oord et al. 2017, App. A.1).

    Attributes:
        num_words: k, their number.
        size: of a word.
        momentum: decay per step of the sums and counts whose ratios are the words.
        least_count: a word with a smaller count is unused: it is replaced by half of the most frequent one.
    """

    num_words: int = 4096
    size: int = 768
    momentum: float = 0.995
    least_count: float = 0.1

    def __post_init__(self) -> None:
        require_at_least(2, self, "num_words")
        require_at_least(1, self, "size")
        require_share(self, "momentum")
        require_at_least(0, self, "least_count")


@dataclasses.dataclass(frozen=True)
class OracleConfig:
    """The restricted oracle of panoptic segmentation (Kolesnikov et al. 2022), two Transformers with a code between.

    Attributes:
        image_size: height and width of images and masks in pixels, a multiple of ``patch_size``.
        patch_size: height and width of a patch in pixels.
        num_classes: C, without void.
        num_instances: the largest number of an instance; pixels of larger ones are not learned.
        code_length: words of a code, a square number: of a grid that is resized to that of the patches.
        codebook: the words.
        encoder, decoder: the stacks of blocks before and after the code.
        encoder_sees_image, decoder_sees_image: whether patches of the image are added to the inputs of each.
    """

    image_size: int = 512
    patch_size: int = 16
    num_classes: int = 133
    num_instances: int = 99
    code_length: int = 256
    codebook: CodebookConfig = CodebookConfig()
    encoder: EncoderConfig = EncoderConfig(depth=6)
    decoder: EncoderConfig = EncoderConfig(depth=12)
    encoder_sees_image: bool = True
    decoder_sees_image: bool = True

    def __post_init__(self) -> None:
        require_at_least(1, self, "image_size", "patch_size", "num_classes", "code_length")
        require_at_least(0, self, "num_instances")
        if self.image_size % self.patch_size:
            raise FieldError(self, "image_size", f"{self.image_size} is not a multiple of patch_size")
        if self.code_side**2 != self.code_length:
            raise FieldError(self, "code_length", f"{self.code_length} is not a square number, such as 64 or 256")
        for field in ("encoder", "decoder"):
            if getattr(self, field).causal or getattr(self, field).experts is not None:
                raise FieldError(self, field, "blocks see all patches, and have no experts; leave these out")

    @property
    def side(self) -> int:
        """Patches along each side."""
        return self.image_size // self.patch_size

    @property
    def code_side(self) -> int:
        """Words along each side of a code's grid."""
        return math.isqrt(self.code_length)

    def build(self, rngs: "nnx.Rngs") -> "Oracle":
        """Returns the oracle with fresh parameters."""
        from lit_het.towers.oracle import Oracle

        return Oracle(self, rngs)
