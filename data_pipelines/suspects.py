"""Suspect samples that training leaves out: the first rows of a table of ``lit-het data score``."""

import csv
import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from lit_het.errors import FieldError, UserError

_SHARD, _KEY = "shard", "key"


@dataclasses.dataclass(frozen=True)
class Suspects:
    """The most suspect samples of a table that ``lit-het data score`` wrote for the training shards.

    Attributes:
        table: the .csv or .parquet file, with a row per sample and the most suspect first.
        fraction: of its rows, from the first on, that training leaves out.

    Raises:
        UserError: the fraction is not between 0 and 1.
    """

    table: Path
    fraction: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise FieldError(self, "fraction", f"{self.fraction} must be between 0 and 1; 0.05 leaves out 5 %")

    def read(self) -> Mapping[str, frozenset[str]]:
        """Returns the keys of the samples in each shard.

        Raises:
            UserError: the table cannot be read, or has other columns.
        """
        rows = self._rows()
        if not rows or not all(isinstance(value, str) for row in rows for value in row):
            raise UserError(f"{self.table} has rows without a shard and a key; write it with lit-het data score")
        keys = defaultdict[str, set[str]](set)
        # Exact decimal arithmetic, as for portions: as floats, 7 % of 100 rows would be more than 7.
        for shard, key in rows[: math.ceil(Fraction(str(self.fraction)) * len(rows))]:
            keys[shard].add(key)
        return {shard: frozenset(found) for shard, found in keys.items()}

    def _rows(self) -> list[tuple[Any, Any]]:
        try:
            if self.table.suffix == ".parquet":
                columns = _read_parquet(self.table)
                return list(zip(columns[_SHARD], columns[_KEY], strict=True))
            with self.table.open(newline="", encoding="utf-8") as file:
                return [(row[_SHARD], row[_KEY]) for row in csv.DictReader(file)]
        except KeyError as error:
            raise UserError(f"{self.table} has no column {error}; take a table of lit-het data score") from error
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{self.table} cannot be read ({error}); write it with lit-het data score") from error


def _read_parquet(path: Path) -> Mapping[str, list[Any]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow; install it with pip install 'lit-het[parquet]'") from error
    try:
        return parquet.read_table(path).to_pydict()
    except arrow.ArrowException as error:
        raise UserError(f"{path} cannot be read ({error}); write it with lit-het data score") from error
