"""The pre-norm Transformer encoder that ViT and text towers share, with its scan over blocks and remat."""

import dataclasses
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lit_het.errors import UserError, require_at_least

ComputeType: TypeAlias = Literal["float32", "bfloat16"]

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Shape and execution of a stack of Transformer blocks.

    Attributes:
        width: size of a token.
        depth: number of blocks.
        mlp_width: size of the hidden layer of the MLPs.
        num_heads: attention heads; divides ``width``.
        compute_type: type of activations; parameters are float32.
        unrolled: True compiles every block by itself (faster steps on CPUs), False scans over one (compiles
            fast at any depth). Parameters are the same.
        remat: what the backward pass recomputes: nothing, all but matrix products, or everything.
    """

    width: int = 768
    depth: int = 12
    mlp_width: int = 3072
    num_heads: int = 12
    compute_type: ComputeType = "float32"
    unrolled: bool = False
    remat: Literal["none", "dots", "full"] = "none"

    def __post_init__(self) -> None:
        require_at_least(1, self, "width", "depth", "mlp_width", "num_heads")
        if self.width % self.num_heads:
            raise UserError(f"encoder.width = {self.width} is not a multiple of encoder.num_heads = {self.num_heads}")


# (width, depth, mlp_width, num_heads): ViT sizes of Dosovitskiy et al. 2021, Zhai et al. 2022 and SoViT Table 1.
_SIZES: dict[str, tuple[int, int, int, int]] = {
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "So150m": (880, 18, 2320, 16),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}


def encoder_size(name: str, *, compute_type: ComputeType = "bfloat16") -> EncoderConfig:
    """Returns the encoder of a published size: mu, Ti, S, B, So150m, L, So400m, H, g or G.

    Raises:
        UserError: the size is unknown.
    """
    if name not in _SIZES:
        raise UserError(f"unknown encoder size {name!r}; the sizes are {', '.join(_SIZES)}")
    width, depth, mlp_width, num_heads = _SIZES[name]
    return EncoderConfig(width, depth, mlp_width, num_heads, compute_type=compute_type)


def linear(size_in: int, size_out: int, dtype: ComputeType, rngs: nnx.Rngs) -> nnx.Linear:
    """Returns a dense layer with Xavier-uniform kernel and zero bias."""
    return nnx.Linear(
        size_in,
        size_out,
        dtype=jnp.dtype(dtype),
        kernel_init=nnx.initializers.xavier_uniform(),
        rngs=rngs,
    )


def layer_norm(width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Returns a LayerNorm that computes in float32 whatever the type of the activations."""
    return nnx.LayerNorm(width, epsilon=1e-6, dtype=jnp.float32, rngs=rngs)


class Attention(nnx.Module):
    """Multi-head attention of queries to tokens.

    Dense layers see flat ``[b*n d]`` operands: XLA's CPU backend is slow at the gradient of batched products.
    """

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        width, dtype = config.width, config.compute_type
        self.query = linear(width, width, dtype, rngs)
        self.key = linear(width, width, dtype, rngs)
        self.value = linear(width, width, dtype, rngs)
        self.out = linear(width, width, dtype, rngs)

    def __call__(self, queries: Float[Array, "bq d"], tokens: Float[Array, "bn d"], b: int) -> Float[Array, "bq d"]:
        """Attends within each of ``b`` examples; rows of an example are adjacent."""
        query, key, value = self.query(queries), self.key(tokens), self.value(tokens)
        query, key, value = (x.reshape(b, x.shape[0] // b, self.num_heads, -1) for x in (query, key, value))
        attended = jax.nn.dot_product_attention(query, key, value)
        return self.out(attended.reshape(queries.shape[0], -1))


class Mlp(nnx.Module):
    """Two dense layers with a tanh-approximated GELU between them."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        self.up = linear(config.width, config.mlp_width, config.compute_type, rngs)
        self.down = linear(config.mlp_width, config.width, config.compute_type, rngs)

    def __call__(self, x: Float[Array, "bn d"]) -> Float[Array, "bn d"]:
        """Maps every token by itself."""
        return self.down(nnx.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    """A pre-norm block: x + Attention(norm(x)), then x + Mlp(norm(x))."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        self.attention_norm = layer_norm(config.width, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = layer_norm(config.width, rngs)
        self.mlp = Mlp(config, rngs)

    def __call__(self, x: Float[Array, "bn d"], b: int) -> Float[Array, "bn d"]:
        """Maps the tokens of ``b`` examples."""
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, b)
        return x + self.mlp(self.mlp_norm(x))


class Encoder(nnx.Module):
    """``depth`` blocks and a final norm; the blocks' parameters are stacked along a leading axis."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        self.config = config

        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.blocks = stack(rngs)
        self.norm = layer_norm(config.width, rngs)

    def __call__(self, tokens: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Returns the normalised tokens in float32."""
        b, n, d = tokens.shape
        graph, stacked = nnx.split(self.blocks)

        def block(x: Float[Array, "bn d"], params: nnx.State) -> tuple[Float[Array, "bn d"], None]:
            return nnx.merge(graph, params)(x, b), None

        if self.config.remat != "none":
            block = jax.checkpoint(block, policy=REMAT_POLICIES[self.config.remat], prevent_cse=self.config.unrolled)
        x = tokens.reshape(b * n, d).astype(self.config.compute_type)
        x, _ = jax.lax.scan(block, x, stacked, unroll=self.config.depth if self.config.unrolled else 1)
        return self.norm(x).reshape(b, n, d)
