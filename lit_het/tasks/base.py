"""The protocol of tasks, all that the training loop uses of one."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het import parameters
from lit_het.heads.learning_rates import learning_rate_factors
from lit_het.optimizers import ParameterGroup
from lit_het.random import Keys
from lit_het.types import Batch, Metrics, Params


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a training is, for objectives that begin later or learn from an average.

    Attributes:
        step: number of updates so far.
        average: the moving average of all parameters; None without one.
    """

    step: Int[Array, ""]
    average: Params | None


Loss: TypeAlias = Callable[[Params, Batch, Keys], tuple[Float[Array, ""], Metrics]]
"""`Task.loss` at a step of a training, of all parameters or of the trainable ones."""

LossAndGradient: TypeAlias = tuple[tuple[Float[Array, ""], Metrics], Params]

Gradient: TypeAlias = Callable[[Loss, Params, Batch, Keys, Int[Array, ""]], LossAndGradient]
"""Arguments are a loss, its arguments, and the number of the step."""


@runtime_checkable
class Task(Protocol):
    """A learning problem.

    Attributes:
        locked: patterns of parameters that training does not differentiate, optimize, donate or save.
    """

    locked: tuple[str, ...]

    def initialize(self, key: Key[Array, ""]) -> Params:
        """Returns fresh parameters."""
        ...

    def loss(
        self, params: Params, batch: Batch, keys: Keys, progress: Progress | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Returns the loss to minimise and metrics to log, all scalars; without ``progress`` that of the first step."""
        ...

    def layers_above(self, params: Params) -> Params:
        """Returns the number of layers between each parameter and the output, see `layers_above_towers`."""
        ...


def layers_above_towers(towers: Mapping[str, Any], params: Params) -> Params:
    """Returns the number of layers between each parameter of a model and the output; 0 outside its towers.

    Args:
        towers: configurations by the first name in the paths of their parameters.
        params: parameters of the model, or a part of them.

    Raises:
        UserError: a tower does not define how its layers count.
    """
    return {
        part: towers[part].layers_above(tree) if part in towers else jax.tree.map(lambda _: 0, tree)
        for part, tree in params.items()
    }


def learning_rate_groups(model: nnx.Module) -> tuple[ParameterGroup, ...]:
    """Returns a group for every parameter whose module has a ``learning_rate_factor`` other than 1."""
    factors = parameters.flatten(learning_rate_factors(model))
    return tuple(ParameterGroup(re.escape(path), factor) for path, factor in factors.items() if factor != 1.0)


def trained_parts(params: Params, locked: Sequence[str]) -> frozenset[str]:
    """Returns the parts of a model, such as "image_tower", with at least one parameter that is not locked.

    Raises:
        UserError: a pattern of ``locked`` matches no parameter.
    """
    return frozenset(parameters.partition(params, locked)[1])
