"""Labelled sets of images: opened once, and read once for every image tower that is evaluated on them.

All evaluators of images begin with what the image tower makes of them (`Features`). A locked tower makes the same at
every evaluation of a run, which then reads no image again.
"""

import contextlib
import dataclasses
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import tyro
from jaxtyping import Float, Int

from lit_het import distributed
from lit_het.console import Bar, say
from lit_het.data_pipelines import storage
from lit_het.data_pipelines.index import ShardIndex
from lit_het.data_pipelines.labels import ClassIndex, LabelsConfig, MultiHot, text_of
from lit_het.data_pipelines.loader import Loader, LoaderConfig
from lit_het.data_pipelines.portions import ALL, Portion
from lit_het.data_pipelines.shards import IMAGE, expand
from lit_het.data_pipelines.storage import Unreadable, readable
from lit_het.data_pipelines.transforms import Preprocessing
from lit_het.errors import UserError, require_at_least
from lit_het.eval.prompts import CLASS_NAMES_FILE, TEMPLATES_FILE, read_classnames, read_templates
from lit_het.training import preemption
from lit_het.types import Batch, ImageFeatures

_MEMBERS_AT_A_TIME = 1024


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """A set in clip_benchmark's layout: shards in a folder, ``classnames.txt`` beside or above them.

    Attributes:
        name: as it stands in the names of figures.
        directory: holds ``classnames.txt``, which labels index, and the folders of shards; a path or an address.
        split: the folder of shards below it, or one that lies elsewhere: an address or an absolute path.
        portion: of the split's images, such as the last 2 % of a training set.
        batch_size: images that each device takes at a time, so that their number changes no result (nor what finds a
            slot in a mixture of experts).
        embeddings: a folder that ``lit-het embed`` wrote for these shards, to be read in place of images.
        multi_label: images have several classes, in vectors in members ``.npy``.
        max_bad_fraction: of the images that may be broken or unlabelled: they count in no figure.
        labelled: whether class names and labels are read at all.

    Raises:
        UserError: a batch without rows.
    """

    name: tyro.conf.Suppress[str]
    directory: tyro.conf.Suppress[str]
    split: str = "test"
    portion: Portion = ALL
    batch_size: int = 64
    embeddings: str | None = None
    multi_label: bool = False
    max_bad_fraction: float = 0.0
    labelled: tyro.conf.Suppress[bool] = True

    def __post_init__(self) -> None:
        require_at_least(1, self, "batch_size")

    @property
    def shards(self) -> str:
        """The folder of shards: below the set's, unless the split is an address or an absolute path itself."""
        if storage.is_remote(self.split) or os.path.isabs(self.split):
            return self.split
        if storage.is_remote(self.directory):
            return self.directory if self.split == "." else f"{self.directory}/{self.split}"
        return os.path.normpath(f"{self.directory}/{self.split}")


@dataclasses.dataclass(frozen=True)
class Features:
    """The images of a set that can be read, in its order.

    Attributes:
        values: what the image tower makes of them, members of an ensemble side by side.
        labels: class indices (zeros where labels are not read), or vectors of ones and zeros.
        positions: of each among all images of the set, those that cannot be read included.
    """

    values: Float[np.ndarray, "n f"]
    labels: Int[np.ndarray, " n"] | Float[np.ndarray, "n k"]
    positions: Int[np.ndarray, " n"]

    def take(self, rows: np.ndarray) -> "Features":
        """Returns those in some rows."""
        return Features(self.values[rows], self.labels[rows], self.positions[rows])


class _Place:
    """Shards that are opened, with labels or without, and what an image tower made of their images."""

    def __init__(self, data: LoaderConfig):
        self._data = data
        self.loaders: dict[LabelsConfig | None, Loader] = {}
        self._read: dict[LabelsConfig | None, tuple[str, Features]] = {}

    def open(self, labels: LabelsConfig | None, fingerprint: Callable[[], str]) -> Loader:
        if labels not in self.loaders:
            loader = Loader(dataclasses.replace(self._data, labels=labels))
            if loader.stored is not None:
                loader.stored.check_tower(fingerprint())
            self.loaders[labels] = loader
        return self.loaders[labels]

    def features(self, labels: LabelsConfig | None, tower: ImageFeatures, name: str) -> Features:
        """Returns the features with some of the labels; those of the tower that was asked for last are kept."""
        if labels not in self._read or self._read[labels][0] != tower.tower:
            loader = self.loaders[labels]
            found = self._of_labelled(tower, name) if labels is None else None
            self._read[labels] = tower.tower, _read(loader, tower, name) if found is None else found
        return self._read[labels][1]

    def _of_labelled(self, tower: ImageFeatures, name: str) -> Features | None:
        """Returns the features that are read with labels, if a label is missing nowhere: then all images are there.

        Whoever has opened the shards with labels reads them, now or later.
        """
        for labels in self.loaders:
            if labels is not None:
                found = self.features(labels, tower, name)
                if len(found.values) == self.loaders[None].num_samples:
                    return dataclasses.replace(found, labels=np.zeros(len(found.values), np.int32))
        return None


