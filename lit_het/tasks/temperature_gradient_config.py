"""The configuration of the gradient of a learned temperature τ from held-out rows."""

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from jaxtyping import ArrayLike

from lit_het import parameters
from lit_het.errors import FieldError, UserError, require_choice
from lit_het.types import Params

if TYPE_CHECKING:
    from lit_het.tasks.base import Gradient

Method: TypeAlias = Literal["simple", "luketina"]

TEMPERATURE = "head/temperature/.*"
"""Paths of the parameters of τ."""


@dataclasses.dataclass(frozen=True)
class TemperatureGradient:
    """How τ is trained on held-out rows.

    Attributes:
        method: ``simple`` takes the gradient of their loss at the present Θ (Eq. 13 with ∇Θ*(τ) = 0), and ``luketina``
            at the Θ after a step of gradient descent, through which it differentiates (Luketina et al. 2016).
        held_out: fraction of every batch; None where a data set of ``data.mixture`` is held out.
    """

    method: Method = "simple"
    held_out: float | None = 0.125

    def __post_init__(self) -> None:
        require_choice(self, "method")
        if self.held_out is not None and not 0 < self.held_out < 1:
            raise FieldError(self, "held_out", f"{self.held_out} must be more than 0 and less than 1, such as 0.125")

    def build(self, fraction: float, learning_rate: Callable[[ArrayLike], ArrayLike]) -> "Gradient":
        """Returns the gradient of a step, with the loss of held-out rows as the metric ``held_out_loss``.

        Args:
            fraction: of the rows of a batch, that are held out.
            learning_rate: of a step, by its number: s_t, the size of the step of gradient descent.
        """
        from lit_het.tasks.temperature_gradient import held_out_gradient

        return held_out_gradient(self.method, fraction, learning_rate)


def held_out_fraction(config: TemperatureGradient | None, share: float | None) -> float | None:
    """Returns the fraction of every batch that is held out; None without a ``temperature_gradient``.

    Args:
        config: of the task.
        share: of the data set that is held out, in a batch; None if there is none.
    """
    if config is None and share is not None:
        raise UserError("a data set of data.mixture is held_out, which only task.temperature_gradient uses; set it")
    if config is not None and (config.held_out is None) == (share is None):
        raise UserError(
            "task.temperature_gradient needs either a fraction of every batch, its held_out, or a data set of "
            f"data.mixture that is held_out, and has {'neither' if share is None else 'both'}"
        )
    return share if config is None or config.held_out is None else config.held_out


def check_temperature(config: TemperatureGradient | None, trainable: Params) -> None:
    """Checks that a task trains its τ, if there is a ``temperature_gradient``.

    Args:
        config: of the task.
        trainable: its parameters that are not locked.
    """
    if config is not None and not any(re.fullmatch(TEMPERATURE, path) for path in parameters.flatten(trainable)):
        raise UserError(
            "task.temperature_gradient trains τ, which is fixed or locked; take another task.head.temperature and "
            "leave it out of task.locked, or leave out task.temperature_gradient"
        )
