"""The result of an importer: inferred configurations and the sources of all parameters."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_het.towers.image_config import ViTConfig
from lit_het.towers.text_config import TextTowerConfig
from lit_het.weights.rename import ParameterSource
from lit_het.weights.sources import Arrays


@dataclasses.dataclass(frozen=True)
class Imported:
    """A model of another program. Its arrays are opened but not yet read.

    Attributes:
        arrays: the opened source.
        parameter_sources: one for each parameter, by its path in a task: ``image_tower/...``, ``text_tower/...`` or
            ``head/...``.
        image_tower, text_tower: configurations with the sizes of the source, or None without such a tower.
        has_bias: whether the logits have a bias ``head/bias`` (sigmoid loss). The temperature is stored as
            ``head/temperature/log_temperature``: log τ, where inner products are divided by τ.
        num_classes: number of classes of the head ``head/logits/...``, or None without a classifier.
        has_several_labels: whether each class of the classifier has a probability of its own (sigmoid loss).
        tokenizer: path of the SentencePiece model or ``tokenizer.json`` beside the weights, or None.
        tokenizer_fields: settings of the tokenizer that its files do not record.
        image_processor: image preprocessing as in ``preprocessor_config.json``, or None if unknown.
    """

    arrays: Arrays
    parameter_sources: list[ParameterSource]
    image_tower: ViTConfig | None = None
    text_tower: TextTowerConfig | None = None
    has_bias: bool = False
    num_classes: int | None = None
    has_several_labels: bool = False
    tokenizer: Path | None = None
    tokenizer_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    image_processor: Mapping[str, Any] | None = None
