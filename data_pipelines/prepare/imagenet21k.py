"""ImageNet-21k from its published tars, one per class, and ImageNet-21K-P (Ridnik et al. 2021) from its tar.

The release has 14 million images: 33 bytes are kept of each, and images are read where they lie.
"""

import array
import hashlib
import itertools
import os
import re
import tarfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import numpy as np
from jaxtyping import Int

from lit_het import untrusted
from lit_het.console import Bar, message
from lit_het.data_pipelines.prepare.dataset import DataSet, Sample, Split, fingerprint, select_splits
from lit_het.data_pipelines.prepare.imagenet import TEMPLATES
from lit_het.data_pipelines.prepare.images import SUFFIXES
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.data_pipelines.shards.tars import DamagedTar, Member, is_hidden, whole_members
from lit_het.errors import UserError, pluralize

TEST_IMAGES = 102_400
"""How many images HET-XL tests on (App. G.3)."""

NUM_FALL11 = 21_841
WITHOUT_IMAGES = ("n03931044", "n09859684")
"""Those of the 21,843 classes of published models of which the release of fall 2011 has no images."""

_WNID = re.compile(r"n\d{8}")
# Images of the release of fall 2011, and of ImageNet-21K-P of fall 2011 and of winter 2021 by the number of classes.
_FALL11_IMAGES = 14_197_122
_PROCESSED = {11_221: {"train": 11_797_632, "test": 561_052}, 10_450: {"train": 11_060_223, "test": 522_500}}
_PARTS = {"train": 0, "val": 1}
_NO_PART = 2
_HEADER_BYTES, _NAME_BYTES = 512, 100


class _Image(NamedTuple):
    wnid: str
    part: int  # of `_PARTS`
    name: str
    offset: int
    size: int


class _Images(NamedTuple):
    """Where all images lie, ``n`` of each array; WNIDs are numbers, ``rank`` is a hash of class and file name."""

    tars: Sequence[Path]
    tar: Int[np.ndarray, " n"]
    wnid: Int[np.ndarray, " n"]
    part: Int[np.ndarray, " n"]
    rank: Int[np.ndarray, " n"]
    offset: Int[np.ndarray, " n"]
    size: Int[np.ndarray, " n"]


def read_imagenet21k(
    source: Path,
    split: str | None = None,
    *,
    classes: Path | None = None,
    words: Path | None = None,
    test_images: int = TEST_IMAGES,
    skip_broken: bool = False,
) -> DataSet:
    """Opens the release or ImageNet-21K-P; labels are ranks of the WNIDs, by default among those of the source.

    The release has no splits. ``test`` is a random choice that depends on the images' names alone: those with the least
    hashes. ImageNet-21K-P has folders ``..._train`` and ``..._val``, which is ``test``.

    Args:
        source: ``fall11_whole.tar``, another tar of ``n00004475.tar`` and so on or of folders of classes, or a folder
            with such tars.
        split: ``train`` or ``test``; None for both.
        classes: a file with a WNID on each line, in the order of the labels, such as those of published models.
        words: a file with ``WNID<tab>names`` on each line, such as WordNet's ``words.txt``; None names classes by their
            WNIDs.
        test_images: how many are in ``test``, of sources without splits.
        skip_broken: whether damaged tars are used as far as they are whole.
    """
    if test_images < 1:
        raise UserError(f"--test-images {test_images}: must be at least 1")
    images = _index(_tars(source), skip_broken)
    if not len(images.tar):
        raise UserError(f"{source}: holds no images of classes; name the tars of ImageNet-21k, such as n00004475.tar")
    left_out: dict[str, int] = {}
    if is_processed := bool((images.part != _NO_PART).any()):
        # Its archive has the classes that it leaves out, too.
        outside = images.part == _NO_PART
        images = _Images(images.tars, *(column[~outside] for column in images[1:]))
        left_out = {"of classes outside of train and val": int(outside.sum())}
    present = [f"n{number:08d}" for number in np.unique(images.wnid).tolist()]
    wnids = classes_of(present) if classes is None else _listed(classes, present)
    if is_processed:
        parts = {name: images.part == _PARTS[part] for name, part in (("train", "train"), ("test", "val"))}
        parts = {name: rows for name, rows in parts.items() if rows.any()}
        published = _PROCESSED.get(len(present), {})
    else:
        chosen = _chosen(images, test_images, source)
        parts = {"train": ~chosen, "test": chosen}
        is_whole = len(present) == NUM_FALL11
        published = {"train": _FALL11_IMAGES - test_images, "test": test_images} if is_whole else {}
    splits = {
        name: _split(images, np.flatnonzero(parts[name]), wnids, published.get(name), left_out)
        for name in select_splits(parts, split, str(source))
    }
    return DataSet(splits, class_names(wnids, words), TEMPLATES)


