"""The temperature τ, which always divides logits.

LiT and big_vision multiply by their "temperature": a factor of 10 is τ = 1/10.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lit_het.heads.temperature_config import BoundedTemperature, FixedTemperature, LogTemperature


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
