"""Supervised classification: image tower, head, and softmax or sigmoid loss; for pre-training and fine-tuning."""

import dataclasses
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het import blocks
from lit_het.errors import UserError, require_at_least, require_choice
from lit_het.heads.base import ClassificationHead
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import HetHConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.losses.base import masked_mean
from lit_het.losses.classification import mean_log_probabilities, sigmoid_cross_entropy, softmax_cross_entropy
from lit_het.random import Keys
from lit_het.tasks import microbatches, mixup
from lit_het.tasks.base import layers_above_towers, trained_parts
from lit_het.tasks.features import FeatureExtractor
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch, LogitSamples, Metrics, Params

ClassificationHeadConfig: TypeAlias = HetXLConfig | HetConfig | HetHConfig | DeterministicConfig


@dataclasses.dataclass(frozen=True)
class ClassificationConfig:
    """A classifier.

    Attributes:
        image_tower: the tower.
        head: maps features to a distribution of logits.
        num_classes: number of classes.
        loss: "softmax" takes class indices; "sigmoid" takes target probabilities of every class, or class indices.
        locked: patterns of parameters to lock; empty trains everything.
        mixup: α of the Beta(α, α) distribution of mixup weights; 0 does not mix examples.
        microbatches: number of parts of a batch that are processed by the tower in turn, to save memory.

    Raises:
        UserError: no classes, an α below 0, an unknown loss, or ensemble members that are averaged before the head.
    """

    image_tower: ViTConfig | ResNetConfig = ViTConfig()
    head: ClassificationHeadConfig = HetXLConfig()
    num_classes: int = 1000
    loss: Literal["softmax", "sigmoid"] = "softmax"
    locked: tuple[str, ...] = ()
    mixup: float = 0.0
    microbatches: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_classes", "microbatches")
        require_at_least(0, self, "mixup")
        require_choice(self, "loss")
        tower = self.image_tower
        if isinstance(tower, ViTConfig) and tower.encoder.num_members > 1 and tower.members == "mean":
            raise UserError(
                "a classifier on the mean of an ensemble's embeddings has one prediction: set image_tower.members to "
                "'apart' for one of each member (e3), or to 'concatenated'"
            )

    def build(self) -> "ClassificationTask":
        """Returns the task."""
        return ClassificationTask(self)


class Classifier(nnx.Module):
    """Image tower and head; the names of its attributes begin parameter paths."""

    head: ClassificationHead

    def __init__(self, config: ClassificationConfig, rngs: nnx.Rngs):
        self.image_tower = config.image_tower.build(rngs)
        self.head = config.head.build(config.image_tower.embedding_size, config.num_classes, rngs)


