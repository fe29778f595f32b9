"""A warning when the noise of a contrastive head becomes isotropic."""

from collections.abc import Iterable, Mapping
from typing import Any

from lit_het.console import message

# Twice the noise of the first record, and no more along the keys' differences than isotropic noise would have.
_GROWTH, _ALIGNMENT = 2.0, 1.25
_SIDES = ("image", "text")


class IsotropicNoise:
    """Checks the records of a run, and warns once.

    Noise pays only along the differences of keys. If it grows elsewhere as well, its gradient is mostly noise itself,
    and Adam, which moves every parameter by the learning rate, makes a random walk of it (docs/noise.md).

    Args:
        records: of a resumed run so far; the first gives the initial norm of the noise.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._first: dict[str, float] = {}
        self._has_warned = False
        for record in records:
            for side in _SIDES:
                if (norm := record.get(f"train/{side}_noise_norm")) is not None:
                    self._first.setdefault(side, norm)

    def check(self, record: Mapping[str, float]) -> None:
        """Checks the metrics of a record."""
        for side in _SIDES:
            norm, alignment = record.get(f"train/{side}_noise_norm"), record.get(f"train/{side}_noise_alignment")
            if norm is None or alignment is None or self._has_warned:
                continue
            first = self._first.setdefault(side, norm)
            if norm > _GROWTH * first and alignment < _ALIGNMENT:
                self._has_warned = True
                message(
                    f"the noise of {side}s has grown from {first:.2g} to {norm:.2g} alike in all directions "
                    f"({alignment:.2f} times isotropic noise along the keys): its gradient is probably mostly noise; "
                    "lower --task.head.covariance.learning-rate-factor, or draw more --task.head.num-samples"
                )
