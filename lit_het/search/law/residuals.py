"""Relative errors of Eq. 2 as a function of its exponents, with the best other parameters for them.

Given c, a and b, Eq. 2 is linear in α, β, ξ and ε, and so is its relative error (f̂ - f) / f. The best of them above a
bound are a linear problem with a unique value, so that only exponents are searched (variable projection: Golub and
Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares problems whose variables separate", SIAM
Journal on Numerical Analysis 1973). Exponents are sought as logarithms: of c, of s = c / (a + b), and of a / b.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls

from lit_het.search.law.law import Curve, Law
from lit_het.search.law.observations import Star

# The least share of the mean f that a term has in the run where it is largest: all parameters are above 0.
LEAST_SHARE = 1e-6
NUM_TERMS = 4
# Terms of a curve, in the order of the columns.
_ALPHA, _BETA, _XI, _EPSILON = range(NUM_TERMS)


@dataclasses.dataclass(frozen=True)
class Exponents:
    """Exponents of one dimension with their derivatives by (log c, log s, log a/b)."""

    a: float
    b: float
    of_a: Float[np.ndarray, "3"]
    of_b: Float[np.ndarray, "3"]

    @staticmethod
    def of(log_c: float, log_s: float, log_ratio: float) -> "Exponents":
        """Returns a and b of c, s = c / (a + b) and a / b, all as logarithms."""
        total = math.exp(log_c - log_s)
        share = 1 / (1 + math.exp(-log_ratio))
        a, b = total * share, total * (1 - share)
        return Exponents(a, b, np.array([a, -a, a * (1 - share)]), np.array([b, -b, -b * share]))


class Residuals:
    """Relative errors of the runs of a sweep.

    ``parameters`` are ``[log c, log s_1, log a_1/b_1, log s_2, ...]``.

    Args:
        star: the runs.
        counts: how often each run counts ``[n]``; None for once each.
    """

    def __init__(self, star: Star, counts: Float[np.ndarray, " n"] | None = None):
        self._star = star
        weights = np.ones(len(star.f)) if counts is None else np.sqrt(counts)
        self.rows = [np.flatnonzero(star.of(name) & (weights > 0)) for name in star.dimensions]
        # Each term is relative to its largest value, so that no power is beyond the range of floats.
        self._smallest = [star.x[rows].min() for rows in self.rows]
        self._largest = [star.x[rows].max() for rows in self.rows]
        self._least_t = star.t.min()
        self._scale = float(np.exp(np.log(star.f).mean()))
        self._terms = []
        for rows, smallest, largest in zip(self.rows, self._smallest, self._largest, strict=True):
            logs = (
                np.log(star.x[rows] / smallest),
                np.log(star.x[rows] / largest),
                np.log(star.t[rows] / self._least_t),
            )
            self._terms.append((*logs, weights[rows] * self._scale / star.f[rows], weights[rows]))

    def values(self, parameters: Float[np.ndarray, " p"]) -> Float[np.ndarray, " n"]:
        """Returns relative errors, each times the root of its count, in the order of the dimensions."""
        return np.concatenate([self._solve(number, parameters)[0] for number in range(len(self.rows))])

    def jacobian(self, parameters: Float[np.ndarray, " p"]) -> Float[np.ndarray, "n p"]:
        """Returns the derivatives of `values`."""
        found, first = np.zeros((sum(map(len, self.rows)), len(parameters))), 0
        for number, rows in enumerate(self.rows):
            columns = [0, 1 + 2 * number, 2 + 2 * number]
            found[first : first + len(rows), columns] = self._derivatives(number, parameters)
            first += len(rows)
        return found

    def law(self, parameters: Float[np.ndarray, " p"]) -> Law:
        """Returns the law with these exponents, in the units of x, t and f."""
        log_c, curves = float(parameters[0]), {}
        for number, name in enumerate(self._star.dimensions):
            exponents = Exponents.of(log_c, *parameters[1 + 2 * number : 3 + 2 * number])
            _, _, shares = self._solve(number, parameters)
            log_shares = np.log(shares * self._scale).tolist()
            log_t = math.exp(log_c) * math.log(self._least_t)
            curves[name] = Curve(
                log_alpha=log_shares[_ALPHA] + exponents.a * math.log(self._smallest[number]),
                a=exponents.a,
                log_beta=log_shares[_BETA] - exponents.b * math.log(self._largest[number]) + log_t,
                b=exponents.b,
                log_xi=log_shares[_XI] + log_t,
                epsilon=math.exp(log_shares[_EPSILON]),
            )
        return Law(math.exp(log_c), curves)

    def at_bound(self, number: int, parameters: Float[np.ndarray, " p"]) -> list[str]:
        """Returns which of α, β, ξ and ε of a dimension the best fit would make 0."""
        _, _, shares = self._solve(number, parameters)
        names = ("α", "β", "ξ", "ε")
        return [name for name, share in zip(names, shares, strict=True) if share <= LEAST_SHARE]

    def _columns(self, number: int, exponents: Exponents, c: float) -> Float[np.ndarray, "n 4"]:
        from_smallest, from_largest, log_t, unit, _ = self._terms[number]
        few_examples = np.exp(-c * log_t)
        powers = np.exp(-exponents.a * from_smallest), np.exp(exponents.b * from_largest) * few_examples
        return np.stack([*powers, few_examples, np.ones_like(log_t)], axis=1) * unit[:, None]

    def _solve(
        self, number: int, parameters: Float[np.ndarray, " p"]
    ) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, "n 4"], Float[np.ndarray, "4"]]:
        """Returns the relative errors, the columns and the best shares of the terms of one dimension."""
        exponents = Exponents.of(float(parameters[0]), *parameters[1 + 2 * number : 3 + 2 * number])
        columns = self._columns(number, exponents, math.exp(parameters[0]))
        weights = self._terms[number][-1]
        shares = LEAST_SHARE + nnls(columns, weights - columns.sum(1) * LEAST_SHARE)[0]
        return columns @ shares - weights, columns, shares

    def _derivatives(self, number: int, parameters: Float[np.ndarray, " p"]) -> Float[np.ndarray, "n 3"]:
        """Returns the derivatives of the errors of one dimension by (log c, log s, log a/b).

        With A the columns, z the shares and P the projection onto the columns whose share is above its bound, it is
        ``(1 - P) dA z - (A⁺)ᵀ dAᵀ r``.
        """
        errors, columns, shares = self._solve(number, parameters)
        c = math.exp(parameters[0])
        exponents = Exponents.of(float(parameters[0]), *parameters[1 + 2 * number : 3 + 2 * number])
        from_smallest, from_largest, log_t, _, _ = self._terms[number]
        by_c = np.array([c, 0.0, 0.0])
        changes = np.zeros((3, *columns.shape))
        changes[:, :, _ALPHA] = -exponents.of_a[:, None] * from_smallest * columns[:, _ALPHA]
        changes[:, :, _BETA] = exponents.of_b[:, None] * from_largest * columns[:, _BETA]
        changes[:, :, _BETA] -= by_c[:, None] * log_t * columns[:, _BETA]
        changes[:, :, _XI] = -by_c[:, None] * log_t * columns[:, _XI]
        free = shares > LEAST_SHARE
        direct = changes @ shares  # [3 n]
        basis, triangle = np.linalg.qr(columns[:, free])
        through_shares = changes[:, :, free].transpose(0, 2, 1) @ errors  # [3 free]
        # Nearly equal columns, as with tiny exponents, have no inverse; any solution of least squares serves.
        moved = basis @ np.linalg.lstsq(triangle.T, through_shares.T, rcond=1e-12)[0]
        return direct.T - basis @ (basis.T @ direct.T) - moved
