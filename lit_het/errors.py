"""The one exception for mistakes a user can mend; the CLI prints it as one line without a traceback."""

from typing import Any


class UserError(Exception):
    """Bad input, configuration or file; the message names the culprit and the way out."""


def require_at_least(least: int, config: Any, *fields: str) -> None:
    """Refuses a configuration with a field below ``least``.

    Raises:
        UserError: with the field and its value.
    """
    for field in fields:
        value = getattr(config, field)
        if value < least:
            raise UserError(f"{type(config).__name__}: {field} = {value} must be at least {least}")
