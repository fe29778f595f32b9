"""Random views of images, made on the devices: crops, reflections and colours (DINO, App. E)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt8

from lit_het import sharding

_LOG_ASPECT = math.log(4 / 3)
# Largest change of brightness, contrast and saturation, and the probabilities of any change and of grey: DINO's.
_BRIGHTNESS, _CONTRAST, _SATURATION = 0.4, 0.4, 0.2
_JITTER, _GREY = 0.8, 0.2
_LUMA = (0.299, 0.587, 0.114)


def random_views(
    key: Key[Array, ""], image: UInt8[Array, "b h w 3"], count: int, size: int, areas: tuple[float, float]
) -> UInt8[Array, "bv size size 3"]:
    """Returns random views of each image, adjacent, with ``size`` pixels a side.

    Args:
        key: random key.
        image: pixels.
        count: v, views of an image.
        size: their height and width in pixels.
        areas: smallest and largest share of the image's area in a crop.
    """
    keys = jax.random.split(key, (len(image), count))

    def view(key: Key[Array, ""], image: UInt8[Array, "h w 3"]) -> UInt8[Array, "size size 3"]:
        of_crop, of_colours = jax.random.split(key)
        cropped = _colours(of_colours, _crop(of_crop, image, size, areas))
        return jnp.round(jnp.clip(cropped, 0, 255)).astype(jnp.uint8)

    views = jax.vmap(lambda keys, image: jax.vmap(lambda key: view(key, image))(keys))(keys, image)
    return sharding.as_batch(views.reshape(-1, size, size, 3))


def _crop(
    key: Key[Array, ""], image: UInt8[Array, "h w 3"], size: int, areas: tuple[float, float]
) -> Float[Array, "size size 3"]:
    """Returns a crop of random area, aspect ratio from 3/4 to 4/3 and place, resized bilinearly, or its reflection."""
    of_area, of_aspect, of_place, of_reflection = jax.random.split(key, 4)
    area = jax.random.uniform(of_area, minval=areas[0], maxval=areas[1])
    aspect = jnp.exp(jax.random.uniform(of_aspect, minval=-_LOG_ASPECT, maxval=_LOG_ASPECT))
    sides = jnp.minimum(jnp.sqrt(jnp.stack([area * aspect, area / aspect])), 1.0)
    first = jax.random.uniform(of_place, (2,)) * (1 - sides)
    shape = jnp.asarray(image.shape[:2], jnp.float32)
    scale = size / (sides * shape)
    # With antialias, as in Pillow: a pixel of a smaller image is a mean of all pixels that it covers.
    cropped = jax.image.scale_and_translate(
        image.astype(jnp.float32), (size, size, 3), (0, 1), scale, -first * shape * scale, "linear", antialias=True
    )
    return jnp.where(jax.random.bernoulli(of_reflection), cropped[:, ::-1], cropped)


def _colours(key: Key[Array, ""], image: Float[Array, "h w 3"]) -> Float[Array, "h w 3"]:
    """Returns an image with random brightness, contrast and saturation, or in grey."""
    of_changes, of_jitter, of_grey = jax.random.split(key, 3)
    most = jnp.array([_BRIGHTNESS, _CONTRAST, _SATURATION])
    factors = 1 + jax.random.uniform(of_changes, (3,), minval=-most, maxval=most)
    brightness, contrast, saturation = jnp.where(jax.random.bernoulli(of_jitter, _JITTER), factors, 1.0)
    image = image * brightness
    image = contrast * image + (1 - contrast) * _grey(image).mean()
    saturation = jnp.where(jax.random.bernoulli(of_grey, _GREY), 0.0, saturation)
    return saturation * image + (1 - saturation) * _grey(image)


def _grey(image: Float[Array, "h w 3"]) -> Float[Array, "h w 1"]:
    return (image @ jnp.array(_LUMA))[:, :, None]
