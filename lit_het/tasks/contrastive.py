"""LiT (Zhai et al. 2022): a locked image tower, a trainable text tower, a contrastive head and loss."""

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het.errors import UserError, require_at_least
from lit_het.heads.base import ContrastiveHead
from lit_het.heads.bayes_vlm import BayesVLMContrastiveConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.gaussian import GaussianContrastive, GaussianContrastiveConfig
from lit_het.heads.mc_dropout import McDropoutContrastiveConfig
from lit_het.heads.prob_vlm import ProbVLMContrastiveConfig
from lit_het.losses.base import masked_mean, weights
from lit_het.losses.contrastive import ContrastiveLoss, SigmoidLoss, SoftmaxLoss
from lit_het.programs import shared
from lit_het.random import Keys
from lit_het.tasks import microbatches
from lit_het.tasks.base import layers_above_towers, learning_rate_groups, trained_parts
from lit_het.tasks.captioner import Captioner, CaptionerConfig, token_loss
from lit_het.tasks.distillation import Distillation, DistillationConfig, distillation_loss
from lit_het.tasks.features import FeatureExtractor, ImageTowerConfig
from lit_het.tasks.masking import MaskingConfig
from lit_het.tasks.mixing import Mixing
from lit_het.tasks.noise_metrics import noise_metrics
from lit_het.tasks.quantities import ImageClassifier
from lit_het.tasks.temperature_gradient import TemperatureGradient, check_temperature
from lit_het.towers.bert import BertConfig
from lit_het.towers.decoder import Source
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViT, ViTConfig
from lit_het.types import Batch, EmbeddingSamples, LogitSamples, Metrics, Params, Queries, TowerOutput

ContrastiveHeadConfig: TypeAlias = (
    DeterministicContrastiveConfig
    | HetXLContrastiveConfig
    | GaussianContrastiveConfig
    | ProbVLMContrastiveConfig
    | BayesVLMContrastiveConfig
    | McDropoutContrastiveConfig
)

# JAX's arrays or NumPy's.
_Rows = TypeVar("_Rows", jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class ContrastiveConfig:
    """An image-text model.

    Attributes:
        image_tower: the image tower.
        text_tower: the text tower; its ``embedding_size`` equals that of the image tower.
        head: maps pairs of embeddings to keys and queries.
        loss: the loss of keys and queries.
        locked: patterns of parameters to lock; LiT locks only the image tower.
        microbatches: number of parts in which the towers process a batch, to save memory; the loss sees all negatives.
        mixing: which images are mixed with others, for a sigmoid loss; None for none.
        masking: the inclusion of images and texts in masked ones, for the Gaussian head; None for none.
        captioner: a text decoder that learns to write the captions beside; None for none.
        distillation: self-distillation of the image tower and prediction of masked patches; None for none.
        temperature_gradient: how held-out rows train τ; None trains it like any parameter.

    Raises:
        UserError: the towers' embeddings differ in size, uncertainty tokens do not fit the head, members of an ensemble
            have separate embeddings for another loss than the softmax loss, the loss needs other samples than the head
            draws, images are mixed for a softmax loss, or masking, a captioner or distillation does not fit the head,
            the towers or other fields.
    """

    image_tower: ImageTowerConfig = ViTConfig()
    text_tower: TextConfig | BertConfig = TextConfig()
    head: ContrastiveHeadConfig = DeterministicContrastiveConfig()
    loss: ContrastiveLoss = SoftmaxLoss()
    locked: tuple[str, ...] = ("image_tower/.*",)
    microbatches: int = 1
    mixing: Mixing | None = None
    masking: MaskingConfig | None = None
    captioner: CaptionerConfig | None = None
    distillation: DistillationConfig | None = None
    temperature_gradient: TemperatureGradient | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "microbatches")
        image, text = self.image_tower.embedding_size, self.text_tower.embedding_size
        if image != text:
            raise UserError(f"text_tower.embedding_size = {text} must equal the image tower's embedding size {image}")
        reads = isinstance(self.head, GaussianContrastiveConfig) and self.head.variances == "towers"
        for name, tower in (("image_tower", self.image_tower), ("text_tower", self.text_tower)):
            if tower.uncertainty_token != reads:
                raise UserError(
                    f"task.{name}.uncertainty_token = {tower.uncertainty_token} does not fit task.head: uncertainty "
                    "tokens of both towers and the Gaussian head with variances = 'towers' need each other"
                )
        if (self.loss.likelihood != "samples") != (self.head.num_samples == 0):
            raise UserError(
                f"task.loss.likelihood = {self.loss.likelihood!r} does not fit task.head.num_samples = "
                f"{self.head.num_samples}: likelihoods without samples need a head with noise and num_samples = 0, and "
                "'samples' at least 1"
            )
        if self.mixing is not None and not isinstance(self.loss, SigmoidLoss):
            raise UserError(
                "task.mixing gives an image a share of two texts, and a softmax loss takes only one; set --task.loss "
                "sigmoid, or --task.mixing None"
            )
        for side, tower in self._towers().items():
            if tower.input_size and not isinstance(self.head, BayesVLMContrastiveConfig):
                raise UserError(f"task.{side}_tower.layer_input is for the head bayes_vlm; set it to False")
        if self.num_keys > 1 and not self.takes_keys:
            raise UserError(
                "image_tower.members = 'apart' gives an image several keys, which need the head 'deterministic' or "
                "'het_xl' and the softmax loss with the likelihood 'samples'; take 'mean' or 'concatenated'"
            )
        if isinstance(self.text_tower, TextConfig) and self.text_tower.pooling == "none":
            raise UserError("task.text_tower.pooling = 'none' is for decoders; choose how texts are pooled")
        if self.masking is not None:
            self.masking.check(self.head, self.image_tower, self.text_tower.vocabulary_size)
        if self.captioner is not None:
            self.captioner.check(self.image_tower, self.microbatches)
            if self.mixing is not None:
                raise UserError(
                    "task.captioner writes the caption of one image, not of mixed ones; leave out task.mixing"
                )
        if self.distillation is not None:
            self.distillation.check(self.image_tower)

    @property
    def num_keys(self) -> int:
        """M, the keys of an image: one of each member of an ensemble whose embeddings stay apart."""
        return self.image_tower.num_members if self.image_tower.members == "apart" else 1

    @property
    def takes_keys(self) -> bool:
        """Whether an image may have several keys."""
        has_noise_by_samples = isinstance(self.head, DeterministicContrastiveConfig | HetXLContrastiveConfig)
        return has_noise_by_samples and isinstance(self.loss, SoftmaxLoss) and self.loss.likelihood == "samples"

    def build_head(self, rngs: nnx.Rngs) -> ContrastiveHead:
        """Returns the head with fresh parameters."""
        size = self.image_tower.embedding_size
        if isinstance(self.head, BayesVLMContrastiveConfig):
            inputs = {f"{side}_input_size": tower.input_size for side, tower in self._towers().items()}
            return self.head.build(size, rngs, **inputs)
        return self.head.build(size, rngs)

    @shared
    def build(self) -> "ContrastiveTask":
        """Returns the task."""
        return ContrastiveTask(self)

    def _towers(self) -> dict[str, ImageTowerConfig | TextConfig | BertConfig]:
        return {"image": self.image_tower, "text": self.text_tower}


