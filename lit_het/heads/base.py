"""The protocols of heads, and what their configurations say of them."""

from typing import Protocol, runtime_checkable

from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from lit_het.types import EmbeddingSamples, LogitSamples


@runtime_checkable
class ClassificationHead(Protocol):
    """Maps features to samples of logits divided by the temperature."""

    def __call__(
        self, features: Float[Array, "b d"], key: Key[Array, ""] | None, num_samples: int | None = None
    ) -> LogitSamples:
        """Returns S noise samples, by default as many as in training; without a key one sample without noise."""
        ...

    def temperature(self) -> Float[Array, ""]:
        """Returns τ."""
        ...

    def noise_norm(self, features: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns the root mean square norm of the noise, sqrt(tr Σ(x)); zeros without noise."""
        ...

    def spectrum(self, features: Float[Array, "b d"]) -> Float[Array, "b _"]:
        """Returns standard deviations of the noise along its principal axes, descending; none without noise."""
        ...


@runtime_checkable
class ContrastiveHead(Protocol):
    """Maps image and text embeddings to keys and noisy queries.

    Attributes:
        bias: added to logits by the sigmoid loss; None for none.
    """

    bias: nnx.Param | None

    def __call__(
        self, image: Float[Array, "n d"], text: Float[Array, "b d"], key: Key[Array, ""] | None
    ) -> EmbeddingSamples:
        """Returns keys and queries; without a random key queries have no noise."""
        ...

    def logits(
        self,
        image: Float[Array, "b d"],
        classes: Float[Array, "k d"],
        key: Key[Array, ""] | None,
        num_samples: int,
    ) -> LogitSamples:
        """Returns S samples of ``(α + ε) · β / τ`` for class embeddings β; without a key one sample without noise."""
        ...

    def image_key(self, image: Float[Array, "b d"]) -> Float[Array, "b d"]:
        """Returns the noiseless image embeddings, which queries are compared with."""
        ...

    def text_key(self, text: Float[Array, "b d"]) -> Float[Array, "b d"]:
        """Returns the noiseless text embeddings, which queries are compared with."""
        ...

    def mean_text_key(self, keys: Float[Array, "k t d"]) -> Float[Array, "k d"]:
        """Returns the key of each class name from the keys of its t prompts."""
        ...

    def auxiliary_losses(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], key: Key[Array, ""] | None
    ) -> dict[str, Float[Array, " b"]]:
        """Returns losses of each example to add to that of the batch, such as a regularization of the noise."""
        ...

    def temperature(self) -> Float[Array, ""]:
        """Returns τ."""
        ...

    def image_noise_norm(self, image: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns sqrt(tr Σ(a)) for image embeddings; zeros without noise."""
        ...

    def text_noise_norm(self, text: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns sqrt(tr Σ(b)) for text embeddings; zeros without noise."""
        ...

    def noise_metrics(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], valid: Bool[Array, " b"]
    ) -> dict[str, Float[Array, " b"]]:
        """Returns values for each example that show the form of the noise in training; none without noise."""
        ...

    def image_spectrum(self, image: Float[Array, "b d"]) -> Float[Array, "b _"]:
        """Returns standard deviations of the noise along its principal axes, descending; none without noise."""
        ...
