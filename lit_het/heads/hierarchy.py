"""A softmax of two levels: ``p(c) = p(g) p(c | g)`` of the cluster g of class c, each a softmax (Goodman 2001).

Clusters are adjacent classes, about √k of √k classes each. Training computes the logits of the clusters, and of the
classes in that of the label; predictions have those of all classes. Both are exact, and sum to one. τ divides the
logits of both levels.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lit_het.heads.logits import logits_layer
from lit_het.types import MASKED, LogitSamples


def cluster_sizes(num_classes: int) -> tuple[int, int]:
    """Returns the number of clusters, and of the classes of each but the last, which may have fewer."""
    size = math.isqrt(num_classes - 1) + 1
    return -(-num_classes // size), size


class HierarchicalLogits(nnx.Module):
    """The log-probabilities of classes; the paths of their parameters are those of a dense layer.

    Args:
        feature_size: d.
        num_classes: k.
        rngs: random keys of the parameters.
        zero_kernel, initial_bias: as of `logits_layer`.
    """

    def __init__(self, feature_size: int, num_classes: int, rngs: nnx.Rngs, *, zero_kernel: bool, initial_bias: float):
        self.out_features = num_classes
        self.num_clusters, self.size = cluster_sizes(num_classes)
        layer: Any = logits_layer(feature_size, num_classes, rngs, zero_kernel=zero_kernel, initial_bias=initial_bias)
        self.kernel, self.bias = layer.kernel, layer.bias
        self.clusters = logits_layer(feature_size, self.num_clusters, rngs, zero_kernel=zero_kernel, initial_bias=0.0)

    def __call__(self, features: Float[Array, "n d"], temperature: Float[Array, ""] | float = 1.0) -> Array:
        """Returns the log-probabilities ``[n k]`` with logits divided by τ."""
        n, k = features.shape[0], self.out_features
        logits = (features @ self.kernel[...] + self.bias[...][None]) / temperature
        # Not `pad`, which ONNX files do not have here.
        rest = jnp.full((n, self.num_clusters * self.size - k), MASKED)
        padded = jnp.concatenate([logits, rest], axis=1).reshape(n, self.num_clusters, self.size)
        inside = jax.nn.log_softmax(padded)
        of_cluster = jax.nn.log_softmax(self.clusters(features) / temperature)
        return (of_cluster[:, :, None] + inside).reshape(n, self.num_clusters * self.size)[:, :k]

    def of_label(
        self, embedding: Float[Array, "n t d"], temperature: Float[Array, ""], label: Int[Array, " n"]
    ) -> Float[Array, "n t outcomes"]:
        """Returns the log-probabilities of the label, of other classes of its cluster, and of other clusters."""
        n, t, d = embedding.shape
        of_cluster = self.clusters(embedding.reshape(n * t, d)).reshape(n, t, -1)
        of_cluster = jax.nn.log_softmax(of_cluster / temperature)
        cluster, place = jnp.divmod(label, self.size)
        classes = cluster[:, None] * self.size + jnp.arange(self.size)[None]
        # Classes beyond the last of the last cluster read those before, and are masked.
        index = jnp.minimum(classes, self.out_features - 1)
        inside = jnp.einsum("ntd,dns->nts", embedding, self.kernel[...][:, index]) + self.bias[...][index][:, None]
        inside = jnp.where((classes < self.out_features)[:, None], inside / temperature, MASKED)
        inside = jax.nn.log_softmax(inside)

        def apart(values: Float[Array, "n t m"], position: Int[Array, " n"]) -> tuple[Array, Array]:
            is_own = jnp.arange(values.shape[-1])[None] == position[:, None]
            own = jnp.sum(values, axis=-1, keepdims=True, where=is_own[:, None])
            return own, jnp.where(is_own[:, None], MASKED, values)

        own_cluster, other_clusters = apart(of_cluster, cluster)
        own, others = apart(inside, place)
        return jnp.concatenate([own_cluster + own, own_cluster + others, other_clusters], axis=-1)


def of_labels(
    embeddings: LogitSamples, layer: HierarchicalLogits, temperature: Float[Array, ""], label: Int[Array, " b"]
) -> LogitSamples:
    """Returns samples of the log-probabilities of `HierarchicalLogits.of_label`.

    Args:
        embeddings: samples of the noisy embeddings, in the place of logits.
        layer: of all classes.
        temperature: τ.
        label: class of each row.
    """

    def logits(common: Any, constants: Any, indices: Int[Array, " t"]) -> Float[Array, "n t outcomes"]:
        keys, label = constants
        return layer.of_label(embeddings.logits(common, keys, indices), temperature, label)

    return dataclasses.replace(embeddings, keys=(embeddings.keys, label), logits=logits)
