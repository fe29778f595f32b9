"""The configuration of suspect samples, see `lit_het.data_pipelines.shards.suspects`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from lit_het.errors import FieldError

if TYPE_CHECKING:
    from lit_het.data_pipelines.shards.suspects import ScoreTable


@dataclasses.dataclass(frozen=True)
class Suspects:
    """The most suspect samples of a table that ``lit-het data score`` wrote for the training shards.

    Attributes:
        table: the .csv or .parquet file, with a row per sample and the most suspect first.
        fraction: of its rows, from the first on, that are suspects.
        weight: of a suspect in the mean loss, where all others have the weight 1; 0 leaves suspects out of training.
    """

    table: Path
    fraction: float = 0.05
    weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise FieldError(self, "fraction", f"{self.fraction} must be between 0 and 1; 0.05 takes 5 %")
        if not 0 <= self.weight < 1:
            raise FieldError(self, "weight", f"{self.weight} must be below 1 and at least 0, which leaves samples out")

    def read(self) -> "ScoreTable":
        """Returns the suspects and the number of rows of each shard."""
        from lit_het.data_pipelines.shards.suspects import read

        return read(self)
