"""How much the label of an image would say: entropy, BALD and EPIG, from samples of its class probabilities.

For an image x with the class probabilities p_s of S samples (of noise, of weights, or members) and their mean p̄:

- entropy ``H(p̄)``;
- BALD, ``H(p̄) - 1/S Σ_s H(p_s)``: the mutual information of the label and the sample (Houlsby et al. 2011);
- EPIG, the mean over target images x* of the mutual information of both labels (Bickford Smith et al. 2023). Their
  joint distribution is ``1/S Σ_s p_s(y | x) p_s(y* | x*)``: a sample s must be of the same weights for both images.

In nats.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, Float

from lit_het.eval.metrics.ensembles import mean_prediction

# Numbers of the joint distributions of an image and a part of the targets.
_BLOCK = 2**22


def entropy(
    log_probabilities: Float[np.ndarray, "n s k"], weights: Float[np.ndarray, " s"] | None = None
) -> Float[np.ndarray, " n"]:
    """Returns the entropy of the mean over samples; by default all have equal weights."""
    return scipy.special.entr(np.exp(mean_prediction(log_probabilities, weights), dtype=np.float64)).sum(axis=1)


def bald(
    log_probabilities: Float[np.ndarray, "n s k"], weights: Float[np.ndarray, " s"] | None = None
) -> Float[np.ndarray, " n"]:
    """Returns the entropy of the mean over samples, less the mean entropy of a sample; by default of equal weights."""
    return divergence_from_mean(log_probabilities, mean_prediction(log_probabilities, weights), weights)


def divergence_from_mean(
    log_probabilities: Float[np.ndarray, "n s k"],
    mean: Float[np.ndarray, "n k"],
    weights: Float[np.ndarray, " s"] | None = None,
) -> Float[np.ndarray, " n"]:
    """Returns BALD as the mean of ``KL(p_s || p̄)``, given log p̄."""
    # In float32 little is left of the difference of entropies.
    finite = np.maximum(log_probabilities, np.finfo(np.float32).min)  # 0 log 0 is 0
    of_samples = np.einsum("nsk,nsk->ns", np.exp(finite), finite - np.maximum(mean, np.finfo(np.float32).min)[:, None])
    return np.average(of_samples, axis=1, weights=weights)


def epig(
    pool: Float[np.ndarray, "n s k"], target: Float[np.ndarray, "t s l"], block_size: int = _BLOCK
) -> Float[np.ndarray, " n"]:
    """Returns the expected predictive information gain of every image of a pool about the target images.

    Args:
        pool: log-probabilities of the images to choose from.
        target: those of the target images, of the same samples.
        block_size: entries of joint distributions that exist at a time.
    """
    return np.asarray(_epig(pool, target, max(1, block_size // (pool.shape[2] * target.shape[2]))))


@jax.jit(static_argnums=2)
def _epig(pool: Float[Array, "n s k"], target: Float[Array, "t s l"], targets_at_a_time: int) -> Float[Array, " n"]:
    def of_image(image: Float[Array, "s k"]) -> Float[Array, ""]:
        def information(other: Float[Array, "s l"]) -> Float[Array, ""]:
            joint = jnp.matmul(image.T, other, precision="highest") / len(image)
            independent = image.mean(axis=0)[:, None] * other.mean(axis=0)[None]
            # Term by term: of the entropies H(y) + H(y*) - H(y, y*) little is left in float32.
            return jnp.sum(jax.scipy.special.rel_entr(joint, independent))

        return jnp.mean(jax.lax.map(information, jnp.exp(target), batch_size=targets_at_a_time))

    return jax.lax.map(of_image, jnp.exp(pool))
