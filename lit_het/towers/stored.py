"""The image tower of another program, of which only embeddings are here."""

from flax import nnx
from jaxtyping import Array, Key, UInt8

from lit_het.errors import UserError
from lit_het.towers.stored_config import StoredConfig
from lit_het.types import TowerOutput


class StoredTower(nnx.Module):
    """A tower without parameters, which no image can pass."""

    def __init__(self, config: StoredConfig):
        self.model = config.model

    def __call__(self, image: UInt8[Array, "b h w 3"], key: Key[Array, ""] | None = None) -> TowerOutput:
        """Raises a `UserError`: only stored embeddings can be read."""
        del image, key
        raise UserError(
            f"the image tower {self.model} is another program's: only stored embeddings of these images can be read. "
            "Write them with lit-het embed --tower transformers:FOLDER, and name their folder with --embeddings (of a "
            "training: --data.embeddings)"
        )
