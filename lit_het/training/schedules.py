"""Learning-rate schedules: a linear warm-up, then a decay."""

import dataclasses
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import ArrayLike

from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.training.durations import Duration, RunLength

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class Cosine:
    """Cosine decay.

    Attributes:
        final_fraction: learning rate at the last step, as a fraction of the peak.
    """

    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "final_fraction")

    def build(self, peak: float, num_steps: int, run: RunLength) -> "optax.Schedule":
        """Returns the decay over ``num_steps`` steps, counted from the end of the warm-up."""
        import optax

        return optax.cosine_decay_schedule(peak, num_steps, self.final_fraction)


@dataclasses.dataclass(frozen=True)
class Linear:
    """Linear decay.

    Attributes:
        final_fraction: learning rate at the last step, as a fraction of the peak.
    """

    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "final_fraction")

    def build(self, peak: float, num_steps: int, run: RunLength) -> "optax.Schedule":
        """Returns the decay over ``num_steps`` steps, counted from the end of the warm-up."""
        import optax

        return optax.linear_schedule(peak, peak * self.final_fraction, num_steps)


@dataclasses.dataclass(frozen=True)
class ReverseSquareRoot:
    """``1 / sqrt(1 + t / timescale)``, which does not depend on the run's length, with a linear cool-down to 0.

    With the warm-up w as timescale and the peak (d w)^-0.5 it is the schedule of Vaswani et al. 2017, Eq. 3.

    Attributes:
        timescale: after three timescales the learning rate is half the peak.
        cooldown: length of the cool-down.
    """

    timescale: Duration = Duration(10_000)
    cooldown: Duration = Duration(0)

    def __post_init__(self) -> None:
        if self.timescale.amount <= 0:
            raise FieldError(self, "timescale", f"{self.timescale} must be positive")

    def build(self, peak: float, num_steps: int, run: RunLength) -> "optax.Schedule":
        """Returns the decay over ``num_steps`` steps, counted from the end of the warm-up."""
        timescale = max(run.steps(self.timescale, "schedule.decay.timescale"), 1)
        cooldown = run.steps(self.cooldown, "schedule.decay.cooldown")
        if cooldown > num_steps:
            raise UserError(
                f"--schedule.decay.cooldown {self.cooldown} is longer than the {num_steps} steps after the warm-up"
            )

        def decay(step: ArrayLike) -> ArrayLike:
            left = (num_steps - jnp.asarray(step)) / max(cooldown, 1)
            return peak / jnp.sqrt(1 + jnp.asarray(step) / timescale) * (jnp.clip(left, 0, 1) if cooldown else 1)

        return decay


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A linear warm-up from ``initial_rate`` to the peak, then a decay.

    Attributes:
        learning_rate: the peak.
        warmup: length of the warm-up.
        initial_rate: learning rate of the first step, if there is a warm-up.
        decay: after the warm-up.
    """

    learning_rate: float = 1e-3
    warmup: Duration = Duration(10_000)
    initial_rate: float = 0.0
    decay: Cosine | Linear | ReverseSquareRoot = Cosine()

    def __post_init__(self) -> None:
        require_at_least(0, self, "initial_rate")
        if not 0 < self.learning_rate < math.inf:
            raise FieldError(self, "learning_rate", f"{self.learning_rate} must be positive and finite")
        if self.initial_rate > self.learning_rate:
            raise FieldError(self, "initial_rate", f"{self.initial_rate} must be at most the peak {self.learning_rate}")

    def build(self, run: RunLength) -> "optax.Schedule":
        """Returns the learning rate of every step of a run."""
        import optax

        warmup = run.steps(self.warmup, "schedule.warmup")
        if warmup >= run.num_steps:
            raise UserError(f"--schedule.warmup {self.warmup} must be shorter than the run's {run.num_steps} steps")
        line = optax.linear_schedule(self.initial_rate, self.learning_rate, warmup)
        decay = self.decay.build(self.learning_rate, run.num_steps - warmup, run)
        return optax.join_schedules([line, decay], [warmup])
