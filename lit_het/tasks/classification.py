"""Supervised classification: image tower, head, softmax or sigmoid loss; pre-training and fine-tuning."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key, UInt8

from lit_het.errors import UserError
from lit_het.heads.base import ClassificationHead
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.losses.base import masked_mean
from lit_het.losses.classification import sigmoid_cross_entropy, softmax_cross_entropy
from lit_het.random import Keys
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch, Metrics, Params


@dataclasses.dataclass(frozen=True)
class ClassificationConfig:
    """A classifier.

    Attributes:
        image_tower: the tower.
        head: how its features become a distribution of logits.
        num_classes: number of classes.
        loss: "softmax" takes class indices, "sigmoid" takes target probabilities of every class.
        locked: patterns of parameters to lock; empty trains everything.
    """

    image_tower: ViTConfig = ViTConfig()
    head: HetXLConfig | DeterministicConfig = HetXLConfig()
    num_classes: int = 1000
    loss: Literal["softmax", "sigmoid"] = "softmax"
    locked: tuple[str, ...] = ()

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
        self.graph = nnx.graphdef(nnx.eval_shape(lambda: Classifier(config, nnx.Rngs(0))))

    def initialize(self, key: Key[Array, ""]) -> Params:
        """Returns fresh parameters."""
        return nnx.to_pure_dict(nnx.state(Classifier(self.config, nnx.Rngs(params=key))))

    def loss(self, params: Params, batch: Batch, keys: Keys) -> tuple[Float[Array, ""], Metrics]:
        """Returns the mean loss over valid rows, and metrics."""
        assert batch.image is not None
        assert batch.label is not None
        model = self._model(params)
        tower = model.image_tower(batch.image)
        logits = model.head(tower.embedding, keys("noise"))
        self._check_labels(batch.label)
        if self.config.loss == "softmax":
            losses = softmax_cross_entropy(logits, batch.label)
            correct = jnp.argmax(self._mean_probabilities(logits), axis=-1) == batch.label
        else:
            losses = sigmoid_cross_entropy(logits, batch.label)
            # The most probable class is one of the true ones.
            best = jnp.argmax(self._mean_probabilities(logits), axis=-1)
            correct = jnp.take_along_axis(batch.label, best[:, None], axis=1)[:, 0] > 0.5
        metrics = {
            "top1": masked_mean(correct.astype(jnp.float32), batch.valid),
            "temperature": model.head.temperature(),
            "image_noise_norm": masked_mean(model.head.noise_norm(tower.embedding), batch.valid),
        }
        return masked_mean(losses, batch.valid) + sum(tower.auxiliary_losses.values()), metrics

    def probabilities(
        self, params: Params, image: UInt8[Array, "b h w c"], key: Key[Array, ""] | None
    ) -> Float[Array, "b k"]:
        """Returns ``1/S Σ_s σ(u_s)``; without a key the noise is left out."""
        model = self._model(params)
        return self._mean_probabilities(model.head(model.image_tower(image).embedding, key))

    def _mean_probabilities(self, logits: Float[Array, "s b k"]) -> Float[Array, "b k"]:
        return (jax.nn.softmax(logits) if self.config.loss == "softmax" else jax.nn.sigmoid(logits)).mean(axis=0)

    def _model(self, params: Params) -> Classifier:
        return nnx.merge(self.graph, params)

    def _check_labels(self, label: Array) -> None:
        expected = 1 if self.config.loss == "softmax" else 2
        if label.ndim != expected or (expected == 2 and label.shape[1] != self.config.num_classes):
            raise UserError(
                f"the {self.config.loss} loss over {self.config.num_classes} classes cannot take labels of shape "
                f"{label.shape}; check --task.loss, --task.num-classes and the data's labels"
            )
