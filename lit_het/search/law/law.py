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

    The weights are logarithms: those of a steep curve are beyond the range of floats.

    Attributes:
        log_alpha: log α, weight of the loss of a small model.
        a: exponent of the dimension where compute is unbounded.
        log_beta: log β, weight of the loss of few training examples.
        b: exponent by which a larger model needs more compute.
        log_xi: log ξ, weight of the loss of little compute that no shape changes.
        epsilon: ε, the loss that remains.

    Raises:
        FieldError: an exponent or ε is not positive and finite, or a logarithm not finite.
    """

    log_alpha: float
    a: float
    log_beta: float
    b: float
    log_xi: float
    epsilon: float

    def __post_init__(self) -> None:
        _require_positive(self, "a", "b", "epsilon")
        for field in ("log_alpha", "log_beta", "log_xi"):
            if not math.isfinite(getattr(self, field)):
                raise FieldError(self, field, f"{getattr(self, field)} must be finite")


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
        """Returns the parameters of one dimension."""
        if dimension not in self.curves:
            raise UserError(f"{dimension} is not a dimension of this law; it has {', '.join(self.curves)}")
        return self.curves[dimension]

    def value(self, dimension: str, x: Numbers, t: Numbers) -> Float[np.ndarray, "..."]:
        """Returns f of Eq. 2, in the unit of the metric.

        Args:
            dimension: name of the dimension.
            x: its values ``[...]``; x and t may be single numbers.
            t: compute ``[...]`` in GFLOP.
        """
        curve, log_x, log_t = self.curve(dimension), np.log(x), np.log(t)
        # Far from the sizes of a sweep a steep curve is infinite.
        with np.errstate(over="ignore"):
            few_examples = np.exp(curve.log_beta + curve.b * log_x - self.c * log_t) + self._few_steps(curve, log_t)
            return np.asarray(np.exp(curve.log_alpha - curve.a * log_x) + few_examples + curve.epsilon)

    def scaling_exponent(self, dimension: str) -> float:
        """Returns ``s = c / (a + b)`` of Eq. 4: the optimum grows as t^s."""
        curve = self.curve(dimension)
        return self.c / (curve.a + curve.b)

    def optimum(self, dimension: str, t: Numbers) -> Float[np.ndarray, "..."]:
        """Returns x* of Eq. 4: the value of the dimension with the least f at compute ``t`` ``[...]`` in GFLOP.

        It is the only one: f falls before it and rises after it (App. A.1).
        """
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(self._log_optimum(self.curve(dimension), np.log(t))))

    def frontier(self, dimension: str, t: Numbers) -> Float[np.ndarray, "..."]:
        """Returns the least f at compute ``t`` ``[...]`` in GFLOP: ``F x^-a + G t^-c + ε`` at x = x*(t) (Eq. 5).

        At the optimum ``β x^b t^-c = (α a / b) x^-a``, so that F = α (1 + a / b) and G = ξ; the paper leaves both open.
        """
        curve, log_t = self.curve(dimension), np.log(t)
        log_f = curve.log_alpha + math.log1p(curve.a / curve.b)
        log_x = self._log_optimum(curve, log_t)
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(log_f - curve.a * log_x) + self._few_steps(curve, log_t) + curve.epsilon)

    def whole(self, shape: Mapping[str, Numbers], t: Numbers, centre: Mapping[str, float]) -> Float[np.ndarray, "..."]:
        """Returns f of Eq. 3 for whole shapes: ``Σ_k α_k x_k^-a_k + Σ_k β_k x_k^b_k t^-c + ξ t^-c + ε∞``.

        With the `constants` of the centre this is the mean of what the dimensions predict for the centre, and of each
        dimension the change from there, which has no large terms that cancel.

        Args:
            shape: values ``[...]`` of every dimension.
            t: compute ``[...]`` in GFLOP.
            centre: the value of every dimension in the centre of the star sweep.
        """
        if missing := [name for name in self.curves if name not in shape or name not in centre]:
            raise UserError(f"f of a whole shape needs all dimensions of the law; {', '.join(missing)} is missing")
        at_centre = {name: self.value(name, centre[name], t) for name in self.curves}
        changes = [self.value(name, shape[name], t) - at_centre[name] for name in self.curves]
        return np.asarray(sum(at_centre.values()) / len(at_centre) + sum(changes))

    def constants(self, centre: Mapping[str, float]) -> tuple[float, float]:
        """Returns ξ and ε∞ of Eq. 3, whose sum over dimensions has them once.

        In a star sweep, the other dimensions j have the values of the centre, and add ``α_j x_j^-a_j`` to ε and
        ``β_j x_j^b_j`` to ξ of dimension k. Without these each dimension has a ξ and an ε∞ of its own, whose means are
        taken; where dimensions disagree, they may be negative.
        """
        curves = self.curves.values()
        with np.errstate(over="ignore", invalid="ignore"):
            logs = {name: math.log(centre[name]) for name in self.curves}
            alpha = [np.exp(curve.log_alpha - curve.a * logs[name]) for name, curve in self.curves.items()]
            beta = [np.exp(curve.log_beta + curve.b * logs[name]) for name, curve in self.curves.items()]
            xi = np.mean([np.exp(curve.log_xi) for curve in curves]) - sum(beta) + np.mean(beta)
            return float(xi), float(np.mean([curve.epsilon for curve in curves]) - sum(alpha) + np.mean(alpha))

    def _log_optimum(self, curve: Curve, log_t: Numbers) -> Numbers:
        log_ratio = curve.log_alpha + math.log(curve.a) - curve.log_beta - math.log(curve.b)
        return (log_ratio + self.c * log_t) / (curve.a + curve.b)

    def _few_steps(self, curve: Curve, log_t: Numbers) -> Numbers:
        """Returns ``ξ t^-c``."""
        return np.exp(curve.log_xi - self.c * log_t)


def _require_positive(config: object, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if not 0 < value < math.inf:
            raise FieldError(config, field, f"{value} must be above 0 and finite")
