"""Images with several captions each: Karpathy's splits of COCO and Flickr, COCO's own caption files, and TextCaps."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_het.data_pipelines.prepare.archives import Files, open_files
from lit_het.data_pipelines.prepare.dataset import DataSet, Split, select_splits
from lit_het.data_pipelines.prepare.listed import Listed, field, match_name, read_object, split_of_listed
from lit_het.errors import UserError

# Karpathy's split of those COCO validation images that papers add to the training set.
_EXTRA_TRAIN_SPLIT = "restval"
_PUBLISHED = {
    "coco": {"train": 113_287, "val": 5_000, "test": 5_000},
    "flickr30k": {"train": 29_000, "val": 1_014, "test": 1_000},
    "flickr8k": {"train": 6_000, "val": 1_000, "test": 1_000},
    "captions_train2017": {"train": 118_287},
    "captions_val2017": {"val": 5_000},
}
_PUBLISHED_TEXTCAPS = {"train": 21_953, "val": 3_166, "test": 3_289}

MAX_FILE_BYTES = 2**28
"""The largest accepted caption file: COCO's have 91 MB, and parsing may take 27 times as much memory."""

MAX_TEXTCAPS_BYTES = 2**29
"""The largest accepted file of TextCaps: each of 109,765 training captions comes with all of its image, and tokens."""


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
    """
    content = read_object(source, MAX_FILE_BYTES)
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


def read_textcaps(source: Path, scratch: Path, split: str | None = None, images: Path | None = None) -> DataSet:
    """Opens a file of TextCaps; a sample's ``txt`` has one caption per line, and images of the test set have none.

    Args:
        source: ``TextCaps_0.1_train.json``, ``TextCaps_0.1_val.json`` or ``TextCaps_0.1_test.json``.
        scratch: a folder with space for decompressed archives.
        split: None or the split in the name of ``source``.
        images: the folder or archive that contains the images at any depth; None means the folder of ``source``.
    """
    named = match_name(source, r"TextCaps_[\d.]+_(train|val|test)\.json", "TextCaps_0.1_val.json")[1]
    select_splits([named], split, str(source))
    captions: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for number, entry in enumerate(field(read_object(source, MAX_TEXTCAPS_BYTES), "data", list, str(source))):
        where = f"{source}: data[{number}]"
        path = f"{field(entry, 'image_id', str, where)}.jpg"
        first.setdefault(path, where)
        texts = captions.setdefault(path, [])
        if named != "test":
            texts.append(_one_line(field(entry, "caption_str", str, where), where))
    listed = [
        Listed(first[path], path, {"txt": "\n".join(texts).encode()} if texts else {})
        for path, texts in captions.items()
    ]
    files = open_files(images or source.parent, scratch)
    return DataSet({named: split_of_listed(listed, files, _PUBLISHED_TEXTCAPS[named])})


def _read_karpathy(content: dict[str, Any], source: Path) -> list[_Captioned]:
    listed = []
    for number, image in enumerate(field(content, "images", list, str(source))):
        where = f"{source}: images[{number}]"
        split, name = (field(image, key, str, where) for key in ("split", "filename"))
        texts = [field(sentence, "raw", str, where) for sentence in field(image, "sentences", list, where)]
        captions = tuple(_one_line(text, where) for text in texts)
        path = f"{image.get('filepath', '')}/{name}".lstrip("/")
        if not re.fullmatch(r"\w{1,100}", split):  # it becomes the name of a folder
            raise UserError(f"{where}: has the invalid split {split[:100]!r}; use a published file")
        listed.append(_Captioned(where, path, "train" if split == _EXTRA_TRAIN_SPLIT else split, captions))
    return listed


def _read_coco(content: dict[str, Any], source: Path, split: str) -> list[_Captioned]:
    images = {
        field(image, "id", int, f"{source}: images[{number}]"): (number, image)
        for number, image in enumerate(field(content, "images", list, str(source)))
    }
    captions: dict[int, list[str]] = {identifier: [] for identifier in images}
    for number, annotation in enumerate(field(content, "annotations", list, str(source))):
        where = f"{source}: annotations[{number}]"
        identifier = field(annotation, "image_id", int, where)
        if identifier not in captions:
            raise UserError(f"{where}: has the unknown image {identifier}; download the file again")
        captions[identifier].append(_one_line(field(annotation, "caption", str, where), where))
    listed = []
    for identifier, (number, image) in images.items():
        where = f"{source}: images[{number}]"
        listed.append(_Captioned(where, field(image, "file_name", str, where), split, tuple(captions[identifier])))
    return listed


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
    captioned = [
        Listed(one.where, one.path, {"txt": "\n".join(one.captions).encode()}) for one in listed if one.captions
    ]
    return split_of_listed(captioned, files, published, {"without caption": len(listed) - len(captioned)})