def classes_of(present: Collection[str]) -> tuple[str, ...]:
    """Returns the classes by their labels: sorted WNIDs, with those of `WITHOUT_IMAGES` for the release of fall 2011.

    Published models have these 21,843 in sorted order (BiT's ``imagenet21k_wordnet_ids.txt``, timm's
    ``imagenet21k_goog_synsets.txt``).
    """
    more = WITHOUT_IMAGES if len(set(present)) == NUM_FALL11 and not set(present) & set(WITHOUT_IMAGES) else ()
    return tuple(sorted({*present, *more}))


def class_names(wnids: Sequence[str], words: Path | None) -> tuple[str, ...]:
    """Returns a different name for each class: its first word; all its words; or these with its WNID."""
    if words is None:
        return tuple(wnids)
    found: dict[str, str] = {}
    for number, line in enumerate(read_lines(str(words)), 1):
        wnid, tab, names = line.partition("\t")
        if not (_WNID.fullmatch(wnid) and tab and names.strip(" ,")):
            raise UserError(f"{words}: line {number} is not a WNID, a tab and names: {line[:80]!r}")
        found[wnid] = names.strip()
    if missing := next((wnid for wnid in wnids if wnid not in found), None):
        raise UserError(f"{words}: has no line of {missing}; give the words of the whole release, or none")
    names = [found[wnid].partition(",")[0].strip() or found[wnid] for wnid in wnids]
    for longer in (lambda wnid: found[wnid], lambda wnid: f"{found[wnid]} ({wnid})"):
        _, inverse, counts = np.unique(names, return_inverse=True, return_counts=True)
        repeated = (counts[inverse] > 1).tolist()
        names = [longer(wnid) if more else name for wnid, name, more in zip(wnids, names, repeated, strict=True)]
    return tuple(names)


