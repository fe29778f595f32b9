"""Learning-rate schedules."""

import dataclasses

import optax

from lit_het.errors import UserError, require_at_least


@dataclasses.dataclass(frozen=True)
class CosineSchedule:
    """Linear warm-up from zero, then a half cosine down to ``final_fraction`` of the peak.

    Attributes:
        learning_rate: the peak.
        warmup_steps: steps of linear growth.
        final_fraction: learning rate at the last step, as a fraction of the peak.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 10_000
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "warmup_steps", "final_fraction")
        if self.learning_rate <= 0:
            raise UserError(f"schedule.learning_rate = {self.learning_rate} must be positive")

    def build(self, num_steps: int) -> optax.Schedule:
        """Returns the schedule over ``num_steps`` steps.

        Raises:
            UserError: the warm-up does not leave a step for the cosine.
        """
        if self.warmup_steps >= num_steps:
            raise UserError(
                f"schedule.warmup_steps = {self.warmup_steps} must be smaller than the run's {num_steps} steps"
            )
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=self.warmup_steps,
            decay_steps=num_steps,
            end_value=self.learning_rate * self.final_fraction,
        )
