"""LiT-decoder: a text decoder on the tokens of an image tower (Beyer et al. 2023; SoViT Sec. 4.2, App. C)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lit_het.errors import UserError
from lit_het.heads.base import ClassificationHead
from lit_het.objectives.tokens import build_head, token_loss
from lit_het.random import Keys
from lit_het.tasks import microbatches
from lit_het.tasks.base import Progress, Task
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.features import FeatureExtractor
from lit_het.tasks.quantities import ImageClassifier
from lit_het.towers.decoder import Source
from lit_het.types import Batch, Metrics, Params


class ImageCaptioner(nnx.Module):
    """Image tower, decoder and head; the names of its attributes begin parameter paths."""

    head: ClassificationHead

    def __init__(self, config: CaptioningConfig, rngs: nnx.Rngs):
        self.image_tower = config.image_tower.build(rngs)
        self.decoder = config.decoder.build(config.image_tower.encoder.width, rngs)
        self.head = build_head(config.decoder, config.head, self.decoder, rngs)


class CaptioningTask(Task[CaptioningConfig, ImageCaptioner]):
    """The task of a `CaptioningConfig`; it writes text and has no classes of images."""

    num_classes, num_predictions = 0, 1
    has_image_noise = has_class_probabilities = False
    antithetic = None

    def __init__(self, config: CaptioningConfig):
        super().__init__(config, ImageCaptioner, {"image_tower": config.image_tower, "decoder": config.decoder})
        self.features = FeatureExtractor(config.image_tower)

    def loss(
        self, params: Params, batch: Batch, keys: Keys, progress: Progress | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Returns the mean loss of the tokens that are to be predicted, and metrics."""
        model = self.model(params)
        if batch.image_embedding is None:
            key = keys("image_tower_routing") if "image_tower" in self.trained else None
            output = microbatches.apply(model.image_tower, batch.image, key, self.config.microbatches)
            embedding, auxiliary_losses, metrics = output.embedding, output.auxiliary_losses, output.metrics
        else:
            embedding, auxiliary_losses, metrics = batch.image_embedding.astype(jnp.float32), {}, {}
        source = self.source(params, embedding)
        loss, found = token_loss(model.decoder, model.head, self.config.loss, source, batch, keys)
        metrics = {f"image_{name}": value for name, value in metrics.items()} | found
        return loss + sum(auxiliary_losses.values()), metrics

    def image_classifier(self, params: Params, classes: Float[Array, "k d"] | None = None) -> ImageClassifier:
        """Raises a `UserError`, as the model is none."""
        raise UserError("the model writes text, and has no classes; use lit-het caption or lit-het ask")

    def source(self, params: Params, features: Float[Array, "b f"]) -> Source:
        """Returns the tokens of images from their features, where they lie one after the other."""
        tokens = self.features.embedding(features)
        return Source(tokens.reshape(len(features), -1, self.config.image_tower.encoder.width))


def captioner_params(task: CaptioningTask, params: Params) -> Params:
    """Returns the parameters of `captioning_of` from those of the image-text model."""
    tower = {name: params["image_tower"][name] for name in task.shapes["image_tower"]}
    return {"image_tower": tower, **params["captioner"]}
