"""Input-dependent Gaussian noise ε(x) ~ N(0, Σ(x)): the only module that draws noise (HET-XL Sec. 2.2, App. L).

With factors ``V(x)`` ``[r q]`` and a positive vector ``d(x)`` ``[q]``, a sample is ``ε = V(x)ᵀ ξ + d(x) η`` with
``ξ ~ N(0, I_r)`` and η

* one standard normal shared by all q coordinates: ``Σ = Vᵀ V + d dᵀ`` (rank one, Eq. 18, the paper's choice), or
* one standard normal per coordinate: ``Σ = Vᵀ V + diag(d²)`` (diagonal; Eq. 17 with d² in the place of d).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het import sharding
from lit_het.errors import UserError
from lit_het.heads.noise_config import CovarianceConfig
from lit_het.trees import tree_of_arrays

# d(x) = softplus(...) + MINIMUM_SCALE, so that the covariance is never zero.
MINIMUM_SCALE = 1e-3


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class Noise:
    """Σ(x) of n examples in factored form.

    Attributes:
        scale: d(x).
        factors: V(x) of every example, or None.
        shared_factors: J of the efficient form, where ``V(x) = J ∘ v(x)``, or None.
        factor_scale: v(x) of the efficient form, or None.
        is_diagonal: whether η has one standard normal per coordinate.
    """

    scale: Float[Array, "n q"]
    factors: Float[Array, "n r q"] | None
    shared_factors: Float[Array, "r q"] | None
    factor_scale: Float[Array, "n q"] | None
    is_diagonal: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def diagonal(cls, scale: Float[Array, "n q"]) -> "Noise":
        """Returns independent noise of every coordinate, with these standard deviations."""
        return cls(scale, None, None, None, is_diagonal=True)

    @property
    def rank(self) -> int:
        """The number r of factors."""
        if self.shared_factors is not None:
            return self.shared_factors.shape[0]
        return 0 if self.factors is None else self.factors.shape[1]

    @property
    def num_normals(self) -> int:
        """Number of standard normals per sample: those of ξ and η."""
        return self.rank + (self.scale.shape[1] if self.is_diagonal else 1)

    def apply(self, normals: Float[Array, "n t z"]) -> Float[Array, "n t q"]:
        """Returns ``ε = Vᵀ ξ + d η`` for given standard normals ``[ξ, η]``."""
        n, t, _ = normals.shape
        xi, eta = normals[..., : self.rank], normals[..., self.rank :]
        noise = self.scale[:, None] * eta
        if self.factors is not None:
            noise = noise + jnp.einsum("ntr,nrq->ntq", xi, self.factors)
        elif self.shared_factors is not None and self.factor_scale is not None:
            low_rank = (xi.reshape(n * t, -1) @ self.shared_factors).reshape(n, t, -1)
            noise = noise + low_rank * self.factor_scale[:, None]
        return noise

    def low_rank(self) -> Float[Array, "n r q"]:
        """Returns V(x)."""
        if self.shared_factors is not None and self.factor_scale is not None:
            return self.shared_factors[None] * self.factor_scale[:, None]
        if self.factors is not None:
            return self.factors
        return jnp.zeros((self.scale.shape[0], 0, self.scale.shape[1]))

    def rows(self) -> Float[Array, "n _ q"]:
        """Returns Q(x) of the low-rank part ``Qᵀ Q`` of Σ: the rows of V(x), and d(x) if the second term is rank one.

        Rank-one noise is their linear combination with ``[ξ, η]``.
        """
        return self.low_rank() if self.is_diagonal else jnp.concatenate([self.low_rank(), self.scale[:, None]], axis=1)

    def project(self, kernel: Float[Array, "q k"]) -> "Noise":
        """Returns the noise ``kernelᵀ ε``, the same samples in another space, by r + 1 products per example.

        Raises:
            ValueError: the second term is diagonal, so that it has no rows.
        """
        if self.is_diagonal:
            raise ValueError("a diagonal term has no low-rank factors")
        n, _, q = (rows := self.rows()).shape
        projected = (rows.reshape(-1, q) @ kernel).reshape(n, -1, kernel.shape[1])
        return Noise(projected[:, -1], projected[:, :-1], None, None, is_diagonal=False)

    def trace(self) -> Float[Array, " n"]:
        """Returns ``tr Σ(x) = E |ε|²``; both second terms have the trace ``|d(x)|²``."""
        squares = jnp.sum(self.scale**2, axis=1)
        if self.factors is not None:
            return squares + jnp.sum(self.factors**2, axis=(1, 2))
        if self.shared_factors is not None and self.factor_scale is not None:
            return squares + self.factor_scale**2 @ jnp.sum(self.shared_factors**2, axis=0)
        return squares

    def alignment(self, keys: Float[Array, "m q"], valid: Bool[Array, " m"]) -> Float[Array, " n"]:
        """Returns the variance of the noise along the differences of valid keys, relative to isotropic noise.

        ``q tr(Σ C) / (tr Σ tr C)`` with the keys' covariance C: 1 for isotropic noise and for a random walk of Σ, more
        where the noise moves queries between keys, which alone can change a loss.
        """
        weight = valid[:, None].astype(keys.dtype)
        # 1 where all keys are equal: there is no difference to be aligned with.
        centred = weight * (keys - jnp.sum(weight * keys, axis=0, keepdims=True) / jnp.maximum(jnp.sum(weight), 1))
        covariance = centred.T @ centred
        rows = self.rows()
        along = jnp.einsum("nrq,qp,nrp->n", rows, covariance, rows)
        if self.is_diagonal:
            along = along + self.scale**2 @ jnp.diagonal(covariance)
        total = jnp.trace(covariance)
        return jnp.where(total > 0, self.scale.shape[1] * along / (self.trace() * jnp.where(total > 0, total, 1)), 1)

    def effective_rank(self) -> Float[Array, " n"]:
        """Returns the participation ratio ``(tr Σ)² / tr Σ²``, the number of directions that share the noise."""
        rows = self.rows()
        squares = jnp.sum(jnp.einsum("nrq,npq->nrp", rows, rows) ** 2, axis=(1, 2))
        if self.is_diagonal:
            diagonal = self.scale**2
            squares = squares + 2 * jnp.einsum("nrq,nq->n", rows**2, diagonal) + jnp.sum(diagonal**2, axis=1)
        return self.trace() ** 2 / squares

    def take(self, index: Int[np.ndarray, " k"]) -> "Noise":
        """Returns the noise ``ε[index]``.

        Raises:
            ValueError: the second term is diagonal, so that coordinates with the same index would have different noise.
        """
        if self.is_diagonal:
            raise ValueError("a diagonal term can only be indexed after its samples are drawn")
        parts = (self.factors, self.shared_factors, self.factor_scale)
        taken = (None if part is None else part[..., index] for part in parts)
        return Noise(self.scale[..., index], *taken, is_diagonal=False)


class Covariance(nnx.Module):
    """Maps features φ(x) to Σ(x), in float32."""

    def __init__(
        self, config: CovarianceConfig, feature_size: int, noise_size: int, feature_norm: float, rngs: nnx.Rngs
    ):
        self.config = config
        self.learning_rate_factor = config.scaled_learning_rate(noise_size, feature_norm)
        r = config.num_factors
        kernel, second_kernel, bias = _initial_scales(config, noise_size, feature_norm)
        if r and config.form == "full":
            self.factors = nnx.Linear(feature_size, r * noise_size, kernel_init=kernel, rngs=rngs)
        elif r:
            self.scale_of_factors = nnx.Linear(feature_size, noise_size, kernel_init=kernel, rngs=rngs)
            shared = nnx.initializers.normal(1 / math.sqrt(r))
            self.shared_factors = nnx.Param(shared(rngs.params(), (r, noise_size), jnp.float32))
        bias_init = nnx.initializers.constant(bias)
        self.diagonal = nnx.Linear(feature_size, noise_size, kernel_init=second_kernel, bias_init=bias_init, rngs=rngs)

    def __call__(self, features: Float[Array, "n d"]) -> Noise:
        """Returns Σ(x) in factored form."""
        config = self.config
        scale = jax.nn.softplus(sharding.as_batch(self.diagonal(features))) + MINIMUM_SCALE
        if not config.num_factors:
            return Noise.diagonal(scale)
        if config.form == "full":
            factors = sharding.as_batch(self.factors(features)).reshape(features.shape[0], config.num_factors, -1)
            return Noise(scale, factors, None, None, config.is_diagonal)
        return Noise(
            scale,
            None,
            self.shared_factors[...],
            sharding.as_batch(self.scale_of_factors(features)),
            config.is_diagonal,
        )

    def covariance(self, features: Float[Array, "n d"]) -> Float[Array, "n q q"]:
        """Returns the matrix Σ(x), O(n q²) memory; for inspection and tests."""
        noise = self(features)
        factors, scale = noise.low_rank(), noise.scale
        low_rank = jnp.einsum("nrq,nrp->nqp", factors, factors)
        if noise.is_diagonal:
            return low_rank + jax.vmap(jnp.diag)(scale**2)
        return low_rank + scale[:, :, None] * scale[:, None, :]

    def spectrum(self, features: Float[Array, "n d"]) -> Float[Array, "n r_plus_one"]:
        """Returns the square roots of the r + 1 largest eigenvalues of Σ(x), in descending order."""
        noise = self(features)
        if noise.is_diagonal:
            values = jnp.linalg.eigvalsh(self.covariance(features))[:, ::-1][:, : self.config.num_factors + 1]
        else:
            rows = noise.rows()
            # Σ = RᵀR and the small matrix R Rᵀ have the same nonzero eigenvalues.
            values = jnp.linalg.eigvalsh(jnp.einsum("npq,nrq->npr", rows, rows))[:, ::-1]
        # Rounding may make an eigenvalue of zero negative.
        return jnp.sqrt(jnp.maximum(values, 0.0))

    def noise_norm(self, features: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Returns ``sqrt(tr Σ(x)) = sqrt(E |ε|²)``."""
        return jnp.sqrt(self(features).trace())


