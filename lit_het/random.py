"""Random keys as a pure function of (seed, stream name, step): there is no state, so a resumed run is exact."""

import dataclasses
import zlib

import jax
from jaxtyping import Array, Int, Key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of one step; ``keys("noise")`` is the key of the stream of that name."""

    base: Key[Array, ""]

    def __call__(self, name: str) -> Key[Array, ""]:
        """Returns the key of a stream; other names and other steps have independent keys."""
        # CRC32, as Python's hash of a string differs between processes.
        return jax.random.fold_in(self.base, zlib.crc32(name.encode()))


def keys_at(seed: int, step: int | Int[Array, ""]) -> Keys:
    """Returns the keys of training step ``step`` of the run with this seed."""
    return Keys(jax.random.fold_in(jax.random.key(seed), step))
