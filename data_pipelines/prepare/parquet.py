"""Parquet files with the bytes of pictures, as Hugging Face's data sets store them."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipelines.prepare.dataset import DataSet, Sample, Split, chosen, fingerprint
from lit_het.errors import UserError

_SPLIT_NAME = re.compile(r"(\w+)-\d+-of-\d+.*\.parquet")
_ROWS_AT_A_TIME = 256


@dataclasses.dataclass(frozen=True)
class Columns:
    """Which columns to read.

    Attributes:
        image: bytes, or a structure with a field ``bytes``; None takes the one that there is.
        label: the class, a string or a number that the schema names; None takes the column that the schema calls a
            ClassLabel if ``caption`` is None too.
        caption: a string.
    """

    image: str | None = None
    label: str | None = None
    caption: str | None = None


def read_parquet(source: Path, split: str | None = None, columns: Columns | None = None) -> DataSet:
    """Opens a parquet file or a folder of them; files called ``test-00000-of-00003...`` are of the split ``test``.

    Args:
        source: the file or folder.
        split: which split to read; where names of files tell none, what to call it (``train``).
        columns: which ones to read; None finds them.

    Raises:
        UserError: pyarrow is not installed, a file is damaged, or it is not clear which columns are meant.
    """
    paths = sorted(source.rglob("*.parquet")) if source.is_dir() else [source]
    if not paths:
        raise UserError(f"{source}: holds no *.parquet files; check the path of the source")
    matches = [_SPLIT_NAME.fullmatch(path.name) for path in paths]
    by_split: dict[str, list[_File]] = {}
    for path, match in zip(paths, matches, strict=True):
        by_split.setdefault(match[1] if match and all(matches) else split or "train", []).append(_File(path))
    parts = {name: by_split[name] for name in chosen(by_split, split, str(source))}
    first = next(iter(parts.values()))[0]
    columns = _find(first, columns or Columns())
    if columns.label is None:
        return DataSet({name: _split(files, columns) for name, files in parts.items()})
    values = {name: [value for file in files for value in file.column(columns.label)] for name, files in parts.items()}
    names = first.features.get(columns.label, {}).get("names") or _distinct(values, columns.label, first)
    labels = {name: _labels(part, names, columns.label, source) for name, part in values.items()}
    return DataSet({name: _split(files, columns, labels[name]) for name, files in parts.items()}, tuple(names))


class _File:
    """One file: its schema, and its rows a few at a time."""

    def __init__(self, path: Path):
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise UserError("parquet needs pyarrow; install it with pip install 'lit-het[parquet]'") from error
        self.path = path
        try:
            with parquet.ParquetFile(path) as file:
                self.schema: Any = file.schema_arrow
                self.num_rows = int(file.metadata.num_rows)
                groups = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            metadata = json.loads((self.schema.metadata or {}).get(b"huggingface", b"{}"))
        except (OSError, ValueError) as error:  # pyarrow's own errors are among these
            raise UserError(f"{path}: is no parquet file, or truncated ({error}); download it again") from error
        self.group_starts = [0, *itertools.accumulate(groups)]
        self.features: dict[str, dict[str, Any]] = metadata.get("info", {}).get("features", {})

    def column(self, name: str) -> list[Any]:
        """All values of one column."""
        return [row[name] for row in self.rows([name], 0, self.num_rows)]

    def rows(self, columns: Sequence[str], start: int, stop: int) -> Iterator[dict[str, Any]]:
        """The rows from ``start`` up to ``stop``, of some columns."""
        import pyarrow.parquet as parquet

        starts = self.group_starts
        groups = [group for group in range(len(starts) - 1) if starts[group] < stop and start < starts[group + 1]]
        try:
            with parquet.ParquetFile(self.path) as file:
                row = starts[groups[0]] if groups else 0
                for batch in file.iter_batches(_ROWS_AT_A_TIME, row_groups=groups, columns=list(columns)):
                    first, last = max(start - row, 0), min(stop - row, batch.num_rows)
                    if first < last:
                        yield from batch.slice(first, last - first).to_pylist()
                    row += batch.num_rows
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path}: is damaged ({error}); download it again") from error


def _find(file: _File, columns: Columns) -> Columns:
    """Fills in the columns that were not named."""
    import pyarrow as arrow

    names: list[str] = file.schema.names
    for name in (columns.image, columns.label, columns.caption):
        if name is not None and name not in names:
            raise UserError(f"{file.path}: has no column {name!r}, only {', '.join(names)}")

    def holds_bytes(field: Any) -> bool:
        if arrow.types.is_struct(field.type):
            return field.type.get_field_index("bytes") >= 0
        return arrow.types.is_binary(field.type) or arrow.types.is_large_binary(field.type)

    images = [name for name in names if holds_bytes(file.schema.field(name))]
    image = columns.image or _only(images, file, "pictures", "--image")
    if image not in images:
        raise UserError(f"{file.path}: column {image!r} holds no bytes of pictures; choose another with --image")
    if columns.label or columns.caption:
        return dataclasses.replace(columns, image=image)
    labels = [name for name, feature in file.features.items() if feature.get("_type") == "ClassLabel"]
    return Columns(image, _only(labels, file, "classes", "--label (or captions with --caption)"))


def _only(names: Sequence[str], file: _File, what: str, flag: str) -> str:
    if len(names) != 1:
        raise UserError(
            f"{file.path}: {len(names)} columns hold {what} ({', '.join(file.schema.names)}); name one with {flag}"
        )
    return names[0]


def _distinct(values: dict[str, list[Any]], column: str, file: _File) -> list[str]:
    """The names of classes that are strings, sorted."""
    distinct = {value for part in values.values() for value in part}
    if not all(isinstance(value, str) for value in distinct):
        raise UserError(f"{file.path}: {column!r} is neither text nor a ClassLabel, so that its classes have no names")
    return sorted(distinct)


def _labels(values: Sequence[Any], names: Sequence[str], column: str, source: Path) -> np.ndarray:
    """Indices into names, of values that are names or indices themselves: ``[values]`` int32."""
    known: dict[Any, int] = {value: label for label, name in enumerate(names) for value in (label, name)}
    for value in values:
        if value not in known:
            raise UserError(f"{source}: {value!r} in column {column!r} is none of {len(names)} classes; mend the file")
    return np.array([known[value] for value in values], np.int32)


def _split(files: Sequence[_File], columns: Columns, labels: np.ndarray | None = None) -> Split:
    starts = [0, *itertools.accumulate(file.num_rows for file in files)]
    image, caption = columns.image or "", columns.caption

    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        # a shard asks for consecutive samples
        for file, start in zip(files, starts[:-1], strict=True):
            first, last = max(numbers[0] - start, 0), min(numbers[-1] + 1 - start, file.num_rows)
            if first >= last:
                continue
            for row, values in enumerate(file.rows([image, *([caption] if caption else [])], first, last), first):
                picture = values[image]
                data = picture["bytes"] if isinstance(picture, dict) else picture
                members = {"txt": (values[caption] or "").encode()} if caption else {}
                yield Sample(data or b"", f"{file.path}: row {row}", members)

    return Split(
        num_samples=starts[-1],
        read=read,
        fingerprint=fingerprint(
            (
                *(f"{file.path.name}:{file.path.stat().st_size}:{file.num_rows}" for file in files),
                *(name or "" for name in dataclasses.astuple(columns)),
                b"" if labels is None else labels.tobytes(),
            )
        ),
        labels=labels,
    )
