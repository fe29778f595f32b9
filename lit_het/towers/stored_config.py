"""The configuration of an image tower of which only embeddings are here."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from lit_het.errors import require_at_least
from lit_het.towers.base import ImageTowerOptions
from lit_het.towers.encoder_config import ComputeType

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.towers.stored import StoredTower


@dataclasses.dataclass(frozen=True)
class StoredConfig(ImageTowerOptions):
    """A tower of another program, of which only stored embeddings are here: ``lit-het embed --tower transformers:...``.

    Attributes:
        model: the fingerprint that ``embed`` says, of its weights and of how it sees pixels.
        embedding_size: size of the embedding.
        image_size: height and width in pixels.
    """

    model: str
    embedding_size: int  # pyright: ignore[reportIncompatibleVariableOverride]
    image_size: int = 224

    pools_tokens = False
    compute_type: ClassVar[ComputeType] = "float32"  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        require_at_least(1, self, "embedding_size", "image_size")

    def in_float32(self) -> "StoredConfig":
        """Returns the tower."""
        return self

    def build(self, rngs: "nnx.Rngs") -> "StoredTower":
        """Returns the tower, which has no parameters."""
        from lit_het.towers.stored import StoredTower

        return StoredTower(self)
