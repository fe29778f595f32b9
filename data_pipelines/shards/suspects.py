"""Suspect samples that training leaves out, or weights less: the first rows of a table of ``lit-het data score``."""

import csv
import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from lit_het.data_pipelines.labels import MAX_TEXT_BYTES
from lit_het.data_pipelines.shards.suspects_config import Suspects
from lit_het.errors import UserError
from lit_het.files import text_of
from lit_het.untrusted import open_regular

MAX_ROWS = 2**24
"""The most rows of a parquet table."""

_SHARD, _KEY = "shard", "key"
# Python's own limit of a cell is below that of a caption.
csv.field_size_limit(MAX_TEXT_BYTES)


class ScoreTable(NamedTuple):
    """What a table of scores says of each shard.

    Attributes:
        suspects: keys of the suspect samples.
        counts: number of rows.
    """

    suspects: Mapping[str, frozenset[str]]
    counts: Mapping[str, int]


def read(config: Suspects) -> ScoreTable:
    """Returns what `Suspects.read` does."""
    rows = _rows(config.table)
    if not rows or not all(isinstance(value, str) for row in rows for value in row):
        raise UserError(f"{config.table} has rows without a shard and a key; write it with lit-het data score")
    keys = defaultdict[str, set[str]](set)
    # Exact decimal arithmetic, as for portions: as floats, 7 % of 100 rows would be more than 7.
    for shard, key in rows[: math.ceil(Fraction(str(config.fraction)) * len(rows))]:
        keys[shard].add(key)
    counts = Counter(shard for shard, _ in rows)
    return ScoreTable({shard: frozenset(found) for shard, found in keys.items()}, counts)


def _rows(table: Path) -> list[tuple[Any, Any]]:
    try:
        if table.suffix == ".parquet":
            columns = _read_parquet(table)
            return list(zip(columns[_SHARD], columns[_KEY], strict=True))
        with open_regular(table) as file:
            reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""))
            return [(text_of(row[_SHARD]), text_of(row[_KEY])) for row in _complete(table, reader)]
    except KeyError as error:
        raise UserError(f"{table} has no column {error}; take a table of lit-het data score") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{table} cannot be read ({error}); write it with lit-het data score") from error


def _complete(table: Path, reader: "csv.DictReader[str]") -> Iterator[Mapping[str, str]]:
    for row in reader:
        if None in row.values():
            raise UserError(f"{table} is cut short in line {reader.line_num}; write it again with lit-het data score")
        yield row


def _read_parquet(path: Path) -> Mapping[str, list[Any]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow; install it with pip install 'lit-het[parquet]'") from error
    try:
        with open_regular(path) as file, parquet.ParquetFile(file) as table:
            if table.metadata.num_rows > MAX_ROWS:
                raise UserError(f"{path} has more than {MAX_ROWS:,} rows; write it with lit-het data score")
            return table.read([_SHARD, _KEY]).to_pydict()
    except arrow.ArrowException as error:
        raise UserError(f"{path} cannot be read ({error}); write it with lit-het data score") from error
