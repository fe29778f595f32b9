"""The configurations of the temperature τ, see `lit_het.heads.temperature`."""

import dataclasses
import math
from typing import TYPE_CHECKING, TypeAlias

from lit_het.errors import UserError, require_at_least

if TYPE_CHECKING:
    from lit_het.heads.temperature import Bounded, Fixed, Log


@dataclasses.dataclass(frozen=True)
class FixedTemperature:
    """A constant τ.

    Raises:
        UserError: ``value`` is not positive and finite.
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf:
            raise UserError(f"temperature.value = {self.value} must be positive and finite: τ divides logits")

    def build(self) -> "Fixed":
        """Returns the module."""
        from lit_het.heads.temperature import Fixed

        return Fixed(self)


@dataclasses.dataclass(frozen=True)
class LogTemperature:
    """τ = exp(t) with a learned t, the usual form for contrastive losses.

    Attributes:
        initial: the initial τ. Contrastive runs end between 0.01 and 0.05; those of a few hundred steps are judged by
            a τ that has not arrived if it starts at the 1/10 of LiT or the 1/3 of HET-XL, which are for 10⁵ steps.
        learning_rate_factor: multiplies the learning rate of t: Adam moves t by no more than the learning rate a step.

    Raises:
        UserError: ``initial`` is not positive and finite, or the factor is negative.
    """

    initial: float = 1 / 20
    learning_rate_factor: float = 3.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "learning_rate_factor")
        if not 0 < self.initial < math.inf:
            raise UserError(f"temperature.initial = {self.initial} must be positive and finite: τ divides logits")

    def build(self) -> "Log":
        """Returns the module."""
        from lit_het.heads.temperature import Log

        return Log(self)


@dataclasses.dataclass(frozen=True)
class BoundedTemperature:
    """τ(t) = (τmax - τmin) sigmoid(t) + τmin with a learned t (HET-XL Eq. 16).

    Attributes:
        minimum, maximum: τmin and τmax.
        initial: the initial τ; None for the midpoint.

    Raises:
        UserError: the bounds are not 0 < minimum < maximum < infinity, or ``initial`` is not between them.
    """

    minimum: float = 0.05
    maximum: float = 5.0
    initial: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.minimum < self.maximum < math.inf:
            raise UserError(f"temperature bounds must be 0 < minimum < maximum, not {self.minimum} and {self.maximum}")
        if self.initial is not None and not self.minimum < self.initial < self.maximum:
            raise UserError(
                f"temperature.initial = {self.initial} must lie between minimum = {self.minimum} and "
                f"maximum = {self.maximum}"
            )

    def build(self) -> "Bounded":
        """Returns the module."""
        from lit_het.heads.temperature import Bounded

        return Bounded(self)


TemperatureConfig: TypeAlias = FixedTemperature | LogTemperature | BoundedTemperature
