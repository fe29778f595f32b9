"""Parquet files with encoded images, as in Hugging Face's data sets."""

import dataclasses
import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_het.console import message
from lit_het.data_pipelines.prepare.archives import FolderFiles
from lit_het.data_pipelines.prepare.dataset import (
    SPLIT_NAMES,
    DataSet,
    Sample,
    Split,
    fingerprint,
    look_like_splits,
    one_line,
    only_split,
    refuse_alike,
    select_splits,
    tell_classes,
)
from lit_het.data_pipelines.shards import storage
from lit_het.errors import UserError, pluralize
from lit_het.untrusted import open_regular, parse_json

MAX_ROWS = 2**24
"""The most rows of a file, whose labels are all read into memory."""

_SPLIT_NAME = re.compile(r"(\w+)-\d+-of-\d+.*\.parquet", re.IGNORECASE)
_NO_SPLITS = frozenset(("part", "data", "file", "shard", "chunk"))  # words before the number of any file
_NUMBER = re.compile(r"(\d+)[-_]of[-_](\d+)", re.IGNORECASE)
_COPY = re.compile(r" ?\(\d+\)(?=\.parquet$)", re.IGNORECASE)  # of a second download
_WORDS = re.compile(r"[^a-z]+")
_ROWS_AT_A_TIME = 256


@dataclasses.dataclass(frozen=True)
class Columns:
    """Which columns to read.

    Attributes:
        image: bytes, or a structure with a field ``bytes``; None uses the only column of this type.
        label: the class, a string or an index of the schema's class names; None uses the schema's ClassLabel column,
            if ``caption`` is None too.
        caption: text, or a list of texts, which become the lines of one.
    """

    image: str | None = None
    label: str | None = None
    caption: str | None = None


def read_parquet(source: Path, split: str | None = None, columns: Columns | None = None) -> DataSet:
    """Opens a parquet file or a folder of them, with splits as the Hugging Face hub names them.

    The files ``test-00000-of-00003...``, ``test.parquet`` and ``test/0000.parquet`` are of the split ``test``.

    Args:
        source: the file or folder.
        split: which split to read; if paths name no splits, the name of the only one.
        columns: which ones to read; None detects them.
    """
    paths = [source]
    if source.is_dir():
        paths = [source / name for name in FolderFiles(source).sizes if name.lower().endswith(".parquet")]
    if not paths:
        raise UserError(f"{source}: holds no *.parquet files; check the path of the source")
    by_split: dict[str, list[_File]] = {}
    for name, of_split in _split_files(source, paths, split).items():
        _check_numbers(source, name, of_split)
        by_split[name] = [_File(path) for path in of_split]
    parts = {name: by_split[name] for name in select_splits(by_split, split, str(source))}
    first = next(iter(parts.values()))[0]
    # The first file decides, and all others must have its columns.
    columns = _find(first, columns or Columns())
    for file in itertools.chain.from_iterable(parts.values()):
        _check(file, columns)
    if columns.label is None:
        for name, files in parts.items():
            count = pluralize(sum(file.num_rows for file in files), "image")
            message(f"{name}: {count} with captions from the column {columns.caption}")
        return DataSet({name: _split(files, columns) for name, files in parts.items()})
    column = columns.label
    values = {file: file.column(column) for files in parts.values() for file in files}
    names = _names(values, column) or _distinct(values, column)
    labels = {
        name: np.concatenate([_labels(f, values[f], names, column) for f in files]) for name, files in parts.items()
    }
    for name, of_split in labels.items():
        tell_classes(name, names, np.bincount(of_split, minlength=len(names)))
    return DataSet({name: _split(files, columns, labels[name]) for name, files in parts.items()}, tuple(names))


def _split_files(source: Path, paths: Sequence[Path], split: str | None) -> dict[str, list[Path]]:
    """Returns the files of each split."""
    found = {path: _split_in(path.relative_to(source) if path != source else Path(path.name)) for path in paths}
    if not any(found.values()):
        if look_like_splits({str(path.relative_to(source)) for path in paths if path != source}):
            raise UserError(
                f"{paths[0]}: may be of a split; name files such as train.parquet, or give one as the source"
            )
        return {split or only_split(source): list(paths)}
    by_split: dict[str, list[Path]] = {}
    folders: dict[str, Path] = {}
    for path, named in found.items():
        if named is None:
            raise UserError(
                f"{path}: names no split, other files do; put it into a folder of its split, or leave it out"
            )
        name, folder = named
        if folders.setdefault(name, folder) != folder:
            raise UserError(
                f"{source}: has the split {name} in {folders[name]}/ and in {folder}/; give one of these as the source"
            )
        by_split.setdefault(name, []).append(path)
    return by_split


