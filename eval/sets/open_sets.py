"""Sets of images, opened once and read once for each image tower.

A locked tower has the same features in every evaluation of a run, so its images are read only once.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Float, Int

from lit_het.console import Bar, message
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing, RandomCrop
from lit_het.data_pipelines.labels import SOFT_LABELS, distribution, text_of
from lit_het.data_pipelines.labels_config import CLASS_NAMES_FILE, CaptionWords, ClassIndex, LabelsConfig, MultiHot
from lit_het.data_pipelines.shards import storage, urls
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.storage import Unreadable, content_or_raise, read_lines
from lit_het.data_pipelines.texts.captions import Tokenizer
from lit_het.data_pipelines.texts.prompts import TEMPLATES_FILE, read_templates
from lit_het.errors import MissingText, UserError, pluralize
from lit_het.eval.features import Features, ReadingTime, joined, stream_features
from lit_het.eval.sets import ImageSet
from lit_het.types import ImageFeatures

_MEMBERS_PER_READ = 1024
_Text = TypeVar("_Text")


class _OpenShards:
    """Opened shards, with and without labels, and the features of their images."""

    def __init__(self, data: LoaderConfig, spent: ReadingTime, tokenizer: Tokenizer | None):
        self._data, self.spent, self._tokenizer = data, spent, tokenizer
        self.loaders: dict[LabelsConfig | None, Loader] = {}
        self._read: dict[LabelsConfig | None, dict[str, Features]] = {}

    def open(self, labels: LabelsConfig | None, fingerprint: Callable[[], str]) -> Loader:
        if labels not in self.loaders:
            loader = Loader(dataclasses.replace(self._data, labels=labels), self._tokenizer, has_captions=False)
            if loader.stored is not None:
                loader.stored.check_tower(fingerprint())
            self.loaders[labels] = loader
        return self.loaders[labels]

    def features(self, labels: LabelsConfig | None, towers: Sequence[ImageFeatures], name: str) -> list[Features]:
        """Returns the features by each tower and the given kind of labels, see `OpenSet.features_of`."""
        known = self._read.get(labels, {})
        distinct = list({tower.tower: tower for tower in towers}.values())
        missing = [tower for tower in distinct if tower.tower not in known]
        if missing:
            found = self._from_labelled(distinct, name) if labels is None else None
            if found is None:
                read = iter(joined(_stream(self.loaders[labels], missing, name, self.spent)))
                found = [next(read) if tower in missing else known[tower.tower] for tower in distinct]
            known = self._read[labels] = {tower.tower: rows for tower, rows in zip(distinct, found, strict=True)}
        return [known[tower.tower] for tower in towers]

    def _from_labelled(self, towers: Sequence[ImageFeatures], name: str) -> list[Features] | None:
        """Returns the features that are read with labels, if every image has a label; None otherwise.

        Shards that are opened with labels are read with labels sooner or later, so that reading them now costs nothing.
        """
        for labels in self.loaders:
            if labels is not None:
                found = self.features(labels, towers, name)
                # With an unlabelled or unreadable image the two passes would give different rows.
                if len(found[0].values) == self.loaders[None].num_samples:
                    return [rows.unlabelled() for rows in found]
        return None


class OpenSet:
    """An `ImageSet` whose shards are indexed.

    Attributes:
        config: of the set.
        class_names: the names that labels index; empty if labels are not read.
        loader: of its images.
    """

    def __init__(self, config: ImageSet, shards: _OpenShards, fingerprint: Callable[[], str]):
        self.config, self._shards = config, shards
        self.class_names = read_lines(f"{config.directory}/{config.names_file}") if config.labelled else ()
        self.loader = shards.open(_labels(config), fingerprint)

    @property
    def has_images(self) -> bool:
        """Whether samples have images, and not texts to translate."""
        return self.loader.config.source is None

    @property
    def templates(self) -> tuple[str, ...] | None:
        """The set's own prompt templates; None if it has none."""
        has_own = storage.exists(f"{self.config.directory}/{TEMPLATES_FILE}")
        return read_templates(self.config.directory) if has_own else None

    def features(self, tower: ImageFeatures) -> Features:
        """Returns the features of all images, see `features_of`."""
        return self.features_of([tower])[0]

    def features_of(self, towers: Sequence[ImageFeatures]) -> list[Features]:
        """Returns the features of all images by each tower; images are read once for all towers together.

        The features are kept until those of a tower that is not among these are asked for.
        """
        return self._shards.features(_labels(self.config), towers, self.config.name)

    def stream(self, tower: ImageFeatures) -> Iterator[Features]:
        """Yields the features of each batch and keeps none: all tokens of all images may not fit in memory."""
        for (rows,) in _stream(self.loader, [tower], self.config.name, self._shards.spent):
            yield rows

    def images(self, positions: Sequence[int]) -> list[np.ndarray]:
        """Returns the preprocessed images ``[h w 3]``, for display."""
        data = dataclasses.replace(self.loader.config, embeddings=None)
        loader = self.loader if self.loader.stored is None else Loader(data)
        image = loader.read(positions).image
        assert image is not None
        return [data.preprocessing.picture(one) for one in image]

    def require_crops(self) -> None:
        """Checks that images can be cropped."""
        if self.loader.stored is not None:
            raise UserError(
                f"{self.config.name}: random crops are of images, not of stored embeddings; leave out --embeddings"
            )
        if self.loader.config.preprocessing.patches is not None:
            raise UserError(
                f"{self.config.name}: random crops are squares, and the tower takes images of any shape; leave out "
                "--crops"
            )

    def augmented(self, crop: InceptionCrop | RandomCrop, seed: int) -> Loader:
        """Returns a loader of the same samples whose views are random crops, flipped at random."""
        self.require_crops()
        data = self.loader.config
        return Loader(
            dataclasses.replace(data, crop=crop, augmentations=(HorizontalFlip(),), seed=seed), has_captions=False
        )

    def contents(self, kinds: Sequence[str]) -> Callable[[int], list[bytes]]:
        """Indexes further members; returns what reads those of the sample at a position of the set."""
        index = ShardIndex([one.address for one in self.loader.index.summaries], self.loader.required, kinds)

        def read(position: int) -> list[bytes]:
            number = self.loader.numbers[position]
            (found,) = index.read([number], kinds)
            try:
                return [content_or_raise(content) for content in found]
            except Unreadable as error:
                raise UserError(
                    f"{index.shard(number)}: {index.key(number)}: {error}; prepare the set again"
                ) from error

        return read

    def labels(self) -> Int[np.ndarray, " n"]:
        """Returns the readable labels of a single-label set, without reading images."""
        labels, found = ClassIndex(f"{self.config.directory}/{CLASS_NAMES_FILE}").build(""), []
        for _, content in self._members(self.loader.index, labels.member):
            with contextlib.suppress(Unreadable):
                found.append(labels.encode(content_or_raise(content)))
        return np.array(found, np.int32)

    def keys(self) -> list[str]:
        """Returns the key of every sample, in the order of the set."""
        return [self.loader.index.key(number) for number in self.loader.numbers]

    def soft_labels(self) -> Float[np.ndarray, "n k"] | None:
        """Returns the distribution of human answers of every sample of a single-label set, None if it has none."""
        addresses = [summary.address for summary in self.loader.index.summaries]
        index = ShardIndex(addresses, self.loader.required, [SOFT_LABELS])
        if not (index.sizes(SOFT_LABELS)[list(self.loader.numbers)] >= 0).any():
            return None
        found = []
        for position, content in self._members(index, SOFT_LABELS):
            try:
                found.append(distribution(content_or_raise(content), len(self.class_names)))
            except Unreadable as error:
                where = f"{index.shard(position)}: {index.key(position)}.{SOFT_LABELS}"
                raise UserError(f"{where}: {error}; prepare the set again") from error
        return np.stack(found)

    def texts(self, member: str, parse: Callable[[str], _Text]) -> list[_Text | None]:
        """Returns what is in the text member of every sample, for a set opened without labels; None if it is bad.

        Args:
            member: the kind of the member.
            parse: a text to its content; raises `Unreadable`.
        """
        addresses = [summary.address for summary in self.loader.index.summaries]
        index, bad = ShardIndex(addresses, self.loader.required, [member]), list[str]()
        found: list[_Text | None] = []
        for position, content in self._members(index, member):
            try:
                found.append(parse(text_of(content_or_raise(content))))
            except Unreadable as error:
                found.append(None)
                bad.append(f"{index.shard(position)}: {index.key(position)}.{member}: {error}")
                if len(bad) > self.config.max_bad_fraction * len(self.loader.numbers):
                    raise MissingText(bad[0]) from error
        if bad:
            message(f"{self.config.name}: {pluralize(len(bad), 'sample')} left out, the first is {bad[0]}")
        return found

    def _members(self, index: ShardIndex, member: str) -> Iterator[tuple[int, bytes | Unreadable]]:
        numbers = self.loader.numbers
        with Bar(f"reading .{member} of {self.config.name}", len(numbers), "samples") as bar:
            for start in range(0, len(numbers), _MEMBERS_PER_READ):
                # Blocks of members, so that requests to a store overlap.
                block = [numbers[place] for place in range(start, min(start + _MEMBERS_PER_READ, len(numbers)))]
                for position, (content,) in zip(block, index.read(block, [member]), strict=True):
                    yield position, content
                bar.advance(len(block))


