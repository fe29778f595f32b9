"""Labelled sets of images, as configurations and the command line name them; `lit_het.eval.features` reads them."""

import dataclasses
import os

import tyro

from lit_het.data_pipelines.labels_config import CLASS_NAMES_FILE
from lit_het.data_pipelines.shards import urls
from lit_het.data_pipelines.shards.portions import ALL, Portion
from lit_het.errors import UserError, require_at_least

# The class names where labels are the words of captions.
WORDS_FILE = "words.txt"


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """A set in clip_benchmark's layout: shards in a folder, with ``classnames.txt`` in it or in its parent.

    Attributes:
        name: used in the names of metrics.
        directory: the folder with ``classnames.txt``, which labels index, and the folders of shards; a path or a URL.
        split: the folder of shards in the directory; or, for shards elsewhere, a URL or an absolute path.
        portion: the part of the split's images to use, such as the last 2 % of a training set.
        batch_size: images per device. The number of devices then changes no result, nor which images get a slot in a
            mixture of experts.
        embeddings: a folder written by ``lit-het embed`` for these shards, read in place of images.
        multi_label: images have several classes, as vectors in members ``.npy``.
        caption_words: images have several classes, the words of their captions (members ``.txt``) that ``words.txt``
            lists, in place of ``classnames.txt``.
        max_bad_fraction: the fraction of images that may be broken or unlabelled; these are left out of all metrics.
        labelled: whether class names and labels are read.
    """

    name: tyro.conf.Suppress[str]
    directory: tyro.conf.Suppress[str]
    split: str = "test"
    portion: Portion = ALL
    batch_size: int = 64
    embeddings: str | None = None
    multi_label: bool = False
    caption_words: bool = False
    max_bad_fraction: float = 0.0
    labelled: tyro.conf.Suppress[bool] = True

    def __post_init__(self) -> None:
        require_at_least(1, self, "batch_size")
        if self.multi_label and self.caption_words:
            raise UserError("labels are vectors or words of captions; give one of --multi-label and --caption-words")

    @property
    def has_several_labels(self) -> bool:
        """Whether an image may have several classes."""
        return self.multi_label or self.caption_words

    @property
    def names_file(self) -> str:
        """The name of the file with the class names."""
        return WORDS_FILE if self.caption_words else CLASS_NAMES_FILE

    @property
    def shards(self) -> str:
        """The folder of shards: in the set's directory, unless the split is a URL or an absolute path."""
        if urls.is_remote(self.split) or os.path.isabs(self.split):
            return self.split
        if urls.is_remote(self.directory):
            return self.directory if self.split == "." else f"{self.directory}/{self.split}"
        return os.path.normpath(f"{self.directory}/{self.split}")


def require_one_label(config: ImageSet) -> None:
    """Checks that a set has one label per image."""
    if config.has_several_labels:
        flag = "--caption-words" if config.caption_words else "--multi-label"
        raise UserError(
            f"{config.name}: only zero-shot and ensemble support several labels per image; leave out {flag}"
        )


def require_other_split(config: ImageSet, train_split: str) -> None:
    """Checks that the training split is not the test split."""
    if have_same_shards(config, dataclasses.replace(config, split=train_split)):
        raise UserError(
            f"{config.name}: cannot train and test on the same split, {config.split}; give another --train-split"
        )


def have_same_shards(one: ImageSet, other: ImageSet) -> bool:
    """Returns whether the shards of two sets are in the same folder, also where its path is written differently."""
    return urls.canonical(one.shards) == urls.canonical(other.shards)
