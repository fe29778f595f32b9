"""Monte-Carlo samples of logits: how many, in which order of products, and how many at a time.

Noise that reaches logits through a linear map L (HET-XL: W, Eq. 5; unshared: W', Eq. 14; HET-H: the hash, Eq. 9) has
two orders of products that differ in cost alone::

    direct      L(φ + Vᵀ ξ + d η)                 q k products a sample
    factored    L φ + (L Vᵀ) ξ + (L d) η          (r + 1) q k products an example, then (r + 1) k a sample

The factored order needs a second term of rank one: a diagonal one has as many normals as coordinates.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
from jaxtyping import Array, Float, Int, Key

from lit_het.errors import UserError, require_at_least, require_choice
from lit_het.heads.covariance import CovarianceConfig, Noise, standard_normals
from lit_het.types import LogitSamples

Order = Literal["cheaper", "direct", "factored"]

# More samples than this at a time win nothing, and leave room for fewer examples.
SAMPLES_PER_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the expectation over the noise is estimated (HET-XL Sec. 2.1); the paper takes S = 1000 (App. N.1).

    Attributes:
        num_samples: S in training.
        num_eval_samples: S in evaluation.
        block_size: vectors of k numbers that exist at a time on a device, memory for time; one for every sample of
            every example, and in the factored order one for every factor of every example.
        order: of products; "cheaper" takes the one with fewer operations.

    Raises:
        UserError: a number below 1, or an order that there is not.
    """

    num_samples: int = 16
    num_eval_samples: int = 16
    block_size: int = 1024
    order: Order = "cheaper"

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_samples", "num_eval_samples", "block_size")
        require_choice(self, "order")

    def samples(self, training: bool) -> int:
        """Returns S."""
        return self.num_samples if training else self.num_eval_samples


def check_order(order: Order, covariance: CovarianceConfig) -> None:
    """Refuses the factored order where there is none.

    Raises:
        UserError: with both fields.
    """
    if order == "factored" and covariance.is_diagonal:
        second_term = f"second_term = {covariance.second_term!r} with num_factors = {covariance.num_factors}"
        raise UserError(
            f"order = 'factored' needs covariance.second_term = 'rank_one' and factors, not {second_term}; "
            "take the order 'cheaper'"
        )


def is_factored(
    order: Order,
    covariance: CovarianceConfig,
    *,
    noise_size: int,
    num_classes: int,
    num_samples: int,
    cost: int | None = None,
) -> bool:
    """Returns whether to map the covariance's factors to logits once, instead of every sample.

    Args:
        order: what the configuration asks for.
        covariance: its rank r, and whether it has a factored order at all.
        noise_size: q.
        num_classes: k.
        num_samples: S.
        cost: multiply-adds of mapping one vector of noise to logits; None is that of a matrix, q k.
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


def certain(
    features: Float[Array, "b d"], logits: Callable[[Float[Array, "b d"]], Float[Array, "b k"]]
) -> LogitSamples:
    """Returns logits without noise as their only sample."""
    return LogitSamples(features, None, logits, lambda common, *_: common[:, None], 1, features.shape[0], 1)


def noisy(
    features: Float[Array, "b d"],
    key: Key[Array, ""],
    num_samples: int,
    block_size: int,
    prepare: Callable[[Float[Array, "n d"]], tuple[Any, Noise]],
    logits: Callable[[Any, Noise, Float[Array, "n t z"]], Float[Array, "n t k"]],
    vectors_per_example: int = 0,
) -> LogitSamples:
    """Returns S samples of logits.

    Args:
        features: φ(x).
        key: randomness.
        num_samples: S.
        block_size: as in `SamplingConfig`.
        prepare: features to what samples have in common and to their noise.
        logits: these two and standard normals to logits divided by τ.
        vectors_per_example: vectors of k numbers that samples have in common.
    """
    num_blocks = -(-num_samples // min(SAMPLES_PER_BLOCK, block_size))
    samples_per_block = -(-num_samples // num_blocks)

    def of_samples(
        common: tuple[Any, Noise], keys: Key[Array, " n"] | None, samples: Int[Array, " t"]
    ) -> Float[Array, "n t k"]:
        assert keys is not None
        state, noise = common
        return logits(state, noise, standard_normals(keys, samples, noise.num_normals))

    return LogitSamples(
        features=features,
        keys=jax.random.split(key, features.shape[0]),
        prepare=prepare,
        logits=of_samples,
        num_samples=num_samples,
        examples_per_block=max(1, block_size // (samples_per_block + vectors_per_example)),
        samples_per_block=samples_per_block,
    )


def noisy_in_logits(
    features: Float[Array, "b d"],
    key: Key[Array, ""],
    num_samples: int,
    block_size: int,
    prepare: Callable[[Float[Array, "n d"]], tuple[Float[Array, "n k"], Noise]],
    temperature: Float[Array, ""],
) -> LogitSamples:
    """Returns S samples ``(base + ε) / τ`` for a prepared base and noise in the space of logits."""

    def logits(base: Float[Array, "n k"], noise: Noise, normals: Float[Array, "n t z"]) -> Float[Array, "n t k"]:
        return (base[:, None] + noise.apply(normals)) / temperature

    factors = jax.eval_shape(lambda phi: prepare(phi)[1].factors, features[:1])
    # An example's base and d(x), and its factors or, where they are shared, v(x).
    vectors = 2 + (1 if factors is None else factors.shape[1])
    return noisy(features, key, num_samples, block_size, prepare, logits, vectors)
