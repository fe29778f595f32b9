"""Input-dependent Gaussian noise ε(x) ~ N(0, Σ(x)): the one place where noise is drawn (HET-XL Sec. 2.2, App. L).

With factors ``V(x)`` ``[q r]`` and a positive vector ``d(x)`` ``[q]``, a sample is ``ε = V(x) ξ + d(x) η`` with
``ξ ~ N(0, I_r)`` and η

* one standard normal shared by all q coordinates: ``Σ = V Vᵀ + d dᵀ`` (rank one, Eq. 18, the paper's choice), or
* one standard normal per coordinate: ``Σ = V Vᵀ + diag(d²)`` (diagonal; Eq. 17 with d² in the place of d).
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from lit_het.errors import UserError, require_at_least

# d(x) = softplus(...) + this: the covariance never vanishes.
MINIMUM_SCALE = 1e-3


@dataclasses.dataclass(frozen=True)
class CovarianceConfig:
    """The shape of Σ(x) and of its starting value.

    Attributes:
        num_factors: r, the rank of the low-rank part.
        form: "full" gives every example its own ``V(x) = reshape(C φ(x))``, O(d q r) parameters; "efficient"
            scales a shared ``J`` per coordinate, ``V(x) = J ∘ v(x)``, O(d q + q r) parameters.
        second_term: "rank_one" or "diagonal", see the module's docstring.
        initial_noise_norm: root mean square norm of the noise at the start, half of its square from each
            term; None starts from ordinary dense layers, whose noise has a norm near 0.7 √q on unit features.
    """

    num_factors: int = 15
    form: Literal["full", "efficient"] = "full"
    second_term: Literal["rank_one", "diagonal"] = "rank_one"
    initial_noise_norm: float | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_factors")

    def build(self, feature_size: int, noise_size: int, feature_norm: float, rngs: nnx.Rngs) -> "Covariance":
        """Returns the module.

        Args:
            feature_size: d, size of φ(x).
            noise_size: q, size of ε.
            feature_norm: typical norm of φ(x), which the starting scales are derived from.
            rngs: where the parameters come from.
        """
        return Covariance(self, feature_size, noise_size, feature_norm, rngs)


class Covariance(nnx.Module):
    """Maps features φ(x) to Σ(x), and samples from it. Computes in float32."""

    def __init__(
        self, config: CovarianceConfig, feature_size: int, noise_size: int, feature_norm: float, rngs: nnx.Rngs
    ):
        self.config = config
        r = config.num_factors
        kernel, second_kernel, bias = _initial_scales(config, noise_size, feature_norm)
        if config.form == "full":
            self.factors = nnx.Linear(feature_size, noise_size * r, kernel_init=kernel, rngs=rngs)
        else:
            self.scale_of_factors = nnx.Linear(feature_size, noise_size, kernel_init=kernel, rngs=rngs)
            shared = nnx.initializers.normal(1 / math.sqrt(r))
            self.shared_factors = nnx.Param(shared(rngs.params(), (noise_size, r)))
        bias_init = nnx.initializers.constant(bias)
        self.diagonal = nnx.Linear(feature_size, noise_size, kernel_init=second_kernel, bias_init=bias_init, rngs=rngs)

    def terms(self, features: Float[Array, "b d"]) -> tuple[Float[Array, "b q r"], Float[Array, "b q"]]:
        """Returns ``V(x)`` and ``d(x)``."""
        if self.config.form == "full":
            factors = self.factors(features).reshape(features.shape[0], -1, self.config.num_factors)
        else:
            factors = self.shared_factors[...][None] * self.scale_of_factors(features)[:, :, None]
        return factors, jax.nn.softplus(self.diagonal(features)) + MINIMUM_SCALE

    def draw(
        self, batch_size: int, noise_size: int, key: Key[Array, ""], num_samples: int
    ) -> tuple[Float[Array, "s b r"], Float[Array, "s b _"]]:
        """Draws the standard normals ξ and η that `apply` turns into noise; η has one column if it is shared."""
        factor_key, second_key = jax.random.split(key)
        columns = 1 if self.config.second_term == "rank_one" else noise_size
        xi = jax.random.normal(factor_key, (num_samples, batch_size, self.config.num_factors))
        return xi, jax.random.normal(second_key, (num_samples, batch_size, columns))

    def apply(
        self, features: Float[Array, "b d"], xi: Float[Array, "s b r"], eta: Float[Array, "s b _"]
    ) -> Float[Array, "s b q"]:
        """Returns ``ε = V(x) ξ + d(x) η`` for given standard normals."""
        factors, scale = self.terms(features)
        return jnp.einsum("bqr,sbr->sbq", factors, xi) + scale[None] * eta

    def sample(self, features: Float[Array, "b d"], key: Key[Array, ""], num_samples: int) -> Float[Array, "s b q"]:
        """Draws ``num_samples`` independent samples of the noise of every example."""
        noise_size = self.diagonal.out_features
        return self.apply(features, *self.draw(features.shape[0], noise_size, key, num_samples))

    def covariance(self, features: Float[Array, "b d"]) -> Float[Array, "b q q"]:
        """Returns Σ(x) itself, O(b q²) memory: for inspection."""
        factors, scale = self.terms(features)
        low_rank = jnp.einsum("bqr,bpr->bqp", factors, factors)
        if self.config.second_term == "rank_one":
            return low_rank + scale[:, :, None] * scale[:, None, :]
        return low_rank + jax.vmap(jnp.diag)(scale**2)

    def noise_norm(self, features: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns ``sqrt(tr Σ(x)) = sqrt(E |ε|²)``; both second terms have the trace ``|d(x)|²``."""
        factors, scale = self.terms(features)
        return jnp.sqrt(jnp.sum(factors**2, axis=(1, 2)) + jnp.sum(scale**2, axis=1))


def _initial_scales(
    config: CovarianceConfig, noise_size: int, feature_norm: float
) -> tuple[jax.nn.initializers.Initializer, jax.nn.initializers.Initializer, float]:
    """Returns the initializer of the layer behind V, and that of the kernel and the value of the bias behind d.

    With kernel entries of variance σ² the entries of V (full form) have variance σ² |φ|², so E |V ξ|² = q r σ² |φ|²;
    in the efficient form E |V ξ|² = q σ² |φ|², as J's entries have variance 1/r. Both are set to half of the
    squared norm asked for, and so is |d|² = q d₀², which holds for every example if the kernel behind d starts at 0.
    """
    if config.initial_noise_norm is None:
        return nnx.initializers.lecun_normal(), nnx.initializers.lecun_normal(), 0.0
    columns = noise_size * (config.num_factors if config.form == "full" else 1)
    half = config.initial_noise_norm / math.sqrt(2)
    scale = half / math.sqrt(noise_size)
    if scale <= MINIMUM_SCALE:
        least = MINIMUM_SCALE * math.sqrt(2 * noise_size)
        raise UserError(
            f"initial_noise_norm = {config.initial_noise_norm} is below {least:.3g}, the least for {noise_size} "
            f"dimensions (d(x) is at least {MINIMUM_SCALE}); choose a larger one"
        )
    kernel = nnx.initializers.normal(half / math.sqrt(columns) / feature_norm)
    return kernel, nnx.initializers.zeros, math.log(math.expm1(scale - MINIMUM_SCALE))
