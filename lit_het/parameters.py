"""Parameter trees as nested dicts: paths, the locked/trainable partition and counts."""

import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jaxtyping import DTypeLike

from lit_het.errors import UserError
from lit_het.types import Params

MAX_PATTERN_LENGTH = 500
"""Characters of a pattern that others wrote."""

MAX_REPETITIONS = 4
"""``*``, ``+``, ``?`` and ``{...}`` in such a pattern; each multiplies the ways in which a path may be tried."""


def check_pattern(pattern: str) -> None:
    """Refuses a regular expression that may try for hours whether it matches a path.

    Raises:
        UserError: it is none, is longer than `MAX_PATTERN_LENGTH`, has flags, repeats a group, or repeats too often.
    """
    try:
        # Of what escapes and sets stand for, only that it is one character matters.
        bare = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern).replace("(?", "(")
        # Behind a flag (?x) blanks and comments would stand between a group and what repeats it.
        if len(pattern) > MAX_PATTERN_LENGTH or re.search(r"\)[*+{]", bare) or re.search(r"\(\?[aiLmsux-]", pattern):
            raise ValueError("is too long, repeats a group, or has flags")
        if len(re.findall(r"[*+?{]", bare)) > MAX_REPETITIONS:
            raise ValueError(f"repeats more than {MAX_REPETITIONS} times")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets in sets, which Python may read otherwise one day
            re.compile(pattern)
    except (ValueError, re.error, RecursionError, OverflowError) as error:
        problem = f"{pattern[:100]!r} cannot be used as a pattern of parameters ({error})"
        raise UserError(f"{problem}; write names of layers, '|' and a few '.*'") from error


def flatten(params: Params) -> dict[str, Any]:
    """Returns ``{"image_tower/encoder/blocks/mlp/up/kernel": array, ...}``."""
    return dict(traverse_util.flatten_dict(params, sep="/"))


def unflatten(flat: dict[str, Any]) -> Params:
    """Inverts `flatten`."""
    return traverse_util.unflatten_dict(flat, sep="/")


def partition(params: Params, patterns: Sequence[str]) -> tuple[Params, Params]:
    """Splits a tree into (parameters whose whole path matches any pattern, the rest); no pattern matches nothing.

    Raises:
        UserError: a pattern matches nothing, which is always a mistake.
    """
    flat = flatten(params)
    for pattern in patterns:
        if not any(re.fullmatch(pattern, path) for path in flat):
            tops = ", ".join(sorted(params))
            raise UserError(f"pattern {pattern!r} matches no parameter; the tree's top level holds: {tops}")
    matching = {path for path in flat if any(re.fullmatch(pattern, path) for pattern in patterns)}
    return (
        unflatten({path: array for path, array in flat.items() if path in matching}),
        unflatten({path: array for path, array in flat.items() if path not in matching}),
    )


def merge(first: Params, second: Params) -> Params:
    """Joins two trees without common leaves; inverts `partition`."""
    return unflatten({**flatten(first), **flatten(second)})


def count(params: Params) -> int:
    """Returns the number of scalars in a tree of arrays or of shapes."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def cast(params: Params, dtype: DTypeLike) -> Params:
    """Returns the tree with every array in ``dtype``."""
    return jax.tree.map(lambda array: array.astype(dtype), params)
