"""The last layer of classifiers, and its initialization."""

from flax import nnx


def logits_layer(
    feature_size: int, num_classes: int, rngs: nnx.Rngs, *, zero_kernel: bool, initial_bias: float
) -> nnx.Linear:
    """Returns the layer from features to logits ``[b k]``; fine-tuning uses a kernel of zeros (SoViT Table 8)."""
    kernel_init = nnx.initializers.zeros if zero_kernel else nnx.initializers.lecun_normal()
    bias_init = nnx.initializers.constant(initial_bias)
    return nnx.Linear(feature_size, num_classes, kernel_init=kernel_init, bias_init=bias_init, rngs=rngs)
