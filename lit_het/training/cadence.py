"""When to log, save and evaluate during a training."""

import dataclasses

from lit_het.errors import FieldError, require_at_least


@dataclasses.dataclass(frozen=True)
class Cadence:
    """Intervals in steps of logging, saving and evaluation, and which checkpoints to retain.

    Attributes:
        log_steps: steps between two records; the host waits for the device only then.
        save_steps: steps between two checkpoints; the last step always saves. A record precedes each checkpoint, so
            that its loss was checked, and a resumed run averages metrics over the same steps.
        save_minutes: maximum minutes between two checkpoints, checked at each record; None for no maximum.
        keep: number of newest checkpoints to retain on disk.
        max_failed_saves: this many consecutive failed saves end the run.
        keep_steps: checkpoints at multiples of this number are retained for good; None retains only the newest.
        evaluate_steps: steps between two evaluations; 0 evaluates only after the last step.
    """

    log_steps: int = 50
    save_steps: int = 1000
    save_minutes: float | None = None
    keep: int = 2
    max_failed_saves: int = 3
    keep_steps: int | None = None
    evaluate_steps: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, self, "log_steps", "save_steps", "keep", "max_failed_saves")
        require_at_least(0, self, "evaluate_steps")
        if self.keep_steps is not None:
            require_at_least(1, self, "keep_steps")
        if self.save_minutes is not None and not self.save_minutes > 0:
            raise FieldError(self, "save_minutes", f"{self.save_minutes} must be more than 0")

    def evaluates_after(self, step: int, num_steps: int) -> bool:
        """Returns whether an evaluation follows a step of a run of ``num_steps``."""
        return step == num_steps or bool(self.evaluate_steps and step and step % self.evaluate_steps == 0)
