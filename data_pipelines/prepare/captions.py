"""Images with several captions each: Karpathy's splits of COCO and Flickr, and COCO's own caption files."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het.data_pipelines.prepare.archives import Files, open_files
from lit_het.data_pipelines.prepare.dataset import DataSet, Sample, Split, chosen, fingerprint, images_in
from lit_het.errors import UserError
from lit_het.untrusted import read_json

# The part of COCO's validation images that everybody trains on.
_TRAINED_ON_TOO = "restval"
_PUBLISHED = {
    "coco": {"train": 113_287, "val": 5_000, "test": 5_000},
    "flickr30k": {"train": 29_000, "val": 1_014, "test": 1_000},
    "flickr8k": {"train": 6_000, "val": 1_000, "test": 1_000},
    "captions_train2017": {"train": 118_287},
    "captions_val2017": {"val": 5_000},
}

MAX_FILE_BYTES = 2**28
"""Larger caption files are refused: COCO's have 91 MB, and parsed they may take 27 times as much memory."""


@dataclasses.dataclass(frozen=True)
class _Captioned:
    """An image that a caption file lists: where, under which path, in which split, with which captions."""

    where: str
    path: str
    split: str
    captions: tuple[str, ...]


def read_captions(source: Path, scratch: Path, split: str | None = None, images: Path | None = None) -> DataSet:
    """Opens a published caption file; each sample's ``txt`` has one caption a line and its key is the image's name.

    Args:
        source: Karpathy's ``dataset_coco.json``, ``dataset_flickr30k.json`` or ``dataset_flickr8k.json``, or COCO's
            ``captions_val2017.json``.
        scratch: a folder with room for what is gzipped.
        split: which of Karpathy's splits to read; what to call COCO's, which else is as the file is called.
        images: the folder, or tar, in or below which the images lie; None means the folder of ``source``.

    Raises:
        UserError: the file is no such one, a caption is empty or of no image, or an image is missing.
    """
    content = _read_json(source)
    if "annotations" in content:
        called = re.search(r"captions_([a-z]+)", source.stem)
        listed = _of_coco(content, source, split or (called[1] if called else "test"))
        published = _PUBLISHED.get(source.stem, {})
    else:
        listed, published = _of_karpathy(content, source), _PUBLISHED.get(str(content.get("dataset")), {})
    names = chosen(sorted({one.split for one in listed}), split, str(source))
    files = open_files(images or source.parent, scratch)
    return DataSet(
        {name: _split([one for one in listed if one.split == name], files, published.get(name)) for name in names}
    )


def _read_json(source: Path) -> dict[str, Any]:
    try:
        content = read_json(source, MAX_FILE_BYTES)
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror}); name a caption file") from error
    except ValueError as error:
        raise UserError(f"{source}: is no JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{source}: is no caption file, but a {type(content).__name__}; take a published one")
    return content


def _of_karpathy(content: dict[str, Any], source: Path) -> list[_Captioned]:
    listed = []
    for number, image in enumerate(_field(content, "images", list, str(source))):
        where = f"{source}: images[{number}]"
        split, name = (_field(image, field, str, where) for field in ("split", "filename"))
        texts = [_field(sentence, "raw", str, where) for sentence in _field(image, "sentences", list, where)]
        captions = tuple(_one_line(text, where) for text in texts)
        path = f"{image.get('filepath', '')}/{name}".lstrip("/")
        if not re.fullmatch(r"\w{1,100}", split):  # it will be the name of a folder
            raise UserError(f"{where}: is of the split {split[:100]!r}; take a published file")
        listed.append(_Captioned(where, path, "train" if split == _TRAINED_ON_TOO else split, captions))
    return listed


def _of_coco(content: dict[str, Any], source: Path, split: str) -> list[_Captioned]:
    images = {
        _field(image, "id", int, f"{source}: images[{number}]"): (number, image)
        for number, image in enumerate(_field(content, "images", list, str(source)))
    }
    captions: dict[int, list[str]] = {identifier: [] for identifier in images}
    for number, annotation in enumerate(_field(content, "annotations", list, str(source))):
        where = f"{source}: annotations[{number}]"
        identifier = _field(annotation, "image_id", int, where)
        if identifier not in captions:
            raise UserError(f"{where}: is of image {identifier}, which is not among images; download the file again")
        captions[identifier].append(_one_line(_field(annotation, "caption", str, where), where))
    listed = []
    for identifier, (number, image) in images.items():
        where = f"{source}: images[{number}]"
        listed.append(_Captioned(where, _field(image, "file_name", str, where), split, tuple(captions[identifier])))
    return listed


def _field(entry: Any, name: str, kind: type, where: str) -> Any:
    value = entry.get(name) if isinstance(entry, Mapping) else None
    if not isinstance(value, kind):
        raise UserError(f"{where}: has no {name!r} as published caption files have; download it again")
    return value


def _one_line(text: str, where: str) -> str:
    """A caption whose line breaks are blanks, as lines separate captions."""
    caption = " ".join(text.split())
    if not caption:
        raise UserError(f"{where}: has an empty caption; write one or remove the entry")
    try:
        caption.encode()
    except UnicodeEncodeError as error:  # JSON may hold half of a surrogate pair
        raise UserError(f"{where}: has a caption that is no text ({error.reason}); mend it") from error
    return caption


def _split(listed: Sequence[_Captioned], files: Files, published: int | None) -> Split:
    captioned = [one for one in listed if one.captions]
    names = _find(captioned, files)
    keys = [Path(one.path).stem.replace(".", "_") for one in captioned]
    first: dict[str, _Captioned] = {}
    for key, one in zip(keys, captioned, strict=True):
        if first.setdefault(key, one) is not one:
            raise UserError(f"{one.where}: {one.path} has the name of {first[key].where}; names must differ")
    texts = ["\n".join(one.captions) for one in captioned]

    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        for number in numbers:
            members = {"txt": texts[number].encode()}
            yield Sample(files.read(names[number]), files.where(names[number]), members, keys[number])

    return Split(
        num_samples=len(captioned),
        read=read,
        fingerprint=fingerprint([*(f"{name}:{files.sizes[name]}" for name in names), *texts]),
        published=published,
        left_out={"without caption": len(listed) - len(captioned)},
    )


def _find(captioned: Sequence[_Captioned], files: Files) -> list[str]:
    """The name of each image among the files: under the path in the list, or in any folder."""
    anywhere: dict[str, list[str]] = {}
    for name in images_in(files):
        anywhere.setdefault(name.rpartition("/")[2], []).append(name)
    found = []
    for one in captioned:
        candidates = [one.path] if one.path in files.sizes else anywhere.get(one.path.rpartition("/")[2], [])
        if not candidates:
            raise UserError(f"{files.path}: holds no {one.path}, which {one.where} lists; name its folder by --images")
        if len(candidates) > 1:
            raise UserError(f"{one.where}: {' and '.join(candidates[:2])} may be meant; choose by --images")
        found += candidates
    return found
