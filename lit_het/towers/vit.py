"""Vision Transformer (Dosovitskiy et al. 2021; SoViT Sec. 4): uint8 pixels in, one embedding per image out."""

import dataclasses
import math
from typing import Any, Literal

import einops
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from lit_het import sharding
from lit_het.errors import FieldError, UserError, require_at_least, require_choice
from lit_het.towers.base import ImageTowerOptions
from lit_het.towers.layers import layer_norm, linear, log_variances
from lit_het.towers.pooling import AttentionPooling
from lit_het.towers.positions import sine_cosine_positions
from lit_het.towers.transformer import Encoder, EncoderConfig
from lit_het.types import TowerOutput


@dataclasses.dataclass(frozen=True)
class ViTConfig(ImageTowerOptions):
    """A Vision Transformer on square images; with experts in its encoder a V-MoE or an efficient ensemble (e3).

    Attributes:
        image_size: height and width in pixels; pixels beyond the last whole patch are ignored (384 is 27 x 14 + 6).
        patch_size: height and width of a patch in pixels.
        encoder: the stack of blocks.
        pooling: the class token, the mean of the patches, the first patch, attention pooling, or none: all tokens
            concatenated.
        positions: learned, or fixed 2-D sine-cosine.
        num_registers: number of learned tokens after the class token, without positions (DINOv2).
        input_norm: whether there is a LayerNorm before the first block (CLIP).
        representation_size: size of a dense layer with tanh after pooling, as in the original ViT; None for none.
        projection_size: size of a dense layer without tanh at the very end (CLIP); None for none.
        weights: pretrained weights, a path or address, see `lit_het.weights.formats`; None for random weights.
        members: how embeddings of an ensemble's members are combined: by their mean, concatenated, or "apart": each is
            an example of a classifier, and a key of its image in an image-text model.
        uncertainty_token: whether one more learned token is encoded, whose output gives log σ² of the embedding
            (ProLIP's [UNC]); the embedding is then ``[mean, log σ²]``, of twice the size.
        norm_twice: whether the encoder's last norm is applied to the class token once more (ProLIP's published code).
        num_inputs: M images that the tower sees at once, along the axis of channels (MIMO, e3 App. B.3); a single image
            is repeated.
        layer_input: whether the embedding is followed by the input of the last linear layer, for its posterior.
        class_token: whether there is a class token also with the pooling "none", for a tower that was trained with one.
        patch_sizes: sizes of patches, one of which each training step draws and resizes the first layer and the
            positions for (FlexiViT, Beyer et al. 2023); empty for ``patch_size`` alone.

    Raises:
        UserError: inconsistent sizes, an unknown choice, a class token that another pooling would not read, an
            uncertainty token of an ensemble, ``layer_input`` without a linear layer at the end, or ``patch_sizes`` that
            do not divide the image or do not fit positions or pooling.
    """

    image_size: int = 224
    patch_size: int = 16
    encoder: EncoderConfig = EncoderConfig()
    pooling: Literal["class_token", "mean", "first", "attention", "none"] = "attention"
    positions: Literal["learned", "sine_cosine"] = "learned"
    num_registers: int = 0
    input_norm: bool = False
    representation_size: int | None = None
    projection_size: int | None = None
    weights: str | None = None
    members: Literal["mean", "concatenated", "apart"] = "mean"
    uncertainty_token: bool = False
    norm_twice: bool = False
    layer_input: bool = False
    num_inputs: int = 1
    class_token: bool = False
    patch_sizes: tuple[int, ...] = ()

    first_parameters = ("patches", "positions", "class_token", "registers", "uncertainty_token", "input_norm")

    def __post_init__(self) -> None:
        require_at_least(1, self, "image_size", "patch_size", "num_inputs")
        require_at_least(0, self, "num_registers")
        require_choice(self, "pooling", "positions", "members")
        if self.image_size < self.patch_size:
            raise UserError(f"image_size = {self.image_size} is less than patch_size = {self.patch_size}")
        for field in ("representation_size", "projection_size"):
            if getattr(self, field) is not None:
                require_at_least(1, self, field)
        if self.class_token and self.pooling != "none":
            raise FieldError(self, "class_token", "True needs pooling 'none'; pooling 'class_token' has one without it")
        if self.uncertainty_token and self.encoder.num_members > 1:
            raise UserError("image_tower.uncertainty_token = True needs encoder.experts.num_members = 1")
        if self.norm_twice and (self.pooling != "class_token" or self.encoder.norm_placement != "before"):
            raise UserError("image_tower.norm_twice = True needs pooling = 'class_token' and norm_placement = 'before'")
        if self.layer_input and self.last_layer is None:
            raise FieldError(
                self,
                "layer_input",
                "True needs projection_size or attention pooling, without members and uncertainty_token",
            )
        if self.patch_sizes:
            self._check_patch_sizes()

    def _check_patch_sizes(self) -> None:
        undivided = [size for size in self.patch_sizes if size < 1 or self.image_size % size]
        if undivided:
            raise FieldError(
                self, "patch_sizes", f"{undivided[0]} does not divide image_size = {self.image_size}; leave it out"
            )
        if self.positions != "learned":
            raise FieldError(self, "patch_sizes", "several sizes need positions = 'learned', which can be resized")
        if self.pooling == "none":
            raise FieldError(
                self, "patch_sizes", "several sizes need a pooling other than 'none', of any number of tokens"
            )

    @property
    def pools_tokens(self) -> bool:
        """Whether its tokens can be read beside an embedding."""
        return self.pooling != "none"

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return self.side**2

    @property
    def has_class_token(self) -> bool:
        """Whether a class token is encoded before the patches."""
        return self.class_token or self.pooling == "class_token"

    @property
    def num_tokens(self) -> int:
        """Tokens of an image: class token, registers and patches."""
        return self.has_class_token + self.num_registers + self.num_patches

    @property
    def side(self) -> int:
        """Patches along each side."""
        return self.image_size // self.patch_size

    @property
    def embedding_size(self) -> int:
        """Size of the embedding."""
        size = self.mean_size * (2 if self.uncertainty_token else 1)
        return size * (self.num_members if self.members == "concatenated" else 1)

    @property
    def last_layer(self) -> str | None:
        """Path of the parameters of the linear layer at the very end; None where the tower ends otherwise."""
        if self.encoder.num_members > 1 or self.uncertainty_token:
            return None
        if self.projection_size is not None:
            return "projection"
        return "pooling/mlp/down" if self.pooling == "attention" and self.representation_size is None else None

    @property
    def input_size(self) -> int:
        """Size of the input of the last layer, where it follows the embedding; 0 otherwise."""
        if not self.layer_input:
            return 0
        if self.projection_size is None:
            return self.encoder.mlp_width
        return self.representation_size or self._pooled_size

    @property
    def mean_size(self) -> int:
        """Size of a member's embedding, without log σ²."""
        return self.projection_size or self.representation_size or self._pooled_size

    @property
    def _pooled_size(self) -> int:
        return (self.num_tokens if self.pooling == "none" else 1) * self.encoder.width

    def all_members(self) -> "ViTConfig":
        """Returns the tower whose output has the embeddings of all members, side by side."""
        return dataclasses.replace(self, members="concatenated")

    def without_pooling(self) -> "ViTConfig | None":
        """Returns the tower whose output is all tokens, one after the other; None of an ensemble or with log σ²."""
        if self.num_members > 1 or self.uncertainty_token:
            return None
        return dataclasses.replace(
            self,
            pooling="none",
            class_token=self.has_class_token,
            representation_size=None,
            projection_size=None,
            norm_twice=False,
            layer_input=False,
            patch_sizes=(),
        )

    def unseen_pixels(self) -> str | None:
        """Returns what is beyond the last whole patch."""
        rest = self.image_size % self.patch_size
        if not rest:
            return None
        below = self.image_size - rest
        return (
            f"patches of {self.patch_size} pixels do not divide images of {self.image_size}: the last {rest} rows and "
            f"columns are not seen; choose an image size of {below} or {below + self.patch_size} to use all pixels"
        )

    def file_options(self) -> dict[str, Any]:
        """Returns its sizes too, and a pooling that a file may not record."""
        pooling = {"image_pooling": self.pooling} if self.pooling in ("mean", "first") else {}
        return {**super().file_options(), "image_size": self.image_size, "patch_size": self.patch_size, **pooling}

    def build(self, rngs: nnx.Rngs) -> "ViT":
        """Returns the tower with fresh parameters."""
        return ViT(self, rngs)