class ClassificationTask:
    """The task of a `ClassificationConfig`."""

    def __init__(self, config: ClassificationConfig):
        self.config = config
        self.locked = config.locked
        self.graph, shapes = nnx.split(nnx.eval_shape(lambda: Classifier(config, nnx.Rngs(0))))
        self.trained = trained_parts(nnx.to_pure_dict(shapes), config.locked)
        self.features = FeatureExtractor(config.image_tower)

    def initialize(self, key: Key[Array, ""]) -> Params:
        """Returns fresh parameters."""
        return nnx.to_pure_dict(nnx.state(Classifier(self.config, nnx.Rngs(params=key))))

    def layers_above(self, params: Params) -> Params:
        """Returns the number of layers between each parameter and the output, see `layers_above_towers`."""
        return layers_above_towers({"image_tower": self.config.image_tower}, params)

    def loss(self, params: Params, batch: Batch, keys: Keys) -> tuple[Float[Array, ""], Metrics]:
        """Returns the mean loss over valid rows, and metrics."""
        assert batch.image is not None
        assert batch.label is not None
        self.check_label_shape(batch.label.shape)
        image, target = batch.image, batch.label
        if self.config.loss == "sigmoid" and target.ndim == 1:
            target = jax.nn.one_hot(target, self.config.num_classes)
        if self.config.mixup:
            weight = mixup.draw_weight(keys("mixup"), self.config.mixup, batch.valid)
            image, target = mixup.mix_pixels(image, weight), mixup.mix_labels(target, weight)
        model = self._model(params)
        key = keys("routing") if "image_tower" in self.trained else None
        embedding, auxiliary_losses, tower_metrics = microbatches.apply(
            model.image_tower, image, key, self.config.microbatches
        )
        # Separate members of an ensemble count as examples, each with its own loss (e3 Sec. 4.1).
        members = len(embedding) // len(batch.valid)
        valid, target = jax.tree.map(lambda x: jnp.repeat(x, members, axis=0), (batch.valid, target))
        # The embedding of an invalid row may be NaN: its gradient would be NaN even with a weight of 0 in the loss.
        features = jnp.where(valid[:, None], embedding, 1.0)
        samples = model.head(features, keys("noise"))
        cross_entropy = softmax_cross_entropy if self.config.loss == "softmax" else sigmoid_cross_entropy
        result = cross_entropy(samples, target, valid)
        metrics = {
            "top1": result.top1,
            "temperature": model.head.temperature(),
            "image_noise_norm": masked_mean(self._noise_norm(model, samples), valid),
            **{f"image_{name}": value for name, value in tower_metrics.items()},
        }
        return result.loss + sum(auxiliary_losses.values()), metrics

    def choose(
        self, params: Params, features: Float[Array, "b f"], key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "b k"]:
        """Returns the log of the mean probability over members (e3 Sec. 4.1) and S noise samples (HET-XL Eq. 2).

        S = 0 omits the noise. A sigmoid loss trains each class independently, so the probabilities of each sample are
        divided by their sum.
        """
        return jax.nn.logmeanexp(self._member_log_probabilities(params, features, key, num_samples), axis=1)

    def members(
        self, params: Params, features: Float[Array, "b f"], key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "b m k"]:
        """Returns the log-probabilities of every member, or of S noise samples of every member.

        A deterministic head has no samples. Members are those of an ensemble with separate predictions; otherwise 1.
        """
        if not num_samples or isinstance(self.config.head, DeterministicConfig):
            return self._member_log_probabilities(params, features, key, 0)
        samples = jax.lax.map(
            lambda key: self._member_log_probabilities(params, features, key, 1), jax.random.split(key, num_samples)
        )
        return jnp.moveaxis(samples, 0, 1).reshape(len(features), -1, self.config.num_classes)

    def certainty(self, params: Params, features: Float[Array, "b f"]) -> tuple[Float[Array, " b"], Float[Array, " b"]]:
        """Returns ``log Σ_k exp(u_k)`` of the logits without noise, and ``sqrt(tr Σ(x))``, means over members."""
        model = self._model(params)
        samples = model.head(self.features.embedding(features), None, training=False)

        def activation(logits: Float[Array, "n t k"]) -> Float[Array, "n t one"]:
            return jax.nn.logsumexp(logits, axis=-1, keepdims=True)

        by_member = mean_log_probabilities(samples, activation)[:, 0], self._noise_norm(model, samples)
        log_normalizer, noise_norm = (x.reshape(len(features), -1).mean(axis=1) for x in by_member)
        return log_normalizer, noise_norm

    def alone(self, params: Params, features: Float[Array, "b f"]) -> Float[Array, "b k"]:
        """Returns the score of each class without noise, independent of other classes: the logit, or ``log σ(u)``.

        With several members it is the mean logit, or the log of the mean probability.
        """
        samples = self._model(params).head(self.features.embedding(features), None, training=False)
        is_softmax = self.config.loss == "softmax"
        found = mean_log_probabilities(samples, (lambda logits: logits) if is_softmax else jax.nn.log_sigmoid)
        found = found.reshape(len(features), -1, self.config.num_classes)
        return found.mean(axis=1) if is_softmax else jax.nn.logmeanexp(found, axis=1)

    def image_spectrum(self, params: Params, features: Float[Array, "b f"]) -> Float[Array, "b _"]:
        """Returns standard deviations of the noise along its principal axes, descending, means over members."""
        found = self._model(params).head.spectrum(self.features.embedding(features))
        return found.reshape(len(features), -1, found.shape[1]).mean(axis=1)

    def _member_log_probabilities(
        self, params: Params, features: Float[Array, "b f"], key: Key[Array, ""], num_samples: int
    ) -> Float[Array, "b m k"]:
        """Returns ``log 1/S Σ_s σ(u_s)`` of every member."""
        head = self._model(params, num_samples).head
        samples = head(self.features.embedding(features), key if num_samples else None, training=False)

        def activation(logits: Float[Array, "n t k"]) -> Float[Array, "n t k"]:
            return jax.nn.log_softmax(logits if self.config.loss == "softmax" else jax.nn.log_sigmoid(logits))

        return mean_log_probabilities(samples, activation).reshape(len(features), -1, self.config.num_classes)

    def _noise_norm(self, model: Classifier, samples: LogitSamples) -> Float[Array, " b"]:
        def block(_: None, features: Float[Array, "n d"]) -> tuple[None, Float[Array, " n"]]:
            return None, model.head.noise_norm(features)

        return blocks.scan_examples(block, None, samples.features, samples.examples_per_block)[1]

    def _model(self, params: Params, num_eval_samples: int = 0) -> Classifier:
        """Returns the model; with a positive S its head takes S samples in evaluation."""
        graph, head = self.graph, self.config.head
        if num_eval_samples and not isinstance(head, DeterministicConfig):
            sampling = dataclasses.replace(head.sampling, num_eval_samples=num_eval_samples)
            config = dataclasses.replace(self.config, head=dataclasses.replace(head, sampling=sampling))
            graph, _ = nnx.split(nnx.eval_shape(lambda: Classifier(config, nnx.Rngs(0))))
        return nnx.merge(graph, params)

    def check_label_shape(self, shape: tuple[int, ...]) -> None:
        """Checks the shape of labels.

        Raises:
            UserError: the loss cannot take labels of this shape.
        """
        k = self.config.num_classes
        if shape[1:] not in ([()] if self.config.loss == "softmax" else [(), (k,)]):
            raise UserError(
                f"the {self.config.loss} loss over {k} classes cannot take labels of shape {shape}; "
                "check --task.loss, --task.num-classes and the data's labels"
            )

    def check_labels(self, label: Int[np.ndarray, " b"] | Float[np.ndarray, "b k"]) -> None:
        """Checks the shape and the values of labels, on the host.

        Raises:
            UserError: a wrong shape, a class that does not exist, or a target outside [0, 1].
        """
        self.check_label_shape(label.shape)
        least, most = label.min(), label.max()
        if label.ndim == 1 and not 0 <= least <= most < self.config.num_classes:
            raise UserError(
                f"label = {least if least < 0 else most} is not a class: --task.num-classes {self.config.num_classes} "
                f"allows 0 to {self.config.num_classes - 1}"
            )
        if label.ndim == 2 and not 0 <= least <= most <= 1:
            raise UserError(
                f"label = {least if least < 0 else most} is not a target of the sigmoid loss (--task.loss): targets "
                "are 0 or 1, or between them for mixed examples"
            )