def _tars(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    tars = sorted(source.glob("*.tar"))
    if not tars:
        raise UserError(f"{source}: holds no tars; folders of images are read by lit-het data prepare folder")
    return tars


def _index(tars: Sequence[Path], skip_broken: bool) -> _Images:
    columns = [array.array(kind) for kind in "iibQqq"]
    sizes = [path.stat().st_size >> 20 for path in tars]
    with Bar("listing images", sum(sizes), "MiB") as bar:
        for number, path in enumerate(tars):
            seen = 0
            for image in _images(path, skip_broken):
                digest = hashlib.blake2b(f"{image.wnid}/{image.name}".encode("utf-8", "surrogateescape"), digest_size=8)
                rank = int.from_bytes(digest.digest(), "little")
                row = (number, int(image.wnid[1:]), image.part, rank, image.offset, image.size)
                for column, value in zip(columns, row, strict=True):
                    column.append(value)
                # One tar may hold all images.
                if (now := image.offset >> 20) > seen:
                    bar.advance(now - seen)
                    seen = now
            bar.advance(sizes[number] - seen)
    tar, wnid, part, rank, offset, size = (np.frombuffer(column, column.typecode) for column in columns)
    ranks, counts = np.unique(rank, return_counts=True)
    if (counts > 1).any():
        pair = np.flatnonzero(rank == ranks[counts > 1][0])[:2].tolist()
        first, other = (tars[int(tar[row])] for row in pair)
        with _open(other) as file:
            name = PurePosixPath(_name_at(file, int(offset[pair[1]]))).name
        raise UserError(f"{other}: has {name}, which is {'there' if other == first else f'in {first}'}, too; keep one")
    # By class and name, so that labels, splits and order do not depend on how the tars were packed.
    order = np.lexsort((rank, wnid))
    return _Images(tars, *(column[order] for column in (tar, wnid, part, rank, offset, size)))


def _images(path: Path, skip_broken: bool) -> Iterator[_Image]:
    with _open(path) as file:
        if file.read(2) == b"\x1f\x8b":
            raise UserError(f"{path}: is gzipped, and its images are read in random order; unpack it with gunzip first")
        end = os.fstat(file.fileno()).st_size
        if _WNID.fullmatch(path.stem):
            yield from _of_class(path, file, 0, end, path.stem, skip_broken)
            return
        for member in _members(path, file, 0, end, "", skip_broken):
            name = PurePosixPath(member.name)
            if name.suffix == ".tar" and _WNID.fullmatch(name.stem):
                yield from _of_class(path, file, member.offset, member.offset + member.size, name.stem, skip_broken)
            elif name.name.lower().endswith(SUFFIXES) and _WNID.fullmatch(name.parent.name):
                part = _PARTS.get(name.parent.parent.name.rpartition("_")[2], _NO_PART)
                yield _Image(name.parent.name, part, name.name, member.offset, member.size)


def _of_class(path: Path, file: IO[bytes], start: int, end: int, wnid: str, skip_broken: bool) -> Iterator[_Image]:
    for member in _members(path, file, start, end, wnid, skip_broken):
        if member.name.lower().endswith(SUFFIXES):
            name = PurePosixPath(member.name).name
            yield _Image(wnid, _NO_PART, name, member.offset, member.size)


def _members(path: Path, file: IO[bytes], start: int, end: int, wnid: str, skip_broken: bool) -> Iterator[Member]:
    """Yields the files in a tar, whole or within another; damage is an error, or ends it with a message."""
    inner = f": {wnid}.tar" if wnid and path.stem != wnid else ""
    try:
        for member in whole_members(file, start, end):
            if member.is_file and not is_hidden(member.name):
                yield member
    except (tarfile.TarError, DamagedTar) as error:
        reason = f"is {error}" if isinstance(error, DamagedTar) else f"is not a tar archive ({error})"
        if not skip_broken:
            advice = "download it again, or use what is whole with --skip-broken"
            raise UserError(f"{path}{inner}: {reason}; {advice}") from error
        message(f"{path}{inner}: {reason}; what is left of it is skipped")


def _listed(path: Path, present: Sequence[str]) -> tuple[str, ...]:
    wnids = tuple(line.strip() for line in read_lines(str(path)))
    if bad := next((wnid for wnid in wnids if not _WNID.fullmatch(wnid)), None):
        raise UserError(f"{path}: {bad[:80]!r} is not a WNID such as n00004475; write one on each line")
    if len(set(wnids)) < len(wnids):
        raise UserError(f"{path}: lists a WNID twice; its lines are the labels")
    if unlisted := [wnid for wnid in present if wnid not in set(wnids)]:
        raise UserError(
            f"{path}: lacks {unlisted[0]} ({pluralize(len(unlisted), 'class')} in all) of the source; add it"
        )
    return wnids


def _chosen(images: _Images, count: int, source: Path) -> np.ndarray:
    """Returns which images are the test split: those with the least hashes."""
    if len(images.rank) <= count:
        raise UserError(
            f"{source}: has {pluralize(len(images.rank), 'image')}, and {count:,} of them would be the test split; "
            "choose fewer with --test-images"
        )
    chosen = np.zeros(len(images.rank), bool)
    chosen[np.argpartition(images.rank, count)[:count]] = True
    return chosen


def _split(
    images: _Images, rows: np.ndarray, wnids: Sequence[str], published: int | None, left_out: dict[str, int]
) -> Split:
    numbers = np.array([int(wnid[1:]) for wnid in wnids])
    # Classes of a file may be in any order.
    order = np.argsort(numbers)
    labels = order[np.searchsorted(numbers[order], images.wnid[rows])].astype(np.int32)

    def read(chosen: Sequence[int]) -> Iterator[Sample]:
        for tar, group in itertools.groupby(rows[chosen].tolist(), lambda row: int(images.tar[row])):
            # Of 21,841 tars not all can be open at once.
            with _open(images.tars[tar]) as file:
                for row in group:
                    yield _sample(images.tars[tar], file, int(images.offset[row]), int(images.size[row]))

    parts = (images.rank[rows].tobytes(), images.size[rows].tobytes(), labels.tobytes())
    return Split(len(rows), read, fingerprint(parts), labels, published, left_out)


def _sample(path: Path, file: IO[bytes], offset: int, size: int) -> Sample:
    # pread, as the file may be larger than what buffered reading would skip fast.
    return Sample(os.pread(file.fileno(), size, offset), f"{path}: {_name_at(file, offset)}")


def _name_at(file: IO[bytes], offset: int) -> str:
    """Returns the name of the member whose content is at an offset."""
    header = os.pread(file.fileno(), _NAME_BYTES, max(0, offset - _HEADER_BYTES))
    return header.partition(b"\0")[0].decode("utf-8", "replace")


def _open(path: Path) -> IO[bytes]:
    try:
        return untrusted.open_regular(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path of the source") from error
