"""The interface between a source and the writer: splits whose samples can be read in any order."""

import codecs
import collections
import dataclasses
import hashlib
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Int

from lit_het.console import message
from lit_het.data_pipelines.prepare.archives import Files
from lit_het.data_pipelines.prepare.images import SUFFIXES, UNREAD_SUFFIXES
from lit_het.errors import UserError, pluralize

TEMPLATES = ("a photo of a {c}.", "a picture of the {c}.", "a close-up of a {c}.", "a {c}, seen from afar.")
"""Default prompt templates."""

SPLIT_NAMES = frozenset(
    ("train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval", "evaluation")
)
"""Names of splits in the paths of files, in any case: those that the Hugging Face hub knows."""

_MOST_NAMED = 8  # classes or suffixes in a message
_LIKE_SPLITS = re.compile("train|test|eval|val|dev")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One image and its other members.

    Attributes:
        image: its bytes, in the format of the source.
        origin: its location in the source, for error messages.
        members: further members by extension, such as ``txt``, the caption.
        key: of the sample; None uses its number.
        border: pixels to remove at each side of the image, which is then stored as PNG.
    """

    image: bytes
    origin: str
    members: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    key: str | None = None
    border: int = 0


@dataclasses.dataclass(frozen=True)
class Split:
    """The samples of one split.

    Attributes:
        num_samples: ``n``.
        read: yields the samples with the given numbers in that order; several threads may call it at once.
        fingerprint: identifies the samples and labels of the source.
        labels: class of each sample, or None.
        published: number of samples of the published data set, or None.
        left_out: number of excluded samples of the source, by reason.
    """

    num_samples: int
    read: Callable[[Sequence[int]], Iterator[Sample]]
    fingerprint: str
    labels: Int[np.ndarray, " n"] | None = None
    published: int | None = None
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class DataSet:
    """Splits and, if they have classes, class names.

    Attributes:
        splits: by the path of their folder.
        class_names: indexed by the labels; None if there are captions in place of labels, or if the names are those of
            the clean set beside corrupted copies.
        templates: prompts with the placeholder ``{c}`` for a class name.
        candidates: the class names of classifiers of more classes that can be evaluated, such as ImageNet's 1,000; None
            if the set has all classes of such classifiers.
        groups: for each class, the indices of the candidates that count as this class.
        categories: the classes of masks, in COCO's form; None if there are no masks.
    """

    splits: Mapping[str, Split]
    class_names: tuple[str, ...] | None = None
    templates: tuple[str, ...] = TEMPLATES
    candidates: tuple[str, ...] | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    categories: Sequence[Mapping[str, Any]] | None = None


def split_of_files(
    files: Files,
    images: Sequence[str],
    labels: Sequence[int] | None = None,
    captions: Sequence[str] | None = None,
    *,
    published: int | None = None,
    left_out: Mapping[str, int] | None = None,
    border: int = 0,
) -> Split:
    """Returns a split of image files in a folder or an archive.

    Args:
        files: the folder or archive.
        images: names of the image files.
        labels: the class of each image.
        captions: the name of each image's caption file.
        published: see `Split`.
        left_out: see `Split`.
        border: see `Sample`.
    """

    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        for number in numbers:
            members = {} if captions is None else {"txt": _without_mark(files.read(captions[number])).strip()}
            yield Sample(files.read(images[number]), files.where(images[number]), members, border=border)

    names = [*images, *(captions or ())]
    return Split(
        num_samples=len(images),
        read=read,
        # Names and sizes, not contents: reading a million images to compare them would take as long as writing them.
        fingerprint=fingerprint((*(f"{name}:{files.sizes[name]}" for name in names), *map(str, labels or ()))),
        labels=None if labels is None else np.asarray(labels, np.int32),
        published=published,
        left_out=left_out or {},
    )


def one_line(caption: bytes) -> bytes:
    """Returns a text without line breaks: to readers, each line is a caption of its own."""
    return b" ".join(_without_mark(caption).split())


def _without_mark(text: bytes) -> bytes:
    """Returns UTF-8 without its byte order mark, which other readers of shards would take for a character."""
    return text.removeprefix(codecs.BOM_UTF8)


def images_in(files: Files) -> list[str]:
    """Returns the sorted names of the files with an image suffix; a message counts images that cannot be read."""
    suffixes = (f".{name.rpartition('.')[2].lower()}" for name in files.sizes)
    unread = collections.Counter(suffix for suffix in suffixes if suffix in UNREAD_SUFFIXES)
    if unread:
        counts = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(unread.items()))
        message(f"{files.path}: left out {counts}; to use them, save them as JPEG, PNG or WebP")
    return [name for name in files.sizes if name.lower().endswith(SUFFIXES)]


def files_beside(files: Files, images: Sequence[str], suffix: str) -> dict[str, str]:
    """Returns the file beside each image with its name and this suffix, in any case: ``A.TXT`` of ``A.JPG``."""
    found: dict[str, str] = {}
    beside = {name.rpartition(".")[0] for name in images}
    for name in files.sizes:
        stem = name[: -len(suffix)]
        if stem in beside and name.lower().endswith(suffix) and (other := found.setdefault(stem, name)) != name:
            raise UserError(f"{files.where(name)}: is of the same image as {other}; keep one of them")
    return {name: found[stem] for name in images if (stem := name.rpartition(".")[0]) in found}


def tell_unused(files: Files, used: Collection[str]) -> None:
    """Prints how many files are not used, by suffix, without those that `images_in` counts."""
    suffixes = (PurePosixPath(name).suffix.lower() for name in files.sizes if name not in used)
    unused = collections.Counter(suffix for suffix in suffixes if suffix not in UNREAD_SUFFIXES)
    if unused:
        each = [f"{count:,} {suffix or 'without suffix'}" for suffix, count in unused.most_common()]
        message(
            f"{files.path}: not used: {_first(each)}; images end in .jpg or alike, and 1.txt is the caption of 1.jpg"
        )


def fingerprint(parts: Iterable[str | bytes]) -> str:
    """Returns a checksum over strings and bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part)
        # A separator: without it ("ab", "c") and ("a", "bc") would have one fingerprint.
        digest.update(b"\0")
    return digest.hexdigest()


