"""BiT's ResNet-v2 (Kolesnikov et al. 2020): uint8 pixels in, one embedding per image out."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key, UInt8

from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.image_config import ResNetConfig
from lit_het.types import TowerOutput

# Blocks of each stage (He et al. 2016, Table 1).
_BLOCKS: dict[int, tuple[int, int, int, int]] = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def standardize(kernel: Float[Array, "h w c_in c_out"]) -> Float[Array, "h w c_in c_out"]:
    """Gives the weights of each output channel mean 0 and variance 1 (Qiao et al. 2019)."""
    centred = kernel - kernel.mean(axis=(0, 1, 2), keepdims=True)
    variance = jnp.square(centred).mean(axis=(0, 1, 2), keepdims=True)
    return centred / jnp.sqrt(variance + 1e-10)


def group_norm(width: int, rngs: nnx.Rngs) -> nnx.GroupNorm:
    """Returns a norm of 32 groups of channels that computes in float32 for any type of activations."""
    # No fast variance E[x²] - E[x]²: with weights of variance 1 activations are large, and it would lose digits.
    return nnx.GroupNorm(width, 32, epsilon=1e-5, dtype=jnp.float32, use_fast_variance=False, rngs=rngs)


class StandardizedConv(nnx.Module):
    """A convolution without bias whose kernel is standardised at every use.

    Args:
        size_in, size_out: numbers of channels.
        size: height and width of the kernel, odd.
        stride: stride of the convolution.
        dtype: type of the product.
        rngs: random key of the kernel.
        padding: "EVEN": ``size // 2`` zeros surround the image, whatever the stride; "SAME": as few as are needed, in
            front of the image at most as many as behind it.
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        size: int,
        stride: int,
        dtype: ComputeType,
        rngs: nnx.Rngs,
        padding: Literal["EVEN", "SAME"] = "EVEN",
    ):
        self.stride, self.dtype, self.padding = stride, dtype, padding
        # The initial scale does not change outputs, only the relative size of optimizer steps.
        kernel = nnx.initializers.lecun_normal()(rngs.params(), (size, size, size_in, size_out), jnp.float32)
        self.kernel = nnx.Param(kernel)

    def __call__(self, x: Float[Array, "b h_in w_in c_in"]) -> Float[Array, "b h_out w_out c_out"]:
        """Returns the feature map, its height and width divided by the stride and rounded up."""
        # Standardised before rounding to the compute type: the mean may be large compared with the deviations.
        kernel = standardize(self.kernel[...])
        margin = kernel.shape[0] // 2
        return jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            window_strides=(self.stride, self.stride),
            padding="SAME" if self.padding == "SAME" else ((margin, margin), (margin, margin)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


class Bottleneck(nnx.Module):
    """A pre-activation block: x + expand(mix(reduce(x))), each convolution after group norm and ReLU.

    A block that changes the shape projects x too, after the first norm and ReLU; the 3 x 3 convolution and the
    projection carry the stride.
    """

    def __init__(self, size_in: int, size: int, stride: int, projected: bool, dtype: ComputeType, rngs: nnx.Rngs):
        self.reduce_norm = group_norm(size_in, rngs)
        self.reduce = StandardizedConv(size_in, size, 1, 1, dtype, rngs)
        self.mix_norm = group_norm(size, rngs)
        self.mix = StandardizedConv(size, size, 3, stride, dtype, rngs)
        self.expand_norm = group_norm(size, rngs)
        self.expand = StandardizedConv(size, 4 * size, 1, 1, dtype, rngs)
        self.shortcut = StandardizedConv(size_in, 4 * size, 1, stride, dtype, rngs) if projected else None

    def __call__(self, x: Float[Array, "b h_in w_in c_in"]) -> Float[Array, "b h_out w_out c_out"]:
        """Maps a feature map to one of ``4 * size`` channels."""
        active = nnx.relu(self.reduce_norm(x))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        x = self.mix(nnx.relu(self.mix_norm(self.reduce(active))))
        return shortcut + self.expand(nnx.relu(self.expand_norm(x)))


class Stage(nnx.Module):
    """``depth`` blocks; those after the first have equal shapes and are stacked along a leading axis."""

    def __init__(self, size_in: int, size: int, depth: int, stride: int, dtype: ComputeType, rngs: nnx.Rngs):
        self.first = Bottleneck(size_in, size, stride, projected=True, dtype=dtype, rngs=rngs)

        @nnx.split_rngs(splits=depth - 1)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Bottleneck:
            return Bottleneck(4 * size, size, stride=1, projected=False, dtype=dtype, rngs=rngs)

        self.blocks = stack(rngs)

    def __call__(self, x: Float[Array, "b h_in w_in c_in"]) -> Float[Array, "b h_out w_out c_out"]:
        """Maps a feature map to one of ``4 * size`` channels."""
        graph, stacked = nnx.split(self.blocks)

        def block(x: Float[Array, "b h w c"], params: nnx.State) -> tuple[Float[Array, "b h w c"], None]:
            return nnx.merge(graph, params)(x), None

        return jax.lax.scan(block, self.first(x), stacked)[0]


class ResNet(nnx.Module):
    """The tower of a `ResNetConfig`."""

    def __init__(self, config: ResNetConfig, rngs: nnx.Rngs):
        self.config = config
        size, dtype, depths = 64 * config.width_multiplier, config.compute_type, _BLOCKS[config.depth]
        self.root = StandardizedConv(3, size, 7, 2, dtype, rngs)
        self.stage1 = Stage(size, size, depths[0], 1, dtype, rngs)
        self.stage2 = Stage(4 * size, 2 * size, depths[1], 2, dtype, rngs)
        self.stage3 = Stage(8 * size, 4 * size, depths[2], 2, dtype, rngs)
        self.stage4 = Stage(16 * size, 8 * size, depths[3], 2, dtype, rngs)
        self.norm = group_norm(32 * size, rngs)

    def __call__(self, image: UInt8[Array, "b h w c"], key: Key[Array, ""] | None = None) -> TowerOutput:
        """Returns embeddings ``[b d]`` and the last feature map row by row; pixels are mapped to [-1, 1] here.

        Args:
            image: pixels as stored.
            key: unused.
        """
        del key
        x = self.root(image.astype(jnp.float32) / 127.5 - 1.0)
        # Explicit padding, as in BiT: its zeros take part in the maximum, while max_pool would pad with -inf.
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2))
        for stage in (self.stage1, self.stage2, self.stage3, self.stage4):
            x = stage(x)
        x = nnx.relu(self.norm(x))
        tokens = x.reshape(x.shape[0], -1, x.shape[-1])
        return TowerOutput(tokens.mean(axis=1), tokens, auxiliary_losses={}, metrics={})
