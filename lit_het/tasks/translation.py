"""The original Transformer (Vaswani et al. 2017): a text decoder on the tokens of a text encoder."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lit_het.errors import FieldError, UserError
from lit_het.heads.base import ClassificationHead
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.objectives.tokens import START_TOKEN, TokenHeadConfig, build_head, check_tied, token_loss
from lit_het.programs import shared
from lit_het.random import Keys
from lit_het.tasks.base import Progress, Task
from lit_het.tasks.features import ImageTowerConfig
from lit_het.tasks.quantities import ImageClassifier
from lit_het.towers.decoder import DecoderConfig, Source
from lit_het.towers.text import TextConfig
from lit_het.types import Batch, Metrics, Params

_ENCODER = TextConfig(pooling="none", padding_token=START_TOKEN)


@dataclasses.dataclass(frozen=True)
class TranslationConfig:
    """A model that writes text about a text: its translation, or another sequence.

    Attributes:
        text_tower: the encoder of source texts, without pooling: the decoder attends to all tokens but padding.
        decoder: the text decoder.
        head: maps the decoder's features to a distribution of logits of the next token.
        loss: of the next token.
        locked: patterns of parameters to lock.
        shared_embedding: whether source and target have one embedding of tokens (Vaswani et al. Sec. 3.4).

    Raises:
        UserError: the encoder pools its tokens or does not know padding, both share embeddings of different sizes, or
            tied logits do not fit the head.
    """

    text_tower: TextConfig = _ENCODER
    decoder: DecoderConfig = DecoderConfig()
    head: TokenHeadConfig = DeterministicConfig()
    loss: SoftmaxCrossEntropy = SoftmaxCrossEntropy()
    locked: tuple[str, ...] = ()
    shared_embedding: bool = False

    def __post_init__(self) -> None:
        tower, decoder = self.text_tower, self.decoder
        if tower.pooling != "none":
            raise UserError(
                f"a decoder attends to the tokens of a text: set task.text_tower.pooling to 'none', not "
                f"{tower.pooling!r}"
            )
        if tower.padding_token is None:
            raise UserError(
                "a decoder does not attend to padding: set task.text_tower.padding_token to that of the tokenizer"
            )
        sizes = [(one.vocabulary_size, one.encoder.width) for one in (tower, decoder)]
        if self.shared_embedding and (sizes[0] != sizes[1] or tower.weights is not None):
            raise FieldError(
                self,
                "shared_embedding",
                "True needs equal vocabulary_size and encoder.width of text_tower and decoder, and no weights",
            )
        check_tied(self.decoder, self.head, "task")

    @property
    def image_tower(self) -> ImageTowerConfig:
        """Raises a `UserError`, as there is none."""
        raise UserError("the model has no image tower: it translates texts, see lit-het translate")

    @shared
    def build(self) -> "TranslationTask":
        """Returns the task."""
        return TranslationTask(self)


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
