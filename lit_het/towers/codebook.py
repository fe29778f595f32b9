"""Vector quantization: vectors are replaced by the nearest of k words, which follow the means of what they replace.

VQ-VAE (van den Oord et al. 2017), its App. A.1 and UViM (Kolesnikov et al. 2022): moving sums m and counts n of the
vectors of each word, ``e = (m / n) / |m / n|``. Words have no gradient; that of the vectors passes the quantization as
if it were not there (straight-through, Bengio et al. 2013).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het.towers.oracle_config import CodebookConfig

PERTURBATION = 0.001
"""The largest relative difference of a word from that of which it is the half."""


class Counted(NamedTuple):
    """The vectors of each word.

    Attributes:
        counts: how many there are.
        sums: of them.
    """

    counts: Float[Array, " k"]
    sums: Float[Array, "k d"]


class Codebook(nnx.Module):
    """The words of a `CodebookConfig`; its parameters are their sums and counts."""

    def __init__(self, config: CodebookConfig, rngs: nnx.Rngs):
        self.config = config
        normal = nnx.initializers.normal(1 / np.sqrt(config.num_words))
        self.sums = nnx.Param(normal(rngs.params(), (config.num_words, config.size), jnp.float32))
        self.counts = nnx.Param(jnp.ones(config.num_words, jnp.float32))

    def words(self) -> Float[Array, "k d"]:
        """Returns the words, unit vectors without a gradient; zeros of those that have no vectors."""
        sums, counts = (jax.lax.stop_gradient(x[...].astype(jnp.float32)) for x in (self.sums, self.counts))
        # A word that was not used for so long that its count is 0 is the zero vector, and not NaN.
        means = sums / jnp.where(counts == 0, 1, counts)[:, None]
        lengths = jnp.linalg.norm(means, axis=1, keepdims=True)
        return means / jnp.where(lengths == 0, 1, lengths)


def quantized(
    vectors: Float[Array, "b n d"], words: Float[Array, "k d"]
) -> tuple[Float[Array, "b n d"], Int[Array, "b n"]]:
    """Returns the nearest word of each vector, whose gradient is the vector's, and the word's number."""
    # The square of the vector is the same for all words.
    distances = jnp.sum(words**2, axis=1)[None, None] - 2 * jnp.einsum("bnd,kd->bnk", vectors, words)
    numbers = jnp.argmin(distances, axis=2).astype(jnp.int32)
    return vectors + jax.lax.stop_gradient(words[numbers] - vectors), numbers


def counted(
    vectors: Float[Array, "b n d"], numbers: Int[Array, "b n"], valid: Bool[Array, " b"], num_words: int
) -> Counted:
    """Returns counts and sums of the vectors of each word in a batch, of its valid rows."""
    vectors, shares = jax.lax.stop_gradient(vectors), jnp.broadcast_to(valid[:, None], numbers.shape)
    counts = jnp.zeros(num_words).at[numbers].add(shares)
    sums = jnp.zeros((num_words, vectors.shape[2])).at[numbers].add(jnp.where(shares[:, :, None], vectors, 0.0))
    return Counted(counts, sums)


def followed(before: Counted, batch: Counted, config: CodebookConfig, key: Key[Array, ""]) -> Counted:
    """Returns sums and counts after a batch, where unused words are halves of the most frequent ones."""
    after = Counted(*(config.momentum * old + new for old, new in zip(before, batch, strict=True)))

    def has_unused(state: tuple[Counted, Key[Array, ""]]) -> Bool[Array, ""]:
        counts = state[0].counts
        # Where no half would be used enough, no word is split: every split leaves one unused word less.
        return (counts.min() < config.least_count) & (counts.max() >= 2 * config.least_count)

    def split(state: tuple[Counted, Key[Array, ""]]) -> tuple[Counted, Key[Array, ""]]:
        (counts, sums), key = state
        key, of_split = jax.random.split(key)
        both = jnp.stack([jnp.argmax(counts), jnp.argmin(counts)])
        size = sums.shape[1]
        factors = jax.random.uniform(of_split, (size,), minval=1 - PERTURBATION, maxval=1 + PERTURBATION)
        count, vector = counts[both[0]] / 2, sums[both[0]] / 2
        return Counted(counts.at[both].set(count), sums.at[both].set(jnp.stack([vector, vector * factors]))), key

    return jax.lax.while_loop(has_unused, split, (after, key))[0]
