"""Checks of what callers of the Python API, and flags, give: one line that names the parameter."""

import math
import numbers
import operator
import os
from typing import Any

from lit_het.errors import UserError

MAX_SEED = 2**32 - 1
MAX_SAMPLES = 10_000


def whole(value: Any, name: str, least: int = 0, most: int | None = None) -> int:
    """Returns a whole number.

    Args:
        value: as given.
        name: of the parameter.
        least: the smallest number.
        most: the largest; None for none.

    Raises:
        UserError: it is no whole number, or out of range.
    """
    try:
        if isinstance(value, bool):  # a kind of int, and no number of anything
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name} = {value!r:.100} must be a whole number") from None
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most:,}"
        raise UserError(f"{name} = {number} must be {bounds}")
    return number


def real(value: Any, name: str) -> float:
    """Returns a finite number.

    Args:
        value: as given.
        name: of the parameter.

    Raises:
        UserError: it is none.
    """
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise UserError(f"{name} = {value!r:.100} must be a number")
    return float(value)


def path(value: Any, name: str) -> str:
    """Returns a path or an address.

    Args:
        value: as given.
        name: of the parameter.

    Raises:
        UserError: it is neither.
    """
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"{name} = {value!r:.100} is no path; give one as text or as a Path")
    return str(os.fspath(value))


def texts(values: Any, name: str) -> list[str]:
    """Returns texts as a list, of any iterable but a text.

    Args:
        values: as given.
        name: of the parameter.

    Raises:
        UserError: it is no list of texts, or has none; such as None or NaN, the empty cells of a table.
    """
    # A set has another order in each process.
    if isinstance(values, str | bytes | set | frozenset) or not hasattr(values, "__iter__"):
        raise UserError(f"{name} = {values!r:.100} is not a list of texts; give one such as ['a cat', 'a dog']")
    found = list(values)
    if not found:
        raise UserError(f"no {name}; give at least one")
    for number, value in enumerate(found):
        if not isinstance(value, str):
            raise UserError(f"{name}[{number}] = {value!r:.100} is no text; leave it out, or give a text")
    return found
