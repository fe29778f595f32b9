"""The configuration of LiT-decoder (Beyer et al. 2023; SoViT Sec. 4.2, App. C): text of a decoder about an image."""

import dataclasses
from typing import Any

from lit_het.errors import UserError, require_at_least
from lit_het.heads.classification_config import DeterministicConfig, TokenHeadConfig
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.tasks.options import WritingOptions
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.image_config import ViTConfig


@dataclasses.dataclass(frozen=True)
class CaptioningConfig(WritingOptions):
    """A model that writes text about an image: captions, or answers to questions.

    Attributes:
        image_tower: the image tower, without pooling: the decoder attends to all of its tokens.
        decoder: the text decoder.
        head: maps the decoder's features to a distribution of logits of the next token.
        loss: of the next token.
        locked: patterns of parameters to lock; LiT locks the image tower.
        microbatches: number of parts in which the image tower processes a batch, to save memory.
    """

    image_tower: ViTConfig = ViTConfig(pooling="none")
    decoder: DecoderConfig = DecoderConfig()
    head: TokenHeadConfig = DeterministicConfig()
    loss: SoftmaxCrossEntropy = SoftmaxCrossEntropy()
    locked: tuple[str, ...] = ("image_tower/.*",)
    microbatches: int = 1

    tower_key = "image_tower_routing"
    summary = "A text decoder on an image tower"
    pipeline_tag = "image-to-text"
    exports = ("lit-het", "huggingface")

    def __post_init__(self) -> None:
        require_at_least(1, self, "microbatches")
        if self.image_tower.without_pooling() != self.image_tower:
            raise UserError(
                "a decoder attends to the tokens of one image tower: set task.image_tower.pooling to 'none', and leave "
                "out its further layers (such as a projection), uncertainty tokens and ensembles of experts"
            )
        self.decoder.check_head(self.head, "task")
        self.head.check_loss(self.loss, "task")
        super().__post_init__()

    def check_stored(self, stored: Any) -> None:
        """Checks that all tokens are stored, see `TaskOptions`."""
        if not stored.recipe.num_tokens:
            raise UserError(
                f"a decoder reads tokens, and {stored.address} holds pooled embeddings, or is of an earlier version; "
                "embed again with --tokens into another folder"
            )
