"""The restricted oracle of UViM (Kolesnikov et al. 2022): masks to a code of few words, and a code to masks again."""

from typing import Literal, NamedTuple, TypeAlias

import einops
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key, Shaped, UInt8

from lit_het.towers.codebook import Codebook, quantized
from lit_het.towers.layers import linear
from lit_het.towers.oracle_config import OracleConfig
from lit_het.towers.transformer import Encoder

CodeDropout: TypeAlias = Literal["random", "ordered", "none"]


class Code(NamedTuple):
    """The code of masks.

    Attributes:
        vectors: what is quantized, with mean 0 and variance 1.
        words: the nearest words, with the gradient of the vectors.
        numbers: of the words.
    """

    vectors: Float[Array, "b n d"]
    words: Float[Array, "b n d"]
    numbers: Int[Array, "b n"]


class MaskLogits(NamedTuple):
    """Logits of each pixel, in patches: of its class with void, and of the number of its instance with 0 for none."""

    classes: Float[Array, "b n p k"]
    instances: Float[Array, "b n p i"]


class Oracle(nnx.Module):
    """The oracle of an `OracleConfig`."""

    def __init__(self, config: OracleConfig, rngs: nnx.Rngs):
        self.config = config
        (before, after), size = (config.encoder, config.decoder), config.codebook.size
        pixels, labels = config.patch_size**2, (config.num_classes + 1, config.num_instances + 1)
        self.classes, self.instances = (
            linear(pixels * count, before.width, before.compute_type, rngs) for count in labels
        )
        if config.encoder_sees_image:
            self.encoder_image = linear(3 * pixels, before.width, before.compute_type, rngs)
        self.encoder_positions = _positions(config, before.width, rngs)
        self.encoder = Encoder(before, rngs)
        self.to_words = linear(before.width, size, "float32", rngs)
        self.codebook = Codebook(config.codebook, rngs)
        self.from_words = linear(size, after.width, "float32", rngs)
        if config.decoder_sees_image:
            self.decoder_image = linear(3 * pixels, after.width, after.compute_type, rngs)
        self.decoder_positions = _positions(config, after.width, rngs)
        self.decoder = Encoder(after, rngs)
        self.class_logits, self.instance_logits = (
            nnx.Linear(after.width, pixels * count, kernel_init=nnx.initializers.zeros, rngs=rngs) for count in labels
        )

    def encode(self, masks: Int[Array, "b h w 2"], image: UInt8[Array, "b h w 3"]) -> Code:
        """Returns the code of masks; see `lit_het.types.Batch` for both."""
        config, found = self.config, self.in_patches(masks)
        x = self.classes(_one_hot(found[..., 0], config.num_classes, config.encoder.compute_type))
        x = x + self.instances(_one_hot(found[..., 1], config.num_instances, config.encoder.compute_type))
        if config.encoder_sees_image:
            x = x + self.encoder_image(self._pixels(image))
        x = self.encoder(x + self.encoder_positions[...][None]).tokens
        x = self.to_words(_resized(x, config.side, config.code_side))
        vectors = jax.nn.standardize(x, axis=-1)
        return Code(vectors, *quantized(vectors, self.codebook.words()))

    def decode(self, words: Float[Array, "b n d"], image: UInt8[Array, "b h w 3"]) -> MaskLogits:
        """Returns the logits of a code of words."""
        config = self.config
        x = _resized(self.from_words(words), config.code_side, config.side)
        if config.decoder_sees_image:
            x = x + self.decoder_image(self._pixels(image))
        x = self.decoder(x + self.decoder_positions[...][None]).tokens
        shape = (*x.shape[:2], config.patch_size**2, -1)
        return MaskLogits(self.class_logits(x).reshape(shape), self.instance_logits(x).reshape(shape))

    def decode_numbers(self, numbers: Int[Array, "b n"], image: UInt8[Array, "b h w 3"]) -> MaskLogits:
        """Returns the logits of the words with these numbers."""
        return self.decode(self.codebook.words()[numbers], image)

    def in_patches(self, image: Shaped[Array, "b h w c"]) -> Shaped[Array, "b n p c"]:
        """Returns the pixels of each patch."""
        size = self.config.patch_size
        return einops.rearrange(image, "b (h p) (w q) c -> b (h w) (p q) c", p=size, q=size)

    def as_image(self, patches: Shaped[Array, "b n p"]) -> Shaped[Array, "b h w"]:
        """Returns the image of the pixels of each patch."""
        side, size = self.config.side, self.config.patch_size
        return einops.rearrange(patches, "b (h w) (p q) -> b (h p) (w q)", h=side, w=side, p=size, q=size)

    def _pixels(self, image: UInt8[Array, "b h w 3"]) -> Float[Array, "b n _"]:
        pixels = self.in_patches(image).astype(jnp.float32) / 127.5 - 1.0
        return pixels.reshape(*pixels.shape[:2], -1)


def dropped(words: Float[Array, "b n d"], kind: CodeDropout, key: Key[Array, ""]) -> Float[Array, "b n d"]:
    """Returns codes of which a random share of the words, another of each code, is zero: any of them, or the last."""
    if kind == "none":
        return words
    b, n, _ = words.shape
    of_shares, of_order = jax.random.split(key)
    places = jnp.broadcast_to(jnp.arange(n), (b, n))
    if kind == "random":
        places = jax.random.permutation(of_order, places, axis=1, independent=True)
    # A word at place i of n is kept with the probability 1 - (i + 1) / (n + 1).
    is_kept = 1 - (places + 1) / (n + 1) > jax.random.uniform(of_shares, (b, 1))
    return words * is_kept[:, :, None]


def _positions(config: OracleConfig, width: int, rngs: nnx.Rngs) -> nnx.Param:
    normal = nnx.initializers.normal(1 / np.sqrt(width))
    return nnx.Param(normal(rngs.params(), (config.side**2, width), jnp.float32))


def _one_hot(labels: Int[Array, "b n p"], most: int, dtype: str) -> Float[Array, "b n _"]:
    """Returns ones of the labels 0 to ``most`` of all pixels of a patch, one after the other; zeros of others."""
    return jax.nn.one_hot(labels, most + 1, dtype=jnp.dtype(dtype)).reshape(*labels.shape[:2], -1)


def _resized(x: Float[Array, "b n d"], before: int, after: int) -> Float[Array, "b m d"]:
    """Returns vectors of a square grid resized to another number of them on each side, linearly."""
    grid = x.reshape(len(x), before, before, -1)
    return jax.image.resize(grid, (len(x), after, after, grid.shape[3]), "linear").reshape(len(x), after**2, -1)
