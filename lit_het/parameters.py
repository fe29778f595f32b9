"""Parameter trees as nested dicts: paths, the locked/trainable partition and counts."""

import functools
import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import DTypeLike

from lit_het.errors import UserError
from lit_het.types import Params

MAX_PATTERN_LENGTH = 500
"""Maximum number of characters of a pattern from a downloaded file."""

MAX_REPETITIONS = 4
"""Maximum number of ``*``, ``+``, ``?`` and ``{...}`` in such a pattern; each multiplies the time of a match."""


def check_pattern(pattern: str) -> None:
    """Checks that a regular expression from a downloaded file is valid and cannot backtrack for hours."""
    try:
        # An escape or a set matches one character; replaced by one, its brackets and stars are not counted below.
        bare = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern).replace("(?", "(")
        # Flags are rejected, as after (?x) blanks and comments could hide the repetition of a group.
        if len(pattern) > MAX_PATTERN_LENGTH or re.search(r"\)[*+{]", bare) or re.search(r"\(\?[aiLmsux-]", pattern):
            raise ValueError("is too long, repeats a group, or has flags")
        if len(re.findall(r"[*+?{]", bare)) > MAX_REPETITIONS:
            raise ValueError(f"repeats more than {MAX_REPETITIONS} times")
        with warnings.catch_warnings():
            # Python warns that nested sets may change their meaning.
            warnings.simplefilter("ignore", FutureWarning)
            re.compile(pattern)
    except (ValueError, re.error, RecursionError, OverflowError) as error:
        problem = f"{pattern[:100]!r} cannot be used as a pattern of parameters ({error})"
        raise UserError(f"{problem}; use layer names, '|' and a few '.*'") from error


def flatten(params: Params) -> dict[str, Any]:
    """Returns ``{"image_tower/encoder/blocks/mlp/up/kernel": array, ...}``."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        within = {f"{name}/{path}": leaf for path, leaf in flatten(value).items()} if isinstance(value, dict) else None
        found |= {name: value} if within is None else within
    return found


def unflatten(flat: dict[str, Any]) -> Params:
    """The inverse of `flatten`."""
    tree: Params = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, tree)[name] = leaf
    return tree


def is_stacked(path: str) -> bool:
    """Returns whether the leading axis of a parameter is the blocks of a stack."""
    return "blocks/" in path


def partition(params: Params, patterns: Sequence[str]) -> tuple[Params, Params]:
    """Splits a tree into the parameters whose whole path matches any pattern, and the rest."""
    flat = flatten(params)
    matching = {path for path in flat if any(re.fullmatch(pattern, path) for pattern in patterns)}
    return (
        unflatten({path: array for path, array in flat.items() if path in matching}),
        unflatten({path: array for path, array in flat.items() if path not in matching}),
    )


def check_patterns(params: Params, patterns: Sequence[str]) -> None:
    """Raises a `UserError` if a pattern matches the path of no parameter."""
    for pattern in patterns:
        if not any(re.fullmatch(pattern, path) for path in flatten(params)):
            tops = ", ".join(sorted(params))
            raise UserError(f"pattern {pattern!r} matches no parameter; paths begin with: {tops}")


def merge(first: Params, second: Params) -> Params:
    """Joins two trees without common leaves; the inverse of `partition`."""
    return unflatten({**flatten(first), **flatten(second)})


def count(params: Params) -> int:
    """Returns the number of scalars in a tree of arrays or of shapes."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def cast(params: Params, dtype: DTypeLike) -> Params:
    """Returns the tree with every array in ``dtype``."""
    return jax.tree.map(lambda array: array.astype(dtype), params)
