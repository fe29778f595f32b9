"""Images with questions and human answers: VQAv2, GQA, TextVQA, ST-VQA and OCR-VQA, from their published files.

A sample is an image with all its questions, in its member ``json``, in the order of the file:

```
{"questions": [{"id": 9000, "question": "How many cookies?", "answers": ["2", "two", ...], "type": "number"}, ...]}
```

Answers are those of the file, and none where a split has none. The type is the one by which a set reports accuracies.
"""

import collections
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lit_het.data_pipelines.prepare.archives import open_files
from lit_het.data_pipelines.prepare.dataset import DataSet, select_splits
from lit_het.data_pipelines.prepare.listed import Listed, field, key_of, match_name, read_object, split_of_listed
from lit_het.errors import UserError

MAX_FILE_BYTES = 2**29
"""The largest accepted file but for GQA's: VQAv2's training annotations have about 400 MB, OCR-VQA's file 300 MB.

Parsing takes 7 times as much memory (synthetic annotations of 36 MB), and may take 27 times as much for hostile files.
"""

MAX_GQA_BYTES = 2**31
"""The largest accepted file of GQA, whose questions come with programs: ``val_all`` has 1.6 GB, ``train_all`` more.

Parsing takes 7 times as much memory, too, hence the ten files of ``train_all`` (about 1.2 GB each) are read in turn.
"""

# Images of each set, where known.
_PUBLISHED_VQA = {"train": 82_783, "val": 40_504, "test": 81_434}
_PUBLISHED_GQA = {"train_balanced": 72_140, "val_balanced": 10_234, "testdev_balanced": 398}
_PUBLISHED_TEXTVQA = {"train": 21_953, "val": 3_166, "test": 3_289}

_GQA_ANSWERED = ("train", "val", "testdev")
_GQA_PARTS = 10  # files in train_all_questions
_OCR_VQA_SPLITS = {"train": 1, "val": 2, "test": 3}


class _Question(NamedTuple):
    """A question: its entry (for error messages), the path of its image as in `Listed`, and what is stored."""

    where: str
    path: str
    identifier: int | str
    text: str
    answers: tuple[str, ...] = ()
    type: str | None = None


class _Annotation(NamedTuple):
    """VQAv2's answers to a question about an image, and their type."""

    image: int
    answers: tuple[str, ...]
    type: str


def read_vqa(source: Path, scratch: Path, split: str | None = None, images: Path | None = None) -> DataSet:
    """Opens questions of VQAv2 (Goyal et al. 2017); the type of a question is that of its answers.

    Args:
        source: ``v2_OpenEnded_mscoco_train2014_questions.json`` or ``..._val2014_...``, beside
            ``v2_mscoco_train2014_annotations.json`` or ``..._val2014_...``; or the questions of ``test2015`` or
            ``test-dev2015``, which have no annotations.
        scratch: a folder with space for decompressed archives.
        split: None or the split in the name of ``source``.
        images: the folder or archive that contains the images at any depth; None means the folder of ``source``.
    """
    pattern = r"v2_OpenEnded_mscoco_((train|val|test|test-dev)(2014|2015))_questions\.json"
    subset, name, year = match_name(source, pattern, "v2_OpenEnded_mscoco_val2014_questions.json").groups()
    annotations = None if name.startswith("test") else source.parent / f"v2_mscoco_{subset}_annotations.json"
    # The questions of test-dev are about images of the test set.
    prefix = f"COCO_{name.removesuffix('-dev')}{year}"
    select_splits([name], split, str(source))
    listed = _by_image(_vqa(source, prefix, annotations))
    files = open_files(images or source.parent, scratch)
    return DataSet({name: split_of_listed(listed, files, _PUBLISHED_VQA.get(name))})


def read_gqa(source: Path, scratch: Path, split: str | None = None, images: Path | None = None) -> DataSet:
    """Opens questions of GQA (Hudson and Manning 2019); the type of a question is its structural type.

    Args:
        source: a file such as ``val_balanced_questions.json``, or the folder ``train_all_questions``.
        scratch: a folder with space for decompressed archives.
        split: None or the split in the name of ``source``.
        images: the folder or archive that contains the images at any depth; None means the folder of ``source``.
    """
    if source.is_dir():
        subset, parts = "train_all", [source / f"train_all_questions_{number}.json" for number in range(_GQA_PARTS)]
    else:
        pattern = r"((?:train|val|testdev|test|challenge|submission)_(?:all|balanced))_questions\.json"
        subset, parts = match_name(source, pattern, "val_balanced_questions.json")[1], [source]
    name = subset.partition("_")[0]
    select_splits([name], split, str(source))
    listed = _by_image(_gqa(parts, has_answers=name in _GQA_ANSWERED))
    files = open_files(images or source.parent, scratch)
    return DataSet({name: split_of_listed(listed, files, _PUBLISHED_GQA.get(subset))})


