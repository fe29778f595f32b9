"""Vector scaling: a factor and a bias for every class, fitted to the logits of labelled images."""

import dataclasses

import numpy as np
import scipy
from jaxtyping import Float, Int

from lit_het.eval.metrics.calibration import check_labels, check_log_probabilities, fit_temperature
from lit_het.eval.metrics.rows import row_blocks

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

    def __call__(self, logits: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
        """Returns ``log softmax(factor * logits + bias)`` in float32."""
        scaled = np.empty_like(logits, np.float32)
        for rows in row_blocks(*logits.shape):
            scaled[rows] = scipy.special.log_softmax(logits[rows] * self.factor + self.bias, axis=1)
        return scaled


def fit_vector_scaling(logits: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> VectorScaling:
    """Returns the scaling of the lowest NLL that L-BFGS finds from the fitted temperature.

    Without regularization, as in the paper: 2k numbers are fitted to n images, too many where classes have few images.
    The logits themselves are scaled: log-probabilities, to which each image adds a constant, would be another model.
    """
    check_log_probabilities(logits)
    n, k = logits.shape
    check_labels(labels, k)
    temperature = fit_temperature(scipy.special.log_softmax(logits, axis=1).astype(np.float32), labels)
    logits, rows = np.maximum(logits.astype(np.float64), -1e4), np.arange(n)

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        scores = logits * parameters[:k] + parameters[k:]
        log_p = scipy.special.log_softmax(scores, axis=1)
        error = np.exp(log_p)
        error[rows, labels] -= 1
        gradient = np.concatenate([(error * logits).sum(axis=0), error.sum(axis=0)]) / n
        return float(-log_p[rows, labels].mean()), gradient

    start = np.concatenate([np.full(k, 1 / temperature), np.zeros(k)])
    found = scipy.optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": _MAX_ITERATIONS})
    return VectorScaling(found.x[:k], found.x[k:])
