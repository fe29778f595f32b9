"""Dense layers of BatchEnsemble (Wen, Tran and Ba, "BatchEnsemble", ICLR 2020; e3 App. B.2, F, G.1)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lit_het.errors import require_at_least, require_choice
from lit_het.towers.layers import ComputeType


@dataclasses.dataclass(frozen=True)
class RankOneConfig:
    """Experts that share a kernel U: expert e has ``U ∘ (r_e s_eᵀ)`` and a bias of its own.

    Attributes:
        initial: r and s are at first random signs, or normal with mean 1 and standard deviation 0.5.
        learning_rate_factor: of r and s (the paper's grid is 0.5, 1 and 2).

    Raises:
        UserError: an unknown choice, or a negative factor.
    """

    initial: Literal["signs", "normal"] = "signs"
    learning_rate_factor: float = 1.0

    def __post_init__(self) -> None:
        require_choice(self, "initial")
        require_at_least(0, self, "learning_rate_factor")

    def vector(self, num_experts: int, size: int, rngs: nnx.Rngs) -> nnx.Param:
        """Returns r or s of all experts."""
        if self.initial == "signs":
            return nnx.Param(jax.random.rademacher(rngs.params(), (num_experts, size), jnp.float32))
        return nnx.Param(1 + nnx.initializers.normal(0.5)(rngs.params(), (num_experts, size), jnp.float32))


class RankOneLinear(nnx.Module):
    """A dense layer of E experts, ``((x ∘ r_e) U) ∘ s_e + b_e``."""

    def __init__(
        self,
        config: RankOneConfig,
        num_experts: int,
        size_in: int,
        size_out: int,
        dtype: ComputeType,
        rngs: nnx.Rngs,
    ):
        self.dtype = jnp.dtype(dtype)
        self.kernel = nnx.Param(nnx.initializers.xavier_uniform()(rngs.params(), (size_in, size_out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((num_experts, size_out), jnp.float32))
        self.vectors = RankOneVectors(config, num_experts, size_in, size_out, rngs)

    def __call__(self, x: Float[Array, "n i"], expert: Int[Array, " n"]) -> Float[Array, "n o"]:
        """Maps each row by the layer of its expert."""
        kernel, bias, r, s = (
            param[...].astype(self.dtype) for param in (self.kernel, self.bias, self.vectors.input, self.vectors.output)
        )
        return ((x.astype(self.dtype) * r[expert]) @ kernel) * s[expert] + bias[expert]


class RankOneVectors(nnx.Module):
    """r and s of a layer, with a learning rate of their own."""

    def __init__(self, config: RankOneConfig, num_experts: int, size_in: int, size_out: int, rngs: nnx.Rngs):
        self.learning_rate_factor = config.learning_rate_factor
        self.input = config.vector(num_experts, size_in, rngs)
        self.output = config.vector(num_experts, size_out, rngs)
