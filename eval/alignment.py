"""How well the noise of a HET head lies in the row space of its classifier (HET-XL App. I.1, Table 17).

A HET head gives the logits the low-rank noise ``V(x) ξ`` with factors ``V(x) = Q(x)ᵀ`` ``[k r]``, so the noise lies in
the row space of ``Q(x)``. HET-XL can express it exactly where the row space of its ``W`` ``[d k]`` contains that space
(Eq. 15). The cosine of the smallest principal angle between both spaces says how close they come in their best
direction: it is the largest singular value of ``B_Wᵀ B_Q(x)``, B being orthonormal bases (Björck & Golub, "Numerical
methods for computing angles between linear subspaces", Mathematics of Computation 1973).

Pure NumPy in float64. The basis of ``W`` is found once, in O(k d²); an example then costs O(k d r).
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Float

from lit_het.errors import UserError


@dataclasses.dataclass(frozen=True)
class RowSpace:
    """The row space of a classifier's kernel; build it with `row_space`.

    Attributes:
        basis: orthonormal columns that span it ``[k rank]``, float64.
    """

    basis: Float[np.ndarray, "k rank"]

    def cosine(self, factors: Float[np.ndarray, "b k r"]) -> Float[np.ndarray, " b"]:
        """Cosine of the smallest principal angle between this space and that of each example's noise.

        1 means that a direction of the noise lies in the row space, 0 that all of the noise is orthogonal to it. The
        cosine is 1 for every example where the row space is everything (``d >= k`` and a kernel of full rank) or where
        the dimensions of both spaces add up to more than k: measure with ``d + r`` well below ``k``. `random_cosine` is
        what a random kernel gives. NaN where the factors are zero: they span nothing.

        Args:
            factors: V(x) of every example. App. I.1 leaves the second term of Σ(x) out; to include a shared d(x)
                (Eq. 18), append it as one more column.

        Raises:
            UserError: the factors belong to another number of classes, or are not finite.
        """
        if factors.shape[1] != self.basis.shape[0]:
            raise UserError(
                f"the noise has {factors.shape[1]} coordinates and the classifier {self.basis.shape[0]} classes; "
                "take both from one HET head (HET-XL's factors live in the features, not in the logits)"
            )
        return np.array([self._cosine_of_one(of_example) for of_example in factors])

    def _cosine_of_one(self, factors: Float[np.ndarray, "k r"]) -> float:
        products = self.basis.T @ _orthonormal_basis(factors)
        if products.size == 0:
            return math.nan
        # Rounding may give slightly more than one.
        return min(1.0, float(np.linalg.svd(products, compute_uv=False)[0]))


def row_space(kernel: Float[np.ndarray, "d k"]) -> RowSpace:
    """Factors a kernel ``W`` ``[d k]`` (one column a class) once, for any number of examples.

    Raises:
        UserError: the kernel is not finite.
    """
    return RowSpace(_orthonormal_basis(kernel.T))


def cosine_of_smallest_angle(
    kernel: Float[np.ndarray, "d k"], factors: Float[np.ndarray, "b k r"]
) -> Float[np.ndarray, " b"]:
    """``row_space(kernel).cosine(factors)``, for a single batch."""
    return row_space(kernel).cosine(factors)


def random_cosine(d: int, k: int, r: int) -> float:
    """The cosine between random spaces of d and r dimensions in k, in the limit of many dimensions.

    With ``α = d / k`` and ``β = r / k`` it is ``sqrt(α (1 - β)) + sqrt(β (1 - α))``, the upper edge of Wachter's
    distribution of squared cosines ("The limiting empirical measure of multiple discriminant ratios", Annals of
    Statistics 1980), and 1 where ``d + r >= k``. For ImageNet-21k, d = 2048 and r = 50 that is 0.351; Table 17 measured
    0.350 ± 0.002 with a random kernel.
    """
    if d + r >= k:
        return 1.0
    return math.sqrt(d / k * (1 - r / k)) + math.sqrt(r / k * (1 - d / k))


def mean_and_deviation(cosines: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Mean and standard deviation over examples, as Table 17 reports them."""
    return float(cosines.mean()), float(cosines.std())


def _orthonormal_basis(columns: Float[np.ndarray, "k n"]) -> Float[np.ndarray, "k rank"]:
    """Orthonormal columns with the span of ``columns``.

    QR reduces the problem to ``[n n]``, whose SVD shows the rank: directions below the rounding error of the numbers
    as they were stored (float32, mostly) would be noise and open angles that are not there.
    """
    if not np.isfinite(columns).all():
        raise UserError("a kernel or factor is not finite; training diverged, use an earlier checkpoint")
    orthonormal, triangle = np.linalg.qr(columns.astype(np.float64))
    left, values, _ = np.linalg.svd(triangle, full_matrices=False)
    precision = np.finfo(columns.dtype).eps * math.sqrt(max(columns.shape))
    kept = values > precision * values[0]
    return orthonormal @ left[:, kept]
