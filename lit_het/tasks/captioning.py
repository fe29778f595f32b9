"""LiT-decoder: a text decoder on the tokens of an image tower (Beyer et al. 2023; SoViT Sec. 4.2, App. C)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het.errors import UserError, require_at_least
from lit_het.heads.base import ClassificationHead
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.logits import TiedLogits
from lit_het.losses.base import masked_mean
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.random import Keys
from lit_het.tasks import microbatches
from lit_het.tasks.base import layers_above_towers, learning_rate_groups, trained_parts
from lit_het.tasks.features import FeatureExtractor
from lit_het.tasks.quantities import ImageClassifier
from lit_het.towers.decoder import DecoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch, LogitSamples, Metrics, Params

START_TOKEN = 0
"""The input from which the first token of a text is predicted: padding, as in T5 and big_vision."""


@dataclasses.dataclass(frozen=True)
class CaptioningConfig:
    """A model that writes text about an image: captions, or answers to questions.

    Attributes:
        image_tower: the image tower, without pooling: the decoder attends to all of its tokens.
        decoder: the text decoder.
        head: maps the decoder's features to a distribution of logits of the next token.
        loss: of the next token.
        locked: patterns of parameters to lock; LiT locks the image tower.
        microbatches: number of parts in which the image tower processes a batch, to save memory.

    Raises:
        UserError: the image tower pools its tokens or has several embeddings of an image, or tied logits do not fit
            the head.
    """

    image_tower: ViTConfig = ViTConfig(pooling="none")
    decoder: DecoderConfig = DecoderConfig()
    head: DeterministicConfig | HetXLConfig = DeterministicConfig()
    loss: SoftmaxCrossEntropy = SoftmaxCrossEntropy()
    locked: tuple[str, ...] = ("image_tower/.*",)
    microbatches: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, self, "microbatches")
        tower = self.image_tower
        layers = tower.representation_size or tower.projection_size or tower.uncertainty_token or tower.layer_input
        if tower.pooling != "none" or layers or tower.num_members > 1:
            raise UserError(
                "a decoder attends to the tokens of one image tower: set task.image_tower.pooling to 'none', and leave "
                "out its further layers (representation_size, projection_size, uncertainty_token, layer_input) and "
                "ensembles of experts"
            )
        if self.decoder.tied_output and self.head.zero_kernel:
            raise UserError("task.decoder.tied_output has no kernel to be zero; set task.head.zero_kernel to False")

    def build(self) -> "CaptioningTask":
        """Returns the task."""
        return CaptioningTask(self)


class Captioner(nnx.Module):
    """Image tower, decoder and head; the names of its attributes begin parameter paths."""

    head: ClassificationHead

    def __init__(self, config: CaptioningConfig, rngs: nnx.Rngs):
        self.image_tower = config.image_tower.build(rngs)
        self.decoder = config.decoder.build(config.image_tower.encoder.width, rngs)
        head = config.head.build(config.decoder.encoder.width, config.decoder.vocabulary_size, rngs)
        if config.decoder.tied_output:
            head.logits = TiedLogits(self.decoder.tokens.embedding, head.logits.bias)
        self.head = head


class CaptioningTask:
    """The task of a `CaptioningConfig`; it writes text and has no classes of images."""

    num_classes, num_predictions = 0, 1
    has_image_noise = has_class_probabilities = False
    antithetic = None

    def __init__(self, config: CaptioningConfig):
        self.config = config
        self.locked = config.locked
        abstract = nnx.eval_shape(lambda: Captioner(config, nnx.Rngs(0)))
        self.learning_rates = learning_rate_groups(abstract)
        self.graph, state = nnx.split(abstract)
        self.shapes = nnx.to_pure_dict(state)
        self.trained = trained_parts(self.shapes, config.locked)
        self.features = FeatureExtractor(config.image_tower)

    def initialize(self, key: Key[Array, ""]) -> Params:
        """Returns fresh parameters."""
        return nnx.to_pure_dict(nnx.state(Captioner(self.config, nnx.Rngs(params=key))))

    def layers_above(self, params: Params) -> Params:
        """Returns the number of layers between each parameter and the output, see `layers_above_towers`."""
        return layers_above_towers({"image_tower": self.config.image_tower, "decoder": self.config.decoder}, params)

    def loss(self, params: Params, batch: Batch, keys: Keys) -> tuple[Float[Array, ""], Metrics]:
        """Returns the mean loss of the tokens that are to be predicted, and metrics."""
        assert batch.text is not None
        assert batch.text_target is not None
        model = self.model(params)
        embedding, auxiliary_losses, metrics = self._embedding(model, batch, keys)
        # As a row that cannot be read may hold anything, see `contrastive._finite`.
        source = self.tokens(jnp.where(batch.valid[:, None], embedding, 1.0))
        features, _ = model.decoder(shifted(batch.text), model.decoder.start(source), key=keys("dropout"))
        counted = batch.text_target & batch.valid[:, None]
        weight = None if batch.weight is None else jnp.broadcast_to(batch.weight[:, None], counted.shape).reshape(-1)
        samples = model.head(features.reshape(-1, features.shape[-1]), keys("noise"))
        result = self.config.loss(samples, batch.text.reshape(-1), counted.reshape(-1), weight)
        metrics = {f"image_{name}": value for name, value in metrics.items()} | {
            "top1": result.top1,
            "temperature": model.head.temperature(),
            "tokens": jnp.sum(counted),
        }
        if isinstance(self.config.head, HetXLConfig):
            metrics["token_noise_norm"] = masked_mean(model.head.noise_norm(samples.features), counted.reshape(-1))
        return result.loss + sum(auxiliary_losses.values()), metrics

    def image_classifier(self, params: Params, classes: Float[Array, "k d"] | None = None) -> ImageClassifier:
        """Raises a `UserError`, as the model is none."""
        raise UserError("the model writes text, and has no classes; use lit-het caption or lit-het ask")

    def next_tokens(
        self,
        params: Params,
        source: Float[Array, "b n width"],
        text: Int[Array, "bt l"],
        key: Key[Array, ""] | None,
        num_samples: int | None = None,
    ) -> LogitSamples:
        """Returns samples of the logits of every token of texts, given the tokens before it.

        Args:
            params: parameters of the model.
            source: image tokens.
            text: t texts of each image, adjacent.
            key: random key of the noise; None for one sample without noise.
            num_samples: S; None for that of training.

        Returns:
            Rows are the l tokens of each text.
        """
        model = self.model(params)
        state = model.decoder.start(source, num_texts=len(text) // len(source))
        features, _ = model.decoder(shifted(text), state)
        samples = model.head(features.reshape(-1, features.shape[-1]), key, num_samples)
        return at_positions(samples, key, jnp.tile(jnp.arange(text.shape[1]), len(text)))

    def tokens(self, embedding: Float[Array, "b f"]) -> Float[Array, "b n width"]:
        """Returns the tokens of images from their features, where they lie one after the other."""
        return self.features.embedding(embedding).reshape(len(embedding), -1, self.config.image_tower.encoder.width)

    def model(self, params: Params) -> Captioner:
        """Returns the model with these parameters."""
        return nnx.merge(self.graph, params)

    def _embedding(self, model: Captioner, batch: Batch, keys: Keys) -> tuple[Float[Array, "b f"], Metrics, Metrics]:
        if batch.image_embedding is not None:
            return batch.image_embedding.astype(jnp.float32), {}, {}
        key = keys("image_tower_routing") if "image_tower" in self.trained else None
        return microbatches.apply(model.image_tower, batch.image, key, self.config.microbatches)


def at_positions(samples: LogitSamples, key: Key[Array, ""] | None, position: Int[Array, " rows"]) -> LogitSamples:
    """Returns samples whose noise depends only on the position of the token in its text.

    So neither other images, nor the beam that a token belongs to, nor the length of a prompt's padding change it, and
    texts that are written and texts that are given have the same probabilities.
    """
    if key is None:
        return samples
    return dataclasses.replace(samples, keys=jax.vmap(lambda number: jax.random.fold_in(key, number))(position))


def shifted(text: Int[Array, "b l"]) -> Int[Array, "b l"]:
    """Returns the inputs from which each token of a text is predicted: the tokens before it."""
    return jnp.pad(text[:, :-1], ((0, 0), (1, 0)), constant_values=START_TOKEN)
