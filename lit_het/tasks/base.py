"""What the training loop knows of a task."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
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

    def layers_above(self, params: Params) -> Params:
        """Returns how many layers stand between each of some parameters and the output, see `layers_above_towers`."""
        ...


def layers_above_towers(towers: Mapping[str, Any], params: Params) -> Params:
    """Returns how many layers stand between each parameter of a model and the output; 0 outside its towers.

    Args:
        towers: configurations by the names that their parameters begin with.
        params: the model's, or a part of them.

    Raises:
        UserError: the layers of a tower have no numbers.
    """
    return {
        part: towers[part].layers_above(tree) if part in towers else jax.tree.map(lambda _: 0, tree)
        for part, tree in params.items()
    }


def trained_parts(params: Params, locked: Sequence[str]) -> frozenset[str]:
    """Returns the parts of a model, such as "image_tower", that are not locked whole.

    Raises:
        UserError: a pattern of ``locked`` matches nothing.
    """
    return frozenset(parameters.partition(params, locked)[1])
