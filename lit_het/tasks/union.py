"""All tasks that a run may have."""

from typing import TypeAlias

from lit_het.tasks.captioning import CaptioningConfig, CaptioningTask
from lit_het.tasks.classification import ClassificationConfig, ClassificationTask
from lit_het.tasks.contrastive import ContrastiveConfig, ContrastiveTask

TaskConfig: TypeAlias = ContrastiveConfig | ClassificationConfig | CaptioningConfig
AnyTask: TypeAlias = ContrastiveTask | ClassificationTask | CaptioningTask
