"""Heads without noise, from which all others are derived."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Key

from lit_het.heads.covariance import Covariance, Noise
from lit_het.heads.options import ClassificationOptions
from lit_het.heads.sampling import noiseless_samples, noisy_samples
from lit_het.heads.temperature_config import TemperatureConfig
from lit_het.types import EmbeddingSamples, LogitSamples, Params

EVALUATED_LOGITS = 2**22
"""Logits that exist at a time on a device when images are compared with class names."""


CANDIDATES = 2**31
"""Number of the random key of what a step draws of classes: beyond those of examples, which `jax.random.split` has."""


def unit(embedding: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Divides every row by its norm (plus 1e-8, as big_vision does)."""
    return embedding / (jnp.linalg.norm(embedding, axis=-1, keepdims=True) + 1e-8)


class ClassificationHead(nnx.Module):
    """Maps features to samples of logits divided by τ; without noise ``(Wᵀ φ + bias) / τ`` (HET-XL Eq. 1).

    Attributes:
        covariance: of the noise; None without noise.
        kernel_alignment: features to the alignment of the noise with the kernel (`HetClassifier`); None elsewhere.
    """

    covariance: Any = None
    kernel_alignment: Any = None

    def __init__(self, config: ClassificationOptions, feature_size: int, num_classes: int, rngs: nnx.Rngs):
        self.get_logits = config.get_logits
        self.logits: Any = config.get_logits.build(
            feature_size, num_classes, rngs, zero_kernel=config.zero_kernel, initial_bias=config.initial_bias
        )
        self.temperature = config.temperature.build()

    def __call__(
        self, features: Float[Array, "b d"], key: Key[Array, ""] | None, num_samples: int | None = None
    ) -> LogitSamples:
        """Returns S noise samples, by default as many as in training; without a key one sample without noise."""
        samples = noiseless_samples(features, self.over_temperature)
        return self.with_outcomes(samples, lambda: noiseless_samples(features, lambda phi: phi), key)

    def with_outcomes(
        self, samples: LogitSamples, embeddings: Callable[[], LogitSamples], key: Key[Array, ""] | None
    ) -> LogitSamples:
        """Returns samples that are trained with the logits of fewer classes, where the layer needs labels.

        Args:
            samples: of the logits of all classes.
            embeddings: returns those of the noisy embeddings, in the place of logits.
            key: random key of the step; None leaves them out.
        """
        if key is None or samples.num_factors or not self.get_logits.needs_labels:
            return samples
        arguments = embeddings(), self.logits, self.temperature(), jax.random.fold_in(key, CANDIDATES)
        return dataclasses.replace(samples, of_labels=functools.partial(self.get_logits.of_labels, *arguments))

    def over_temperature(self, features: Float[Array, "n d"]) -> Float[Array, "n k"]:
        """Returns the logits of all classes, divided by τ."""
        return self.get_logits.over_temperature(self.logits, features, self.temperature())

    def noise_norm(self, features: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns the root mean square norm of the noise, ``sqrt(tr Σ(x))``; zeros without noise."""
        return jnp.zeros(features.shape[0]) if self.covariance is None else self.covariance.noise_norm(features)

    def spectrum(self, features: Float[Array, "b d"]) -> Float[Array, "b _"]:
        """Returns the roots of the largest eigenvalues of the covariance, in descending order; none without noise."""
        return jnp.zeros((features.shape[0], 0)) if self.covariance is None else self.covariance.spectrum(features)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What the towers return for image-text pairs, which a head is fitted to.

    Attributes:
        count: most pairs.
        batches: number of pairs of a batch to all batches, each of the towers' outputs for images and for texts.
        hessian: of the loss, see `lit_het.losses.contrastive.SoftmaxLoss.hessian`.
        towers: configurations of the towers, by "image" and "text".
        params: parameters of the towers, by "image_tower" and "text_tower".
        mesh: devices to compute on.
    """

    count: int
    batches: Callable[[int], Iterator[tuple[np.ndarray, np.ndarray]]]
    hessian: Callable[..., Float[Array, "d d"]]
    towers: dict[str, Any]
    params: Params
    mesh: Mesh


class ContrastiveHead(nnx.Module):
    """Maps image and text embeddings to keys and queries; here, both are the unit embeddings.

    Attributes:
        bias: added to logits by the sigmoid loss; None for none.
        image_covariance: of the noise that is added to keys of images; None without noise, or with another one.
    """

    image_covariance: Covariance | None = None

    def __init__(self, temperature: TemperatureConfig, initial_bias: float | None):
        self.temperature = temperature.build()
        self.bias = None if initial_bias is None else nnx.Param(jnp.float32(initial_bias))

    def __call__(
        self, image: Float[Array, "n d"], text: Float[Array, "b d"], key: Key[Array, ""] | None
    ) -> EmbeddingSamples:
        """Returns keys and queries; without a random key queries have no noise."""
        bias = None if self.bias is None else self.bias[...]
        return EmbeddingSamples(self.image_key(image), self.text_key(text), None, None, self.temperature(), bias)

    def logits(
        self,
        image: Float[Array, "b d"],
        classes: Float[Array, "k key"],
        key: Key[Array, ""] | None,
        num_samples: int,
    ) -> LogitSamples:
        """Returns S samples of ``(α + ε) · β / τ`` for class embeddings β; without a key one sample without noise.

        Keys may be longer than the noise, which applies to their leading entries.
        """
        temperature = self.temperature()
        # Asked whether there is noise: that of all images at once is not used, and compilers leave it out.
        if key is None or self.image_noise(image) is None:
            return noiseless_samples(image, lambda image: self.image_key(image) @ classes.T / temperature)

        def prepare(image: Float[Array, "n d"]) -> tuple[Float[Array, "n k"], Any]:
            return self.image_key(image) @ classes.T, self.image_noise(image)

        def logits(base: Float[Array, "n k"], epsilon: Float[Array, "n t q"]) -> Float[Array, "n t k"]:
            return (base[:, None] + epsilon @ classes[:, : epsilon.shape[2]].T) / temperature

        block_size = max(len(image), EVALUATED_LOGITS // len(classes))
        return noisy_samples(image, key, num_samples, block_size, prepare, logits)

    def image_key(self, image: Float[Array, "b d"]) -> Float[Array, "b d"]:
        """Returns the noiseless image embeddings, which queries are compared with."""
        return unit(image)

    def text_key(self, text: Float[Array, "b d"]) -> Float[Array, "b d"]:
        """Returns the noiseless text embeddings, which queries are compared with."""
        return unit(text)

    def mean_text_key(self, keys: Float[Array, "k t d"]) -> Float[Array, "k d"]:
        """Returns the key of each class name from the keys of its t prompts."""
        return unit(keys.mean(axis=1))

    def auxiliary_losses(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], key: Key[Array, ""] | None
    ) -> dict[str, Float[Array, " b"]]:
        """Returns losses of each example to add to that of the batch, such as a regularization of the noise."""
        return {}

    def image_noise(self, image: Float[Array, "b d"]) -> Noise | None:
        """Returns Σ(a) of the noise that is added to keys of images; None without."""

    def text_noise(self, text: Float[Array, "b d"]) -> Noise | None:
        """Returns Σ(b) of the noise that is added to keys of texts; None without."""

    def image_noise_norm(self, image: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns ``sqrt(tr Σ(a))`` for image embeddings; zeros without noise."""
        return _norm(self.image_noise(image), image)

    def text_noise_norm(self, text: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns ``sqrt(tr Σ(b))`` for text embeddings; zeros without noise."""
        return _norm(self.text_noise(text), text)

    def noise_metrics(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], valid: Bool[Array, " b"]
    ) -> dict[str, Float[Array, " b"]]:
        """Returns what shows the form of the noise in training, here its effective rank; nothing without noise.

        Without gradients: they are only logged.
        """
        sides = {"image": self.image_noise(image), "text": self.text_noise(text)}
        found = {f"{side}_noise_rank": noise.effective_rank() for side, noise in sides.items() if noise is not None}
        return jax.lax.stop_gradient(found)

    def image_spectrum(self, image: Float[Array, "b d"]) -> Float[Array, "b _"]:
        """Returns standard deviations of diagonal noise along its principal axes, descending; none without noise."""
        noise = self.image_noise(image)
        return jnp.zeros((len(image), 0)) if noise is None else jnp.sort(noise.scale, axis=1, descending=True)

    def fitted(self, pairs: Pairs) -> Params:
        """Returns parameters that are fitted to pairs, of a head whose configuration says so.

        Raises:
            UserError: there are too few pairs, or they say nothing.
        """
        raise NotImplementedError


def _norm(noise: Noise | None, embedding: Float[Array, "b d"]) -> Float[Array, " b"]:
    return jnp.zeros(len(embedding)) if noise is None else jnp.sqrt(noise.trace())
