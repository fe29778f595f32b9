"""The law of one shape dimension, and its optimum and frontier (SoViT Eq. 2, 4, 5)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from lit_het.errors import FieldError, UserError

# An array, or a single number.
Numbers: TypeAlias = Float[np.ndarray, "..."] | float


@dataclasses.dataclass(frozen=True)
class Curve:
    """The parameters of one dimension in ``f(x, t) = α x^-a + (β x^b + ξ) t^-c + ε``, all above 0.

    Attributes:
        alpha: α, weight of the loss of a small model.
        a: exponent of the dimension where compute is unbounded.
        beta: β, weight of the loss of few training examples.
        b: exponent by which a larger model needs more compute.
        xi: ξ, weight of the loss of little compute that no shape changes.
        epsilon: ε, the loss that remains.

    Raises:
        FieldError: a parameter is not positive and finite.
    """

    alpha: float
    a: float
    beta: float
    b: float
    xi: float
    epsilon: float

    def __post_init__(self) -> None:
        _require_positive(self, *(field.name for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Law:
    """Eq. 2 for several dimensions, which share ``c``.

    Attributes:
        c: exponent of compute.
        curves: the other parameters, by the name of the dimension.

    Raises:
        FieldError: ``c`` is not positive and finite.
    """

    c: float
    curves: Mapping[str, Curve]

    def __post_init__(self) -> None:
        _require_positive(self, "c")

    def curve(self, dimension: str) -> Curve:
        """Returns the parameters of one dimension.

        Raises:
            UserError: the law has no such dimension.
        """
        if dimension not in self.curves:
            raise UserError(f"{dimension} is no dimension of this law; it has {', '.join(self.curves)}")
        return self.curves[dimension]

    def value(self, dimension: str, x: Numbers, t: Numbers) -> Float[np.ndarray, "..."]:
        """Returns f of Eq. 2, in the unit of the metric.

        Args:
            dimension: name of the dimension.
            x: its values ``[...]``; x and t may be single numbers.
            t: compute ``[...]`` in GFLOP.

        Raises:
            UserError: the law has no such dimension.
        """
        curve, x, t = self.curve(dimension), np.asarray(x, np.float64), np.asarray(t, np.float64)
        few_examples = (curve.beta * x**curve.b + curve.xi) * t**-self.c
        return np.asarray(curve.alpha * x**-curve.a + few_examples + curve.epsilon)

    def scaling_exponent(self, dimension: str) -> float:
        """Returns ``s = c / (a + b)`` of Eq. 4: the optimum grows as t^s."""
        curve = self.curve(dimension)
        return self.c / (curve.a + curve.b)

    def optimum(self, dimension: str, t: Numbers) -> Float[np.ndarray, "..."]:
        """Returns x* of Eq. 4: the value of the dimension with the least f at compute ``t`` ``[...]`` in GFLOP.

        It is the only one: f falls before it and rises after it (App. A.1).
        """
        curve = self.curve(dimension)
        # Logarithms, because the ratio may be beyond the range of floats.
        log_ratio = math.log(curve.alpha * curve.a) - math.log(curve.beta * curve.b)
        return np.asarray(np.exp((log_ratio + self.c * np.log(t)) / (curve.a + curve.b)))

    def frontier(self, dimension: str, t: Numbers) -> Float[np.ndarray, "..."]:
        """Returns the least f at compute ``t`` ``[...]`` in GFLOP: ``F x^-a + G t^-c + ε`` at x = x*(t) (Eq. 5).

        At the optimum ``β x^b t^-c = (α a / b) x^-a``, so that F = α (1 + a / b) and G = ξ; the paper leaves both open.
        """
        curve, x, t = self.curve(dimension), self.optimum(dimension, t), np.asarray(t, np.float64)
        of_size = curve.alpha * (1 + curve.a / curve.b) * x**-curve.a
        return np.asarray(of_size + curve.xi * t**-self.c + curve.epsilon)


def _require_positive(config: object, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if not 0 < value < math.inf:
            raise FieldError(config, field, f"{value} must be above 0 and finite")
