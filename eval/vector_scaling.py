"""Vector scaling: a factor and a bias for every class, fitted to the logits of labelled images."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int
from scipy import optimize, special

from lit_het.eval.calibration import check_labels, check_log_probabilities, fit_temperature
from lit_het.eval.rows import row_blocks

_MAX_ITERATIONS = 100


@dataclasses.dataclass(frozen=True)
class VectorScaling:
    """Guo et al., "On calibration of modern neural networks", ICML 2017, Sec. 4.2.

    Attributes:
        factor: of the logits of each class.
        bias: added to them.
    """

    factor: Float[np.ndarray, " k"]
    bias: Float[np.ndarray, " k"]

    def __call__(self, log_probabilities: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
        """Returns ``log softmax(factor * log p + bias)`` in float32."""
        scaled = np.empty_like(log_probabilities, np.float32)
        for rows in row_blocks(*log_probabilities.shape):
            scaled[rows] = special.log_softmax(log_probabilities[rows] * self.factor + self.bias, axis=1)
        return scaled


def fit_vector_scaling(log_probabilities: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> VectorScaling:
    """Returns the scaling of the lowest NLL that L-BFGS finds from the fitted temperature.

    Without regularization, as in the paper: 2k numbers are fitted to n images, too many where classes have few images.

    Raises:
        UserError: no images, a label outside the classes, or a row without finite log-probabilities.
    """
    check_log_probabilities(log_probabilities)
    n, k = log_probabilities.shape
    check_labels(labels, k)
    logits, rows = np.maximum(log_probabilities.astype(np.float64), -1e4), np.arange(n)

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        scores = logits * parameters[:k] + parameters[k:]
        log_p = special.log_softmax(scores, axis=1)
        error = np.exp(log_p)
        error[rows, labels] -= 1
        gradient = np.concatenate([(error * logits).sum(axis=0), error.sum(axis=0)]) / n
        return float(-log_p[rows, labels].mean()), gradient

    start = np.concatenate([np.full(k, 1 / fit_temperature(log_probabilities, labels)), np.zeros(k)])
    found = optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": _MAX_ITERATIONS})
    return VectorScaling(found.x[:k], found.x[k:])
