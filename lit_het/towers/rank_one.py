"""Dense layers of BatchEnsemble (Wen, Tran and Ba, "BatchEnsemble", ICLR 2020; e3 App. B.2, F, G.1)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.experts_config import RankOneConfig


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
        self.input = _vector(config, num_experts, size_in, rngs)
        self.output = _vector(config, num_experts, size_out, rngs)


def _vector(config: RankOneConfig, num_experts: int, size: int, rngs: nnx.Rngs) -> nnx.Param:
    """Returns r or s of all experts."""
    if config.initial == "signs":
        return nnx.Param(jax.random.rademacher(rngs.params(), (num_experts, size), jnp.float32))
    return nnx.Param(1 + nnx.initializers.normal(0.5)(rngs.params(), (num_experts, size), jnp.float32))
