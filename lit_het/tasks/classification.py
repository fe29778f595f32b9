"""Supervised classification: image tower, head, softmax or sigmoid loss; pre-training and fine-tuning."""

import dataclasses
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt8

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
from lit_het.tasks import mixup
from lit_het.tasks.base import trained_parts
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
        head: how its features become a distribution of logits.
        num_classes: number of classes.
        loss: "softmax" takes class indices, "sigmoid" takes target probabilities of every class.
        locked: patterns of parameters to lock; empty trains everything.
        mixup: α of the Beta(α, α) that training examples are mixed by; 0 does not mix them.

    Raises:
        UserError: no classes, an α below 0, a loss that there is not, or members of an ensemble averaged before the
            head.
    """

    image_tower: ViTConfig | ResNetConfig = ViTConfig()
    head: ClassificationHeadConfig = HetXLConfig()
    num_classes: int = 1000
    loss: Literal["softmax", "sigmoid"] = "softmax"
    locked: tuple[str, ...] = ()
    mixup: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_classes")
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
    """Image tower and head under the names that parameter paths begin with."""

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

    def loss(self, params: Params, batch: Batch, keys: Keys) -> tuple[Float[Array, ""], Metrics]:
        """Returns the mean loss over valid rows, and metrics."""
        assert batch.image is not None
        assert batch.label is not None
        self.check_label_shape(batch.label.shape)
        image, target = batch.image, batch.label
        if self.config.mixup:
            share = mixup.draw_share(keys("mixup"), self.config.mixup, batch.valid)
            image, target = mixup.mix_pixels(image, share), mixup.mix_labels(target, share)
        model = self._model(params)
        tower = model.image_tower(image, keys("routing") if "image_tower" in self.trained else None)
        # Members of an ensemble that stay apart are as many examples, each with its own loss (e3 Sec. 4.1).
        members = len(tower.embedding) // len(batch.valid)
        valid, target = jax.tree.map(lambda x: jnp.repeat(x, members, axis=0), (batch.valid, target))
        # An invalid row may be anything, not a number included, whose gradient no weight of zero would undo.
        features = jnp.where(valid[:, None], tower.embedding, 1.0)
        samples = model.head(features, keys("noise"))
        cross_entropy = softmax_cross_entropy if self.config.loss == "softmax" else sigmoid_cross_entropy
        result = cross_entropy(samples, target, valid)
        metrics = {
            "top1": result.top1,
            "temperature": model.head.temperature(),
            "image_noise_norm": masked_mean(self._noise_norm(model, samples), valid),
            **{f"image_{name}": value for name, value in tower.metrics.items()},
        }
        return result.loss + sum(tower.auxiliary_losses.values()), metrics

    def probabilities(
        self, params: Params, image: UInt8[Array, "b h w c"], key: Key[Array, ""] | None
    ) -> Float[Array, "b k"]:
        """Returns the mean of `log_probabilities` as probabilities over members (e3 Sec. 4.1)."""
        log_p = self.log_probabilities(params, self.features(params, image), key)
        return jnp.exp(log_p).mean(axis=1)

    def log_probabilities(
        self, params: Params, features: Float[Array, "b f"], key: Key[Array, ""] | None
    ) -> Float[Array, "b m k"]:
        """Returns ``log 1/S Σ_s σ(u_s)`` over the head's evaluation samples; without a key the noise is left out.

        Members of an ensemble that stay apart have their own; others count as one.
        """
        samples = self._model(params).head(self.features.embedding(features), key, training=False)
        function = jax.nn.log_softmax if self.config.loss == "softmax" else jax.nn.log_sigmoid
        return mean_log_probabilities(samples, function).reshape(len(features), -1, self.config.num_classes)

    def choose(
        self, params: Params, features: Float[Array, "b f"], key: Key[Array, ""], noise: bool
    ) -> Float[Array, "b k"]:
        """Returns the log of the mean over members, divided by its sum: a sigmoid loss trains each class by itself."""
        return jax.nn.log_softmax(self._mean(params, features, key if noise else None))

    def members(
        self, params: Params, features: Float[Array, "b f"], key: Key[Array, ""], noise: bool
    ) -> Float[Array, "b m k"]:
        """Returns `log_probabilities` of every member, divided by their sum."""
        return jax.nn.log_softmax(self.log_probabilities(params, features, key if noise else None))

    def certainty(
        self, params: Params, features: Float[Array, "b f"], key: Key[Array, ""]
    ) -> tuple[Float[Array, " b"], ...]:
        """Returns ``log_total``, ``log_normalizer`` and ``noise_norm`` of `lit_het.types.HeadOutput`."""
        log_normalizer, noise_norm = self.log_normalizer(params, features), self.noise_norm(params, features)
        if self.config.loss == "softmax":
            return log_normalizer, log_normalizer, noise_norm
        return jax.nn.logsumexp(self._mean(params, features, None), axis=1), log_normalizer, noise_norm

    def _mean(self, params: Params, features: Float[Array, "b f"], key: Key[Array, ""] | None) -> Float[Array, "b k"]:
        of_members = self.log_probabilities(params, features, key)
        return jax.nn.logsumexp(of_members, axis=1) - jnp.log(of_members.shape[1])

    def log_normalizer(self, params: Params, features: Float[Array, "b f"]) -> Float[Array, " b"]:
        """Returns ``log Σ_k exp(u_k)`` of the logits without noise, mean over members."""
        samples = self._model(params).head(self.features.embedding(features), None, training=False)

        def activation(logits: Float[Array, "n t k"]) -> Float[Array, "n t one"]:
            return jax.nn.logsumexp(logits, axis=-1, keepdims=True)

        return mean_log_probabilities(samples, activation).reshape(len(features), -1).mean(axis=1)

    def noise_norm(self, params: Params, features: Float[Array, "b f"]) -> Float[Array, " b"]:
        """Returns ``sqrt(tr Σ(x))``, mean over members."""
        model = self._model(params)
        samples = model.head(self.features.embedding(features), None, training=False)
        return self._noise_norm(model, samples).reshape(len(features), -1).mean(axis=1)

    def _noise_norm(self, model: Classifier, samples: LogitSamples) -> Float[Array, " b"]:
        def of_block(_: None, features: Float[Array, "n d"]) -> tuple[None, Float[Array, " n"]]:
            return None, model.head.noise_norm(features)

        return blocks.scan_examples(of_block, None, samples.features, samples.examples_per_block)[1]

    def _model(self, params: Params) -> Classifier:
        return nnx.merge(self.graph, params)

    def check_label_shape(self, shape: tuple[int, ...]) -> None:
        """Refuses labels that the loss cannot take.

        Raises:
            UserError: with the shape and the flags.
        """
        k = self.config.num_classes
        if len(shape) != (1 if self.config.loss == "softmax" else 2) or shape[1:] not in ((), (k,)):
            raise UserError(
                f"the {self.config.loss} loss over {k} classes cannot take labels of shape {shape}; "
                "check --task.loss, --task.num-classes and the data's labels"
            )

    def check_labels(self, label: Int[np.ndarray, " b"] | Float[np.ndarray, "b k"]) -> None:
        """Refuses labels on the host, where their values are known.

        Raises:
            UserError: a shape that does not fit, a class that does not exist, or a target outside [0, 1].
        """
        self.check_label_shape(label.shape)
        least, most = label.min(), label.max()
        if self.config.loss == "softmax" and not 0 <= least <= most < self.config.num_classes:
            raise UserError(
                f"label = {least if least < 0 else most} is no class: --task.num-classes {self.config.num_classes} "
                f"allows 0 to {self.config.num_classes - 1}"
            )
        if self.config.loss == "sigmoid" and not 0 <= least <= most <= 1:
            raise UserError(
                f"label = {least if least < 0 else most} is no target of the sigmoid loss (--task.loss): targets are "
                "0 or 1, or between them where examples are mixed"
            )
