"""Measured numbers, which are compared but for rounding: other processors, and equal sums in another order."""

import math
import re
from typing import Any

_TOLERANCE = 1e-4
# Differences of nearly equal figures, their intervals and tests, have fewer digits.
_DIFFERENCE = re.compile(r"/report\.json/comparison/.*/(difference|error|error_against|t|p|low|high|degrees)")
_OF_DIFFERENCES = 1e-2
# Adam's first updates are gradients over their own size: rounding of those near zero is seen in the norm.
_UPDATE = re.compile(r"/train/update_norm")
_OF_UPDATES = 1e-3
_ZERO = 1e-6


def rounded(value: Any) -> Any:
    """Returns a value of JSON with seven digits of every number that is not whole."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def compare(recorded: Any, now: Any) -> None:
    """Raises an `AssertionError` with the keys or numbers in which a value of JSON differs from what was recorded."""
    before, after = _leaves(recorded), _leaves(now)
    differing = {key: (before.get(key), after.get(key)) for key in before | after if not _close(before, after, key)}
    assert not differing, f"recorded and now: {differing}; python -m tests.frozen.record [NAME ...] records them anew"


def _close(before: dict[str, Any], after: dict[str, Any], key: str) -> bool:
    if key not in before or key not in after:
        return False
    one, other = before[key], after[key]
    if isinstance(one, float) or isinstance(other, float):
        patterns = {_DIFFERENCE: _OF_DIFFERENCES, _UPDATE: _OF_UPDATES}
        tolerance = next((wide for pattern, wide in patterns.items() if pattern.fullmatch(key)), _TOLERANCE)
        return one is not None and other is not None and math.isclose(one, other, rel_tol=tolerance, abs_tol=_ZERO)
    return one == other


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: len(value)} | {
            inner: leaf for key, entry in entries for inner, leaf in _leaves(entry, f"{path}/{key}").items()
        }
    return {path: value}
