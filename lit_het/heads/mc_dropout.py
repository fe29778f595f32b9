"""Monte Carlo dropout: embeddings with some of their entries dropped (Gal & Ghahramani 2016, Sec. 3 and 4).

With masks m of zeros and ones, training compares the unit vectors of ``m ∘ a``, a mask for each image and each text. A
prediction uses all entries, or for images the mean over S masks. The uncertainty is the variance over masks,
``E |z - E z|²`` for ``z = m ∘ a / |m ∘ a|``.
"""

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Key

from lit_het.heads.base import EVALUATED_LOGITS, ContrastiveHead, unit
from lit_het.heads.contrastive_config import McDropoutContrastiveConfig
from lit_het.heads.covariance import Noise, standard_normals
from lit_het.heads.sampling import noisy_samples
from lit_het.types import EmbeddingSamples, LogitSamples

# Masks that the noise norm is measured with, the same for all examples and calls.
_MASKS = 16


class McDropoutContrastive(ContrastiveHead):
    """The head of a `McDropoutContrastiveConfig`."""

    def __init__(self, config: McDropoutContrastiveConfig):
        super().__init__(config.temperature, config.initial_bias)
        self.dropout = config.dropout

    def __call__(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], key: Key[Array, ""] | None
    ) -> EmbeddingSamples:
        """Returns embeddings of both sides with dropped entries, as queries and as keys; without a key all entries."""
        if key is None:
            return super().__call__(image, text, None)

        def dropped(x: Float[Array, "b d"], key: Key[Array, ""]) -> Float[Array, "b d"]:
            normals = standard_normals(jax.random.split(key, len(x)), jnp.arange(1), x.shape[1])
            return x * self._is_kept(normals[:, 0])

        keys = jax.random.split(key)
        return super().__call__(dropped(image, keys[0]), dropped(text, keys[1]), None)

    def logits(
        self,
        image: Float[Array, "b d"],
        classes: Float[Array, "k d"],
        key: Key[Array, ""] | None,
        num_samples: int,
    ) -> LogitSamples:
        """Returns S samples ``z · β / τ``, each with its own mask of the image; without a key one with all entries."""
        if key is None:
            return super().logits(image, classes, key, num_samples)
        temperature = self.temperature()

        def prepare(image: Float[Array, "n d"]) -> tuple[Float[Array, "n d"], Noise]:
            # The noise is its normals, one for each entry: they choose the mask.
            return image, Noise.diagonal(jnp.ones_like(image))

        def logits(image: Float[Array, "n d"], normals: Float[Array, "n t d"]) -> Float[Array, "n t k"]:
            return unit(image[:, None] * self._is_kept(normals)) @ classes.T / temperature

        block_size = max(len(image), EVALUATED_LOGITS // len(classes))
        return noisy_samples(image, key, num_samples, block_size, prepare, logits)

    def image_noise_norm(self, image: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns the square root of the summed variances over masks."""
        return self._noise_norm(image)

    def text_noise_norm(self, text: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns the square root of the summed variances over masks."""
        return self._noise_norm(text)

    def image_spectrum(self, image: Float[Array, "b d"]) -> Float[Array, "b masks"]:
        """Returns the standard deviations over masks along their principal axes, in descending order."""
        deviations = self._deviations(image)
        gram = jnp.einsum("bmd,bnd->bmn", deviations, deviations) / (_MASKS - 1)
        # Rounding may make the smallest eigenvalue negative, which is 0: deviations sum to zero.
        return jnp.sqrt(jnp.maximum(jnp.linalg.eigvalsh(gram), 0.0))[:, ::-1]

    def _noise_norm(self, embedding: Float[Array, "b d"]) -> Float[Array, " b"]:
        return jnp.sqrt(jnp.sum(self._deviations(embedding) ** 2, axis=(1, 2)) / (_MASKS - 1))

    def _deviations(self, embedding: Float[Array, "b d"]) -> Float[Array, "b masks d"]:
        """Returns z of every mask minus their mean; the sum of squares over masks - 1 is an unbiased variance."""
        # One set of masks for all rows: a prediction must not depend on the other rows of its block.
        normals = standard_normals(jax.random.key(0)[None], jnp.arange(_MASKS), embedding.shape[1])
        samples = unit(embedding[:, None] * self._is_kept(normals))
        return samples - samples.mean(axis=1, keepdims=True)

    def _is_kept(self, normals: Float[Array, "*rows d"]) -> Bool[Array, "*rows d"]:
        """Returns masks; their usual factor 1 / (1 - p) is not part of unit vectors."""
        is_kept = normals < norm.ppf(1 - self.dropout)
        # A vector without any entry has no direction, and no gradient of its norm.
        return is_kept | ~jnp.any(is_kept, axis=-1, keepdims=True)
