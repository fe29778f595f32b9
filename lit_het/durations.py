"""How long things last: steps, examples, epochs or a percentage of the run, as papers say it."""

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
        unit: steps, examples, epochs, or percent of the run, for its parts alone.
    """

    amount: int | float
    unit: Unit = "steps"

    def __post_init__(self) -> None:
        require_choice(self, "unit")
        require_at_least(0, self, "amount")
        if not math.isfinite(self.amount):
            raise FieldError(self, "amount", f"{self.amount} must be finite")
        if self.unit == "steps" and self.amount != int(self.amount):
            raise FieldError(self, "amount", f"{self.amount} steps are no whole number; did you mean percent?")

    @staticmethod
    def parse(text: str) -> "Duration":
        """Returns the duration of a text such as "90 epochs"; a bare number counts steps.

        Raises:
            ValueError: the text is none.
        """
        number, _, rest = text.strip().partition(" ")
        try:
            unit = {"": "steps", **{unit: unit for unit in get_args(Unit)}}[rest.strip()]
            return Duration(float(number) if {".", "e"} & set(number.lower()) else int(number), unit)
        except (KeyError, ValueError, UserError) as error:
            *units, last = get_args(Unit)
            raise ValueError(
                f"{text!r} is no duration; write a number of {', '.join(units)} or {last}, such as '90 epochs'"
            ) from error

    def __str__(self) -> str:
        return f"{self.amount} {self.unit}"


@dataclasses.dataclass(frozen=True)
class RunLength:
    """The length of a run in steps, and what turns other units into steps.

    Attributes:
        num_steps: optimizer updates.
        batch_size: examples of a step.
        epoch_size: examples of an epoch; None for a stream, which has no epochs.
    """

    num_steps: int
    batch_size: int
    epoch_size: int | None = None

    @staticmethod
    def resolve(length: Duration, batch_size: int, epoch_size: int | None) -> "RunLength":
        """Returns the length of a run of ``length``.

        Raises:
            UserError: a stream has no epochs, or the run has no step.
        """
        num_steps = RunLength(0, batch_size, epoch_size).steps(length, "length")
        if num_steps < 1:
            raise UserError(f"--length {length} is not one batch of {batch_size}; train longer")
        return RunLength(num_steps, batch_size, epoch_size)

    def steps(self, duration: Duration, flag: str) -> int:
        """Returns the whole steps that fit into a duration: a fraction of a step is left out.

        Args:
            duration: of the run or of a part of it.
            flag: its name, for messages.

        Raises:
            UserError: a stream has no epochs.
        """
        amount = Fraction(str(duration.amount))  # 0.1 means a tenth, not the float beside it
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