def refuse_alike(classes: Iterable[str], source: str) -> None:
    """Refuses names of classes that would be one class to a reader."""
    seen: dict[str, str] = {}
    for name in classes:
        if name != name.encode("utf-8", "replace").decode():
            raise UserError(f"{source}: the name of the class {name!a} is not UTF-8; rename it")
        key = " ".join(unicodedata.normalize("NFC", name.replace("_", " ")).casefold().split())
        if (other := seen.setdefault(key, name)) != name:
            raise UserError(
                f"{source}: {other!r} and {name!r} are of one class, as they differ only in case, spaces or Unicode "
                "form; join or rename them"
            )


def tell_classes(split: str, names: Sequence[str], counts: Int[np.ndarray, " k"]) -> None:
    """Prints the classes of a split with the numbers of their images."""
    each = [f"{name} ({count:,})" for name, count in zip(names, counts.tolist(), strict=True)]
    message(f"{split}: {pluralize(len(names), 'class')}, with images: {_first(each)}")


def _first(each: Sequence[str]) -> str:
    more = f" and {len(each) - _MOST_NAMED:,} more" if len(each) > _MOST_NAMED else ""
    return f"{', '.join(each[:_MOST_NAMED])}{more}"


def only_split(source: Path) -> str:
    """Returns the split of a source that names none: its own name, if that is one, otherwise ``train``."""
    name = source.resolve().name.partition(".")[0].lower()
    return name if name in SPLIT_NAMES else "train"


def look_like_splits(names: Collection[str]) -> bool:
    """Returns whether all of some names, none of them a split's, may be of splits: ``train2017`` and ``val2017``."""
    found = [_LIKE_SPLITS.search(name.lower()) for name in names]
    return len({match and match[0] for match in found}) > 1 and all(found)


def select_splits(available: Iterable[str], split: str | None, source: str) -> list[str]:
    """Returns the splits to read: the requested one, or all."""
    names = list(available)
    if split is not None and split not in names:
        raise UserError(f"{source}: has no split {split!r}, only {', '.join(names)}; choose with --split")
    return names if split is None else [split]