class ViT(nnx.Module):
    """The tower of a `ViTConfig`; the class token has no position, as in big_vision."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.config = config
        encoder, dtype = config.encoder, config.compute_type
        self.patches = linear(config.patch_size**2 * 3 * config.num_inputs, encoder.width, dtype, rngs)
        if config.positions == "learned":
            scale = nnx.initializers.normal(1 / np.sqrt(encoder.width))
            self.positions = nnx.Param(scale(rngs.params(), (config.num_patches, encoder.width), jnp.float32))
        if config.has_class_token:
            self.class_token = nnx.Param(jnp.zeros(encoder.width, jnp.float32))
        if config.num_registers:
            scale = nnx.initializers.normal(0.02)
            self.registers = nnx.Param(scale(rngs.params(), (config.num_registers, encoder.width), jnp.float32))
        if config.uncertainty_token:
            scale = nnx.initializers.normal(1 / np.sqrt(encoder.width))
            self.uncertainty_token = nnx.Param(scale(rngs.params(), (encoder.width,), jnp.float32))
            self.uncertainty = log_variances(encoder.width, config.mean_size, rngs)
        # CLIP's "pre-LayerNorm".
        if config.input_norm:
            self.input_norm = layer_norm(encoder.width, encoder.norm_epsilon, rngs)
        self.encoder = Encoder(encoder, rngs)
        if config.pooling == "attention":
            self.pooling = AttentionPooling(encoder, rngs)
        size = config._pooled_size
        if config.representation_size is not None:
            self.pre_logits = linear(size, config.representation_size, dtype, rngs)
            size = config.representation_size
        if config.projection_size is not None:
            self.projection = linear(size, config.projection_size, dtype, rngs)

    def __call__(
        self,
        image: UInt8[Array, "b h w c"],
        key: Key[Array, ""] | None = None,
        kept: Int[Array, "b _"] | None = None,
        masked: Bool[Array, "b n"] | None = None,
        mask_token: Float[Array, " width"] | None = None,
    ) -> TowerOutput:
        """Returns embeddings and the encoder's tokens; pixels are mapped to [-1, 1] here.

        Args:
            image: pixels as stored, of one image or of ``num_inputs``; of another size than that of the tower, its
                positions are resized.
            key: random key of training, for experts; without it the tower is deterministic.
            kept: numbers of the patches of each image to encode, which leaves out the others; None for all.
            masked: patches to replace by ``mask_token``, before positions are added; None for none.
            mask_token: what replaces them.
        """
        b, size = image.shape[0], self.patch_size
        if image.shape[3] < 3 * self.config.num_inputs:
            image = jnp.tile(image, (1, 1, 1, self.config.num_inputs))
        height, width = (length // size * size for length in image.shape[1:3])
        # Patches do not overlap, so the convolution is one matrix product.
        pixels = einops.rearrange(image[:, :height, :width], "b (h p) (w q) c -> b (h w) (p q c)", p=size, q=size)
        positions = self._positions(height // size, width // size)[None]
        if kept is not None:
            pixels, positions = jnp.take_along_axis(pixels, kept[:, :, None], axis=1), positions[0][kept]
        # Pixels travel to the device as uint8, a quarter of the bytes of float32.
        tokens = self.patches(pixels.reshape(-1, pixels.shape[-1]).astype(jnp.float32) / 127.5 - 1.0)
        tokens = tokens.reshape(b, -1, tokens.shape[-1])
        if masked is not None:
            assert mask_token is not None
            tokens = jnp.where(masked[:, :, None], mask_token.astype(tokens.dtype), tokens)
        tokens = self._with_first_tokens(tokens + positions)
        if self.config.input_norm:
            tokens = self.input_norm(tokens)
        encoded = self.encoder(tokens, key)
        embedding = self._embed(encoded.tokens)
        embedding = self.config.join_members(embedding.reshape(b, -1, embedding.shape[1]))
        return TowerOutput(embedding, encoded.tokens, encoded.auxiliary_losses, encoded.metrics)

    @property
    def patch_size(self) -> int:
        """Height and width of a patch in pixels: of the present parameters, see `resizing.at_patch_size`."""
        return math.isqrt(self.patches.kernel.shape[0] // (3 * self.config.num_inputs))

    def num_patches(self, image: UInt8[Array, "b h w c"]) -> int:
        """Returns the number of patches of each image."""
        return math.prod(length // self.patch_size for length in image.shape[1:3])

    def _embed(self, tokens: Float[Array, "b n d"]) -> Float[Array, "b _"]:
        """Returns the mean, or with an uncertainty token, the first of all tokens, the mean and log σ²."""
        if not self.config.uncertainty_token:
            return self._project(self._pool(tokens))
        log_variance = sharding.as_batch(self.uncertainty(tokens[:, 0]))
        return jnp.concatenate([self._project(self._pool(tokens[:, 1:])), log_variance], axis=1)

    def _positions(self, rows: int, columns: int) -> Float[Array, "n d"]:
        """Returns the positions of a grid of patches, resized bilinearly where it is not the tower's own."""
        side, width = self.config.side, self.config.encoder.width
        if self.config.positions == "learned":
            own = self.positions[...]
            side = math.isqrt(len(own))
        else:
            own = jnp.asarray(sine_cosine_positions(side, side, width))
        if (rows, columns) == (side, side):
            return own
        return jax.image.resize(own.reshape(side, side, width), (rows, columns, width), "linear").reshape(-1, width)

    def _with_first_tokens(self, tokens: Float[Array, "b n d"]) -> Float[Array, "b _ d"]:
        first = []
        if self.config.uncertainty_token:
            first.append(self.uncertainty_token[...][None])
        if self.config.has_class_token:
            first.append(self.class_token[...][None])
        if self.config.num_registers:
            first.append(self.registers[...])
        shape = (tokens.shape[0], -1, tokens.shape[-1])
        first = [jnp.broadcast_to(x, (shape[0], *x.shape)).astype(tokens.dtype) for x in first]
        return jnp.concatenate([*first, tokens], axis=1)

    def _pool(self, tokens: Float[Array, "b n d"]) -> Float[Array, "b _"]:
        match self.config.pooling:
            case "class_token":
                return self.encoder.norm(tokens[:, 0]) if self.config.norm_twice else tokens[:, 0]
            case "mean":
                # Registers hold no content of the image (DINOv2): they are left out of the mean.
                return tokens[:, self.config.num_registers :].mean(axis=1)
            case "first":
                return tokens[:, self.config.num_registers]
            case "attention":
                if self.config.layer_input and self.config.projection_size is None:
                    return jnp.concatenate(self.pooling.with_hidden(tokens), axis=1)
                return self.pooling(tokens)
            case "none":
                return tokens.reshape(tokens.shape[0], -1)

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