def read_textvqa(source: Path, scratch: Path, split: str | None = None, images: Path | None = None) -> DataSet:
    """Opens questions of TextVQA (Singh et al. 2019).

    Args:
        source: ``TextVQA_0.5.1_train.json``, ``TextVQA_0.5.1_val.json``, or ``TextVQA_0.5.1_test.json`` (no answers).
        scratch: a folder with space for decompressed archives.
        split: None or the split in the name of ``source``.
        images: the folder or archive that contains the images at any depth; None means the folder of ``source``.
    """
    name = match_name(source, r"TextVQA_[\d.]+_(train|val|test)\.json", "TextVQA_0.5.1_val.json")[1]
    select_splits([name], split, str(source))
    listed = _by_image(_data(source, "image_id", ".jpg", has_answers=name != "test"))
    files = open_files(images or source.parent, scratch)
    return DataSet({name: split_of_listed(listed, files, _PUBLISHED_TEXTVQA[name])})


def read_stvqa(source: Path, scratch: Path, split: str | None = None, images: Path | None = None) -> DataSet:
    """Opens questions of ST-VQA (Biten et al. 2019), those of its task 3.

    Args:
        source: ``train_task_3.json``, or ``test_task_3.json`` (no answers).
        scratch: a folder with space for decompressed archives.
        split: None or the split in the name of ``source``.
        images: the folder or archive that contains the images at any depth; None means the folder of ``source``.
    """
    name = match_name(source, r"(train|test)_task_3\.json", "train_task_3.json")[1]
    select_splits([name], split, str(source))
    listed = _by_image(_data(source, "file_path", "", has_answers=name != "test"))
    # Its images come from six data sets, each in a folder of its own: a name may occur in two of them.
    count = collections.Counter(key_of(one.path) for one in listed)
    distinct = [
        dataclasses.replace(one, key=key_of(one.path.replace("/", "_"))) if count[key_of(one.path)] > 1 else one
        for one in listed
    ]
    files = open_files(images or source.parent, scratch)
    return DataSet({name: split_of_listed(distinct, files, None)})


def read_ocrvqa(
    source: Path,
    scratch: Path,
    split: str | None = None,
    images: Path | None = None,
    *,
    skip_missing: bool = False,
) -> DataSet:
    """Opens questions of OCR-VQA (Mishra et al. 2019); the id of a question is its image's and its number from 0.

    Args:
        source: ``dataset.json``.
        scratch: a folder with space for decompressed archives.
        split: ``train``, ``val`` or ``test``; None means all.
        images: the folder or archive that contains the images at any depth; None means the folder of ``source``.
        skip_missing: leave out images that are missing, unless all of a split are: shops no longer show some of them.
    """
    names = select_splits(_OCR_VQA_SPLITS, split, str(source))
    content = read_object(source, MAX_FILE_BYTES)
    listed = {name: _by_image(_ocr_vqa(content, source, _OCR_VQA_SPLITS[name])) for name in names}
    files = open_files(images or source.parent, scratch)
    return DataSet({name: split_of_listed(listed[name], files, None, skip_missing=skip_missing) for name in names})


def _by_image(questions: Iterable[_Question]) -> list[Listed]:
    """Returns the images of questions, in the order of their first questions."""
    texts: dict[str, list[bytes]] = {}
    first: dict[str, str] = {}
    seen: set[int | str] = set()
    for one in questions:
        if one.identifier in seen:
            raise UserError(f"{one.where}: has the id {one.identifier!r} of an earlier question; download it again")
        seen.add(one.identifier)
        first.setdefault(one.path, one.where)
        # As bytes, the 14 million questions of GQA's train_all take far less memory than as dictionaries.
        texts.setdefault(one.path, []).append(_encoded(one))
    return [
        Listed(first[path], path, {"json": b'{"questions": [' + b", ".join(of_image) + b"]}"})
        for path, of_image in texts.items()
    ]