class OpenSet:
    """An `ImageSet` whose shards are indexed.

    Attributes:
        config: as given.
        class_names: names that labels index; none where labels are not read.
        loader: of its images.

    Raises:
        UserError: a file that is missing or malformed, or embeddings of another tower.
    """

    def __init__(self, config: ImageSet, place: _Place, fingerprint: Callable[[], str]):
        self.config, self._place = config, place
        self.class_names = read_classnames(config.directory) if config.labelled else ()
        self.loader = place.open(_labels(config), fingerprint)

    @property
    def templates(self) -> tuple[str, ...] | None:
        """The set's own prompt templates, if it has some."""
        has_own = storage.exists(f"{self.config.directory}/{TEMPLATES_FILE}")
        return read_templates(self.config.directory) if has_own else None

    def features(self, tower: ImageFeatures) -> Features:
        """Returns the features of all images; those of the tower that was asked for last are kept.

        Raises:
            UserError: too many images cannot be read, or none can.
        """
        return self._place.features(_labels(self.config), tower, self.config.name)

    def images(self, positions: Sequence[int]) -> list[np.ndarray]:
        """Returns images ``[h w c]`` as the tower sees them, for people to look at."""
        data = dataclasses.replace(self.loader.config, embeddings=None)
        loader = self.loader if self.loader.stored is None else Loader(data)
        image = loader.read(positions).image
        assert image is not None
        return list(image)

    def labels(self) -> Int[np.ndarray, " n"]:
        """Returns the labels that can be read, of a set with one label an image; no image is read."""
        labels, found = ClassIndex(f"{self.config.directory}/{CLASS_NAMES_FILE}").build(""), []
        for _, content in self._members(self.loader.index, labels.member):
            with contextlib.suppress(Unreadable):
                found.append(labels.encode(readable(content)))
        return np.array(found, np.int32)

    def texts(self, member: str) -> list[str]:
        """Returns the text members of all samples of a set without labels.

        Raises:
            UserError: one is missing or cannot be read.
        """
        addresses = [summary.address for summary in self.loader.index.summaries]
        index, found = ShardIndex(addresses, [IMAGE], [member]), []
        for position, content in self._members(index, member):
            try:
                found.append(text_of(readable(content)))
            except Unreadable as error:
                where = f"{index.shard(position)}: {index.key(position)}.{member}"
                raise UserError(f"{where}: {error}; name the member with captions by --captions") from error
        return found

    def _members(self, index: ShardIndex, member: str) -> Iterator[tuple[int, bytes | Unreadable]]:
        numbers = self.config.portion.of(len(index))
        with Bar(f"reading .{member} of {self.config.name}", len(numbers), "samples") as bar:
            for start in range(0, len(numbers), _MEMBERS_AT_A_TIME):
                block = numbers[start : start + _MEMBERS_AT_A_TIME]
                for position, (content,) in zip(block, index.read(block, [member]), strict=True):
                    yield position, content
                bar.advance(len(block))


class Sets:
    """The sets of one model's evaluations: those in one place, whatever they are called, share what is read there.

    Args:
        image_size: pixels along each side that the tower takes.
        preprocessing: that of the model's training.
        fingerprint: of the model's image tower, which stored embeddings must be of.
    """

    def __init__(self, image_size: int, preprocessing: Preprocessing, fingerprint: Callable[[], str]):
        self.image_size, self.preprocessing, self._fingerprint = image_size, preprocessing, fingerprint
        self._places: dict[LoaderConfig, _Place] = {}

    def open(self, config: ImageSet) -> OpenSet:
        """Opens a set; raises as `OpenSet`."""
        data = LoaderConfig(
            shards=(config.shards,),
            portion=config.portion,
            image_size=self.image_size,
            batch_size=config.batch_size,
            preprocessing=self.preprocessing,
            embeddings=config.embeddings,
            max_bad_fraction=config.max_bad_fraction,
        )
        return OpenSet(config, self._places.setdefault(data, _Place(data)), self._fingerprint)


def require_one_label(config: ImageSet) -> None:
    """Refuses a set whose images have several labels.

    Raises:
        UserError: they have.
    """
    if config.multi_label:
        raise UserError(f"{config.name}: only zero-shot measures images with several labels; leave out --multi-label")


