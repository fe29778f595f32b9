"""What a sample is labelled with: the class in its ``.cls`` member, or the words of its caption."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from lit_het.data_pipelines import storage
from lit_het.data_pipelines.storage import Unreadable, read_lines
from lit_het.errors import UserError
from lit_het.untrusted import Malformed, parse_npy

OUT_OF_RANGE = "label is out of range"
"""Why a sample cannot be used whose label is beyond the names: then the names are wrong, and not a few samples."""

MAX_TEXT_BYTES = 2**20
"""A caption, a label or a JSON object of more bytes (1 MiB) cannot be used."""

_NUMBERS = "biuf"  # NumPy's kinds of those that may be 0 or 1
_MAX_DIGITS = 18  # Python reads thousands of them only to refuse them


@runtime_checkable
class Labels(Protocol):
    """Reads the label of one sample.

    Attributes:
        member: the extension of the member that holds the label.
        num_classes: ``k``.
    """

    member: str
    num_classes: int

    def zeros(self, count: int) -> np.ndarray:
        """Labels of samples without one: ``[count]`` int32 or ``[count k]`` float32."""
        ...

    def encode(self, content: bytes) -> int | np.ndarray:
        """One label, to be put into a row of ``zeros``.

        Raises:
            Unreadable: the content is no label of this vocabulary.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ClassIndex:
    """Labels that are class indices in the member ``.cls``.

    Attributes:
        names: a file with one class name a line; None means ``classnames.txt`` in the folder of the shards or the one
            above.
    """

    names: str | None = None

    def build(self, directory: str) -> Labels:
        """Reads the names; ``directory`` is where the shards lie."""
        path = self.names or _near(directory, "classnames.txt")
        return ClassIndexLabels(path, len(read_lines(path)))


@dataclasses.dataclass(frozen=True)
class CaptionWords:
    """Labels that mark which words of a fixed vocabulary stand in the caption (multi-label).

    A word is what white space separates, in lower case, so that ``double-struck`` is one word.

    Attributes:
        vocabulary: a file with one word a line; None means ``words.txt`` in the folder of the shards or the one above.
    """

    vocabulary: Path | None = None

    def build(self, directory: str) -> Labels:
        """Reads the vocabulary; ``directory`` is where the shards lie."""
        path = str(self.vocabulary or _near(directory, "words.txt"))
        return CaptionWordsLabels(path, read_lines(path))


@dataclasses.dataclass(frozen=True)
class MultiHot:
    """Labels that mark several classes: a NumPy vector of ones and zeros in the member ``.npy`` (clip_benchmark).

    Attributes:
        names: as for `ClassIndex`.
    """

    names: str | None = None

    def build(self, directory: str) -> Labels:
        """Reads the names; ``directory`` is where the shards lie."""
        path = self.names or _near(directory, "classnames.txt")
        return MultiHotLabels(path, len(read_lines(path)))


LabelsConfig: TypeAlias = ClassIndex | CaptionWords | MultiHot


class ClassIndexLabels:
    """Class indices ``[b]`` int32."""

    member = "cls"

    def __init__(self, path: str, num_classes: int):
        self._path = path
        self.num_classes = num_classes

    def zeros(self, count: int) -> np.ndarray:
        """Class 0 for each of ``count`` samples."""
        return np.zeros(count, np.int32)

    def encode(self, content: bytes) -> int:
        """The class index."""
        digits = text_of(content).strip()
        if not digits.isdecimal() or len(digits) > _MAX_DIGITS:
            detail = f"{digits[:100]!r} is no index below {self.num_classes}; make {self._path} and the shards agree"
            raise Unreadable("label is no class", detail)
        if int(digits) >= self.num_classes:
            detail = f"{digits!r} is no index below {self.num_classes}; {self._path} has too few names"
            raise Unreadable(OUT_OF_RANGE, detail)
        return int(digits)


class MultiHotLabels:
    """Multi-hot vectors ``[b k]`` float32 as they are stored."""

    member = "npy"

    def __init__(self, path: str, num_classes: int):
        self._path = path
        self.num_classes = num_classes

    def zeros(self, count: int) -> np.ndarray:
        """No class for each of ``count`` samples."""
        return np.zeros((count, self.num_classes), np.float32)

    def encode(self, content: bytes) -> np.ndarray:
        """The vector ``[k]``."""
        try:
            label = parse_npy(content)
        except Malformed as error:
            raise Unreadable("label is no NumPy array", storage.reason(error)) from error
        is_vector = label.shape == (self.num_classes,) and label.dtype.kind in _NUMBERS
        if not is_vector or not np.isin(label, (0, 1)).all():
            detail = f"it is not {self.num_classes} ones and zeros; make {self._path} and the shards agree"
            raise Unreadable("label is no vector of classes", detail)
        return label.astype(np.float32)


class CaptionWordsLabels:
    """Multi-hot vectors ``[b k]`` float32 of the words of captions."""

    member = "txt"

    def __init__(self, path: str, words: Sequence[str]):
        self._path = path
        self._columns = {word: column for column, word in enumerate(words)}
        self.num_classes = len(words)
        if len(self._columns) < len(words):
            raise UserError(f"{path}: a word stands in it twice; keep each word once")

    def zeros(self, count: int) -> np.ndarray:
        """No word for each of ``count`` samples."""
        return np.zeros((count, self.num_classes), np.float32)

    def encode(self, content: bytes) -> np.ndarray:
        """One for each word of the caption, ``[k]``."""
        label = np.zeros(self.num_classes, np.float32)
        try:
            label[[self._columns[word] for word in words_of(text_of(content))]] = 1
        except KeyError as error:
            detail = f"{str(error)[:100]} is not in {self._path}; make the vocabulary from these captions"
            raise Unreadable("unknown word", detail) from error
        return label


def _near(directory: str, name: str) -> str:
    """Returns the file in a folder, or in the one above where that alone has it."""
    near, above = f"{directory}/{name}", f"{storage.parent(directory)}/{name}"
    return above if not storage.exists(near) and storage.exists(above) else near


def text_of(content: bytes) -> str:
    """The text in a member.

    Raises:
        Unreadable: it is not UTF-8, or too long.
    """
    if len(content) > MAX_TEXT_BYTES:
        raise Unreadable("text too long", f"{len(content):,} bytes, at most {MAX_TEXT_BYTES:,} are read")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable("text is not UTF-8", error.reason) from error


def words_of(caption: str) -> list[str]:
    """The words of a caption: what white space separates, in lower case."""
    return caption.lower().split()
