"""Checks of what callers of the Python API, and flags, give: one line that names the parameter."""

import math
import numbers
import operator
import os
from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar

from lit_het.errors import UserError

MAX_SEED = 2**32 - 1
MAX_SAMPLES = 10_000

_Value = TypeVar("_Value")


def instance(value: _Value, name: str, kinds: type | UnionType | tuple[type, ...], what: str) -> _Value:
    """Returns a value of some types.

    Args:
        value: as given.
        name: of the parameter.
        kinds: the types.
        what: what they are, in words.
    """
    if not isinstance(value, kinds):
        raise UserError(f"{name} = {value!r:.100} must be {what}")
    return value


def flag(value: Any, name: str) -> bool:
    """Returns a truth value; raises a `UserError` for anything else, such as the text "no"."""
    return instance(value, name, bool, "True or False")


def whole(value: Any, name: str, least: int = 0, most: int | None = None) -> int:
    """Returns a whole number.

    Args:
        value: as given.
        name: of the parameter.
        least: the smallest number.
        most: the largest; None for none.
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
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
        raise UserError(f"{name} = {value!r:.100} must be a number")
    return float(value)


def path(value: Any, name: str) -> str:
    """Returns a path or an address.

    Args:
        value: as given.
        name: of the parameter.
    """
    if not isinstance(value, str | os.PathLike) or "\0" in str(value):
        raise UserError(f"{name} = {value!r:.100} is not a path; give one as text or as a Path")
    return str(os.fspath(value))


def paths(values: Any, name: str, least: int = 0) -> list[str]:
    """Returns a list of paths or addresses.

    Args:
        values: as given.
        name: of the parameter.
        least: the fewest.
    """
    return [path(value, f"{name}[{number}]") for number, value in enumerate(listed(values, name, "paths", least))]


def listed(values: Any, name: str, what: str, least: int = 0) -> list[Any]:
    """Returns the items of any iterable but a text, bytes, a mapping or a set.

    Args:
        values: as given.
        name: of the parameter.
        what: the items, in words.
        least: the fewest.
    """
    # A set has another order in each process; a text would be spelled.
    if isinstance(values, str | bytes | set | frozenset | Mapping) or not hasattr(values, "__iter__"):
        raise UserError(f"{name} = {values!r:.100} is not a list of {what}; give one, such as [first, second]")
    found = list(values)
    if len(found) < least:
        raise UserError(f"no {name}; give at least one")
    return found


def text(value: Any, name: str) -> str:
    """Returns a text.

    Args:
        value: as given.
        name: of the parameter.
    """
    if not isinstance(value, str):
        raise UserError(f"{name} = {value!r:.100} is not a text; leave it out, or give a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} = {value!r:.100} is not valid Unicode ({error.reason}); write it anew") from None
    return value


def texts(values: Any, name: str) -> list[str]:
    """Returns texts as a list, of any iterable but a text.

    Args:
        values: as given.
        name: of the parameter.
    """
    found = listed(values, name, "texts", least=1)
    for number, value in enumerate(found):
        if not text(value, f"{name}[{number}]").strip():
            raise UserError(f"{name}[{number}] = {value!r} is blank; leave it out, or give a text")
    return found
