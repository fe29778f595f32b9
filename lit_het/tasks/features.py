"""Features of an image tower, the input of every head; those of an ensemble's members are concatenated."""

import functools
from typing import TypeAlias

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8

from lit_het.errors import UserError
from lit_het.towers.image_config import ImageTowerConfig
from lit_het.types import Params

ImageOrStored: TypeAlias = UInt8[Array, "b *image"] | Float[Array, "b f"]
"""Pixels, or precomputed features of the image tower."""


class FeatureExtractor:
    """An image tower without a head.

    Attributes:
        num_members: m.
        size: f, the size of an image's features.
        mean_size: see `lit_het.types.ImageFeatures`.
    """

    def __init__(self, config: ImageTowerConfig):
        self._config = config
        self.num_members, self.mean_size = config.num_members, config.mean_size
        self.size = config.all_members().output_size

    @functools.cached_property
    def _graph(self) -> nnx.GraphDef:
        return nnx.graphdef(nnx.eval_shape(lambda: self._config.all_members().build(nnx.Rngs(0))))

    def __call__(self, params: Params, view: ImageOrStored) -> Float[Array, "b f"]:
        """Returns the features of images, or stored features in float32.

        Args:
            params: a tree with the tower's parameters under "image_tower".
            view: pixels or stored features.
        """
        if view.ndim == 2:
            self._check_size(view)
            return view.astype(jnp.float32)
        return self.tower(params, view)

    def tower(self, params: Params, image: UInt8[Array, "b *image"]) -> Float[Array, "b f"]:
        """Returns the features of images of the tower's own; the parameters are those of a call."""
        return nnx.merge(self._graph, params.get("image_tower", {}))(image).embedding

    def embedding(self, features: Float[Array, "b f"]) -> Float[Array, "_ d"]:
        """Returns the embeddings of features, one per image or one per member, as the tower is configured."""
        self._check_size(features)
        return self._config.join_members(features.reshape(-1, self.num_members, self.size // self.num_members))

    def _check_size(self, features: Float[Array, "b f"]) -> None:
        if features.shape[1] != self.size:
            raise UserError(
                f"stored image embeddings have size {features.shape[1]}, those of the image tower {self.size}"
            )
