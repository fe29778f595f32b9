"""Vision Transformer (Dosovitskiy et al. 2021; SoViT Sec. 4): uint8 pixels in, one embedding per image out."""

import dataclasses
from typing import Literal

import einops
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from lit_het.errors import UserError, require_at_least
from lit_het.towers.pooling import AttentionPooling
from lit_het.towers.transformer import ComputeType, Encoder, EncoderConfig, linear
from lit_het.types import TowerOutput


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """A Vision Transformer on square images.

    Attributes:
        image_size: height and width in pixels; a multiple of ``patch_size``.
        patch_size: height and width of a patch in pixels.
        encoder: the stack of blocks.
        pooling: the class token, the mean of the patches, or attention pooling.
        positions: learned, or fixed 2-D sine-cosine.
        representation_size: size of a dense layer with tanh after pooling, as in the original ViT; None for none.
    """

    image_size: int = 224
    patch_size: int = 16
    encoder: EncoderConfig = EncoderConfig()
    pooling: Literal["class_token", "mean", "attention"] = "attention"
    positions: Literal["learned", "sine_cosine"] = "learned"
    representation_size: int | None = None

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise UserError(f"image_size = {self.image_size} is not a multiple of patch_size = {self.patch_size}")
        if self.representation_size is not None:
            require_at_least(1, self, "representation_size")

    @property
    def compute_type(self) -> ComputeType:
        """Type of activations."""
        return self.encoder.compute_type

    @property
    def embedding_size(self) -> int:
        """Size of the embedding."""
        return self.encoder.width if self.representation_size is None else self.representation_size

    def build(self, rngs: nnx.Rngs) -> "ViT":
        """Returns the tower with fresh parameters."""
        return ViT(self, rngs)


class ViT(nnx.Module):
    """The tower of a `ViTConfig`. Positions are added before the class token is put in front, as in big_vision."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.config = config
        encoder, side = config.encoder, config.image_size // config.patch_size
        self.patches = linear(config.patch_size**2 * 3, encoder.width, encoder.compute_type, rngs)
        if config.positions == "learned":
            scale = nnx.initializers.normal(1 / np.sqrt(encoder.width))
            self.positions = nnx.Param(scale(rngs.params(), (side * side, encoder.width)))
        if config.pooling == "class_token":
            self.class_token = nnx.Param(jnp.zeros(encoder.width))
        self.encoder = Encoder(encoder, rngs)
        if config.pooling == "attention":
            self.pooling = AttentionPooling(encoder, rngs)
        if config.representation_size is not None:
            self.pre_logits = linear(encoder.width, config.representation_size, encoder.compute_type, rngs)

    def __call__(self, image: UInt8[Array, "b h w c"]) -> TowerOutput:
        """Returns embeddings ``[b d]`` and the encoder's tokens; pixels are mapped to [-1, 1] here."""
        b, size = image.shape[0], self.config.patch_size
        # One flat matrix product instead of a convolution: patches do not overlap.
        pixels = einops.rearrange(image, "b (h p) (w q) c -> (b h w) (p q c)", p=size, q=size)
        tokens = self.patches(pixels.astype(jnp.float32) / 127.5 - 1.0)
        tokens = tokens.reshape(b, -1, tokens.shape[-1]) + self._positions()[None]
        if self.config.pooling == "class_token":
            first = jnp.broadcast_to(self.class_token[...], (b, 1, tokens.shape[-1]))
            tokens = jnp.concatenate([first.astype(tokens.dtype), tokens], axis=1)
        tokens = self.encoder(tokens)
        embedding = self._pool(tokens)
        if self.config.representation_size is not None:
            embedding = jnp.tanh(self.pre_logits(embedding).astype(jnp.float32))
        return TowerOutput(embedding, tokens, auxiliary_losses={})

    def _positions(self) -> Float[Array, "n d"]:
        if self.config.positions == "learned":
            return self.positions[...]
        side = self.config.image_size // self.config.patch_size
        return jnp.asarray(sine_cosine_positions(side, side, self.config.encoder.width))

    def _pool(self, tokens: Float[Array, "b n d"]) -> Float[Array, "b d"]:
        match self.config.pooling:
            case "class_token":
                return tokens[:, 0]
            case "mean":
                return tokens.mean(axis=1)
            case "attention":
                return self.pooling(tokens)


def sine_cosine_positions(height: int, width: int, size: int) -> Float[np.ndarray, "n d"]:
    """Returns fixed 2-D positions ``[sin x, cos x, sin y, cos y]``, row by row (MoCo v3; Beyer et al. 2022).

    Raises:
        UserError: ``size`` is not a multiple of 4.
    """
    if size % 4:
        raise UserError(f"sine-cosine positions need a width that is a multiple of 4, not {size}")
    rows, columns = np.mgrid[:height, :width]
    frequencies = 1.0 / 10_000 ** np.linspace(0, 1, size // 4)
    x, y = (np.einsum("n,f->nf", axis.ravel(), frequencies) for axis in (columns, rows))
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)