def require_other_split(config: ImageSet, train_split: str) -> None:
    """Refuses to train on the images that are tested.

    Raises:
        UserError: both splits are one folder, however they are written.
    """
    shards = (config.shards, dataclasses.replace(config, split=train_split).shards)
    tested, trained_on = (posixpath.normpath(storage.absolute(folder)) for folder in shards)
    if tested == trained_on:
        raise UserError(
            f"{config.name}: cannot train and test on the same split, {config.split}; give another --train-split"
        )


def parse_set(argument: str, like: ImageSet) -> ImageSet:
    """Returns the set that ``NAME=FOLDER`` or ``FOLDER`` names, with the other fields of ``like``.

    The folder holds ``classnames.txt`` (if the set has classes) and either shards or a folder ``like.split`` of them;
    or it holds shards and the folder above it ``classnames.txt``. Without a name it has the folder's, ``test`` that of
    the folder above.

    Raises:
        UserError: there is no such folder, no class names, or a name with a slash.
    """
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).is_dir():
        name, path = "", argument
    if "/" in name:
        raise UserError(f"{argument}: the name of a set becomes that of a file; leave out the slash")
    folder = path.rstrip("/")
    if not folder:
        raise UserError(f"{argument!r} names no folder; write NAME=FOLDER, or FOLDER with classnames.txt and shards")
    parent, _, last = folder.rpartition("/")
    if not storage.is_remote(folder) and not Path(folder).is_dir():
        raise UserError(f"no folder {folder}; name a folder with classnames.txt and shards")
    directory, split = folder, "." if _has_shards(folder) else like.split
    if like.labelled and not storage.exists(f"{folder}/{CLASS_NAMES_FILE}"):
        directory, split = parent or ".", last
        if not storage.exists(f"{directory}/{CLASS_NAMES_FILE}"):
            raise UserError(f"no classnames.txt in {folder} or above it; write one with a class name a line")
    if not name:
        name = parent.rpartition("/")[2] if last == like.split and parent.rpartition("/")[2] else last
    return dataclasses.replace(like, name=name, directory=directory, split=split)


def _has_shards(folder: str) -> bool:
    try:
        return bool(expand(folder))
    except UserError:
        return False


def _labels(config: ImageSet) -> LabelsConfig | None:
    if not config.labelled:
        return None
    names = f"{config.directory}/{CLASS_NAMES_FILE}"
    return MultiHot(names) if config.multi_label else ClassIndex(names)


def _read(loader: Loader, tower: ImageFeatures, name: str) -> Features:
    if loader.stored is not None:
        loader.stored.check_tower(tower.tower)
    batches = loader.epoch(loader.config.batch_size * tower.num_shares, jax.process_index(), jax.process_count())
    with Bar(f"reading {name}", loader.num_samples, "images") as bar:
        found = read_features(tower, batches, bar.advance, name)
    for (shard, cause), count in sorted(loader.faults.counts.items()):
        say(f"{shard}: {count} samples left out: {cause}", by_all=True)
    return found


def read_features(
    tower: ImageFeatures, batches: Iterable[Batch], advance: Callable[[int], object], name: str
) -> Features:
    """Returns the features of the valid rows of all batches; ``advance`` is called with the images done.

    Raises:
        UserError: features that are not finite, or no valid row.
        Preempted: the run that this is a part of is to end.
    """
    values, labels, positions, seen = [], [], [], 0
    for batch, features in _ahead(tower, batches):
        preemption.leave_if_due()
        valid = distributed.rows_of_all(batch.valid)
        rows = np.asarray(features)[valid]
        if not np.isfinite(rows).all():
            raise UserError(f"{name}: an embedding is not finite; training diverged, use an earlier checkpoint")
        values.append(rows)
        of_batch = np.zeros(len(batch.valid), np.int32) if batch.label is None else np.asarray(batch.label)
        labels.append(distributed.rows_of_all(of_batch)[valid])
        positions.append(seen + np.flatnonzero(valid))
        seen += len(valid)
        advance(len(rows))
    if not sum(map(len, values)):
        raise UserError(f"{name}: the set holds no valid image; check its path and its shards")
    return Features(*(np.concatenate(parts) for parts in (values, labels, positions)))


def _ahead(tower: ImageFeatures, batches: Iterable[Batch]) -> Iterator[tuple[Batch, object]]:
    """Yields each batch with its features, when the device has the next batch already."""
    before = None
    for batch in batches:
        assert batch.view is not None
        now = batch, tower.extract(np.asarray(batch.view))
        if before is not None:
            yield before
        before = now
    if before is not None:
        yield before
