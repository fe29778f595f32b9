"""The original Transformer (Vaswani et al. 2017): a text decoder on the tokens of a text encoder."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lit_het.errors import UserError
from lit_het.heads.base import ClassificationHead
from lit_het.objectives.tokens import build_head, token_loss
from lit_het.random import Keys
from lit_het.tasks.base import Progress, Task
from lit_het.tasks.quantities import ImageClassifier
from lit_het.tasks.translation import TranslationConfig
from lit_het.towers.decoder import Source
from lit_het.types import Batch, Metrics, Params


class Translator(nnx.Module):
    """Encoder, decoder and head; the names of its attributes begin parameter paths."""

    head: ClassificationHead

    def __init__(self, config: TranslationConfig, rngs: nnx.Rngs):
        self.text_tower = config.text_tower.build(rngs)
        self.decoder = config.decoder.build(config.text_tower.encoder.width, rngs)
        self.head = build_head(config.decoder, config.head, self.decoder, rngs)
        if config.shared_embedding:
            self.text_tower.tokens.embedding = self.decoder.tokens.embedding


class TokenIds:
    """What stands for the features of an image where the source is a text: its token ids, which programs encode.

    Attributes:
        num_members, mean_size: as of `lit_het.tasks.features.FeatureExtractor`.
        size: tokens of a source.
    """

    num_members, mean_size = 1, None

    def __init__(self, size: int):
        self.size = size

    def __call__(self, params: Params, view: Int[Array, "b n"]) -> Float[Array, "b n"]:
        """Returns the ids as numbers, which are exact up to 2²⁴."""
        return view.astype(jnp.float32)


class TranslationTask(Task[TranslationConfig, Translator]):
    """The task of a `TranslationConfig`; it writes text and has no classes of images."""

    num_classes, num_predictions = 0, 1
    has_image_noise = has_class_probabilities = False
    antithetic = None

    def __init__(self, config: TranslationConfig):
        super().__init__(config, Translator, {"text_tower": config.text_tower, "decoder": config.decoder})
        self.features = TokenIds(config.text_tower.length)

    def loss(
        self, params: Params, batch: Batch, keys: Keys, progress: Progress | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Returns the mean loss of the tokens that are to be predicted, and metrics."""
        assert batch.source is not None
        model = self.model(params)
        # A locked encoder drops nothing.
        key = keys("text_tower") if "text_tower" in self.trained else None
        encoded = model.text_tower(batch.source, key)
        source = Source(encoded.tokens, batch.source != self.config.text_tower.padding_token)
        loss, found = token_loss(model.decoder, model.head, self.config.loss, source, batch, keys)
        metrics = {f"text_{name}": value for name, value in encoded.metrics.items()} | found
        return loss + sum(encoded.auxiliary_losses.values()), metrics

    def image_classifier(self, params: Params, classes: Float[Array, "k d"] | None = None) -> ImageClassifier:
        """Raises a `UserError`, as the model is none."""
        raise UserError("the model translates text, and has no classes; use lit-het translate")

    def source(self, params: Params, features: Float[Array, "b n"]) -> Source:
        """Returns the encoded tokens of texts from their ids."""
        ids = features.astype(jnp.int32)
        tokens = self.model(params).text_tower(ids).tokens
        return Source(tokens, ids != self.config.text_tower.padding_token)
