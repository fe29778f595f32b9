"""The temperature τ, which always divides logits.

LiT and big_vision multiply by their "temperature": a factor of 10 is τ = 1/10.
"""

import dataclasses
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lit_het.errors import UserError, require_at_least


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
        return Bounded(self)


TemperatureConfig: TypeAlias = FixedTemperature | LogTemperature | BoundedTemperature


class Fixed(nnx.Module):
    """The module of a `FixedTemperature`: no parameters."""

    def __init__(self, config: FixedTemperature):
        self.value = config.value

    def __call__(self) -> Float[Array, ""]:
        """Returns τ."""
        return jnp.float32(self.value)


class Log(nnx.Module):
    """The module of a `LogTemperature`."""

    def __init__(self, config: LogTemperature):
        self.learning_rate_factor = config.learning_rate_factor
        self.log_temperature = nnx.Param(jnp.float32(math.log(config.initial)))

    def __call__(self) -> Float[Array, ""]:
        """Returns τ."""
        return jnp.exp(self.log_temperature[...])


class Bounded(nnx.Module):
    """The module of a `BoundedTemperature`; sigmoid(0) = 1/2 is the midpoint."""

    def __init__(self, config: BoundedTemperature):
        self.config = config
        start = (config.minimum + config.maximum) / 2 if config.initial is None else config.initial
        share = (start - config.minimum) / (config.maximum - config.minimum)
        self.position = nnx.Param(jnp.float32(math.log(share / (1 - share))))

    def __call__(self) -> Float[Array, ""]:
        """Returns τ."""
        low, high = self.config.minimum, self.config.maximum
        return (high - low) * jax.nn.sigmoid(self.position[...]) + low
