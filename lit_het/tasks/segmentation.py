"""The configuration of stage II of UViM (Kolesnikov et al. 2022, SoViT Sec. 5.4): codes of masks from images."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.heads.classification_config import DeterministicConfig, TokenHeadConfig
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.programs import shared
from lit_het.tasks.mask_oracle import check_masks, mask_columns
from lit_het.tasks.options import TaskOptions
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.oracle_config import OracleConfig

if TYPE_CHECKING:
    from lit_het.tasks.segmenting import SegmentationTask

_ORACLE = OracleConfig()


@dataclasses.dataclass(frozen=True)
class SegmentationConfig(TaskOptions):
    """A model of panoptic segmentation: a decoder writes the code of an image's masks, which the oracle decodes.

    Attributes:
        image_tower: the image tower, without pooling: the decoder attends to all of its tokens.
        decoder: writes codes; its vocabulary is the codebook with a token before the first one, 0.
        oracle: of stage I, which stays as it was trained.
        oracle_run: the run of stage I.
        head: maps the decoder's features to a distribution of logits of the next word.
        loss: of the next word.
        locked: patterns of parameters to lock; without the image tower it is trained, too.
        microbatches: number of parts in which the image tower processes a batch, to save memory.
    """

    image_tower: ViTConfig = ViTConfig(image_size=_ORACLE.image_size, pooling="none")
    decoder: DecoderConfig = DecoderConfig(_ORACLE.codebook.num_words + 1, _ORACLE.code_length, dropout=0.0)
    oracle: OracleConfig = _ORACLE
    oracle_run: Path = Path("runs/uvim_oracle")
    head: TokenHeadConfig = DeterministicConfig()
    loss: SoftmaxCrossEntropy = SoftmaxCrossEntropy()
    locked: tuple[str, ...] = ("image_tower/.*", "oracle/.*")
    microbatches: int = 1

    pipeline_tag = "image-segmentation"
    summary = "A model of panoptic segmentation"
    exports = ("lit-het",)

    def __post_init__(self) -> None:
        require_at_least(1, self, "microbatches")
        if self.image_tower.without_pooling() != self.image_tower:
            raise UserError(
                "a decoder attends to the tokens of one image tower: set task.image_tower.pooling to 'none', and leave "
                "out its further layers (such as a projection), uncertainty tokens and ensembles of experts"
            )
        oracle, decoder = self.oracle, self.decoder
        if (size := oracle.codebook.num_words + 1) != decoder.vocabulary_size:
            raise UserError(
                f"task.decoder writes {decoder.vocabulary_size} tokens, and the oracle has a codebook of {size - 1} "
                f"words and a start: other tokens would be no words; set --task.decoder.vocabulary-size {size}"
            )
        if oracle.code_length != decoder.length:
            raise UserError(
                f"task.decoder writes {decoder.length} tokens, and codes have {oracle.code_length} words; set "
                f"--task.decoder.length {oracle.code_length}"
            )
        decoder.check_head(self.head, "task")
        super().__post_init__()

    @property
    def mask_classes(self) -> int:
        """The classes of the oracle's masks."""
        return self.oracle.num_classes

    @property
    def sources(self) -> Mapping[str, Path]:
        """The run of the oracle, see `TaskOptions`."""
        return {"oracle": self.oracle_run}

    def check_data(self, run: Any, loader: Any, tokenizer: Any) -> None:
        """Checks the sizes of images and masks and the number of classes, see `TaskOptions`."""
        super().check_data(run, loader, tokenizer)
        if "oracle/.*" not in self.locked:
            raise FieldError(self, "locked", "the oracle stays as it was trained; add 'oracle/.*'")
        check_masks(self.oracle, run, loader)

    def columns(self, data: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the columns of images and masks, see `TaskOptions`."""
        return super().columns(data) | mask_columns(self.oracle)

    def logits_at_once(self, rows: int, batch_size: int) -> int:
        """Returns the size of a block of logits of words, see `TaskOptions`."""
        from lit_het.objectives.tokens import token_logits_at_once

        return token_logits_at_once(self.decoder, self.head, rows)

    @shared
    def build(self) -> "SegmentationTask":
        """Returns the task."""
        from lit_het.tasks.segmenting import SegmentationTask

        return SegmentationTask(self)
