"""What an importer finds in a source: configurations inferred from it, and where each of its arrays goes."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_het.checkpoints.rename import Piece
from lit_het.checkpoints.sources import Arrays
from lit_het.towers.bert import BertConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig


@dataclasses.dataclass(frozen=True)
class Imported:
    """A model of another program, not yet read.

    Attributes:
        arrays: the opened source.
        pieces: parameters under the names that tasks give them: ``image_tower/...``, ``text_tower/...``, ``head/...``.
        image_tower, text_tower: towers of the source's sizes, or None.
        has_bias: whether the source scores pairs with a bias ``head/bias`` (sigmoid loss). Its temperature is
            ``head/temperature/log_temperature``: log τ, where τ divides inner products.
        num_classes: of a classifier's head ``head/logits/...``, or None.
        tokenizer: a SentencePiece model beside the weights, or None.
        image_processor: how images were prepared, in the words of a ``preprocessor_config.json``; None where nothing
            tells.
    """

    arrays: Arrays
    pieces: list[Piece]
    image_tower: ViTConfig | None = None
    text_tower: TextConfig | BertConfig | None = None
    has_bias: bool = False
    num_classes: int | None = None
    tokenizer: Path | None = None
    image_processor: Mapping[str, Any] | None = None
