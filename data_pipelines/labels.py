"""Labels of samples: the class in the member ``.cls``, a multi-hot vector, or the words of the caption."""

import codecs
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from lit_het.data_pipelines.labels_config import CLASS_NAMES_FILE
from lit_het.data_pipelines.labels_config import CaptionWords as CaptionWords
from lit_het.data_pipelines.labels_config import ClassIndex as ClassIndex
from lit_het.data_pipelines.labels_config import MultiHot as MultiHot
from lit_het.data_pipelines.shards import storage, urls
from lit_het.data_pipelines.shards.storage import Unreadable, read_lines
from lit_het.errors import UserError
from lit_het.untrusted import Malformed, parse_npy

OUT_OF_RANGE = "label is out of range"
"""The cause for a label beyond the class names. Then the file of names is wrong, not a few samples."""

MAX_TEXT_BYTES = 2**20
"""The largest caption, label or JSON object: 1 MiB."""

SOFT_LABELS = "soft.npy"
"""The member with the distribution of human answers over the class names, beside the class in ``cls``: ``[k]``."""

_NUMBERS = "biuf"  # NumPy kinds of booleans, integers and floats
_MAX_DIGITS = 18  # int() raises an error above 4,300 digits


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
        """Placeholder labels: ``[count]`` int32 or ``[count k]`` float32."""
        ...

    def encode(self, content: bytes) -> int | np.ndarray:
        """Returns one label, for a row of ``zeros``.

        Raises:
            Unreadable: the content is not a label of this vocabulary.
        """
        ...


class ClassIndexLabels:
    """Class indices ``[b]`` int32."""

    member = "cls"

    def __init__(self, path: str, num_classes: int):
        self._path = path
        self.num_classes = num_classes

    def zeros(self, count: int) -> np.ndarray:
        """Returns class 0 for each of ``count`` samples."""
        return np.zeros(count, np.int32)

    def encode(self, content: bytes) -> int:
        """Returns the class index."""
        digits = text_of(content).strip()
        if not digits.isdecimal() or len(digits) > _MAX_DIGITS:
            detail = (
                f"{digits[:100]!r} is not an index below {self.num_classes}; make {self._path} and the shards agree"
            )
            raise Unreadable("label is not a class", detail)
        if int(digits) >= self.num_classes:
            detail = f"{digits!r} is not an index below {self.num_classes}; {self._path} has too few names"
            raise Unreadable(OUT_OF_RANGE, detail)
        return int(digits)


class MultiHotLabels:
    """Stored multi-hot vectors ``[b k]`` float32."""

    member = "npy"

    def __init__(self, path: str, num_classes: int):
        self._path = path
        self.num_classes = num_classes

    def zeros(self, count: int) -> np.ndarray:
        """Returns zeros for each of ``count`` samples."""
        return np.zeros((count, self.num_classes), np.float32)

    def encode(self, content: bytes) -> np.ndarray:
        """Returns the vector ``[k]``."""
        try:
            label = parse_npy(content)
        except Malformed as error:
            raise Unreadable("label is not a NumPy array", storage.reason(error)) from error
        is_vector = label.shape == (self.num_classes,) and label.dtype.kind in _NUMBERS
        if not is_vector or not np.isin(label, (0, 1)).all():
            detail = f"expected {self.num_classes} ones and zeros; make {self._path} and the shards agree"
            raise Unreadable("label is not a multi-hot vector", detail)
        return label.astype(np.float32)


class CaptionWordsLabels:
    """Multi-hot vectors ``[b k]`` float32 of the words of captions."""

    member = "txt"

    def __init__(self, path: str, words: Sequence[str], *, ignore_others: bool = False):
        self._path, self._ignore_others = path, ignore_others
        self._columns = {word: column for column, word in enumerate(words)}
        self.num_classes = len(words)
        if len(self._columns) < len(words):
            raise UserError(f"{path}: a word is repeated; list each word once")

    def zeros(self, count: int) -> np.ndarray:
        """Returns zeros for each of ``count`` samples."""
        return np.zeros((count, self.num_classes), np.float32)

    def encode(self, content: bytes) -> np.ndarray:
        """Returns the multi-hot vector ``[k]`` of the caption's words."""
        label, words = np.zeros(self.num_classes, np.float32), words_of(text_of(content))
        if self._ignore_others:
            words = [word for word in words if word in self._columns]
        try:
            # A fancy index sets every word at once, and raises KeyError at the first unknown word before anything is
            # set.
            label[[self._columns[word] for word in words]] = 1
        except KeyError as error:
            detail = f"{str(error)[:100]} is not in {self._path}; make the vocabulary from these captions"
            raise Unreadable("unknown word", detail) from error
        return label


def distribution(content: bytes, num_classes: int) -> Float[np.ndarray, " k"]:
    """Returns the distribution over classes in a member `SOFT_LABELS`.

    Raises:
        Unreadable: the content is not a vector of probabilities that sum to 1.
    """
    try:
        found = parse_npy(content)
    except Malformed as error:
        raise Unreadable("soft label is not a NumPy array", storage.reason(error)) from error
    is_vector = found.shape == (num_classes,) and found.dtype.kind == "f"
    if not is_vector or not (found >= 0).all() or not np.isclose(found.sum(), 1, atol=1e-3):
        raise Unreadable("soft label is not a distribution", f"expected {num_classes} probabilities")
    return found.astype(np.float32)


def find_beside(directory: str, name: str) -> str:
    """Returns the path of a file in a folder, or in its parent if only the parent has the file."""
    # clip_benchmark has one file of names for all splits, so it lies above their folders.
    near, above = f"{directory}/{name}", f"{urls.parent(directory)}/{name}"
    return above if not storage.exists(near) and storage.exists(above) else near


def check_names_beside(addresses: Sequence[str]) -> None:
    """Refuses shards whose file of class names differs from that of the first one, with which labels are read."""
    # The folder of the first shard comes first, and each one once.
    first, *others = dict.fromkeys(
        find_beside(folder, CLASS_NAMES_FILE) for folder in dict.fromkeys(map(urls.parent, addresses))
    )
    for other in others:
        if storage.exists(other) and read_lines(other) != read_lines(first):
            raise UserError(
                f"{other}: differs from {first}, so one number is of two classes; prepare the sets together, or give "
                "the names of all in labels.names of the configuration"
            )


def text_of(content: bytes) -> str:
    """Decodes the text in a member, without the byte order mark that editors of Windows put before it.

    Raises:
        Unreadable: it is not UTF-8, or too long.
    """
    # Before decoding, which may take four times the memory.
    if len(content) > MAX_TEXT_BYTES:
        raise Unreadable("text too long", f"{len(content):,} bytes, at most {MAX_TEXT_BYTES:,} are read")
    # Without a mark, UTF-16 of English is UTF-8 too, with zeros between the letters.
    is_utf16 = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or 3 * content.count(0) > len(content)
    try:
        if not is_utf16:
            return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    raise Unreadable("text is not UTF-8", f"but perhaps {'UTF-16' if is_utf16 else 'Latin-1'}; save it as UTF-8")


def words_of(caption: str) -> list[str]:
    """Returns the lowercased words of a caption, split at white space."""
    return caption.lower().split()
