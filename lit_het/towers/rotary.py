"""Rotary positions (RoFormer, Su et al. 2021, Sec. 3.2): queries and keys are turned by the angles of their positions.

Entries i and i + e/2 of a head of size e are one plane, turned by the angle a_i: ``(x cos a - y sin a, y cos a +
x sin a)``. The product of a query and a key then depends on the difference of their angles only.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from lit_het.towers.image_config import RotaryConfig
from lit_het.trees import tree_of_arrays


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class Rotation:
    """The turns of tokens, the same for all heads.

    Attributes:
        cosines, sines: of the angle of each plane, of every example or of all; also of several kinds of blocks.
    """

    cosines: Float[Array, "*kinds #b n half"]
    sines: Float[Array, "*kinds #b n half"]

    @classmethod
    def by(cls, angles: Float[Array, "#b n half"], num_first: int = 0) -> "Rotation":
        """Returns the turns by angles, behind ``num_first`` tokens that are not turned."""
        first = jnp.zeros((angles.shape[0], num_first, angles.shape[2]), angles.dtype)
        every = jnp.concatenate([first, angles], axis=1)
        return cls(jnp.cos(every), jnp.sin(every))

    def __call__(self, x: Float[Array, "b n h e"]) -> Float[Array, "b n h e"]:
        """Returns turned queries or keys, computed in float32."""
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        cosines, sines = self.cosines[:, :, None], self.sines[:, :, None]
        turned = first * cosines - second * sines, second * cosines + first * sines
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def line_angles(positions: Shaped[np.ndarray, " n"], base: float, number: int) -> Float[np.ndarray, "n f"]:
    """Returns the angles ``p base^(-i/f)`` of positions in ``f = number`` planes (RoFormer Eq. 15)."""
    return np.einsum("n,f->nf", positions, base ** -(np.arange(number) / number)).astype(np.float32)


def grid_angles(config: RotaryConfig, rows: int, columns: int, head_size: int) -> Float[np.ndarray, "n half"]:
    """Returns the angles of patches, row by row: those of the row in the first half of planes, then of the column."""

    def coordinates(number: int) -> Float[np.ndarray, " n"]:
        return config.start + (config.stop - config.start) * (np.arange(number) + config.place) / number

    y, x = (line_angles(coordinates(number), config.base, head_size // 4) for number in (rows, columns))
    return np.concatenate([np.repeat(y, columns, axis=0), np.tile(x, (rows, 1))], axis=1)