def _encoded(one: _Question) -> bytes:
    entry: dict[str, Any] = {"id": one.identifier, "question": one.text, "answers": one.answers}
    if one.type is not None:
        entry["type"] = one.type
    try:
        return json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON may contain lone surrogates
        raise UserError(f"{one.where}: has a text that is not valid ({error.reason}); fix it") from error


def _vqa(source: Path, prefix: str, annotations: Path | None) -> Iterator[_Question]:
    annotated = {} if annotations is None else _annotations(annotations)
    asked: set[int] = set()
    for number, entry in enumerate(field(read_object(source, MAX_FILE_BYTES), "questions", list, str(source))):
        where = f"{source}: questions[{number}]"
        identifier, image = (field(entry, name, int, where) for name in ("question_id", "image_id"))
        question = _Question(where, f"{prefix}_{image:012d}.jpg", identifier, field(entry, "question", str, where))
        if annotations is not None:
            found = annotated.get(identifier)
            if found is None or found.image != image:
                raise UserError(f"{where}: {annotations} has no answers to it about image {image}; download both again")
            question = question._replace(answers=found.answers, type=found.type)
        asked.add(identifier)
        yield question
    if unasked := annotated.keys() - asked:
        raise UserError(f"{annotations}: answers question {min(unasked)}, which {source} lacks; download both again")


def _annotations(path: Path) -> dict[int, _Annotation]:
    """Returns VQAv2's answers by the ids of questions."""
    found: dict[int, _Annotation] = {}
    for number, entry in enumerate(field(read_object(path, MAX_FILE_BYTES), "annotations", list, str(path))):
        where = f"{path}: annotations[{number}]"
        identifier, image = (field(entry, name, int, where) for name in ("question_id", "image_id"))
        if identifier in found:
            raise UserError(f"{where}: answers question {identifier} again; download it again")
        # Interned, because most of the four million answers are the same few words.
        answers = (sys.intern(field(one, "answer", str, where)) for one in field(entry, "answers", list, where))
        found[identifier] = _Annotation(image, tuple(answers), field(entry, "answer_type", str, where))
    return found


def _gqa(parts: Iterable[Path], *, has_answers: bool) -> Iterator[_Question]:
    for part in parts:
        for identifier, entry in read_object(part, MAX_GQA_BYTES).items():
            where = f"{part}: {identifier:.100}"
            text, image = (field(entry, name, str, where) for name in ("question", "imageId"))
            answers = (field(entry, "answer", str, where),) if has_answers else ()
            kind = field(field(entry, "types", dict, where), "structural", str, where) if "types" in entry else None
            yield _Question(where, f"{image}.jpg", identifier, text, answers, kind)


def _data(source: Path, image: str, suffix: str, *, has_answers: bool) -> Iterator[_Question]:
    """Yields the questions of TextVQA or ST-VQA, whose entries have the image's path but a suffix in a field."""
    for number, entry in enumerate(field(read_object(source, MAX_FILE_BYTES), "data", list, str(source))):
        where = f"{source}: data[{number}]"
        path, text = (field(entry, name, str, where) for name in (image, "question"))
        answers = _texts(entry, "answers", where) if has_answers else ()
        yield _Question(where, path + suffix, field(entry, "question_id", int, where), text, answers)


def _ocr_vqa(content: dict[str, Any], source: Path, split: int) -> Iterator[_Question]:
    for identifier, entry in content.items():
        where = f"{source}: {identifier:.100}"
        found = field(entry, "split", int, where)
        if found not in _OCR_VQA_SPLITS.values():
            raise UserError(f"{where}: has the split {found}, which is not 1, 2 or 3; download it again")
        if found == split:
            questions, answers = (_texts(entry, name, where) for name in ("questions", "answers"))
            if len(questions) != len(answers):
                raise UserError(
                    f"{where}: has {len(questions)} questions and {len(answers)} answers; download it again"
                )
            for number, (text, answer) in enumerate(zip(questions, answers, strict=True)):
                # The suffix is that of the web address, unless whoever loaded the images gave all of them the same.
                yield _Question(where, f"{identifier}.*", f"{identifier}_{number}", text, (answer,))


def _texts(entry: Any, name: str, where: str) -> tuple[str, ...]:
    texts = field(entry, name, list, where)
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: has {name!r} that are not texts, unlike published files; download it again")
    return tuple(texts)