class Sets:
    """Opens the sets of one model's evaluations; sets on the same shards share their features, whatever their names.

    Args:
        image_size: side length of the tower's input, in pixels.
        preprocessing: that of the model's training.
        fingerprint: of the model's image tower; stored embeddings must have the same.
        source: the member with the text to translate, read in place of images.
        tokenizer: of this text.

    Attributes:
        image_size, preprocessing: as given.
        spent: on reading all sets.
    """

    def __init__(
        self,
        image_size: int,
        preprocessing: Preprocessing,
        fingerprint: Callable[[], str],
        source: str | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self._source, self._tokenizer = source, tokenizer
        self.image_size, self.preprocessing, self._fingerprint = image_size, preprocessing, fingerprint
        self.spent = ReadingTime()
        # By configuration, not by name: two names of the same shards share one pass over the images.
        self._opened: dict[LoaderConfig, _OpenShards] = {}
        self._sets: list[OpenSet] = []

    def open(self, config: ImageSet, captions: str | None = None) -> OpenSet:
        """Opens a set; raises as `OpenSet`, and a `UserError` for a portion by captions that are not read.

        Args:
            config: of the set.
            captions: the member with the captions that the evaluation reads; None if it reads none.
        """
        captions = captions if config.portion.by in ("caption", "name") else LoaderConfig.captions
        if captions is None:
            raise UserError(
                f"{config.name}: portion {config.portion}: this evaluation reads no captions; give a portion by "
                "sample, by key or in order"
            )
        data = LoaderConfig(
            shards=(config.shards,),
            captions=captions,
            portion=config.portion,
            image_size=self.image_size,
            batch_size=config.batch_size,
            preprocessing=self.preprocessing,
            embeddings=config.embeddings,
            source=self._source,
            max_bad_fraction=config.max_bad_fraction,
        )
        shards = self._opened.setdefault(data, _OpenShards(data, self.spent, self._tokenizer))
        self._sets.append(OpenSet(config, shards, self._fingerprint))
        return self._sets[-1]

    @property
    def digest(self) -> str:
        """Identifies the samples, class names and templates of all sets that were opened."""
        content = [(one.loader.digest, one.class_names, one.templates) for one in self._sets]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _labels(config: ImageSet) -> LabelsConfig | None:
    if not config.labelled:
        return None
    names = f"{config.directory}/{config.names_file}"
    if config.caption_words:
        # `Path` would take a slash of an address away: at one, the words lie beside the shards or above.
        return CaptionWords(None if urls.is_remote(names) else Path(names))
    return MultiHot(names) if config.multi_label else ClassIndex(names)


def _stream(loader: Loader, towers: Sequence[ImageFeatures], name: str, spent: ReadingTime) -> Iterator[list[Features]]:
    """Yields the features of the readable images of each batch by each tower."""
    if loader.stored is not None:
        for tower in towers:
            loader.stored.check_tower(tower.tower)
    # Models of different meshes split batches over different numbers of devices.
    shards = math.lcm(*(tower.num_shards for tower in towers))
    batches = loader.epoch(loader.config.batch_size * shards, jax.process_index(), jax.process_count())
    with Bar(f"reading {name}", loader.num_samples, "samples") as bar:
        yield from stream_features(towers, batches, bar.advance, name, spent)
    for (shard, cause), count in sorted(loader.faults.counts.items()):
        message(f"{shard}: {pluralize(count, 'sample')} left out: {cause}", on_all_processes=True)
