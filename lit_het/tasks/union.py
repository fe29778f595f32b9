"""The configurations of all tasks that a run may have."""

from typing import TypeAlias

from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.mask_oracle import MaskOracleConfig
from lit_het.tasks.segmentation import SegmentationConfig
from lit_het.tasks.translation import TranslationConfig

TaskConfig: TypeAlias = (
    ContrastiveConfig
    | ClassificationConfig
    | CaptioningConfig
    | TranslationConfig
    | MaskOracleConfig
    | SegmentationConfig
)