class TwoTowers(nnx.Module):
    """Both towers and the head; the names of its attributes begin parameter paths."""

    head: ContrastiveHead

    def __init__(self, config: ContrastiveConfig, rngs: nnx.Rngs):
        self.image_tower = config.image_tower.build(rngs)
        self.text_tower = config.text_tower.build(rngs)
        self.head = config.build_head(rngs)
        if config.captioner is not None:
            assert isinstance(config.image_tower, ViTConfig)
            self.captioner = Captioner(config.captioner, config.image_tower.encoder.width, rngs)
        if config.distillation is not None:
            assert isinstance(config.image_tower, ViTConfig)
            self.distillation = Distillation(config.distillation, config.image_tower, rngs)


class ContrastiveTask:
    """The task of a `ContrastiveConfig`."""

    def __init__(self, config: ContrastiveConfig):
        self.config = config
        self.locked = config.locked
        self.num_classes = None
        self.has_image_noise = config.head.has_image_noise
        self.has_class_probabilities = isinstance(config.loss, SigmoidLoss)
        self.antithetic = config.head.antithetic
        abstract = nnx.eval_shape(lambda: TwoTowers(config, nnx.Rngs(0)))
        self.learning_rates = learning_rate_groups(abstract)
        self.graph, state = nnx.split(abstract)
        self.shapes = nnx.to_pure_dict(state)
        self.trained = trained_parts(self.shapes, config.locked)
        if config.distillation is not None and not {"image_tower", "distillation"} <= self.trained:
            raise UserError("task.distillation trains the image tower and its own heads: leave both out of task.locked")
        self.features = FeatureExtractor(config.image_tower)
        self.num_predictions = config.num_keys
        check_temperature(config.temperature_gradient, self.shapes, config.locked)

    def initialize(self, key: Key[Array, ""]) -> Params:
        """Returns fresh parameters."""
        return nnx.to_pure_dict(nnx.state(TwoTowers(self.config, nnx.Rngs(params=key))))

    def layers_above(self, params: Params) -> Params:
        """Returns the number of layers between each parameter and the output, see `layers_above_towers`."""
        towers = {"image_tower": self.config.image_tower, "text_tower": self.config.text_tower}
        towers |= {} if self.config.captioner is None else {"captioner": self.config.captioner}
        return layers_above_towers(towers, params)

    def loss(self, params: Params, batch: Batch, keys: Keys) -> tuple[Float[Array, ""], Metrics]:
        """Returns the contrastive loss of the batch, and metrics."""
        model, mixed = self._model(params), None
        ids = [ids for ids in (batch.image_id, batch.text_id) if ids is not None]
        if self.config.mixing is not None:
            assert batch.image is not None
            pixels, mixed = self.config.mixing(batch.image, batch.valid, ids, keys("mixing"))
            batch = dataclasses.replace(batch, image=pixels)
        image, text, outputs = self._embeddings(model, batch, keys)
        samples = _by_image(model.head(image, text, keys("noise")), self.config.num_keys)
        if mixed is None:
            loss = self.config.loss(samples, batch.valid, ids, batch.weight)
        else:
            assert isinstance(self.config.loss, SigmoidLoss)
            loss = self.config.loss(samples, batch.valid, ids, batch.weight, mixed)
        metrics = {"temperature": samples.temperature}
        if self.config.masking is not None:
            values, valid, weight = self._masked_losses(model, batch, image, text, keys("masking"))
            metrics["masked_inclusion_loss"] = masked_mean(values, valid)
            loss = loss + jnp.sum(weights(valid, weight) * values)
        # Heads of images with several members have no auxiliary losses, and the noise of the first is measured.
        first = image.reshape(len(text), -1, image.shape[1])[:, 0]
        for name, values in model.head.auxiliary_losses(first, text, keys("dropout")).items():
            metrics[name] = masked_mean(values, batch.valid)
            loss = loss + jnp.sum(weights(batch.valid, batch.weight) * values)
        metrics |= noise_metrics(model.head, first, text, batch.valid)
        for name, output in outputs.items():
            metrics |= {f"{name}_{key}": value for key, value in output.metrics.items()}
            loss = loss + sum(output.auxiliary_losses.values())
        if self.config.captioner is not None:
            value, found = self._captioning_loss(model, batch, outputs, keys)
            metrics |= {"caption_loss": value, **{f"caption_{name}": figure for name, figure in found.items()}}
            loss = loss + self.config.captioner.weight * value
        return loss, metrics

    def distillation_loss(
        self, params: Params, teacher: Params, batch: Batch, keys: Keys
    ) -> tuple[Float[Array, ""], Metrics]:
        """Returns the losses of `DistillationConfig`, and metrics; ``teacher`` is the average of ``params``."""
        return distillation_loss(self._distilled(params), self._distilled(teacher), batch, keys)

    def _distilled(self, params: Params) -> tuple[ViT, Distillation]:
        model = self._model(params)
        assert isinstance(model.image_tower, ViT)
        return model.image_tower, model.distillation

    def _captioning_loss(
        self, model: TwoTowers, batch: Batch, outputs: Mapping[str, TowerOutput], keys: Keys
    ) -> tuple[Float[Array, ""], Metrics]:
        captioner = self.config.captioner
        assert captioner is not None
        if "image" not in outputs or batch.text_target is None:
            raise UserError(
                "task.captioner needs images, not their stored embeddings, and the tokens of captions: leave out "
                "data.embeddings, and set data.prompt, to '' for no prompt"
            )
        decoder, head = model.captioner.decoder, model.captioner.head
        return token_loss(decoder, head, captioner.loss, Source(outputs["image"].tokens), batch, keys)

    def _masked_losses(
        self, model: TwoTowers, batch: Batch, image: Float[Array, "b d"], text: Float[Array, "b d"], key: Key[Array, ""]
    ) -> tuple[Float[Array, " n"], Bool[Array, " n"], Float[Array, " n"] | None]:
        """Returns the weighted inclusion losses of the masked rows, and which of them count how much."""
        masking, head = self.config.masking, model.head
        assert masking is not None
        assert isinstance(head, GaussianContrastive)
        assert isinstance(model.image_tower, ViT)
        if batch.image is None or batch.text is None or batch.text_embedding is not None:
            raise UserError("task.masking needs images and captions, not their stored embeddings; leave one out")
        pixels, words, valid = (masking.rows(x) for x in (batch.image, batch.text, batch.valid))
        of_images, of_texts = jax.random.split(key)
        kept = masking.kept_patches(of_images, len(pixels), model.image_tower.config.num_patches)
        masked_image = model.image_tower(pixels, None, kept).embedding
        masked_text = model.text_tower(masking.masked_text(of_texts, words)).embedding
        masked = (_finite(side, valid) for side in (masked_image, masked_text))
        values = head.masked_inclusion(masking.rows(image), masking.rows(text), *masked)
        return masking.weight * values, valid, None if batch.weight is None else masking.rows(batch.weight)

    def image_classifier(self, params: Params, classes: Float[Array, "k d"] | None = None) -> ImageClassifier:
        """Returns the model as a classifier over texts β with the logits ``(α + ε) · β / τ``, of each key of an image.

        With noise on the image only, as in the ablation of HET-XL App. M; the paper evaluates without noise.

        Args:
            params: parameters of the model.
            classes: unit embeddings of the texts; None for quantities of the image alone.
        """
        head = self._model(params).head

        def logits(image: Float[Array, "n d"], key: Key[Array, ""] | None, num_samples: int) -> LogitSamples:
            assert classes is not None, "this quantity needs the embeddings of class names"
            return head.logits(image, classes, key, num_samples)

        def embeddings(members: Float[Array, "b m d"]) -> Float[Array, "b key"]:
            b, m, d = members.shape
            keys = head.image_key(members.reshape(b * m, d))
            return keys if m == 1 else head.mean_text_key(keys.reshape(b, m, -1))

        return ImageClassifier(
            inputs=self.features.embedding,
            logits=logits,
            log_probabilities=jax.nn.log_softmax,
            scores=lambda logits: logits,
            # As in the loss, where the keys of all members are right answers.
            mean_scores=lambda scores: jax.nn.logmeanexp(scores, axis=1),
            embeddings=embeddings,
            noise_norm=head.image_noise_norm,
            noise_spectrum=head.image_spectrum,
            pair_bias=0.0 if head.bias is None else head.bias[...],
        )

    def temperature(self, params: Params) -> Float[Array, ""]:
        """Returns τ."""
        return self._model(params).head.temperature()

    def encode_text(self, params: Params, text: Int[Array, "b l"]) -> Float[Array, "b d"]:
        """Returns noiseless embeddings, the head's keys."""
        model = self._model(params)
        return model.head.text_key(model.text_tower(text).embedding)

    def mean_text_key(self, params: Params, keys: Float[Array, "k t d"]) -> Float[Array, "k d"]:
        """Returns the embedding of each class name from those of its t prompts."""
        return self._model(params).head.mean_text_key(keys)

    def embeddings_of(self, keys: _Rows) -> _Rows:
        """Returns the unit embeddings of keys, whose further entries only BayesVLM's posterior needs.

        Those of Gaussian embeddings stay: scores are made of them.
        """
        is_longer = isinstance(self.config.head, BayesVLMContrastiveConfig)
        return keys[..., : self.config.image_tower.embedding_size] if is_longer else keys

    def _embeddings(
        self, model: TwoTowers, batch: Batch, keys: Keys
    ) -> tuple[Float[Array, "bm d"], Float[Array, "b d"], dict[str, TowerOutput]]:
        """Returns the embeddings of images and of texts, and all outputs of the towers that computed them.

        Those of the members of an image are adjacent.
        """
        assert batch.text is not None
        outputs, parts = {}, self.config.microbatches
        if batch.text_embedding is None:
            key = self._routing_key("text_tower", keys)
            outputs["text"] = microbatches.apply(model.text_tower, batch.text, key, parts)
            text = outputs["text"].embedding
        else:
            text = batch.text_embedding.astype(jnp.float32)
        if batch.image_embedding is None:
            key = self._routing_key("image_tower", keys)
            outputs["image"] = microbatches.apply(model.image_tower, batch.image, key, parts)
            image = outputs["image"].embedding
        else:
            image = self.features.embedding(batch.image_embedding.astype(jnp.float32))
        of_members = jnp.repeat(batch.valid, self.config.num_keys, axis=0)
        return _finite(image, of_members), _finite(text, batch.valid), outputs

    def _model(self, params: Params) -> TwoTowers:
        return nnx.merge(self.graph, params)

    def _routing_key(self, tower: str, keys: Keys) -> Key[Array, ""] | None:
        """Returns the random key of a tower's experts; None for a locked tower."""
        return keys(f"{tower}_routing") if tower in self.trained else None


def _by_image(samples: EmbeddingSamples, num_keys: int) -> EmbeddingSamples:
    """Returns what the head makes of the members of each image, which are adjacent rows, as keys and queries of it.

    The M members are further samples of a query: its loss is the log of the mean probability over both. Every member is
    a key, so that the probability of an image is the sum over its keys.
    """
    if num_keys == 1:
        return samples
    image, queries = samples.image, samples.image_queries
    if queries is not None:
        queries = Queries(queries.drawn().reshape(-1, num_keys * queries.num_samples, image.shape[1]))
    return dataclasses.replace(samples, image=image.reshape(-1, num_keys, image.shape[1]), image_queries=queries)


def _finite(embedding: Float[Array, "b d"], valid: Bool[Array, " b"]) -> Float[Array, "b d"]:
    """Returns embeddings with ones in invalid rows, where NaN would make gradients NaN even with a weight of 0."""
    return jnp.where(valid[:, None], embedding, 1.0)
