"""What tasks expect of heads."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Key

from lit_het.types import EmbeddingSamples, LogitSamples, Queries


@runtime_checkable
class ClassificationHead(Protocol):
    """From features to samples of logits, already divided by the temperature."""

    def __call__(
        self, features: Float[Array, "b d"], key: Key[Array, ""] | None, *, training: bool = True
    ) -> LogitSamples:
        """Returns as many samples as training or evaluation takes; without a key one sample without noise."""
        ...

    def temperature(self) -> Float[Array, ""]:
        """Returns τ."""
        ...

    def noise_norm(self, features: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns the root mean square norm of the noise, sqrt(tr Σ(x)); zeros where there is none."""
        ...

    def spectrum(self, features: Float[Array, "b d"]) -> Float[Array, "b _"]:
        """Returns the noise's standard deviations along its principal axes, falling; none where there is no noise."""
        ...


@runtime_checkable
class ContrastiveHead(Protocol):
    """From a pair of embeddings to keys and noisy queries."""

    def __call__(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], key: Key[Array, ""] | None
    ) -> EmbeddingSamples:
        """Returns keys and queries; without a key queries have no noise."""
        ...

    def image_queries(self, image: Float[Array, "b d"], key: Key[Array, ""], num_samples: int) -> Queries | None:
        """Returns noisy image embeddings for evaluation; None where there is no noise."""
        ...

    def image_key(self, image: Float[Array, "b d"]) -> Float[Array, "b d"]:
        """Returns the noiseless image embeddings that inner products are taken with."""
        ...

    def text_key(self, text: Float[Array, "b d"]) -> Float[Array, "b d"]:
        """Returns the noiseless text embeddings that inner products are taken with."""
        ...

    def temperature(self) -> Float[Array, ""]:
        """Returns τ."""
        ...

    def image_noise_norm(self, image: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns sqrt(tr Σ(a)) for image embeddings; zeros where there is no noise."""
        ...

    def text_noise_norm(self, text: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns sqrt(tr Σ(b)) for text embeddings; zeros where there is no noise."""
        ...

    def image_spectrum(self, image: Float[Array, "b d"]) -> Float[Array, "b _"]:
        """Returns the noise's standard deviations along its principal axes, falling; none where there is no noise."""
        ...
