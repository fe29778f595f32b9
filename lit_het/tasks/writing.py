"""Models that write text about what their tower reads: LiT-decoder on images, and the original Transformer on texts.

Beyer et al. 2023 and SoViT Sec. 4.2, App. C; Vaswani et al. 2017.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Real

from lit_het.heads.base import ClassificationHead
from lit_het.objectives.tokens import build_head, token_loss
from lit_het.random import Keys
from lit_het.tasks.base import Forward, Task
from lit_het.tasks.features import FeatureExtractor
from lit_het.tasks.options import WritingOptions
from lit_het.towers.decoder import Decoder, Source
from lit_het.types import Batch, Params


class EncoderDecoder(nnx.Module):
    """Tower, decoder and head; the names of its attributes begin parameter paths."""

    decoder: Decoder
    head: ClassificationHead

    def __init__(self, config: WritingOptions, rngs: nnx.Rngs):
        tower = config.tower.build(rngs)
        setattr(self, f"{config.reads}_tower", tower)
        self.decoder = config.decoder.build(config.tower.encoder.width, rngs)
        self.head = build_head(config.decoder, config.head, self.decoder, rngs)
        if config.shared_embedding:
            tower.tokens.embedding = self.decoder.tokens.embedding


class WritingTask(Task[WritingOptions, EncoderDecoder]):
    """The task of `WritingOptions`; it has no classes of images."""

    num_classes = 0

    def __init__(self, config: WritingOptions):
        self._tower = f"{config.reads}_tower"
        super().__init__(config, EncoderDecoder)
        self._layered["decoder"] = config.decoder
        self.features = None if config.image_tower is None else FeatureExtractor(config.image_tower)

    def forward(self, model: EncoderDecoder, batch: Batch, keys: Keys) -> Forward:
        """Returns the mean loss of the tokens that are to be predicted, see `Task`."""
        config = self.config
        if batch.image_embedding is None:
            output = self.tower_output(model, self._tower, batch.view, keys(config.tower_key))
            outputs, embedding = {config.reads: output}, output.embedding
        else:
            outputs, embedding = {}, self.features.embedding(batch.image_embedding.astype(jnp.float32))
        source = self._source(embedding, batch.source)
        return Forward(*token_loss(model.decoder, model.head, config.loss, source, batch, keys), outputs)

    def source(self, params: Params, rows: Real[Array, "b _"]) -> Source:
        """Returns the tokens that the decoder attends to.

        Args:
            params: of the model.
            rows: features of images, in which their tokens lie one after the other, or token ids of texts.
        """
        if self.features is None:
            return self._source(getattr(self.model(params), self._tower)(rows).embedding, rows)
        return self._source(self.features.embedding(rows), None)

    def _source(self, embedding: Float[Array, "b _"], ids: Int[Array, "b n"] | None) -> Source:
        """Returns the tokens of an embedding without pooling; of a text, all but padding."""
        tokens = embedding.reshape(len(embedding), -1, self.config.tower.encoder.width)
        return Source(tokens, None if ids is None else ids != self.config.tower.padding_token)
