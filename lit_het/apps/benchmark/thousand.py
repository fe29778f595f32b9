"""The 1,000 images of a task of VTAB-1k, copied to folders of 800 and of 200, which choose between settings.

Which images these are, is fixed by the authors' code (task_adaptation at d7630d3): the first 800 of the training split,
and the first 200 of a validation split. It is a folder of the set, or the end of the training split from a fixed image
on; without either, the last 200 images of what is there.
"""

import dataclasses
import glob
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het.data_pipelines.labels import ClassIndexLabels
from lit_het.data_pipelines.labels_config import CLASS_NAMES_FILE
from lit_het.data_pipelines.shards import urls
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.storage import Unreadable, content_or_raise, read_lines
from lit_het.data_pipelines.shards.writing import IMAGE, expand, matching, write_shards
from lit_het.errors import UserError, pluralize
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.benchmarks import check_complete
from lit_het.files import completed_folder

TRAIN, VALIDATION = "train800", "val200"
NUM_TRAIN, NUM_VALIDATION = 800, 200
# The first image of the validation set, where the training split holds it too.
_STARTS: Mapping[str, int] = {
    "caltech101": 2754,
    "cifar100": 45_000,
    "pets": 2944,
    "svhn": 65_931,
    "eurosat": 16_200,
    "resisc45": 18_900,
    "clevr_closest_object_distance": 63_000,
    "clevr_count_all": 63_000,
    "dsprites_label_orientation": 589_824,
    "dsprites_label_x_position": 589_824,
}
_TRAIN_SPLIT, _VALIDATION_SPLITS = "train", ("val", "validation", "valid")
# Where the images are from.
_SOURCE = "source.json"
_MEMBERS = (IMAGE, ClassIndexLabels.member)
_IMAGES_PER_READ = 100


@dataclasses.dataclass(frozen=True)
class Images:
    """Consecutive images of a split.

    Attributes:
        index: of the split.
        chosen: the numbers of the images.
    """

    index: ShardIndex
    chosen: range

    @property
    def folder(self) -> str:
        """The address of the split."""
        return urls.parent(self.index.summaries[0].address)

    @property
    def source(self) -> dict[str, Any]:
        """Identifies the images."""
        return {"samples": self.index.digest, "first": self.chosen.start, "count": len(self.chosen)}


def require_test(data: ImageSet) -> None:
    """Raises a `UserError` if a set has no complete test split, which is read only after all trainings."""
    if not _has_shards(data):
        raise UserError(f"{data.directory} has no folder {data.split} with shards, to test on; export it as well")
    check_complete(data)


def write_thousand(name: str, directory: str, folder: Path) -> int:
    """Copies the 1,000 images of a task to ``train800`` and ``val200`` of a folder, unless they are there.

    Args:
        name: of the task.
        directory: of the set, in clip_benchmark's layout; a path or a URL.
        folder: to write to; the class names are copied, too.

    Returns:
        The number of classes.

    Raises:
        UserError: the set has no training split, too few images, or its images are sorted by class; a label is not
            that of a class; or the folder holds other images.
    """
    names = read_lines(f"{directory}/{CLASS_NAMES_FILE}")
    found = choose(name, directory)
    source = json.dumps({split: images.source for split, images in found.items()}, indent=1) + "\n"
    if folder.exists():
        if not (folder / _SOURCE).is_file() or (folder / _SOURCE).read_text() != source:
            raise UserError(f"{folder} holds images of another set; delete it, or give another --output")
        return len(names)
    labels = ClassIndexLabels(f"{directory}/{CLASS_NAMES_FILE}", len(names))
    try:
        with completed_folder(folder) as partial:
            for split, images in found.items():
                seen = list[int]()
                write_shards(partial / split, _samples(images, labels, seen))
                _check_order(split, images, seen, len(names))
            (partial / CLASS_NAMES_FILE).write_text("".join(f"{one}\n" for one in names), "utf-8")
            (partial / _SOURCE).write_text(source, "utf-8")
    except OSError:
        if not folder.exists():  # another process that shares the output has written the same images
            raise
    return len(names)


def choose(name: str, directory: str) -> dict[str, Images]:
    """Returns which images of a set are those of `TRAIN` and `VALIDATION`; raises as `write_thousand`."""
    train = _index(name, directory, _TRAIN_SPLIT)
    if train is None:
        raise UserError(
            f"{directory} has no folder {_TRAIN_SPLIT} with shards, of which VTAB-1k trains on 1,000 images; "
            "export it as well, such as by clip_benchmark_export_wds --split train"
        )
    validation = next(filter(None, (_index(name, directory, split) for split in _VALIDATION_SPLITS)), None)
    start, where = 0, f"{directory}/{_TRAIN_SPLIT} has {pluralize(len(train), 'image')}"
    if validation is None:
        # A training split without the images of the validation set ends before their published start.
        start = min(_STARTS.get(name, len(train)), len(train) - NUM_VALIDATION)
        validation, is_enough = train, start >= NUM_TRAIN
    else:
        is_enough = len(train) >= NUM_TRAIN and len(validation) >= NUM_VALIDATION
        where += f", and its validation split {len(validation):,}"
    if not is_enough:
        raise UserError(f"{where}; VTAB-1k takes {NUM_TRAIN} and {NUM_VALIDATION}")
    return {
        TRAIN: Images(train, range(NUM_TRAIN)),
        VALIDATION: Images(validation, range(start, start + NUM_VALIDATION)),
    }


def _index(name: str, directory: str, split: str) -> ShardIndex | None:
    """Returns the labelled images of a split; None if it has no shards."""
    data = ImageSet(name, directory, split)
    if not _has_shards(data):
        return None
    check_complete(data)
    return ShardIndex(expand(data.shards), _MEMBERS)


def _has_shards(data: ImageSet) -> bool:
    return bool(matching(f"{glob.escape(data.shards)}/*.tar"))


def _check_order(split: str, images: Images, seen: Sequence[int], num_classes: int) -> None:
    """Raises a `UserError` for the labels of images that are sorted by class, or of few of the classes."""
    count = len(set(seen))
    # Of images in random order, each class is hardly one run. The 200 need not have most of the classes.
    if count == sum(1 for _ in itertools.groupby(seen)) or (split == TRAIN and 2 * count < num_classes):
        raise UserError(
            f"the {len(seen)} images of {images.folder} from number {images.chosen.start} are of {count} of "
            f"{pluralize(num_classes, 'class')}, or sorted by class; write its shards in random order"
        )


def _samples(images: Images, labels: ClassIndexLabels, seen: list[int]) -> Iterator[dict[str, Any]]:
    """Yields the samples to write, and adds their labels to ``seen``."""
    for start in range(0, len(images.chosen), _IMAGES_PER_READ):
        block = images.chosen[start : start + _IMAGES_PER_READ]
        for number, contents in zip(block, images.index.read(block, _MEMBERS), strict=True):
            try:
                image, label = map(content_or_raise, contents)
                seen.append(labels.encode(label))
            except Unreadable as error:
                raise UserError(f"{images.index.shard(number)}: {images.index.key(number)}: {error}") from error
            # Keys may begin anew in every shard; the content decides the format of an image.
            yield {"__key__": f"{number:06d}", "jpg": image, "cls": label}
