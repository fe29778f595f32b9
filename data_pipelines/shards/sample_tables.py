"""Tables of samples: rows with a shard and a key, as ``lit-het data score`` and ``lit-het data dedup`` write them."""

import csv
import io
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from lit_het.console import message
from lit_het.data_pipelines.labels import MAX_TEXT_BYTES
from lit_het.data_pipelines.shards.index import ShardIndex, index_shard
from lit_het.data_pipelines.shards.urls import canonical
from lit_het.errors import UserError
from lit_het.files import text_of
from lit_het.untrusted import open_regular

MAX_ROWS = 2**24
"""The most rows of a parquet table."""

SHARD, KEY = "shard", "key"
_DEDUP = "lit-het data dedup"
# Python's own limit of a cell is below that of a caption.
csv.field_size_limit(MAX_TEXT_BYTES)


def read_rows(table: Path, command: str, columns: Sequence[str] = (SHARD, KEY)) -> Iterator[tuple[Any, ...]]:
    """Yields columns of every row of a .parquet file or, by any other ending, of a CSV, whose values are texts.

    Args:
        table: the file.
        command: that writes such tables, for messages.
        columns: the shard, the key, and what else is read.
    """
    try:
        read = _rows_of_parquet if table.suffix == ".parquet" else _rows_of_csv
        for row in read(table, command, columns):
            if not all(isinstance(value, str) for value in row[:2]):
                raise UserError(f"{table} has rows without a shard and a key; write it with {command}")
            yield row
    except KeyError as error:
        raise UserError(f"{table} has no column {error}; take a table of {command}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{table} cannot be read ({error}); write it with {command}") from error


def names_any(table: Path, shards: Collection[str]) -> bool:
    """Returns whether a table names any of the given shards."""
    return not _excluded_keys(table).keys().isdisjoint(map(canonical, shards))


def excluded_keys(table: Path, shards: Collection[str]) -> dict[str, frozenset[str]]:
    """Returns the keys that a table leaves out of each of the given shards, by their addresses; others are ignored.

    Raises:
        UserError: the table names other shards only.
    """
    named = _excluded_keys(table)
    found = {shard: keys for shard in shards if (keys := named.get(canonical(shard)))}
    if named and not found:
        raise UserError(
            f"{table} names {next(iter(named))} and others, but no shard of this training, such as "
            f"{next(iter(shards), 'none')}; leave it out of data.exclude, or write it for these shards"
        )
    return found


def _excluded_keys(table: Path) -> dict[str, frozenset[str]]:
    """Returns the keys of each shard, by the one spelling of its address."""
    found = dict[str, frozenset[str]]()
    for shard, keys in keys_of_shards(read_rows(table, _DEDUP)).items():
        name = canonical(shard)
        found[name] = keys | found.get(name, frozenset())
    return found


def excluded_samples(tables: Sequence[Path], index: ShardIndex) -> Int[np.ndarray, " n"]:
    """Returns the samples that tables leave out of all data sets, in ascending order."""
    found = [np.empty(0, "<i8")]
    for table in tables:
        keys = excluded_keys(table, [summary.address for summary in index.summaries])
        found.append(np.asarray(index.samples_of(keys), "<i8"))
        if len(found[-1]) < sum(map(len, keys.values())):
            _check_keys(table, keys)  # unless they are those of samples without a caption
    excluded = np.unique(np.concatenate(found))
    if tables:
        message(f"{len(excluded):,} of {len(index):,} samples are left out by {', '.join(map(str, tables))}")
    return excluded


def _check_keys(table: Path, keys: Mapping[str, frozenset[str]]) -> None:
    """Checks that shards have the keys that a table names."""
    for shard, wanted in keys.items():
        there = {key.decode("utf-8", "surrogateescape") for key in index_shard(shard).keys.tolist()}
        if unknown := min(wanted - there, default=""):
            raise UserError(f"{table} names {unknown}, which {shard} has not: it changed since; write the table again")


def keys_of_shards(rows: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    """Returns the keys of each shard."""
    keys = defaultdict[str, set[str]](set)
    for shard, key in rows:
        keys[shard].add(key)
    return {shard: frozenset(found) for shard, found in keys.items()}


def _rows_of_csv(table: Path, command: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    with open_regular(table) as file:
        reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""))
        if missing := set(columns) - set(reader.fieldnames or ()):
            raise KeyError(max(missing))
        for row in _complete(table, reader, command):
            yield tuple(text_of(row[name]) for name in columns)


def _complete(table: Path, reader: "csv.DictReader[str]", command: str) -> Iterator[Mapping[str, str]]:
    for row in reader:
        if None in row.values():
            raise UserError(f"{table} is cut short in line {reader.line_num}; write it again with {command}")
        yield row


def _rows_of_parquet(path: Path, command: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow; install it with pip install 'lit-het[parquet]'") from error
    try:
        with open_regular(path) as file, parquet.ParquetFile(file) as table:
            if table.metadata.num_rows > MAX_ROWS:
                raise UserError(f"{path} has more than {MAX_ROWS:,} rows; write it as .csv")
            if missing := set(columns) - set(table.schema_arrow.names):
                raise KeyError(max(missing))
            for batch in table.iter_batches(columns=list(columns)):
                found = batch.to_pydict()
                yield from zip(*(found[name] for name in columns), strict=True)
    except arrow.ArrowException as error:
        raise UserError(f"{path} cannot be read ({error}); write it with {command}") from error
