"""Classifiers' heads in the study: a head on the features of the locked tower, whose classes are the names."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from lit_het.heads.base import ClassificationHead
from lit_het.heads.classification_config import ClassificationHeadConfig
from lit_het.losses.base import masked_mean
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.random import Keys
from lit_het.tasks.base import Forward, Task
from lit_het.tasks.options import TaskOptions
from lit_het.tasks.quantities import ImageClassifier
from lit_het.types import Batch, Params


@dataclasses.dataclass(frozen=True)
class FeatureClassifierConfig(TaskOptions):
    """A classifier of features.

    Attributes:
        head: maps features to a distribution of logits.
        feature_size: of the features.
        num_classes: number of names.
    """

    head: ClassificationHeadConfig
    feature_size: int
    num_classes: int

    loss = SoftmaxCrossEntropy()

    def build(self) -> "FeatureClassifier":
        """Returns the task."""
        return FeatureClassifier(self)


class _Model(nnx.Module):
    head: ClassificationHead

    def __init__(self, config: FeatureClassifierConfig, rngs: nnx.Rngs):
        self.head = config.head.build(config.feature_size, config.num_classes, rngs)


class FeatureClassifier(Task[FeatureClassifierConfig, _Model]):
    """The task of a `FeatureClassifierConfig`, without a tower: `lit_het.tasks.classification` on stored features."""

    def __init__(self, config: FeatureClassifierConfig):
        super().__init__(config, _Model)
        self.has_image_noise = config.head.sampling is not None

    def forward(self, model: _Model, batch: Batch, keys: Keys) -> Forward:
        """Returns the mean loss and metrics."""
        assert batch.image_embedding is not None
        assert batch.label is not None
        head = model.head
        result = self.config.loss(head(batch.image_embedding, keys("noise")), batch.label, batch.valid)
        norm = masked_mean(head.noise_norm(batch.image_embedding), batch.valid)
        metrics = {"top1": result.top1, "temperature": head.temperature(), "image_noise_norm": norm}
        return Forward(result.loss, metrics, outputs={})

    def image_classifier(self, params: Params, classes: Array | None = None) -> ImageClassifier:
        """Returns the model as an image classifier; it has its own classes."""
        head = self.model(params).head
        return ImageClassifier(
            inputs=lambda features: features,
            logits=head,
            log_probabilities=jax.nn.log_softmax,
            scores=lambda logits: logits,
            mean_scores=lambda scores: jnp.mean(scores, axis=1),
            embeddings=lambda inputs: inputs.mean(axis=1),
            noise_norm=head.noise_norm,
            noise_spectrum=head.spectrum,
        )
