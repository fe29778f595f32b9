"""Contrastive heads: deterministic, and HET-XL with noise on unit-normalised queries (HET-XL Sec. 5.2, App. A.2)."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from lit_het.heads.base import EVALUATED_LOGITS, ContrastiveHead, unit
from lit_het.heads.contrastive_config import DeterministicContrastiveConfig as DeterministicContrastiveConfig
from lit_het.heads.contrastive_config import HetXLContrastiveConfig
from lit_het.heads.covariance import Covariance, Noise, standard_normals
from lit_het.heads.sampling import (
    in_pairs,
    is_factored,
    noiseless_samples,
    noisy_logit_samples,
    noisy_samples,
)
from lit_het.types import EmbeddingSamples, LogitSamples, Queries


class HetXLContrastive(ContrastiveHead):
    """The head of a `HetXLContrastiveConfig`."""

    def __init__(self, config: HetXLContrastiveConfig, embedding_size: int, rngs: nnx.Rngs):
        super().__init__(config.temperature, config.initial_bias)
        self.config = config

        def covariance(side: str) -> Covariance | None:
            if config.noisy not in ("both", side):
                return None
            # Entries of an embedding that is not normalized are of order 1.
            norm = 1.0 if config.normalize_before_noise else math.sqrt(embedding_size)
            return config.covariance.build(embedding_size, embedding_size, norm, rngs)

        self.image_covariance = covariance("image")
        self.text_covariance = covariance("text")

    def __call__(
        self, image: Float[Array, "n d"], text: Float[Array, "b d"], key: Key[Array, ""] | None
    ) -> EmbeddingSamples:
        """Returns keys and S noisy queries of each side; without a random key deterministic embeddings only."""
        image_queries, text_queries = None, None
        if key is not None:
            image_noise, text_noise = jax.random.split(key)
            image_queries = self.image_queries(image, image_noise, self.config.num_samples)
            text_queries = self._queries(text, self.text_covariance, text_noise, self.config.num_samples)
        return EmbeddingSamples(
            image=self.image_key(image),
            text=self.text_key(text),
            image_queries=image_queries,
            text_queries=text_queries,
            temperature=self.temperature(),
            bias=None if self.bias is None else self.bias[...],
        )

    def image_queries(self, image: Float[Array, "b d"], key: Key[Array, ""], num_samples: int) -> Queries | None:
        """Returns noisy image embeddings, or None if images have no noise."""
        return self._queries(image, self.image_covariance, key, num_samples)

    def logits(
        self,
        image: Float[Array, "b d"],
        classes: Float[Array, "k d"],
        key: Key[Array, ""] | None,
        num_samples: int,
    ) -> LogitSamples:
        """Returns S samples ``(α + ε) · β / τ`` with noise on the image only, as in the ablation of HET-XL App. M."""
        temperature, covariance = self.temperature(), self.image_covariance
        if key is None or covariance is None:
            return noiseless_samples(image, lambda image: self.image_key(image) @ classes.T / temperature)

        block_size = max(len(image), EVALUATED_LOGITS // len(classes))

        def prepare(image: Float[Array, "n d"]) -> tuple[Float[Array, "n d"], Noise]:
            embedding = self._before(image)
            return embedding, covariance(embedding)

        k, d = classes.shape
        if not self.config.normalize_after_noise and is_factored(
            self.config.order, covariance.config, noise_size=d, num_classes=k, num_samples=num_samples
        ):

            def prepare_factored(image: Float[Array, "n d"]) -> tuple[Float[Array, "n k"], Noise]:
                embedding, noise = prepare(image)
                return embedding @ classes.T, noise.project(classes.T)

            return noisy_logit_samples(
                image, key, num_samples, block_size, prepare_factored, temperature, antithetic=self.config.antithetic
            )

        def logits(embedding: Float[Array, "n d"], epsilon: Float[Array, "n t d"]) -> Float[Array, "n t k"]:
            return self._after(embedding[:, None] + epsilon) @ classes.T / temperature

        return noisy_samples(image, key, num_samples, block_size, prepare, logits, antithetic=self.config.antithetic)

    def image_key(self, image: Float[Array, "b d"]) -> Float[Array, "b d"]:
        """Returns noiseless image embeddings."""
        return self._after(self._before(image))

    def text_key(self, text: Float[Array, "b d"]) -> Float[Array, "b d"]:
        """Returns noiseless text embeddings."""
        return self._after(self._before(text))

    def image_noise(self, image: Float[Array, "b d"]) -> Noise | None:
        """Returns Σ(a), or None."""
        return None if self.image_covariance is None else self.image_covariance(self._before(image))

    def text_noise(self, text: Float[Array, "b d"]) -> Noise | None:
        """Returns Σ(b), or None."""
        return None if self.text_covariance is None else self.text_covariance(self._before(text))

    def noise_metrics(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], valid: Bool[Array, " b"]
    ) -> dict[str, Float[Array, " b"]]:
        """Returns the effective rank, and the alignment of each side's noise with the other side's keys."""
        found = super().noise_metrics(image, text, valid)
        sides = ("image", self.image_noise(image), text), ("text", self.text_noise(text), image)
        for name, noise, other in sides:
            if noise is not None:
                found[f"{name}_noise_alignment"] = noise.alignment(self._after(self._before(other)), valid)
        return jax.lax.stop_gradient(found)

    def image_spectrum(self, image: Float[Array, "b d"]) -> Float[Array, "b _"]:
        """Returns the square roots of the largest eigenvalues of Σ(a), in descending order."""
        if self.image_covariance is None:
            return jnp.zeros((image.shape[0], 0))
        return self.image_covariance.spectrum(self._before(image))

    def _queries(
        self, embedding: Float[Array, "b d"], covariance: Covariance | None, key: Key[Array, ""], num_samples: int
    ) -> Queries | None:
        if covariance is None:
            return None
        embedding = self._before(embedding)
        noise = covariance(embedding)
        if num_samples == 0:
            return Queries(embedding[:, None], noise.rows())
        b, d = embedding.shape
        normals = standard_normals(
            jax.random.split(key, b),
            jnp.arange(num_samples),
            noise.num_normals,
            antithetic=in_pairs(self.config.antithetic, num_samples),
        )
        # A query meets one key per example of the batch, as a classifier meets its classes.
        if not is_factored(self.config.order, covariance.config, noise_size=d, num_classes=b, num_samples=num_samples):
            return Queries(self._after(embedding[:, None] + noise.apply(normals)))
        rows = noise.rows()
        scale = 1 / _norms(embedding, rows, normals) if self.config.normalize_after_noise else None
        return Queries(embedding[:, None], rows, normals, scale)

    def _before(self, embedding: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        return unit(embedding) if self.config.normalize_before_noise else embedding

    def _after(self, embedding: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        return unit(embedding) if self.config.normalize_after_noise else embedding


def _norms(
    mean: Float[Array, "b d"], rows: Float[Array, "b r d"], normals: Float[Array, "b s r"]
) -> Float[Array, "b s"]:
    """Returns ``|mean + normals @ rows|`` (plus 1e-8, as `unit`) from the inner products of mean and rows."""
    # By the Gram matrix of r + 2 vectors, so that no noisy embedding [b s d] is ever computed.
    vectors = jnp.concatenate([mean[:, None], rows], axis=1)
    gram = jnp.einsum("bpd,bqd->bpq", vectors, vectors)
    weights = jnp.concatenate([jnp.ones((*normals.shape[:2], 1)), normals], axis=2)
    # Rounding may make the square of a tiny norm negative.
    return jnp.sqrt(jnp.maximum(jnp.einsum("bsp,bpq,bsq->bs", weights, gram, weights), 0.0)) + 1e-8
