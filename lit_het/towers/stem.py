"""The ResNet below the patches of a hybrid ViT (Dosovitskiy et al. 2021, Sec. 3.1).

As in the authors' code it is not BiT's: blocks are norms after convolutions, ``relu(f(x) + x)`` (He et al. 2016, v1.5),
still with standardised weights and group norm, and zeros surround an image as TensorFlow's "SAME" puts them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.resnet import StandardizedConv, group_norm
from lit_het.towers.stem_config import StemConfig


class NormedConv(nnx.Module):
    """A standardised convolution and the norm after it."""

    def __init__(self, size_in: int, size_out: int, size: int, stride: int, dtype: ComputeType, rngs: nnx.Rngs):
        self.conv = StandardizedConv(size_in, size_out, size, stride, dtype, rngs, padding="SAME")
        self.norm = group_norm(size_out, rngs)

    def __call__(self, x: Float[Array, "b h_in w_in c_in"]) -> Float[Array, "b h_out w_out c_out"]:
        """Returns the feature map, its height and width divided by the stride and rounded up."""
        return self.norm(self.conv(x)).astype(x.dtype)


class StemBlock(nnx.Module):
    """A bottleneck with norms after its convolutions; one that changes the shape projects x too."""

    def __init__(self, size_in: int, size: int, stride: int, projected: bool, dtype: ComputeType, rngs: nnx.Rngs):
        self.reduce = NormedConv(size_in, size, 1, 1, dtype, rngs)
        self.mix = NormedConv(size, size, 3, stride, dtype, rngs)
        self.expand = NormedConv(size, 4 * size, 1, 1, dtype, rngs)
        # Blocks begin as their shortcuts, as in the authors' code.
        scale: Any = self.expand.norm.scale
        scale[...] = jnp.zeros(4 * size)
        self.shortcut = NormedConv(size_in, 4 * size, 1, stride, dtype, rngs) if projected else None

    def __call__(self, x: Float[Array, "b h_in w_in c_in"]) -> Float[Array, "b h_out w_out c_out"]:
        """Maps a feature map to one of ``4 * size`` channels."""
        shortcut = x if self.shortcut is None else self.shortcut(x)
        x = self.expand(nnx.relu(self.mix(nnx.relu(self.reduce(x)))))
        return nnx.relu(shortcut + x)


class Stem(nnx.Module):
    """The stem of a `StemConfig`; blocks of a stage after the first have equal shapes and are stacked."""

    def __init__(self, config: StemConfig, num_channels: int, dtype: ComputeType, rngs: nnx.Rngs):
        self.num_stages, self.dtype = len(config.blocks), dtype
        self.root = NormedConv(num_channels, config.width, 7, 2, dtype, rngs)
        size_in, size = config.width, config.width
        for number, depth in enumerate(config.blocks):
            stride = 2 if number else 1
            setattr(self, f"first{number}", StemBlock(size_in, size, stride, projected=True, dtype=dtype, rngs=rngs))
            if depth > 1:
                setattr(self, f"blocks{number}", _stacked(size, depth - 1, dtype, rngs))
            size_in, size = 4 * size, 2 * size

    def __call__(self, pixels: Float[Array, "b h w c"]) -> Float[Array, "b rows columns d"]:
        """Returns the feature map of pixels in [-1, 1]."""
        x = nnx.relu(self.root(pixels.astype(self.dtype)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for number in range(self.num_stages):
            x = getattr(self, f"first{number}")(x)
            if (blocks := getattr(self, f"blocks{number}", None)) is not None:
                graph, stacked = nnx.split(blocks)

                def block(x: Float[Array, "b h w c"], params: nnx.State, graph=graph) -> tuple[Array, None]:
                    return nnx.merge(graph, params)(x), None

                x = jax.lax.scan(block, x, stacked)[0]
        return x


def _stacked(size: int, depth: int, dtype: ComputeType, rngs: nnx.Rngs) -> StemBlock:
    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs: nnx.Rngs) -> StemBlock:
        return StemBlock(4 * size, size, stride=1, projected=False, dtype=dtype, rngs=rngs)

    return stack(rngs)
