"""The one exception for mistakes a user can mend; the CLI prints it as one line without a traceback."""

from typing import Any, get_args, get_type_hints

# The exit code of what passes, and may succeed when it is started again (sysexits.h).
TRY_AGAIN = 75


class UserError(Exception):
    """Bad input, configuration or file; the message names the culprit and the way out.

    Attributes:
        code: with which the command ends.
    """

    code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """Returns text in one line without control characters, which names in the files of others may hold."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Unwritable(UserError):
    """A disk that is full, or storage that cannot be written to now: the same start may succeed later."""

    code = TRY_AGAIN


class FieldError(UserError):
    """A field of a configuration with a value that cannot be.

    Attributes:
        field: its name.
        problem: the value, and what it should be.
    """

    def __init__(self, config: Any, field: str, problem: str):
        super().__init__(f"{type(config).__name__}: {field} = {problem}")
        self.field, self.problem = field, problem


def require_at_least(least: int, config: Any, *fields: str) -> None:
    """Refuses a configuration with a field below ``least``.

    Raises:
        FieldError: with the field and its value.
    """
    for field in fields:
        value = getattr(config, field)
        if not value >= least:  # nor NaN
            raise FieldError(config, field, f"{value} must be at least {least}")


def require_choice(config: Any, *fields: str) -> None:
    """Refuses a configuration with a field that is none of the choices its annotation, a ``Literal``, names.

    Raises:
        FieldError: with the field, its value and the choices.
    """
    hints = get_type_hints(type(config))
    for field in fields:
        value, choices = getattr(config, field), get_args(hints[field])
        if value not in choices:
            raise FieldError(config, field, f"{value!r} is none of {', '.join(map(repr, choices))}")
