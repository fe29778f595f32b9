"""A Kronecker-factored Laplace approximation of a linear layer, and its prior precision by the marginal likelihood.

A layer ``g = φ W`` (p inputs, q outputs) with the prior N(0, 1/λ) on every weight has at W the posterior covariance
``A⁻¹ ⊗ B⁻¹`` with ``A = Σ φ φᵀ / √n + √λ I`` and ``B = Σ H / √n + √λ I``, H the Gauss-Newton Hessian of an example with
respect to g. So ``g ~ N(φ W, (φᵀ A⁻¹ φ) B⁻¹)`` (Ritter et al. 2018; Baumann et al. 2024). Both sums are scaled to one
mean eigenvalue first, which leaves their product as it is (π of K-FAC, Martens and Grosse 2015): the split of λ would
depend on the units of φ otherwise. In float64, on the host.
"""

from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float

from lit_het.errors import UserError

# The smallest precision that is tried, as a share of the largest possible one.
_LEAST = 1e-24
# Of negative eigenvalues, relative to the largest one, which rounding of a Hessian makes.
_ROUNDING = 1e-2


class Factors(NamedTuple):
    """``Σ φ φᵀ / √n`` and ``Σ H / √n``; their Kronecker product is n times that of the means."""

    inputs: Float[np.ndarray, "p p"]
    outputs: Float[np.ndarray, "q q"]


class Posterior(NamedTuple):
    """The posterior of a layer.

    Attributes:
        input_root: R with ``A⁻¹ = R Rᵀ``, so that ``φᵀ A⁻¹ φ = |Rᵀ φ|²`` is never negative.
        output_variance: the diagonal of ``B⁻¹``.
        precision: λ.
    """

    input_root: Float[np.ndarray, "p p"]
    output_variance: Float[np.ndarray, " q"]
    precision: float


def log_marginal_likelihood(
    inputs: Float[np.ndarray, " p"], outputs: Float[np.ndarray, " q"], squared_norm: float, precision: float
) -> float:
    """Returns the log of Laplace's marginal likelihood, up to a constant.

    It is ``-λ |W|² / 2 + p q log λ / 2 - log det(A ⊗ B) / 2`` with ``log det(A ⊗ B) = q log det A + p log det B``. Its
    derivative with respect to log λ decreases, as each ``a / (a + √λ)`` does: the maximum is unique.

    Args:
        inputs: eigenvalues a of ``Σ φ φᵀ / √n``.
        outputs: eigenvalues b of ``Σ H / √n``.
        squared_norm: ``|W|²``.
        precision: λ.
    """
    root = np.sqrt(precision)
    # Both determinants have a factor of √λ per weight, which the normalizer of the prior cancels.
    of_inputs, of_outputs = np.log1p(inputs / root).sum(), np.log1p(outputs / root).sum()
    return float(-precision * squared_norm - len(outputs) * of_inputs - len(inputs) * of_outputs) / 2


def fit(factors: Factors, squared_norm: float, pseudo_count: float, side: str) -> Posterior:
    """Returns the posterior with the prior precision of the largest marginal likelihood.

    Args:
        factors: of the examples.
        squared_norm: ``|W|²``.
        pseudo_count: how many times every example counts.
        side: of the layer, for messages.

    Raises:
        UserError: the factors or the variances are not finite, or a factor is zero.
    """
    if not all(np.isfinite(factor).all() for factor in factors):
        raise UserError(f"the Hessian of the {side} side is not finite; check the temperature and the embeddings")
    (a, of_inputs), (b, of_outputs) = (np.linalg.eigh(factor * np.sqrt(pseudo_count)) for factor in factors)
    # A loss that is almost zero leaves rounding errors of float32.
    if b.min() < -_ROUNDING * b.max():
        raise UserError(
            f"the model predicts the pairs almost perfectly, which leaves no Hessian of the {side} side; give others"
        )
    a, b = np.maximum(a, 0.0), np.maximum(b, 0.0)  # rounding may make zeros negative
    if not (a.any() and b.any()):
        raise UserError(f"the pairs say nothing about the {side} side; give pairs of different images and captions")
    balance = np.sqrt(a.mean() / b.mean())
    a, b = a / balance, b * balance
    most = np.log(len(a) * len(b) / squared_norm)  # at the maximum λ |W|² is at most the number of weights
    found: scipy.optimize.OptimizeResult = scipy.optimize.minimize_scalar(
        lambda log: -log_marginal_likelihood(a, b, squared_norm, np.exp(log)),
        bounds=(most + np.log(_LEAST), most),
        method="bounded",
        options={"xatol": 1e-8},
    )
    precision = float(np.exp(found.x))
    root = of_inputs / np.sqrt(a + np.sqrt(precision))
    variance = (of_outputs**2) @ (1 / (b + np.sqrt(precision)))
    posterior = Posterior(root.astype(np.float32), variance.astype(np.float32), precision)
    # As float32: so the head holds them.
    if not (np.isfinite(posterior.input_root).all() and 0 < posterior.output_variance.min() < np.inf):
        raise UserError(f"variances of the {side} side are not finite; choose another --task.head.pseudo-data-count")
    return posterior
