"""The last layer of classifiers, and its initialization."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lit_het.errors import UserError


def logits_layer(
    feature_size: int, num_classes: int, rngs: nnx.Rngs, *, zero_kernel: bool, initial_bias: float
) -> nnx.Linear:
    """Returns the layer from features to logits ``[b k]``; fine-tuning uses a kernel of zeros (SoViT Table 8)."""
    kernel_init = nnx.initializers.zeros if zero_kernel else nnx.initializers.lecun_normal()
    bias_init = nnx.initializers.constant(initial_bias)
    return nnx.Linear(feature_size, num_classes, kernel_init=kernel_init, bias_init=bias_init, rngs=rngs)


class TiedLogits(nnx.Module):
    """Logits of tokens whose kernel is their embedding (Press & Wolf 2017), with biases of its own.

    Args:
        embedding: of tokens; the parameter is shared, not copied.
        bias: as in `logits_layer`, or None.
    """

    def __init__(self, embedding: nnx.Param, bias: nnx.Param | None):
        self.embedding, self.bias = embedding, bias

    @property
    def out_features(self) -> int:
        """The number of tokens."""
        return self.embedding[...].shape[0]

    @property
    def kernel(self) -> Float[Array, "d k"]:
        """The transposed embedding."""
        return self.embedding[...].T

    def __call__(self, features: Float[Array, "n d"]) -> Float[Array, "n k"]:
        """Returns the logits."""
        logits = features @ self.kernel
        return logits if self.bias is None else logits + self.bias[...][None]


class CheckedLogits(nnx.Module):
    """A function of the user's in the place of a layer.

    Args:
        function: an `nnx.Module` or a function, of embeddings to logits.
        name: of what returned it, for messages.
        feature_size: d.
        num_classes: k.

    Raises:
        UserError: it is no function, or its logits have another shape than ``[n k]``.
    """

    def __init__(self, function: Any, name: str, feature_size: int, num_classes: int):
        if not callable(function):
            raise UserError(
                f"get_logits = {name!r} returns {type(function).__name__}, and not a function of embeddings"
            )
        self.function, self.name, self.out_features = function, name, num_classes
        nnx.eval_shape(lambda embeddings: self(embeddings), jax.ShapeDtypeStruct((2, feature_size), jnp.float32))

    def __call__(self, features: Float[Array, "n d"]) -> Float[Array, "n k"]:
        """Returns the logits."""
        logits: Any = self.function(features)
        expected, found = (features.shape[0], self.out_features), getattr(logits, "shape", type(logits).__name__)
        if found != expected:
            raise UserError(
                f"get_logits = {self.name!r} returns {found} for embeddings {features.shape}; {self.out_features} "
                f"classes need logits {expected}"
            )
        return logits
