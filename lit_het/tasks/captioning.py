"""LiT-decoder: a text decoder on the tokens of an image tower (Beyer et al. 2023; SoViT Sec. 4.2, App. C)."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lit_het.errors import UserError, require_at_least
from lit_het.heads.base import ClassificationHead
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.objectives.tokens import TokenHeadConfig, build_head, check_tied, token_loss
from lit_het.programs import shared
from lit_het.random import Keys
from lit_het.tasks import microbatches
from lit_het.tasks.base import Progress, Task
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.features import FeatureExtractor
from lit_het.tasks.quantities import ImageClassifier
from lit_het.towers.decoder import DecoderConfig, Source
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch, Metrics, Params


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
    head: TokenHeadConfig = DeterministicConfig()
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
        check_tied(self.decoder, self.head, "task")

    @shared
    def build(self) -> "CaptioningTask":
        """Returns the task."""
        return CaptioningTask(self)


def captioning_of(config: ContrastiveConfig) -> CaptioningConfig | None:
    """Returns the image tower and the decoder of an image-text model as a model that writes text; None without one."""
    if config.captioner is None:
        return None
    assert isinstance(config.image_tower, ViTConfig)
    tower, captioner = config.image_tower.without_pooling(), config.captioner
    # Nothing is locked: patterns of the text tower would match nothing.
    return CaptioningConfig(tower, captioner.decoder, captioner.head, captioner.loss, locked=())


def captioner_params(task: "CaptioningTask", params: Params) -> Params:
    """Returns the parameters of `captioning_of` from those of the image-text model."""
    tower = {name: params["image_tower"][name] for name in task.shapes["image_tower"]}
    return {"image_tower": tower, **params["captioner"]}


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
