"""Monte-Carlo samples of logits: their number, the order of products, and the size of blocks.

Noise is mapped to logits by a linear map L (HET-XL: W, Eq. 5; unshared: W', Eq. 14; HET-H: the hash, Eq. 9). Two orders
of products give the same logits at different costs::

    direct      L(φ + Vᵀ ξ + d η)                 q k products per sample
    factored    L φ + (L Vᵀ) ξ + (L d) η          (r + 1) q k products per example, then (r + 1) k per sample

The factored order needs a rank-one second term: a diagonal one has as many normals as coordinates.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from lit_het.errors import UserError
from lit_het.heads.covariance import Noise, standard_normals
from lit_het.heads.noise_config import CovarianceConfig, Order, check_low_rank
from lit_het.heads.noise_config import SamplingConfig as SamplingConfig
from lit_het.types import LogitSamples

# Larger blocks of samples are not faster, and leave memory for fewer examples.
SAMPLES_PER_BLOCK = 64


def in_pairs(antithetic: bool | None, num_samples: int) -> bool:
    """Returns whether S samples come in antithetic pairs; by default where S is even.

    Raises:
        UserError: pairs are asked for, and S is odd.
    """
    if antithetic and num_samples % 2:
        raise UserError(
            f"{num_samples} noise samples are odd, but the head draws them in pairs (antithetic = True); give an even "
            "number with --samples"
        )
    return num_samples % 2 == 0 if antithetic is None else antithetic


def is_factored(
    order: Order,
    covariance: CovarianceConfig,
    *,
    noise_size: int,
    num_classes: int,
    num_samples: int,
    cost: int | None = None,
) -> bool:
    """Returns whether to use the factored order: to map the factors of the covariance to logits instead of the samples.

    Args:
        order: the configured order.
        covariance: its rank is r; a diagonal one has no factored order.
        noise_size: q.
        num_classes: k.
        num_samples: S.
        cost: multiply-adds of mapping one noise vector to logits; None for a matrix product, q k.
    """
    if covariance.is_diagonal or order == "direct":
        return False
    if order == "factored":
        return True
    rows = covariance.num_factors + 1
    cost = noise_size * num_classes if cost is None else cost
    direct = num_samples * (rows * noise_size + cost)
    factored = rows * cost + num_samples * rows * num_classes
    return factored < direct


def noiseless_samples(
    features: Float[Array, "b d"], logits: Callable[[Float[Array, "b d"]], Float[Array, "b k"]]
) -> LogitSamples:
    """Returns logits without noise, as one sample."""
    return LogitSamples(features, None, logits, lambda common, *_: common[:, None], 1, features.shape[0], 1)


def side_by_side(samples: LogitSamples, num_members: int) -> LogitSamples:
    """Returns samples of the logits of examples, from those of the members of each, which are adjacent rows."""

    def by_example(rows: Array) -> Array:
        return rows.reshape(-1, num_members, *rows.shape[1:])

    def as_rows(examples: Array) -> Array:
        return examples.reshape(-1, *examples.shape[2:])

    def logits(common: Any, keys: Key[Array, "n m"] | None, indices: Int[Array, " t"]) -> Float[Array, "n t mk"]:
        found = samples.logits(common, None if keys is None else as_rows(keys), indices)
        return by_example(found).swapaxes(1, 2).reshape(-1, found.shape[1], num_members * found.shape[2])

    return dataclasses.replace(
        samples,
        features=by_example(samples.features),
        keys=None if samples.keys is None else by_example(samples.keys),
        prepare=lambda features: samples.prepare(as_rows(features)),
        logits=logits,
        examples_per_block=max(1, samples.examples_per_block // num_members),
        num_members=num_members * samples.num_members,
    )


def noisy_samples(
    features: Float[Array, "b d"],
    key: Key[Array, ""],
    num_samples: int,
    block_size: int,
    prepare: Callable[[Float[Array, "n d"]], tuple[Any, Noise]],
    logits: Callable[[Any, Float[Array, "n t q"]], Float[Array, "n t k"]],
    vectors_per_example: int = 0,
    *,
    antithetic: bool | None = None,
) -> LogitSamples:
    """Returns S samples of logits, or for S = 0 their mean and factors.

    Args:
        features: φ(x).
        key: random key of the noise.
        num_samples: S.
        block_size: as in `SamplingConfig`.
        prepare: features to the values that all samples share, and to their noise.
        logits: (shared values, noise ε) to logits divided by τ.
        vectors_per_example: number of vectors of size k that the samples of an example share.
        antithetic: as in `SamplingConfig`.

    Raises:
        UserError: S is odd and pairs are asked for, or 0 and the noise has a normal for each coordinate.
    """
    if num_samples == 0:
        return _gaussian_logits(features, block_size, prepare, logits)
    pairs = in_pairs(antithetic, num_samples)
    num_blocks = -(-num_samples // min(SAMPLES_PER_BLOCK, block_size))
    samples_per_block = -(-num_samples // num_blocks)

    def sample_logits(
        common: tuple[Any, Noise], keys: Key[Array, " n"] | None, samples: Int[Array, " t"]
    ) -> Float[Array, "n t k"]:
        assert keys is not None
        state, noise = common
        return logits(state, noise.apply(standard_normals(keys, samples, noise.num_normals, antithetic=pairs)))

    return LogitSamples(
        features=features,
        keys=jax.random.split(key, features.shape[0]),
        prepare=prepare,
        logits=sample_logits,
        num_samples=num_samples,
        examples_per_block=max(1, block_size // (samples_per_block + vectors_per_example)),
        samples_per_block=samples_per_block,
    )


def noisy_logit_samples(
    features: Float[Array, "b d"],
    key: Key[Array, ""],
    num_samples: int,
    block_size: int,
    prepare: Callable[[Float[Array, "n d"]], tuple[Float[Array, "n k"], Noise]],
    temperature: Float[Array, ""],
    *,
    antithetic: bool | None = None,
) -> LogitSamples:
    """Returns S samples ``(base + ε) / τ`` with noise in the space of logits, see `noisy_samples`."""

    def logits(base: Float[Array, "n k"], epsilon: Float[Array, "n t k"]) -> Float[Array, "n t k"]:
        return (base[:, None] + epsilon) / temperature

    factors = jax.eval_shape(lambda phi: prepare(phi)[1].factors, features[:1])
    # Vectors of size k that the samples of an example share: base and d(x), and its factors, or v(x) of shared factors.
    vectors = 2 + (1 if factors is None else factors.shape[1])
    return noisy_samples(features, key, num_samples, block_size, prepare, logits, vectors, antithetic=antithetic)


def _gaussian_logits(
    features: Float[Array, "b d"],
    block_size: int,
    prepare: Callable[[Float[Array, "n d"]], tuple[Any, Noise]],
    logits: Callable[[Any, Float[Array, "n t q"]], Float[Array, "n t k"]],
) -> LogitSamples:
    """Returns the mean and the factors of logits, to first order in the noise: exactly, where they are linear in it."""

    def rows(common: tuple[Any, Noise], _: None, __: Int[Array, " one"]) -> Float[Array, "n rows k"]:
        state, noise = common
        factors = noise.rows()
        origin = jnp.zeros_like(factors)
        mean = logits(state, origin[:, :1])
        # A derivative, as a difference of logits would lose the digits of small noise; compilers leave out its values.
        of_factors = jax.jvp(lambda epsilon: logits(state, epsilon), (origin,), (factors,))[1]
        return jnp.concatenate([mean, of_factors], axis=1)

    check_low_rank(jax.eval_shape(lambda phi: prepare(phi)[1], features[:1]).is_diagonal)
    count = jax.eval_shape(lambda phi: prepare(phi)[1].rows(), features[:1]).shape[1]
    return LogitSamples(features, None, prepare, rows, 1, max(1, block_size // (count + 2)), 1, num_factors=count)
