"""How images of any shape become patches."""

import dataclasses

from lit_het.errors import FieldError, require_at_least

PLACE_BYTES = 4
"""Bytes of a patch behind its pixels."""

_LARGEST_PLACE, _MOST_PIXELS = 2**16 - 1, 2**26


@dataclasses.dataclass(frozen=True)
class Patches:
    """Patches of images that keep their aspect ratio, see `lit_het.patches`.

    Attributes:
        size: height and width of a patch in pixels.
        most: the most patches of an image; one that has fewer is padded.
    """

    size: int = 16
    most: int = 256

    def __post_init__(self) -> None:
        require_at_least(1, self, "size", "most")
        if self.most > (limit := min(_LARGEST_PLACE, _MOST_PIXELS // self.size**2)):
            raise FieldError(self, "most", f"{self.most} patches of {self.size} pixels must be at most {limit}")

    def __str__(self) -> str:
        return f"at most {self.most} patches of {self.size} pixels"

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of an image as patches."""
        return self.most, 3 * self.size**2 + PLACE_BYTES
