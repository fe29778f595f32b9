"""The exception for mistakes that the user can fix; the CLI prints it as one line without a traceback."""

import numbers
from typing import Any, get_args, get_type_hints

# Exit code of a temporary failure, EX_TEMPFAIL in sysexits.h: the same command may succeed later.
TRY_AGAIN = 75

MAX_CHARACTERS = 4000
"""The longest message; a longer one is shown without its middle."""


class UserError(Exception):
    """Wrong input, configuration or file; the message names the cause and the way out.

    Attributes:
        code: the command's exit code.
    """

    code = 1

    def __str__(self) -> str:
        text = super().__str__()
        # The cause is at the beginning and the way out at the end, however long a path between them is.
        if len(text) > MAX_CHARACTERS:
            text = f"{text[: MAX_CHARACTERS // 2]} ... {text[-MAX_CHARACTERS // 2 :]}"
        return printable(text)


def printable(text: str) -> str:
    """Returns text in one line, control characters escaped: names in downloaded files may contain any."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def pluralize(number: int, noun: str) -> str:
    """Returns a number and its noun: ``1 sample``, ``2,000 samples``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


class Unwritable(UserError):
    """A full disk or unavailable storage; the same command may succeed later."""

    code = TRY_AGAIN


class DoesNotFit(UserError):
    """A step of training that needs more memory than a device has."""


class DataError(UserError):
    """Data that cannot be used; a command may know another hint (``hints`` in `lit_het.cli.main`).

    Attributes:
        problem: the cause, without the way out.
    """

    def __init__(self, problem: str, way_out: str):
        super().__init__(f"{problem}; {way_out}")
        self.problem = problem


class TooManyBadSamples(DataError):
    """More samples are broken than `max_bad_fraction` allows."""

    def __init__(self, problem: str):
        super().__init__(problem, "fix them, or allow more with max_bad_fraction")


class MissingText(DataError):
    """A sample lacks a text that every sample must have."""

    def __init__(self, problem: str):
        super().__init__(problem, "give the member with captions as --captions, that with questions as --questions")


class MissingImage(DataError):
    """A published list names an image that is not there."""

    def __init__(self, problem: str):
        super().__init__(problem, "set its folder with --images")


class OtherEmbeddings(DataError):
    """A folder to write embeddings to holds those of another tower or of other inputs."""

    def __init__(self, problem: str):
        super().__init__(problem, "choose another folder for them")


class FieldError(UserError):
    """A field of a configuration with an invalid value.

    Attributes:
        field: name of the field.
        problem: the value, and what it must be.
    """

    def __init__(self, config: Any, field: str, problem: str):
        super().__init__(f"{type(config).__name__}: {field} = {problem}")
        self.field, self.problem = field, problem


def require_at_least(least: int, config: Any, *fields: str) -> None:
    """Checks that fields of a configuration are at least ``least``.

    Raises:
        FieldError: a field is smaller, or not a number.
    """
    for field in fields:
        value = getattr(config, field)
        # Not `<`, as NaN fails too.
        if not isinstance(value, numbers.Real) or not value >= least:  # pyright: ignore[reportOperatorIssue]
            raise FieldError(config, field, f"{value} must be at least {least}")


def require_share(config: Any, *fields: str) -> None:
    """Checks that fields of a configuration are in [0, 1).

    Raises:
        FieldError: a field is not.
    """
    for field in fields:
        value = getattr(config, field)
        if not isinstance(value, numbers.Real) or not 0 <= value < 1:  # pyright: ignore[reportOperatorIssue]
            raise FieldError(config, field, f"{value} is not in [0, 1)")


def require_choice(config: Any, *fields: str) -> None:
    """Checks that fields of a configuration have one of the values of their ``Literal`` annotation.

    Raises:
        FieldError: a field has another value.
    """
    hints = get_type_hints(type(config))
    for field in fields:
        value, choices = getattr(config, field), get_args(hints[field])
        if value not in choices:
            raise FieldError(config, field, f"{value!r} is not one of {', '.join(map(repr, choices))}")
