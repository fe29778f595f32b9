"""All tasks that a run may have."""

from typing import TypeAlias

from lit_het.tasks.captioning_task import CaptioningTask
from lit_het.tasks.classifier import ClassificationTask
from lit_het.tasks.translator import TranslationTask
from lit_het.tasks.two_towers import ContrastiveTask

AnyTask: TypeAlias = ContrastiveTask | ClassificationTask | CaptioningTask | TranslationTask

WritingTask: TypeAlias = CaptioningTask | TranslationTask
"""Tasks whose models write text."""
