"""MIMO: a tower sees several images at once, and predicts the class of each (Havasi et al., ICLR 2021; e3 App. G.3).

In evaluation all inputs are the same image, and its predictions are averaged.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from lit_het import sharding
from lit_het.errors import UserError, require_at_least


@dataclasses.dataclass(frozen=True)
class MimoConfig:
    """How inputs are drawn in training.

    Attributes:
        input_repetition: probability that all inputs are the same image (the paper's grid is 0.5, 0.625 and 0.75).
        batch_repetitions: how often a batch is used in a step, in different combinations (the paper's are 1 and 2).
    """

    input_repetition: float = 0.5
    batch_repetitions: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, self, "batch_repetitions")
        if not 0 <= self.input_repetition <= 1:
            raise UserError(f"MimoConfig: input_repetition = {self.input_repetition} must be between 0 and 1")


def draw_inputs(key: Key[Array, ""], config: MimoConfig, batch_size: int, num_inputs: int) -> Int[Array, "rows inputs"]:
    """Returns the examples of each row of inputs, as indices of the batch.

    Every input of the tower sees each example as often as the batch is repeated. The share of rows with equal inputs is
    ``input_repetition``, as in the authors' code.
    """
    order_key, *keys = jax.random.split(key, 1 + num_inputs)
    order = jax.random.permutation(order_key, jnp.tile(jnp.arange(batch_size), config.batch_repetitions))
    shuffled = round(len(order) * (1 - config.input_repetition))
    columns = [jnp.concatenate([jax.random.permutation(own, order[:shuffled]), order[shuffled:]]) for own in keys]
    return jnp.stack(columns, axis=1)


def of_inputs(
    valid: Bool[Array, " b"], target: Any, weight: Float[Array, " b"] | None, inputs: Int[Array, "rows inputs"]
) -> tuple[Bool[Array, " rows"], Any, Float[Array, " rows"] | None]:
    """Returns which rows of inputs count, the target of each input, and the weights of rows in the loss.

    A row counts if all its images can be read, as the tower sees them together; its weight is the mean of theirs.
    """
    targets = jax.tree.map(lambda x: x[inputs], target)
    return valid[inputs].all(axis=1), targets, None if weight is None else weight[inputs].mean(axis=1)


def side_by_side(image: UInt8[Array, "b h w c"], inputs: Int[Array, "rows inputs"]) -> UInt8[Array, "rows h w mc"]:
    """Returns the images of each row, one after the other along the axis of channels."""
    # On several devices the images of the batch are gathered, as bytes.
    images = jnp.moveaxis(image[inputs], 1, 3)
    return sharding.as_batch(images.reshape(*images.shape[:3], -1))
