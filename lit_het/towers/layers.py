"""Layers of all Transformers: dense, norm and MLP."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from lit_het.towers.encoder_config import Activation, ComputeType

# The keys of attention weights follow those of the outputs of layers.
_OF_WEIGHTS = 16


def _saving_slopes(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns a function of single numbers that saves its derivative for the backward pass, and nothing else.

    JAX would save several arrays of the size of the hidden layer, the largest of a block.
    """
    saving = jax.custom_jvp(function)

    def derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        value, slope = jax.jvp(function, primals, (jnp.ones_like(primals[0]),))
        return value, slope * tangents[0]

    saving.defjvp(derivative)
    return saving


_FUNCTIONS: dict[Activation, Callable[[Array], Array]] = {
    "gelu_tanh": _saving_slopes(lambda x: nnx.gelu(x, approximate=True)),
    "gelu": _saving_slopes(lambda x: nnx.gelu(x, approximate=False)),
    "quick_gelu": _saving_slopes(lambda x: x * jax.nn.sigmoid(1.702 * x)),
    "relu": jax.nn.relu,
}
GATES: dict[Activation, Callable[[Array], Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": _FUNCTIONS["gelu"],
    "geglu_tanh": _FUNCTIONS["gelu_tanh"],
}
"""Activations with a gate beside the hidden layer (Shazeer 2020, Eq. 6), and the functions of the gate."""


def linear(size_in: int, size_out: int, dtype: ComputeType, rngs: nnx.Rngs) -> nnx.Linear:
    """Returns a dense layer with Xavier-uniform kernel and zero bias."""
    return nnx.Linear(
        size_in,
        size_out,
        dtype=jnp.dtype(dtype),
        kernel_init=nnx.initializers.xavier_uniform(),
        rngs=rngs,
    )


def log_variances(size_in: int, size_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Returns ProLIP's dense layer of log σ², in float32: at first -10, and a standard normal around it."""
    normal, constant = nnx.initializers.normal(size_in**-0.5), nnx.initializers.constant(-10.0)
    return nnx.Linear(size_in, size_out, kernel_init=normal, bias_init=constant, rngs=rngs)


def norm(kind: Literal["layer", "rms"], width: int, epsilon: float, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """Returns a norm that computes in float32 for any type of activations."""
    of_kind = nnx.LayerNorm if kind == "layer" else nnx.RMSNorm
    return of_kind(width, epsilon=epsilon, dtype=jnp.float32, rngs=rngs)


class DropoutRates(NamedTuple):
    """Rates at which a tower drops in training.

    Attributes:
        layers: of embeddings, and of outputs of layers before they are added.
        weights: of attention weights.
    """

    layers: float = 0.0
    weights: float = 0.0


NO_DROPOUT = DropoutRates()


class WeightDropout(NamedTuple):
    """Dropout of the attention weights of a layer.

    Attributes:
        rate: at which they are dropped.
        key: random key of the layer.
    """

    rate: float
    key: Key[Array, ""]


class Dropout(NamedTuple):
    """Dropout of a block, by the numbers of its layers; without a key nothing is dropped.

    Attributes:
        rates: at which it drops.
        key: random key of the block.
    """

    rates: DropoutRates
    key: Key[Array, ""] | None

    def __call__(self, x: Float[Array, "*n d"], number: int) -> Float[Array, "*n d"]:
        """Drops entries of the output of a layer."""
        if self.key is None or not self.rates.layers:
            return x
        return nnx.Dropout(self.rates.layers, deterministic=False)(x, rngs=jax.random.fold_in(self.key, number))

    def of_weights(self, number: int) -> WeightDropout | None:
        """Returns the dropout of the attention weights of a layer; None where none are dropped."""
        if self.key is None or not self.rates.weights:
            return None
        return WeightDropout(self.rates.weights, jax.random.fold_in(self.key, _OF_WEIGHTS + number))


def _same(x: Float[Array, "n _"], _: int) -> Float[Array, "n _"]:
    return x


def _applied(layer: Any, x: Float[Array, "n _"]) -> Float[Array, "n _"]:
    return layer(x)


class Mlp(nnx.Module):
    """Two dense layers with a nonlinearity between them."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Activation,
        dtype: ComputeType,
        rngs: nnx.Rngs,
        layer: Callable[..., Any] = linear,
    ):
        self.activation: Activation = activation
        self.up = layer(width, hidden, dtype, rngs)
        if activation in GATES:
            self.gate = layer(width, hidden, dtype, rngs)
        self.down = layer(hidden, width, dtype, rngs)

    def __call__(
        self,
        x: Float[Array, "n d"],
        apply: Callable[[Any, Array], Array] = _applied,
        drop: Callable[[Array, int], Array] = _same,
    ) -> Float[Array, "n d"]:
        """Maps every token independently.

        Args:
            x: tokens.
            apply: applies a dense layer to its input; stacked experts use another product.
            drop: dropout of the hidden layer (0) and of the output (1).
        """
        return drop(apply(self.down, drop(self.hidden(x, apply), 0)), 1)

    def hidden(self, x: Float[Array, "n d"], apply: Callable[[Any, Array], Array] = _applied) -> Float[Array, "n h"]:
        """Returns the input of the last layer; arguments as those of a call."""
        hidden = apply(self.up, x)
        if self.activation in GATES:
            return GATES[self.activation](apply(self.gate, x)) * hidden
        return _FUNCTIONS[self.activation](hidden)
