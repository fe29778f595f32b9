"""The configuration of LiT-decoder (Beyer et al. 2023; SoViT Sec. 4.2, App. C): text of a decoder about an image."""

import dataclasses
from typing import TYPE_CHECKING

from lit_het.errors import UserError, require_at_least
from lit_het.heads.classification_config import DeterministicConfig, TokenHeadConfig
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.programs import shared
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.image_config import ViTConfig

if TYPE_CHECKING:
    from lit_het.tasks.captioning_task import CaptioningTask


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
        self.decoder.check_head(self.head, "task")

    @property
    def compute_type(self) -> ComputeType:
        """The type of activations, in which locked parameters are held."""
        return self.image_tower.compute_type

    @shared
    def build(self) -> "CaptioningTask":
        """Returns the task."""
        from lit_het.tasks.captioning_task import CaptioningTask

        return CaptioningTask(self)


def captioning_of(config: ContrastiveConfig) -> CaptioningConfig | None:
    """Returns the image tower and the decoder of an image-text model as a model that writes text; None without one."""
    if config.captioner is None:
        return None
    assert isinstance(config.image_tower, ViTConfig)
    tower, captioner = config.image_tower.without_pooling(), config.captioner
    # Nothing is locked: patterns of the text tower would match nothing.
    return CaptioningConfig(tower, captioner.decoder, captioner.head, captioner.loss, locked=())
