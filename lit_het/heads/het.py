"""The HET classifier, with noise in the logits: (Wᵀ φ + bias + ε(x)) / τ (HET-XL Eq. 2)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from lit_het.heads.base import ClassificationHead
from lit_het.heads.classification_config import HetConfig
from lit_het.heads.covariance import Noise
from lit_het.heads.sampling import noiseless_samples, noisy_logit_samples
from lit_het.types import LogitSamples


class HetClassifier(ClassificationHead):
    """The head of a `HetConfig`."""

    def __init__(self, config: HetConfig, feature_size: int, num_classes: int, rngs: nnx.Rngs):
        super().__init__(config, feature_size, num_classes, rngs)
        self.config = config
        # Features are outputs of a LayerNorm, so their norm is about the square root of their size.
        self.covariance = config.covariance.build(feature_size, num_classes, feature_size**0.5, rngs)

    def __call__(
        self, features: Float[Array, "b d"], key: Key[Array, ""] | None, num_samples: int | None = None
    ) -> LogitSamples:
        """Returns S samples of logits divided by τ, by default as in training; without a key one without noise."""
        temperature, sampling = self.temperature(), self.config.sampling
        if key is None:
            return noiseless_samples(features, self.over_temperature)

        def prepare(phi: Float[Array, "n d"]) -> tuple[Float[Array, "n k"], Noise]:
            return self.logits(phi), self.covariance(phi)

        num_samples = sampling.num_samples if num_samples is None else num_samples
        return noisy_logit_samples(
            features, key, num_samples, sampling.block_size, prepare, temperature, antithetic=sampling.antithetic
        )

    def kernel_alignment(self, features: Float[Array, "b d"]) -> Float[Array, "b _"]:
        """Returns the cosine of the smallest principal angle between the row spaces of W and Q(x) (HET-XL App. I.1).

        ``Qᵀ Q`` is the low-rank part of Σ: with a rank-one second term all of it. Near 1, at least one direction of the
        noise lies in the row space of W, as all those of noise ``Wᵀ ε`` (HET-XL) do. The second column is that of a W
        of standard normals. Without factors there are no columns: diagonal noise spans everything.
        """
        factors = self.covariance(features).rows()
        if not factors.shape[1]:
            return jnp.zeros((features.shape[0], 0))
        of_factors = jnp.linalg.qr(factors.swapaxes(1, 2))[0]
        kernel = self.logits.kernel[...]
        random = nnx.initializers.normal(1.0)(jax.random.key(0), kernel.shape)
        # The singular values of the products of orthonormal bases are cosines of angles (Björck & Golub 1973).
        bases = (jnp.linalg.qr(rows.T)[0] for rows in (kernel, random))
        cosines = [jnp.linalg.norm(jnp.einsum("kd,nkr->ndr", basis, of_factors), 2, axis=(1, 2)) for basis in bases]
        return jnp.stack(cosines, axis=1)
