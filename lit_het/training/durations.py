"""Durations of training in steps, examples, epochs or percent of the run, as papers give them."""

import dataclasses
import math
from fractions import Fraction
from typing import Literal, get_args

from lit_het.errors import FieldError, UserError, require_at_least, require_choice

Unit = Literal["steps", "examples", "epochs", "percent"]


@dataclasses.dataclass(frozen=True)
class Duration:
    """A length of training; ``parse`` reads what ``str`` writes.

    Attributes:
        amount: how many units.
        unit: steps, examples or epochs; parts of a run, such as the warm-up, may also be given in percent of it.
    """

    amount: int | float
    unit: Unit = "steps"

    def __post_init__(self) -> None:
        require_choice(self, "unit")
        require_at_least(0, self, "amount")
        if not math.isfinite(self.amount):
            raise FieldError(self, "amount", f"{self.amount} must be finite")
        if self.unit == "steps" and self.amount != int(self.amount):
            raise FieldError(self, "amount", f"{self.amount} steps are not a whole number; did you mean percent?")

    @staticmethod
    def parse(text: str) -> "Duration":
        """Returns the duration of a text such as "90 epochs"; a bare number counts steps.

        Raises:
            ValueError: the text is not a duration.
        """
        number, _, rest = text.strip().partition(" ")
        try:
            unit = {"": "steps", **{unit: unit for unit in get_args(Unit)}}[rest.strip()]
            return Duration(float(number) if {".", "e"} & set(number.lower()) else int(number), unit)
        except (KeyError, ValueError, UserError) as error:
            *units, last = get_args(Unit)
            raise ValueError(
                f"{text!r} is not a duration; write a number of {', '.join(units)} or {last}, such as '90 epochs'"
            ) from error

    def __str__(self) -> str:
        return f"{self.amount} {self.unit}"


@dataclasses.dataclass(frozen=True)
class RunLength:
    """The length of a run in steps, and the sizes that convert other units to steps.

    Attributes:
        num_steps: optimizer updates.
        batch_size: examples per step.
        epoch_size: examples per epoch; None for a stream, which has no epochs.
    """

    num_steps: int
    batch_size: int
    epoch_size: int | None = None

    @staticmethod
    def resolve(length: Duration, batch_size: int, epoch_size: int | None) -> "RunLength":
        """Returns the length of a run of ``length``."""
        num_steps = RunLength(0, batch_size, epoch_size).steps(length, "length")
        if num_steps < 1:
            raise UserError(f"--length {length} is less than one batch of {batch_size} examples; train longer")
        return RunLength(num_steps, batch_size, epoch_size)

    def steps(self, duration: Duration, flag: str) -> int:
        """Returns a duration in steps, rounded down.

        Args:
            duration: the run or a part of it.
            flag: name of the setting, for error messages.
        """
        # Exact: the float nearest to 0.1 is larger than 0.1, and might add a step.
        amount = Fraction(str(duration.amount))
        match duration.unit:
            case "steps":
                return math.floor(amount)
            case "examples":
                return math.floor(amount / self.batch_size)
            case "percent":
                return math.floor(amount * self.num_steps / 100)
            case "epochs":
                if self.epoch_size is None:
                    raise UserError(f"--{flag} {duration}: a stream has no epochs; give steps or examples")
                return math.floor(amount * self.epoch_size / self.batch_size)