def _check_numbers(source: Path, split: str, paths: Sequence[Path]) -> None:
    """Tells how many files of a split are missing."""
    found: dict[tuple[Path, str], tuple[str, dict[str, Path]]] = {}
    for path in paths:
        name = _COPY.sub("", path.name.lower())
        match = _NUMBER.search(name)
        stem, number, of = (name[: match.start()].rstrip("-_"), *match.groups()) if match else (Path(name).stem, "", "")
        total, others = found.setdefault((path.parent, stem), (of, {}))
        if number in others or of != total:
            other = others.get(number) or next(iter(others.values()))
            raise UserError(
                f"{path}: is of another revision of the split {split} than {other.name}, or a copy; keep one of them"
            )
        others[number] = path
    for total, others in found.values():
        if len(others) < int(total or 0):
            message(f"{source}: holds {len(others)} of {int(total)} files of the split {split}; the others are missing")


def _split_in(path: Path) -> tuple[str, Path] | None:
    """Returns the split that a relative path names, and the folder of its files; None if it names none."""
    match = _SPLIT_NAME.fullmatch(path.name)
    numbered = match[1].lower() if match else None
    words = [word for word in _WORDS.split(path.name.lower()) if word in SPLIT_NAMES]
    if numbered in SPLIT_NAMES or (len(words) == 1 and not numbered):
        return words[0], path.parent
    for folder in path.parents[:-1]:
        # The hub has folders such as partial-train, of the first part of a large set; Hive writes split=train.
        name = folder.name.lower().removeprefix("partial-").removeprefix("split=")
        if name in SPLIT_NAMES and not words:
            return name, folder
    return (numbered, path.parent) if numbered and numbered not in _NO_SPLITS else None


