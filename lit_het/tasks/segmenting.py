"""Stage II of UViM (Kolesnikov et al. 2022): a decoder writes the code of an image's masks; the oracle decodes it."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lit_het.losses.masks import merged
from lit_het.objectives.tokens import build_head, token_loss
from lit_het.random import Keys
from lit_het.tasks.base import Forward, Task
from lit_het.tasks.features import FeatureExtractor, ImageOrStored
from lit_het.tasks.generation import Prompt, generate
from lit_het.tasks.quantities import ImageSegmenter
from lit_het.tasks.segmentation import SegmentationConfig
from lit_het.texts import GenerationConfig
from lit_het.towers.decoder import Source
from lit_het.towers.decoder_config import START_TOKEN
from lit_het.types import Batch, Params

_NEVER = -1
"""A token that ends no code: all have the same length."""


class Segmenter(nnx.Module):
    """Tower, decoder, head and oracle; the names of its attributes begin parameter paths."""

    def __init__(self, config: SegmentationConfig, rngs: nnx.Rngs):
        self.image_tower = config.image_tower.build(rngs)
        self.decoder = config.decoder.build(config.image_tower.encoder.width, rngs)
        self.head = build_head(config.decoder, config.head, self.decoder, rngs)
        self.oracle = config.oracle.build(rngs)


class TokensAndPixels(FeatureExtractor):
    """What is known of an image: the tokens of its tower, then its pixels, which the oracle decodes codes beside."""

    def __init__(self, config: SegmentationConfig):
        super().__init__(config.image_tower)
        self.num_values = self.size
        self.side = config.oracle.image_size
        self.size += 3 * self.side**2

    def __call__(self, params: Params, view: ImageOrStored) -> Float[Array, "b f"]:
        """Returns the features of images; arguments as of a `FeatureExtractor`."""
        tokens = self.tower(params, view)
        return jnp.concatenate([tokens, view.reshape(len(view), -1).astype(jnp.float32)], axis=1)


class SegmentationTask(Task[SegmentationConfig, Segmenter]):
    """The task of a `SegmentationConfig`."""

    def __init__(self, config: SegmentationConfig):
        super().__init__(config, Segmenter)
        self._layered["decoder"] = config.decoder
        self.features = TokensAndPixels(config)

    def forward(self, model: Segmenter, batch: Batch, keys: Keys) -> Forward:
        """Returns the mean loss of the words of codes, see `Task`."""
        assert batch.image is not None
        assert batch.masks is not None
        numbers = jax.lax.stop_gradient(model.oracle.encode(batch.masks, batch.image).numbers)
        # Token 0 is the start, from which the first word is predicted.
        written = dataclasses.replace(batch, text=numbers + 1, text_target=jnp.ones(numbers.shape, bool))
        output = self.tower_output(model, "image_tower", batch.view, keys("image_tower_routing"))
        found = token_loss(model.decoder, model.head, self.config.loss, self._source(output.embedding), written, keys)
        return Forward(*found, {"image": output})

    def image_classifier(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, params: Params, classes: Float[Array, "k d"] | None = None
    ) -> ImageSegmenter:
        """Returns the model as one of the masks of images."""

        def masks(features: Float[Array, "b f"]) -> Int[Array, "b h w 2"]:
            oracle, side = self.model(params).oracle, self.features.side
            image = features[:, self.features.num_values :].reshape(-1, side, side, 3).astype(jnp.uint8)
            logits = oracle.decode_numbers(self.codes(params, features), image)
            classes, instances = (x.reshape(len(x), -1, x.shape[-1]) for x in logits)
            found = merged(classes, instances).reshape(*logits.classes.shape[:3], 2)
            return jnp.stack([oracle.as_image(found[..., one]) for one in range(2)], axis=-1)

        return ImageSegmenter(masks)

    def codes(self, params: Params, features: Float[Array, "b f"]) -> Int[Array, "b n"]:
        """Returns the codes of images, each word the most probable one given those before."""
        decoder, b = self.config.decoder, features.shape[0]
        written = generate(
            self,
            params,
            self._source(features[:, : self.features.num_values]),
            Prompt(jnp.zeros((b, 0), jnp.int32), jnp.zeros(b, jnp.int32)),
            GenerationConfig(decoder.length),
            end_token=_NEVER,
            allowed=jnp.arange(decoder.vocabulary_size) != START_TOKEN,
        )
        return written.tokens[:, 0] - 1

    def _source(self, embedding: Float[Array, "b _"]) -> Source:
        return Source(embedding.reshape(len(embedding), -1, self.config.image_tower.encoder.width))
