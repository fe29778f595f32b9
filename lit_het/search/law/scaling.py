"""Scales a small optimal shape to a larger budget (SoViT Sec. 3, "Scaling")."""

import dataclasses
import math
from collections.abc import Mapping

from lit_het.errors import UserError
from lit_het.search.law import UNITS
from lit_het.search.law.observations import shown_shape

# Sizes of matrix products that hardware divides well; the published widths and MLP sizes are multiples of 16.
MULTIPLE = 16
# JAX counts along an axis with 32 bits unless told otherwise; no useful size comes near.
LARGEST = 2**31 - 1
# s of SoViT Sec. 4.1, for classification; Sec. 4.2 finds 0.25, 0.49 and 0.62 for captions and questions.
PUBLISHED_EXPONENTS = {"width": 0.22, "depth": 0.45, "mlp": 0.6}


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A shape for a budget.

    Attributes:
        exact: the value of each dimension by the law.
        shape: rounded to sizes that hardware divides well.
        factor: τ, the growth of compute.
    """

    exact: dict[str, float]
    shape: dict[str, int]
    factor: float


def scale(
    start: Mapping[str, float],
    start_compute: float,
    budget: float,
    exponents: Mapping[str, float],
    multiples: Mapping[str, int],
    weights: Mapping[str, float] | None = None,
) -> Scaled:
    """Returns the shape ``x0 τ^(s_k w_k)`` for a budget ``t = τ t0``.

    Args:
        start: x0, a shape that is optimal at ``start_compute``.
        start_compute: t0 in GFLOP.
        budget: t in GFLOP.
        exponents: s of the D dimensions that grow; others retain their value.
        multiples: the number of which the rounded value is a multiple, by dimension; 1 where there is none.
        weights: w_k of the dimensions that grow, whose sum is 1; None for 1 / D.
    """
    for name, value in {"start compute": start_compute, "budget": budget, **start, **exponents}.items():
        if not 0 < value < math.inf:
            raise UserError(f"{name} {value:g} must be above 0 and finite")
    if budget < start_compute:
        raise UserError(
            f"budget {budget:g} GFLOP is below {start_compute:g}, the compute of the smallest shape "
            f"({shown_shape(start)}); give a larger budget or a smaller start"
        )
    for name in exponents:
        if name not in start:
            raise UserError(f"{name} is not a dimension of the start; it has {', '.join(start)}")
    if weights is None:
        weights = dict.fromkeys(exponents, 1 / max(1, len(exponents)))
    elif weights.keys() != exponents.keys() or min(weights.values()) < 0 or abs(sum(weights.values()) - 1) > 1e-6:
        raise UserError(f"weights: give one of at least 0 for each of {', '.join(exponents)}, with a sum of 1")
    factor = budget / start_compute
    exact = {
        name: value * _power(factor, exponents.get(name, 0.0) * weights.get(name, 0.0)) for name, value in start.items()
    }
    return Scaled(exact, {name: rounded(value, multiples.get(name, 1)) for name, value in exact.items()}, factor)


def rounded(value: float, multiple: int = 1) -> int:
    """Returns the nearest multiple of a whole number, at least one; halves are rounded up."""
    if not value <= LARGEST:
        raise UserError(
            f"a size of {value:g} is too large, above {LARGEST}; give a smaller budget, exponents, factors or start"
        )
    return multiple * max(1, math.floor(value / multiple + 0.5))


def gflop(amount: float, unit: str = "GFLOP", gflop_per_hour: float | None = None) -> float:
    """Returns a budget in GFLOP.

    Args:
        amount: how much.
        unit: one of `lit_het.search.law.UNITS`: GFLOP, or hours of a device.
        gflop_per_hour: what one device computes in an hour; only for hours. The paper found GFLOP and TPU core-hours
            to correlate with 0.99 (Fig. 4).
    """
    if unit not in UNITS:
        raise UserError(f"unknown unit {unit!r} of a budget; give one of {', '.join(UNITS)}")
    if not 0 < amount < math.inf:
        raise UserError(f"budget {amount:g} must be above 0 and finite")
    if unit == "GFLOP":
        if gflop_per_hour is not None:
            raise UserError("a budget in GFLOP needs no GFLOP per hour; leave it out, or give hours")
        return amount
    if gflop_per_hour is None or not 0 < gflop_per_hour < math.inf:
        raise UserError(
            f"a budget in {unit} needs the GFLOP of one hour, above 0: measure a training step, and see lit-het plan"
        )
    return amount * gflop_per_hour


def _power(base: float, exponent: float) -> float:
    try:
        return base**exponent
    except OverflowError:
        return math.inf