class _File:
    """One file: its schema, and its rows in small batches."""

    def __init__(self, path: Path):
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise UserError("parquet needs pyarrow; install it with pip install 'lit-het[parquet]'") from error
        self.path = path
        try:
            with open_regular(path) as opened, parquet.ParquetFile(opened) as file:
                self.schema: Any = file.schema_arrow
                self.num_rows = int(file.metadata.num_rows)
                groups = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            self.class_names = _class_names((self.schema.metadata or {}).get(b"huggingface", b"{}"))
        except Exception as error:  # pyarrow raises arbitrary exceptions on damage
            reason = storage.reason(error)
            raise UserError(f"{path}: is not a parquet file, or truncated ({reason}); download it again") from error
        if min(groups, default=0) < 0 or sum(groups) != self.num_rows or self.num_rows > MAX_ROWS:
            raise UserError(
                f"{path}: its {self.num_rows:,} rows differ from the sum of its row groups, or exceed {MAX_ROWS:,};"
                " write it again"
            )
        if len(set(self.schema.names)) < len(self.schema.names):
            raise UserError(f"{path}: two of the columns {', '.join(self.schema.names)} have one name; rename one")
        self.group_starts = [0, *itertools.accumulate(groups)]

    def column(self, name: str) -> list[Any]:
        """Returns all values of one column."""
        return [row[name] for row in self.rows({name: self.schema.field(name).type}, 0, self.num_rows)]

    def rows(self, types: Mapping[str, Any], start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Yields the rows from ``start`` to ``stop`` (exclusive) of the given columns, cast to the given types."""
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        starts = self.group_starts
        # Only row groups that overlap with the range: a shard must not cost a pass over the whole file.
        groups = [group for group in range(len(starts) - 1) if starts[group] < stop and start < starts[group + 1]]
        try:
            with parquet.ParquetFile(self.path) as file:
                row = starts[groups[0]] if groups else 0
                for batch in file.iter_batches(_ROWS_AT_A_TIME, row_groups=groups, columns=list(types)):
                    first, last = max(start - row, 0), min(stop - row, batch.num_rows)
                    if first < last:
                        part = batch.slice(first, last - first).select(list(types))
                        yield from part.cast(arrow.schema(types)).to_pylist()
                    row += batch.num_rows
        except Exception as error:  # as above
            raise UserError(f"{self.path}: is damaged ({storage.reason(error)}); download it again") from error


def _class_names(metadata: bytes) -> dict[str, tuple[str, ...]]:
    """Returns the ClassLabel columns of a Hugging Face schema, each with its class names, if any.

    Raises:
        Malformed: it is not JSON.
    """
    found = parse_json(metadata)
    for field in ("info", "features"):
        found = found.get(field) if isinstance(found, dict) else None
    features = found if isinstance(found, dict) else {}
    return {
        column: _texts(feature.get("names"))
        for column, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }


def _texts(names: Any) -> tuple[str, ...]:
    """Returns the items of a list of strings, or nothing for any other value."""
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def _find(file: _File, columns: Columns) -> Columns:
    """Detects the columns that were not given."""
    _check(file, columns)
    images = [name for name in file.schema.names if _holds_bytes(file, name)]
    image = columns.image or _only(images, file, "images", "--image")
    if columns.label or columns.caption:
        return dataclasses.replace(columns, image=image)
    labels = [name for name in file.schema.names if name in file.class_names]
    return Columns(image, _only(labels, file, "classes", "--label (or captions with --caption)"))


def _check(file: _File, columns: Columns) -> None:
    """Checks that a file has the columns, each with a suitable type."""
    for name in (columns.image, columns.label, columns.caption):
        if name is not None and name not in file.schema.names:
            raise UserError(f"{file.path}: has no column {name!r}, only {', '.join(file.schema.names)}")
    if columns.image is not None and not _holds_bytes(file, columns.image):
        raise UserError(f"{file.path}: column {columns.image!r} holds no bytes of images; choose another with --image")
    if columns.caption is not None:
        _caption_type(file, columns.caption)


def _holds_bytes(file: _File, column: str) -> bool:
    import pyarrow as arrow

    held = file.schema.field(column).type
    if arrow.types.is_struct(held):
        if held.get_field_index("bytes") < 0:
            return False
        held = held.field("bytes").type
    return _is_bytes(held)


def _is_bytes(held: Any) -> bool:
    import pyarrow as arrow

    return arrow.types.is_binary(held) or arrow.types.is_large_binary(held) or arrow.types.is_binary_view(held)


def _caption_type(file: _File, column: str) -> Any:
    """Returns the type to read captions as: bytes, which unlike strings need not be UTF-8, or lists of bytes."""
    import pyarrow as arrow

    kinds = arrow.types
    held = file.schema.field(column).type
    is_list = kinds.is_list(held) or kinds.is_large_list(held) or kinds.is_fixed_size_list(held)
    text = held.value_type if is_list else held
    # pandas writes its categories as a dictionary of texts and their numbers.
    text = text.value_type if kinds.is_dictionary(text) else text
    if not (kinds.is_string(text) or kinds.is_large_string(text) or kinds.is_string_view(text) or _is_bytes(text)):
        raise UserError(
            f"{file.path}: column {column!r} holds {held}, neither text nor lists of it; choose another with --caption"
        )
    return arrow.list_(arrow.large_binary()) if is_list else arrow.large_binary()


def _only(names: Sequence[str], file: _File, what: str, flag: str) -> str:
    if len(names) != 1:
        raise UserError(
            f"{file.path}: {len(names)} columns hold {what} ({', '.join(file.schema.names)}); name one with {flag}"
        )
    return names[0]


def _names(files: Iterable[_File], column: str) -> tuple[str, ...]:
    """Returns the class names of a ClassLabel; none where no file has any."""
    named = [file for file in files if file.class_names.get(column)]
    for file in named[1:]:
        if file.class_names[column] != named[0].class_names[column]:
            raise UserError(
                f"{file.path}: the class names of {column!r}, or their order, differ from those in {named[0].path}; "
                "write both with the same ClassLabel, or prepare each alone"
            )
    return named[0].class_names[column] if named else ()


def _distinct(values: Mapping[_File, list[Any]], column: str) -> list[str]:
    """Returns the sorted class names of a column of strings."""
    for file, found in values.items():
        if not all(isinstance(value, str) for value in found):
            raise UserError(f"{file.path}: {column!r} is neither text nor a ClassLabel: its classes have no names")
    names = sorted({value for found in values.values() for value in found})
    refuse_alike(names, f"{next(iter(values)).path}: column {column!r}")
    return names


def _labels(file: _File, values: Sequence[Any], names: Sequence[str], column: str) -> np.ndarray:
    """Converts values, which are names or, in a file with class names, indices, to indices: ``[values]`` int32."""
    # Both names and indices are accepted: parquet files of the same data set differ in this.
    known: dict[Any, int] = {name: label for label, name in enumerate(names)}
    unknown = f"is none of {len(names)} classes; fix the file"
    if file.class_names.get(column):
        known |= {label: label for label in range(len(names))}
    else:
        unknown = "is not the name of a class, and this file names no numbers; write it with its ClassLabel"
    for value in values:
        if not isinstance(value, Hashable) or value not in known:
            raise UserError(f"{file.path}: {repr(value)[:100]} in column {column!r} {unknown}")
    return np.array([known[value] for value in values], np.int32)


def _split(files: Sequence[_File], columns: Columns, labels: np.ndarray | None = None) -> Split:
    starts = [0, *itertools.accumulate(file.num_rows for file in files)]
    image, caption = columns.image or "", columns.caption

    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        # The writer requests the samples of a shard, which are consecutive.
        for file, start in zip(files, starts[:-1], strict=True):
            first, last = max(numbers[0] - start, 0), min(numbers[-1] + 1 - start, file.num_rows)
            if first >= last:
                continue
            types = {image: file.schema.field(image).type}
            if caption:
                types[caption] = _caption_type(file, caption)
            for row, values in enumerate(file.rows(types, first, last), first):
                cell = values[image]
                data = cell["bytes"] if isinstance(cell, dict) else cell
                members = {"txt": _lines(values[caption])} if caption else {}
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


def _lines(captions: bytes | list[bytes | None] | None) -> bytes:
    """Returns captions with a line for each."""
    listed = captions if isinstance(captions, list) else [captions]
    return b"\n".join(filter(None, (one_line(caption) for caption in listed if caption)))
