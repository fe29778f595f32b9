"""Images with several captions each: Karpathy's splits of COCO and Flickr, and COCO's own caption files."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het.data_pipelines.prepare.archives import Files, open_files
from lit_het.data_pipelines.prepare.dataset import DataSet, Sample, Split, fingerprint, images_in, select_splits
from lit_het.errors import UserError
from lit_het.untrusted import read_json

# Karpathy's split of those COCO validation images that papers add to the training set.
_EXTRA_TRAIN_SPLIT = "restval"
_PUBLISHED = {
    "coco": {"train": 113_287, "val": 5_000, "test": 5_000},
    "flickr30k": {"train": 29_000, "val": 1_014, "test": 1_000},
    "flickr8k": {"train": 6_000, "val": 1_000, "test": 1_000},
    "captions_train2017": {"train": 118_287},
    "captions_val2017": {"val": 5_000},
}

MAX_FILE_BYTES = 2**28
"""The largest accepted caption file: COCO's have 91 MB, and parsing may take 27 times as much memory."""


@dataclasses.dataclass(frozen=True)
class _Captioned:
    """An image in a caption file: its entry (for error messages), path, split and captions."""

    where: str
    path: str
    split: str
    captions: tuple[str, ...]


def read_captions(source: Path, scratch: Path, split: str | None = None, images: Path | None = None) -> DataSet:
    """Opens a published caption file; a sample's ``txt`` has one caption per line and its key is the image's name.

    Args:
        source: Karpathy's ``dataset_coco.json``, ``dataset_flickr30k.json`` or ``dataset_flickr8k.json``, or COCO's
            ``captions_val2017.json``.
        scratch: a folder with space for decompressed archives.
        split: which of Karpathy's splits to read; for COCO's files the split's name, by default from the file name.
        images: the folder or tar that contains the images at any depth; None means the folder of ``source``.

    Raises:
        UserError: the file has another format, a caption is empty or has no image, or an image is missing.
    """
    content = _read_json(source)
    if "annotations" in content:
        named = re.search(r"captions_([a-z]+)", source.stem)
        listed = _read_coco(content, source, split or (named[1] if named else "test"))
        published = _PUBLISHED.get(source.stem, {})
    else:
        listed, published = _read_karpathy(content, source), _PUBLISHED.get(str(content.get("dataset")), {})
    names = select_splits(sorted({one.split for one in listed}), split, str(source))
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
        raise UserError(f"{source}: is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{source}: is not a caption file, but a {type(content).__name__}; use a published one")
    return content


def _read_karpathy(content: dict[str, Any], source: Path) -> list[_Captioned]:
    listed = []
    for number, image in enumerate(_field(content, "images", list, str(source))):
        where = f"{source}: images[{number}]"
        split, name = (_field(image, field, str, where) for field in ("split", "filename"))
        texts = [_field(sentence, "raw", str, where) for sentence in _field(image, "sentences", list, where)]
        captions = tuple(_one_line(text, where) for text in texts)
        path = f"{image.get('filepath', '')}/{name}".lstrip("/")
        if not re.fullmatch(r"\w{1,100}", split):  # it becomes the name of a folder
            raise UserError(f"{where}: has the invalid split {split[:100]!r}; use a published file")
        listed.append(_Captioned(where, path, "train" if split == _EXTRA_TRAIN_SPLIT else split, captions))
    return listed


def _read_coco(content: dict[str, Any], source: Path, split: str) -> list[_Captioned]:
    images = {
        _field(image, "id", int, f"{source}: images[{number}]"): (number, image)
        for number, image in enumerate(_field(content, "images", list, str(source)))
    }
    captions: dict[int, list[str]] = {identifier: [] for identifier in images}
    for number, annotation in enumerate(_field(content, "annotations", list, str(source))):
        where = f"{source}: annotations[{number}]"
        identifier = _field(annotation, "image_id", int, where)
        if identifier not in captions:
            raise UserError(f"{where}: has the unknown image {identifier}; download the file again")
        captions[identifier].append(_one_line(_field(annotation, "caption", str, where), where))
    listed = []
    for identifier, (number, image) in images.items():
        where = f"{source}: images[{number}]"
        listed.append(_Captioned(where, _field(image, "file_name", str, where), split, tuple(captions[identifier])))
    return listed


def _field(entry: Any, name: str, kind: type, where: str) -> Any:
    value = entry.get(name) if isinstance(entry, Mapping) else None
    if not isinstance(value, kind):
        raise UserError(f"{where}: has no {name!r}, unlike published caption files; download it again")
    return value


def _one_line(text: str, where: str) -> str:
    """Replaces line breaks of a caption by spaces, because lines separate captions."""
    caption = " ".join(text.split())
    if not caption:
        raise UserError(f"{where}: has an empty caption; write one or remove the entry")
    try:
        caption.encode()
    except UnicodeEncodeError as error:  # JSON may contain lone surrogates
        raise UserError(f"{where}: has a caption that is not valid text ({error.reason}); fix it") from error
    return caption


def _split(listed: Sequence[_Captioned], files: Files, published: int | None) -> Split:
    captioned = [one for one in listed if one.captions]
    names = _find(captioned, files)
    # A dot would end the key in webdataset.
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
    """Returns the file of each image: at the listed path, or else with the same name in any folder."""
    anywhere: dict[str, list[str]] = {}
    for name in images_in(files):
        anywhere.setdefault(name.rpartition("/")[2], []).append(name)
    found = []
    for one in captioned:
        # Archives are unpacked into various folders; a name that is unique is enough.
        candidates = [one.path] if one.path in files.sizes else anywhere.get(one.path.rpartition("/")[2], [])
        if not candidates:
            raise UserError(f"{files.path}: holds no {one.path}, which {one.where} lists; set its folder with --images")
        if len(candidates) > 1:
            raise UserError(f"{one.where}: {' and '.join(candidates[:2])} both match; choose with --images")
        found += candidates
    return found
