"""Supervised classification: image tower, head, and softmax or sigmoid loss."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from lit_het.errors import UserError
from lit_het.heads import sampling
from lit_het.heads.base import ClassificationHead
from lit_het.losses import blocks, sample_free
from lit_het.losses.base import masked_mean
from lit_het.losses.classification import LossAndTop1
from lit_het.mixtures import LabelMixture
from lit_het.random import Keys
from lit_het.tasks import mimo
from lit_het.tasks.base import Forward, Task
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.features import FeatureExtractor
from lit_het.tasks.quantities import ImageClassifier
from lit_het.types import Batch, LogitSamples, Params


class Classifier(nnx.Module):
    """Image tower and head; the names of its attributes begin parameter paths."""

    head: ClassificationHead

    def __init__(self, config: ClassificationConfig, rngs: nnx.Rngs):
        self.image_tower = config.image_tower.build(rngs)
        self.head = config.head.build(config.image_tower.embedding_size, config.num_classes * config.num_heads, rngs)


class ClassificationTask(Task[ClassificationConfig, Classifier]):
    """The task of a `ClassificationConfig`."""

    may_lack_head = True

    def __init__(self, config: ClassificationConfig):
        super().__init__(config, Classifier)
        self.num_classes = config.num_classes
        self.has_image_noise = config.head.sampling is not None
        self.antithetic = config.head.sampling and config.head.sampling.antithetic
        self.features = FeatureExtractor(config.image_tower)
        self.num_predictions = self.features.num_members * config.num_heads

    def with_targets(self, batch: Batch) -> Batch:
        """Returns the batch with the targets of the loss, see `Task`."""
        assert batch.label is not None
        assert not isinstance(batch.label, LabelMixture), "objectives mix targets"
        self.check_label_shape(batch.label.shape)
        return dataclasses.replace(batch, label=self.config.loss.targets(batch.label, self.config.num_classes))

    def forward(self, model: Classifier, batch: Batch, keys: Keys) -> Forward:
        """Returns the mean loss over valid rows, see `Task`."""
        image, rows = batch.view, (batch.valid, batch.label, batch.weight)
        if self.config.mimo is not None:
            inputs = mimo.draw_inputs(keys("mimo"), self.config.mimo, len(image), self.config.num_heads)
            image, rows = mimo.side_by_side(image, inputs), mimo.of_inputs(*rows, inputs)
        if batch.image_embedding is None:
            outputs = {"image": self.tower_output(model, "image_tower", image, keys("routing"))}
            embedding = outputs["image"].embedding
        else:
            outputs, embedding = {}, self.features.embedding(image.astype(jnp.float32))
        # The embedding of an invalid row may be NaN: its gradient would be NaN even with a weight of 0 in the loss.
        valid = jnp.repeat(rows[0], len(embedding) // len(rows[0]), axis=0)
        embedding = jnp.where(valid[:, None], embedding, 1.0)
        samples = model.head(embedding, keys("noise"))
        noise_norm = masked_mean(_noise_norm(model.head, samples), valid)
        result = self._loss_of_members(samples, *rows)
        metrics = {
            "top1": result.top1,
            "temperature": model.head.temperature(),
            "image_noise_norm": noise_norm,
        }
        return Forward(result.loss, metrics, outputs, embedding)

    def _loss_of_members(
        self, samples: LogitSamples, valid: Bool[Array, " b"], target: Any, weight: Float[Array, " b"] | None
    ) -> LossAndTop1:
        """Returns the loss of examples with the predictions of several members of the tower, or of several heads.

        Args:
            samples: of the members of each example, in adjacent rows.
            valid: which examples count.
            target: of examples; with MIMO of each of their heads.
            weight: of examples in the loss; None for equal weights.
        """
        samples = dataclasses.replace(samples, num_members=self.config.num_heads)
        joint, members = self.config.member_loss == "joint", len(samples.features) // len(valid)
        if joint and members > 1:
            samples = sampling.side_by_side(samples, members)
        if samples.num_members > 1 and self.config.mimo is None:
            target = jax.tree.map(lambda x: jnp.repeat(x[:, None], samples.num_members, axis=1), target)
        if not joint:
            # Members count as examples, each with its own loss (e3 Sec. 4.1).
            rows = (valid, target, weight)
            valid, target, weight = jax.tree.map(lambda x: jnp.repeat(x, members, axis=0), rows)
        return self.config.loss(samples, target, valid, weight, joint=joint)

    def image_classifier(self, params: Params, classes: Float[Array, "k d"] | None = None) -> ImageClassifier:
        """Returns the model as an image classifier; it has its own classes.

        Where the likelihood of the loss is one of logits, predictions with noise are by it, whatever S is.
        """
        head, likelihood = self.model(params).head, self.config.loss.likelihood

        def logits(inputs: Float[Array, "n d"], key: Key[Array, ""] | None, num_samples: int) -> LogitSamples:
            if key is not None and likelihood in sample_free.PREDICTED:
                samples = sample_free.predictions(likelihood, head(inputs, key, 0))
            else:
                samples = head(inputs, key, num_samples)
            return dataclasses.replace(samples, num_members=self.config.num_heads)

        return ImageClassifier(
            inputs=self.features.embedding,
            logits=logits,
            log_probabilities=self.config.loss.log_probabilities,
            scores=self.config.loss.scores,
            mean_scores=self.config.loss.mean_scores,
            embeddings=lambda inputs: inputs.mean(axis=1),
            noise_norm=head.noise_norm,
            noise_spectrum=head.spectrum,
            kernel_alignment=head.kernel_alignment,
        )

    def check_label_shape(self, shape: tuple[int, ...]) -> None:
        """Checks the shape of labels."""
        k = self.config.num_classes
        if shape[1:] not in self.config.loss.label_shapes(k):
            raise UserError(
                f"{type(self.config.loss).__name__} over {k} classes cannot take labels of shape {shape}; "
                "check the task's loss, --task.num-classes and the data's labels"
            )

    def check_batch(self, batch: Batch) -> None:
        """Checks the shape and the values of labels, on the host."""
        label = np.asarray(batch.label)
        self.check_label_shape(label.shape)
        least, most = label.min(), label.max()
        if label.ndim == 1 and not 0 <= least <= most < self.config.num_classes:
            raise UserError(
                f"label = {least if least < 0 else most} is not a class: --task.num-classes {self.config.num_classes} "
                f"allows 0 to {self.config.num_classes - 1}"
            )
        if label.ndim == 2 and not 0 <= least <= most <= 1:
            raise UserError(
                f"label = {least if least < 0 else most} is not a target of SigmoidCrossEntropy: targets "
                "are 0 or 1, or between them for mixed examples"
            )


def _noise_norm(head: ClassificationHead, samples: LogitSamples) -> Float[Array, " b"]:
    """Returns ``sqrt(tr Σ(x))`` in the blocks of the samples, as the factors V(x) of all examples may not fit."""

    def block(_: None, features: Float[Array, "n d"]) -> tuple[None, Float[Array, " n"]]:
        return None, head.noise_norm(features)

    return blocks.scan_examples(block, None, samples.features, samples.examples_per_block)[1]