def standard_normals(
    keys: Key[Array, " n"], samples: Int[Array, " t"], count: int, *, antithetic: bool = False
) -> Float[Array, "n t {count}"]:
    """Returns the standard normals of t samples of n examples.

    A sample depends only on its example's key and its own index, so that blocks and devices do not change it.

    Args:
        keys: random keys of the examples.
        samples: indices of the samples.
        count: number of normals of a sample.
        antithetic: whether samples 2i and 2i + 1 are ξ and -ξ. Their mean is exactly zero, so that terms of odd order
            in the noise, which add variance, and a bias to the log of the mean, cancel.
    """

    def draw(key: Key[Array, ""], sample: Int[Array, ""]) -> Float[Array, " _"]:
        if not antithetic:
            return jax.random.normal(jax.random.fold_in(key, sample), (count,))
        return (1 - 2 * (sample % 2)) * jax.random.normal(jax.random.fold_in(key, sample // 2), (count,))

    return jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(keys, samples)


def _initial_scales(
    config: CovarianceConfig, noise_size: int, feature_norm: float
) -> tuple[jax.nn.initializers.Initializer, jax.nn.initializers.Initializer, float]:
    """Returns the initializer of the layer of V, that of the kernel of d, and the initial bias of d.

    With kernel entries of variance σ² the entries of V (full form) have variance σ² |φ|², so E |V ξ|² = q r σ² |φ|²;
    in the efficient form E |V ξ|² = q σ² |φ|², as J's entries have variance 1/r. Both are set to half of the
    requested squared norm, and so is |d|² = q d₀², for every example if the kernel of d is initially 0. Without factors
    the second term has the whole norm.
    """
    if config.initial_noise_norm is None:
        return nnx.initializers.lecun_normal(), nnx.initializers.lecun_normal(), 0.0
    terms = 2 if config.num_factors else 1
    share = config.initial_noise_norm / math.sqrt(terms)
    scale = share / math.sqrt(noise_size)
    if scale <= MINIMUM_SCALE:
        least = MINIMUM_SCALE * math.sqrt(terms * noise_size)
        raise UserError(
            f"initial_noise_norm = {config.initial_noise_norm} is below {least:.3g}, the minimum for {noise_size} "
            f"dimensions (d(x) is at least {MINIMUM_SCALE}); choose a larger one"
        )
    kernel = nnx.initializers.normal(share / math.sqrt(config.num_columns(noise_size)) / feature_norm)
    return kernel, nnx.initializers.zeros, _inverse_softplus(scale - MINIMUM_SCALE)


def _inverse_softplus(value: float) -> float:
    # The usual log(exp(value) - 1) overflows for large values and loses the digits of small ones.
    return value + math.log(-math.expm1(-value))
