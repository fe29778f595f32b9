"""All tasks that a run may have, and what is asked of any of them."""

from typing import TypeAlias

from lit_het.tasks.captioning import CaptioningConfig, CaptioningTask
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.classifier import ClassificationTask
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.translation import TranslationConfig, TranslationTask
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.towers.layers import ComputeType

TaskConfig: TypeAlias = ContrastiveConfig | ClassificationConfig | CaptioningConfig | TranslationConfig
AnyTask: TypeAlias = ContrastiveTask | ClassificationTask | CaptioningTask | TranslationTask


def compute_type_of(config: TaskConfig) -> ComputeType:
    """Returns the type in which locked parameters are held: that of the image tower, or of the encoder of texts."""
    if isinstance(config, TranslationConfig):
        return config.text_tower.encoder.compute_type
    return config.image_tower.compute_type
