"""What the training loop knows of a task."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Key

from lit_het import parameters
from lit_het.random import Keys
from lit_het.types import Batch, Metrics, Params


@runtime_checkable
class Task(Protocol):
    """A learning problem.

    Attributes:
        locked: patterns of the parameters that training never differentiates, optimizes, donates or saves.
    """

    locked: tuple[str, ...]

    def initialize(self, key: Key[Array, ""]) -> Params:
        """Returns fresh parameters; works under `jax.eval_shape`."""
        ...

    def loss(self, params: Params, batch: Batch, keys: Keys) -> tuple[Float[Array, ""], Metrics]:
        """Returns the loss to minimise and metrics to log, all scalars."""
        ...


def trained_parts(params: Params, locked: Sequence[str]) -> frozenset[str]:
    """Returns the parts of a model, such as "image_tower", that are not locked whole.

    Raises:
        UserError: a pattern of ``locked`` matches nothing.
    """
    return frozenset(parameters.partition(params, locked)[1])
