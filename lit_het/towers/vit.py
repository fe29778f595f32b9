"""Vision Transformer (Dosovitskiy et al. 2021; SoViT Sec. 4): uint8 pixels in, one embedding per image out."""

import dataclasses
import math

import einops
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt8

from lit_het import patches, sharding
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.layers import linear, log_variances
from lit_het.towers.pooling import AttentionPooling, mean_of_present
from lit_het.towers.positions import sine_cosine_positions
from lit_het.towers.resizing import bilinear_rows
from lit_het.towers.rotary import Rotation, grid_angles
from lit_het.towers.transformer import Encoder
from lit_het.types import TowerOutput


class ViT(nnx.Module):
    """The tower of a `ViTConfig`; the class token has no position, as in big_vision."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.config = config
        encoder, dtype = config.encoder, config.compute_type
        if config.stem is not None:
            self.stem = config.stem.build(3 * config.num_inputs, dtype, rngs)
        self.patches = linear(config.cells**2 * config.num_channels, encoder.width, dtype, rngs)
        if config.positions == "learned":
            scale = nnx.initializers.normal(1 / np.sqrt(encoder.width))
            self.positions = nnx.Param(scale(rngs.params(), (config.num_patches, encoder.width), jnp.float32))
        if config.has_class_token:
            self.class_token = nnx.Param(jnp.zeros(encoder.width, jnp.float32))
            if config.num_class_tokens > 1:  # of zeros all would stay equal
                scale, shape = nnx.initializers.normal(0.02), (config.num_class_tokens, encoder.width)
                self.class_token = nnx.Param(scale(rngs.params(), shape, jnp.float32))
        if config.num_registers:
            scale = nnx.initializers.normal(0.02)
            self.registers = nnx.Param(scale(rngs.params(), (config.num_registers, encoder.width), jnp.float32))
        if config.uncertainty_token:
            scale = nnx.initializers.normal(1 / np.sqrt(encoder.width))
            self.uncertainty_token = nnx.Param(scale(rngs.params(), (encoder.width,), jnp.float32))
            self.uncertainty = log_variances(encoder.width, config.mean_size, rngs)
        # CLIP's "pre-LayerNorm".
        if config.input_norm:
            self.input_norm = encoder.build_norm(rngs)
        self.encoder = Encoder(encoder, rngs)
        if config.top is not None:
            execution = {name: getattr(encoder, name) for name in ("compute_type", "unrolled", "remat")}
            self.top = Encoder(dataclasses.replace(config.top, **execution), rngs)
        if config.pooling == "attention":
            self.pooling = AttentionPooling(encoder, rngs, config.pooling_heads)
        size = config._pooled_size
        if config.representation_size is not None:
            self.pre_logits = linear(size, config.representation_size, dtype, rngs)
            size = config.representation_size
        if config.projection_size is not None:
            self.projection = linear(size, config.projection_size, dtype, rngs)

    def __call__(
        self,
        image: UInt8[Array, "b *image"],
        key: Key[Array, ""] | None = None,
        kept: Int[Array, "b _"] | None = None,
        masked: Bool[Array, "b n"] | None = None,
        mask_token: Float[Array, " width"] | None = None,
    ) -> TowerOutput:
        """Returns embeddings and the encoder's tokens; pixels are mapped to [-1, 1] here.

        Args:
            image: pixels as stored ``[b h w c]``, of one image or of ``num_inputs``; of another size than that of the
                tower, its positions are resized. Or patches ``[b n c]`` of images of any shape, see `lit_het.patches`.
            key: random key of training, for experts; without it the tower is deterministic.
            kept: numbers of the patches of each image to encode, which leaves out the others; None for all.
            masked: patches to replace by ``mask_token``, before positions are added; None for none.
            mask_token: what replaces them.
        """
        b, present, rotation = image.shape[0], None, None
        if image.ndim == 3:
            pixels, places = patches.split(image)
            positions, present = self._positions_at(places), places[:, :, :1] > 0
        else:
            pixels, grid = self._of_squares(image)
            positions, rotation = self._positions(*grid)[None], self._rotation(*grid, kept)
        if kept is not None:
            rows = kept[:, :, None]
            pixels, positions, present = jax.tree.map(
                lambda x: jnp.take_along_axis(x, rows, axis=1), (pixels, positions, present)
            )
        pixels = pixels if self.config.stem is not None else _scaled(pixels)
        tokens = self.patches(pixels.reshape(-1, pixels.shape[-1]))
        tokens = tokens.reshape(b, -1, tokens.shape[-1])
        if masked is not None:
            assert mask_token is not None
            tokens = jnp.where(masked[:, :, None], mask_token.astype(tokens.dtype), tokens)
        tokens = self._with_first_tokens(tokens + positions)
        if present is not None:
            # The first tokens have no padding.
            present = jnp.pad(present[:, :, 0], ((0, 0), (tokens.shape[1] - present.shape[1], 0)), constant_values=True)
        if self.config.input_norm:
            tokens = self.input_norm(tokens)
        encoded = self.encoder(tokens, key, present, rotation=rotation)
        if self.config.top is not None:
            encoded = self.top(encoded.tokens, key, present)
        embedding = self._embed(encoded.tokens, present)
        embedding = self.config.join_members(embedding.reshape(b, -1, embedding.shape[1]))
        return TowerOutput(embedding, encoded.tokens, encoded.auxiliary_losses, encoded.metrics)

    @property
    def patch_size(self) -> int:
        """Height and width of a patch in pixels, or in cells of the stem: of the parameters, see `resizing`."""
        return math.isqrt(self.patches.kernel.shape[0] // self.config.num_channels)

    def num_patches(self, image: UInt8[Array, "b *image"]) -> int:
        """Returns the number of patches of each image, with padding."""
        if image.ndim == 3:
            return image.shape[1]
        sides, stem = image.shape[1:3], self.config.stem
        sides = sides if stem is None else map(stem.length, sides)
        return self.config.num_grids * math.prod(length // self.patch_size for length in sides)

    def _of_squares(self, image: Shaped[Array, "b h w c"]) -> tuple[Shaped[Array, "b n pqc"], tuple[int, int]]:
        """Returns what patches of images of one size are cut from, and the rows and columns of patches."""
        size = self.patch_size
        if image.shape[3] < 3 * self.config.num_inputs:
            image = jnp.tile(image, (1, 1, 1, self.config.num_inputs))
        if self.config.stem is not None:
            image = self.stem(_scaled(image))
        height, width = (length // size * size for length in image.shape[1:3])
        # Patches do not overlap, so the convolution is one matrix product.
        pattern = "b (h p) (w q) (m c) -> b (m h w) (p q c)"
        pixels = einops.rearrange(image[:, :height, :width], pattern, p=size, q=size, m=self.config.num_grids)
        return pixels, (height // size, width // size)

    def _embed(self, tokens: Float[Array, "b n d"], present: Bool[Array, "b n"] | None) -> Float[Array, "b _"]:
        """Returns the mean, or with an uncertainty token, the first of all tokens, the mean and log σ²."""
        if not self.config.uncertainty_token:
            return self._project(self._pool(tokens, present))
        log_variance = sharding.as_batch(self.uncertainty(tokens[:, 0]))
        pooled = self._pool(tokens[:, 1:], None if present is None else present[:, 1:])
        return jnp.concatenate([self._project(pooled), log_variance], axis=1)

    def _own_positions(self) -> Float[Array, "m side side d"]:
        side, width, grids = self.config.side, self.config.encoder.width, self.config.num_grids
        if self.config.positions == "learned":
            own = self.positions[...]
            side = math.isqrt(len(own) // grids)
        else:
            own = jnp.asarray(sine_cosine_positions(side, side, width))
        return own.reshape(grids, side, side, width)

    def _positions(self, rows: int, columns: int) -> Float[Array, "n d"]:
        """Returns the positions of grids of patches, resized bilinearly where they are not the tower's own."""
        if self.config.positions == "none":
            return jnp.zeros((rows * columns, self.config.encoder.width))
        own = self._own_positions()
        if (rows, columns) != own.shape[1:3]:
            own = jax.image.resize(own, (own.shape[0], rows, columns, own.shape[3]), "linear")
        return own.reshape(-1, own.shape[3])

    def _positions_at(self, places: Int[Array, "b n 2"]) -> Float[Array, "b n d"]:
        """Returns the positions of patches, of each image as `_positions` of its grid."""
        own = self._own_positions()
        _, side, _, width = own.shape  # of one grid
        # A row without an image has no grid.
        places, grids = jnp.maximum(places - 1, 0), jnp.maximum(places.max(axis=1), 1)
        rows, columns = (bilinear_rows(places[:, :, axis], grids[:, axis, None], side) for axis in (0, 1))
        weights = (rows[:, :, :, None] * columns[:, :, None]).reshape(-1, side * side)
        resized = jnp.matmul(weights, own.reshape(-1, width), precision="highest")
        return resized.reshape(*places.shape[:2], width)

    def _rotation(self, rows: int, columns: int, kept: Int[Array, "b _"] | None) -> Rotation | None:
        """Returns the turns of all tokens: the first ones, which have no place in the image, are not turned."""
        config = self.config
        if config.rotary is None:
            return None
        angles = jnp.asarray(grid_angles(config.rotary, rows, columns, config.encoder.size_of_head))
        return Rotation.by(angles[None] if kept is None else angles[kept], config.uncertainty_token + config.num_first)

    def _with_first_tokens(self, tokens: Float[Array, "b n d"]) -> Float[Array, "b _ d"]:
        first = []
        if self.config.uncertainty_token:
            first.append(self.uncertainty_token[...][None])
        if self.config.has_class_token:
            first.append(self.class_token[...].reshape(-1, tokens.shape[-1]))
        if self.config.num_registers:
            first.append(self.registers[...])
        shape = (tokens.shape[0], -1, tokens.shape[-1])
        first = [jnp.broadcast_to(x, (shape[0], *x.shape)).astype(tokens.dtype) for x in first]
        return jnp.concatenate([*first, tokens], axis=1)

    def _pool(self, tokens: Float[Array, "b n d"], present: Bool[Array, "b n"] | None) -> Float[Array, "b _"]:
        match self.config.pooling:
            case "class_token":
                pooled = tokens[:, : self.config.num_class_tokens].reshape(tokens.shape[0], -1)
                return self.encoder.norm(pooled) if self.config.norm_twice else pooled
            case "mean":
                return self._mean_of_patches(tokens, present)
            case "class_and_mean":
                return jnp.concatenate([tokens[:, 0], self._mean_of_patches(tokens, present)], axis=1)
            case "first":
                return tokens[:, self.config.num_registers]
            case "attention":
                if self.config.layer_input and self.config.projection_size is None:
                    return jnp.concatenate(self.pooling.with_hidden(tokens, present), axis=1)
                return self.pooling(tokens, present)
            case "none":
                return tokens.reshape(tokens.shape[0], -1)

    def _mean_of_patches(
        self, tokens: Float[Array, "b n d"], present: Bool[Array, "b n"] | None
    ) -> Float[Array, "b d"]:
        # Registers hold no content of the image (DINOv2): they are left out.
        first = self.config.num_first
        return mean_of_present(tokens[:, first:], None if present is None else present[:, first:])

    def _project(self, embedding: Float[Array, "b _"]) -> Float[Array, "b d"]:
        if self.config.representation_size is not None:
            # With one row per image the compiler would otherwise move rows to the shards of the kernel, as in pooling.
            embedding = jnp.tanh(sharding.as_batch(self.pre_logits(embedding)).astype(jnp.float32))
        if self.config.projection_size is None:
            return embedding
        projected = sharding.as_batch(self.projection(embedding)).astype(jnp.float32)
        if self.config.layer_input:
            return jnp.concatenate([projected, embedding.astype(jnp.float32)], axis=1)
        return projected


def _scaled(pixels: Shaped[Array, "*b c"]) -> Float[Array, "*b c"]:
    """Maps pixels to [-1, 1]: they travel to the device as uint8, a quarter of the bytes of float32."""
    return pixels.astype(jnp.float32) / 127.5 - 1.0
