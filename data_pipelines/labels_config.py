"""The configurations of labels, see `lit_het.data_pipelines.labels`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

if TYPE_CHECKING:
    from lit_het.data_pipelines.labels import Labels

CLASS_NAMES_FILE = "classnames.txt"
"""The class names of a data set in its folder: one per line; the line number is the label."""


@dataclasses.dataclass(frozen=True)
class ClassIndex:
    """Labels that are class indices in the member ``.cls``.

    Attributes:
        names: a file with one class name per line; None means ``classnames.txt`` in the folder of the shards or its
            parent.
        has_one_class: whether each image has one class.
    """

    names: str | None = None

    has_one_class: ClassVar[bool] = True

    def build(self, directory: str) -> "Labels":
        """Reads the names; ``directory`` is the folder of the shards."""
        from lit_het.data_pipelines.labels import ClassIndexLabels, find_beside
        from lit_het.data_pipelines.shards.storage import read_lines

        path = self.names or find_beside(directory, CLASS_NAMES_FILE)
        return ClassIndexLabels(path, len(read_lines(path)))


@dataclasses.dataclass(frozen=True)
class CaptionWords:
    """Multi-hot labels of the words of a fixed vocabulary that occur in the caption.

    Words are lowercased and separated by white space, so that ``double-struck`` is one word.

    Attributes:
        vocabulary: a file with one word per line; None means ``words.txt`` in the folder of the shards or its parent.
        ignore_others: whether a caption may have other words, which are then no labels; it is unreadable otherwise.
    """

    vocabulary: Path | None = None
    ignore_others: bool = False

    has_one_class: ClassVar[bool] = False

    def build(self, directory: str) -> "Labels":
        """Reads the vocabulary; ``directory`` is the folder of the shards."""
        from lit_het.data_pipelines.labels import CaptionWordsLabels, find_beside
        from lit_het.data_pipelines.shards.storage import read_lines

        path = str(self.vocabulary or find_beside(directory, "words.txt"))
        return CaptionWordsLabels(path, read_lines(path), ignore_others=self.ignore_others)


@dataclasses.dataclass(frozen=True)
class MultiHot:
    """Multi-hot labels: a NumPy vector of ones and zeros in the member ``.npy``, as in clip_benchmark.

    Attributes:
        names: as for `ClassIndex`.
    """

    names: str | None = None

    has_one_class: ClassVar[bool] = False

    def build(self, directory: str) -> "Labels":
        """Reads the names; ``directory`` is the folder of the shards."""
        from lit_het.data_pipelines.labels import MultiHotLabels, find_beside
        from lit_het.data_pipelines.shards.storage import read_lines

        path = self.names or find_beside(directory, CLASS_NAMES_FILE)
        return MultiHotLabels(path, len(read_lines(path)))


LabelsConfig: TypeAlias = ClassIndex | CaptionWords | MultiHot
