"""What an importer finds in a source: configurations inferred from it, and where each of its arrays goes."""

import dataclasses

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
        temperature: τ, which divides inner products; None where the source has none.
        bias: of the sigmoid loss, or None.
        num_classes: of a classifier's head, or None.
        tokenizer: name of the file with the vocabulary beside the weights, or None.
    """

    arrays: Arrays
    pieces: list[Piece]
    image_tower: ViTConfig | None = None
    text_tower: TextConfig | BertConfig | None = None
    temperature: float | None = None
    bias: float | None = None
    num_classes: int | None = None
    tokenizer: str | None = None
