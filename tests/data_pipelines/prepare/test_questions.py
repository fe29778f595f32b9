"""Published files of questions become shards with one sample per image."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lit_het.cli.main import main
from lit_het.data_pipelines.prepare.questions import read_gqa, read_ocrvqa, read_stvqa, read_textvqa, read_vqa
from tests.data_pipelines.prepare.conftest import GOLDEN, changed, make_image, make_json, write, written
from tests.refusals import assert_refused


def annotation(identifier: int, image: int, kind: str, *answers: str) -> dict[str, Any]:
    """Returns an entry of VQAv2's annotations."""
    return {
        "question_id": identifier,
        "image_id": image,
        "question_type": "none of the above",
        "multiple_choice_answer": answers[0],
        "answer_type": kind,
        "answers": [
            {"answer_id": number, "answer": answer, "answer_confidence": "maybe"}
            for number, answer in enumerate(answers, 1)
        ],
    }


def gqa_entry(image: str, question: str, answer: str, kind: str = "query") -> dict[str, Any]:
    return {
        "imageId": image,
        "question": question,
        "answer": answer,
        "fullAnswer": f"It is {answer}.",
        "isBalanced": True,
        "semantic": [{"operation": "select", "dependencies": [], "argument": "wall (12)"}],
        "types": {"detailed": "relS", "semantic": "rel", "structural": kind},
    }


COUNTS = ["2"] * 7 + ["two", "3", "2 "]
VQA_PREFIX, VQA_KEY = "v2_OpenEnded_mscoco_", "COCO_test2015_000000000001"
VQA_FILE = f"{VQA_PREFIX}train2014_questions.json"
VQA = {
    "info": {"version": "2.0"},
    "data_subtype": "train2014",
    "questions": [
        {"image_id": 9, "question": "How many cookies?", "question_id": 9000},
        {"image_id": 25, "question": "Is it sunny?", "question_id": 25001},
        {"image_id": 9, "question": "What is “this”?", "question_id": 9002},
    ],
}
VQA_ANSWERS_FILE = "v2_mscoco_train2014_annotations.json"
VQA_ANSWERS = {
    "annotations": [
        annotation(9002, 9, "other", *["tea"] * 10),
        annotation(25001, 25, "yes/no", *["yes"] * 10),
        annotation(9000, 9, "number", *COUNTS),
    ]
}
GQA_FILE = "val_balanced_questions.json"
GQA = {
    "07333408": gqa_entry("2375429", "What is on the white wall?", "pipe"),
    "07333405": gqa_entry("n161313", "Is it red?", "no", "verify"),
    "00000001": gqa_entry("2375429", "Which side?", "left", "choose"),
}
TEXTVQA_FILE = "TextVQA_0.5.1_val.json"
TEXTVQA = {
    "dataset_type": "val",
    "data": [
        {"question": "which brand?", "image_id": "003a8ae2", "question_id": 34602, "answers": ["nokia"] * 9 + [""]},
        {"question": "what time?", "image_id": "005635e1", "question_id": 34603, "answers": ["10:10"] * 10},
        {"question": "what is it?", "image_id": "003a8ae2", "question_id": 34604, "answers": ["a phone"] * 10},
    ],
}
STVQA_FILE = "train_task_3.json"
STVQA = {
    "data": [
        {"question": "Which price?", "file_path": "icdar/img_1.jpg", "question_id": 0, "answers": ["$5", "5"]},
        {"question": "Which shop?", "file_path": "iiit/img_1.jpg", "question_id": 2, "answers": ["spar"]},
        {"question": "Which year?", "file_path": "icdar/img_2.x.jpg", "question_id": 1, "answers": ["1999"]},
    ]
}
OCRVQA_FILE = "dataset.json"
OCRVQA = {
    "761183272": {
        "imageURL": "http://example.org/61Y5cOdHJbL.jpg",
        "questions": ["Who wrote this book?", "Is this a comedy?"],
        "answers": ["Sandra Boynton", "No"],
        "title": "Calendar",
        "split": 1,
    },
    "B00": {"imageURL": "http://example.org/a.gif", "questions": ["What year?"], "answers": ["2016"], "split": 3},
    "157": {"imageURL": "http://example.org/b.jpg", "questions": ["Who?"], "answers": ["A. Nobody"], "split": 2},
}
KINDS: dict[str, tuple[Callable[..., Any], dict[str, object], tuple[str, ...]]] = {
    "vqa": (
        read_vqa,
        {VQA_FILE: VQA, VQA_ANSWERS_FILE: VQA_ANSWERS},
        ("train2014/COCO_train2014_000000000009.jpg", "train2014/COCO_train2014_000000000025.jpg"),
    ),
    "gqa": (read_gqa, {GQA_FILE: GQA}, ("images/n161313.jpg", "images/2375429.jpg")),
    "textvqa": (read_textvqa, {TEXTVQA_FILE: TEXTVQA}, ("train_images/003a8ae2.jpg", "train_images/005635e1.jpg")),
    "st-vqa": (
        read_stvqa,
        {STVQA_FILE: STVQA},
        ("images/icdar/img_1.jpg", "images/iiit/img_1.jpg", "images/icdar/img_2.x.jpg"),
    ),
    "ocr-vqa": (read_ocrvqa, {OCRVQA_FILE: OCRVQA}, ("images/761183272.jpg", "images/B00.gif", "images/157.png")),
}


@pytest.fixture
def make(tmp_path) -> Callable[..., Path]:
    """Writes files with their images into one folder and returns the path of the first file."""

    def make(files: Mapping[str, object], images: tuple[str, ...] = ()) -> Path:
        paths = [make_json(tmp_path / "source", name, content, images) for name, content in files.items()]
        return paths[0]

    return make


@pytest.fixture
def source(make) -> Callable[[str], Path]:
    """Writes the files and images of a kind."""
    return lambda kind: make(*KINDS[kind][1:])


def questions(samples) -> dict[str, Any]:
    for sample in samples:
        assert json.loads(sample.members["json"]).keys() == {"questions"}
    return {sample.key: json.loads(sample.members["json"])["questions"] for sample in samples}


def test_vqa_has_ten_answers_and_their_type_for_each_question(source, tmp_path):
    dataset = read_vqa(source("vqa"), tmp_path)
    assert (dataset.class_names, list(dataset.splits)) == (None, ["train"])
    assert dataset.splits["train"].published == 82_783
    samples = write(dataset, tmp_path, "train")
    assert [sample.image for sample in samples] == [make_image(0), make_image(40)]
    assert questions(samples) == {
        "COCO_train2014_000000000009": [
            {"id": 9000, "question": "How many cookies?", "answers": COUNTS, "type": "number"},
            {"id": 9002, "question": "What is “this”?", "answers": ["tea"] * 10, "type": "other"},
        ],
        "COCO_train2014_000000000025": [
            {"id": 25001, "question": "Is it sunny?", "answers": ["yes"] * 10, "type": "yes/no"}
        ],
    }


WHY = {"question": "Why?", "question_id": 1000}


@pytest.mark.parametrize(
    ("read", "file", "content", "key", "published"),
    [
        (read_vqa, f"{VQA_PREFIX}test2015_questions.json", {"questions": [{**WHY, "image_id": 1}]}, VQA_KEY, 81_434),
        (read_vqa, f"{VQA_PREFIX}test-dev2015_questions.json", {"questions": [{**WHY, "image_id": 1}]}, VQA_KEY, None),
        (read_gqa, "test_all_questions.json", {"1000": {**WHY, "imageId": "n1"}}, "n1", None),
        (read_textvqa, "TextVQA_0.5.1_test.json", {"data": [{**WHY, "image_id": "0a"}]}, "0a", 3_289),
    ],
)
def test_questions_of_test_sets_have_no_answers(make, tmp_path, read, file, content, key, published):
    dataset = read(make({file: content}, (f"test2015/{key}.jpg",)), tmp_path)
    (name,) = dataset.splits
    assert name == ("test-dev" if "dev" in file else "test")
    assert dataset.splits[name].published == published
    identifier = "1000" if read is read_gqa else 1000
    found = questions(write(dataset, tmp_path, name))
    assert found == {key: [{"id": identifier, "question": "Why?", "answers": []}]}


def test_gqa_has_one_answer_and_the_structural_type_for_each_question(source, tmp_path):
    dataset = read_gqa(source("gqa"), tmp_path)
    assert dataset.splits["val"].published == 10_234
    assert questions(write(dataset, tmp_path, "val")) == {
        "2375429": [
            {"id": "07333408", "question": "What is on the white wall?", "answers": ["pipe"], "type": "query"},
            {"id": "00000001", "question": "Which side?", "answers": ["left"], "type": "choose"},
        ],
        "n161313": [{"id": "07333405", "question": "Is it red?", "answers": ["no"], "type": "verify"}],
    }


def test_the_ten_files_of_gqas_train_all_are_read_in_the_order_of_their_numbers(make, tmp_path):
    files = {
        f"train_all_questions/train_all_questions_{number}.json": {
            f"{number}": gqa_entry(f"{number % 2}", "Which number?", str(number))
        }
        for number in range(10)
    }
    folder = make(files, ("0.jpg", "1.jpg")).parent
    found = questions(write(read_gqa(folder, tmp_path), tmp_path, "train"))
    assert {key: [one["id"] for one in asked] for key, asked in found.items()} == {
        "0": ["0", "2", "4", "6", "8"],
        "1": ["1", "3", "5", "7", "9"],
    }
    (folder / "train_all_questions_7.json").unlink()
    assert_refused(
        r"train_all_questions_7\.json: cannot be read \(No such file.*put the publishe", read_gqa, folder, tmp_path
    )


def test_textvqa_has_its_ten_answers_also_where_one_is_empty(source, tmp_path):
    dataset = read_textvqa(source("textvqa"), tmp_path)
    assert dataset.splits["val"].published == 3_166
    assert questions(write(dataset, tmp_path, "val")) == {
        "003a8ae2": [
            {"id": 34602, "question": "which brand?", "answers": ["nokia"] * 9 + [""]},
            {"id": 34604, "question": "what is it?", "answers": ["a phone"] * 10},
        ],
        "005635e1": [{"id": 34603, "question": "what time?", "answers": ["10:10"] * 10}],
    }


def test_images_of_stvqa_with_the_same_name_are_told_apart_by_their_folder(source, tmp_path):
    samples = write(read_stvqa(source("st-vqa"), tmp_path), tmp_path, "train")
    assert questions(samples) == {
        "icdar_img_1": [{"id": 0, "question": "Which price?", "answers": ["$5", "5"]}],
        "iiit_img_1": [{"id": 2, "question": "Which shop?", "answers": ["spar"]}],
        "img_2_x": [{"id": 1, "question": "Which year?", "answers": ["1999"]}],
    }
    assert [sample.image for sample in samples] == [make_image(0), make_image(40), make_image(80)]


def test_ocrvqa_numbers_the_questions_of_an_image_whatever_its_suffix(source, tmp_path):
    dataset = read_ocrvqa(source("ocr-vqa"), tmp_path)
    assert list(dataset.splits) == ["train", "val", "test"]
    assert questions(write(dataset, tmp_path, "train")) == {
        "761183272": [
            {"id": "761183272_0", "question": "Who wrote this book?", "answers": ["Sandra Boynton"]},
            {"id": "761183272_1", "question": "Is this a comedy?", "answers": ["No"]},
        ]
    }
    assert questions(write(dataset, tmp_path, "test")).keys() == {"B00"}
    assert questions(write(dataset, tmp_path, "val")).keys() == {"157"}
    assert list(read_ocrvqa(tmp_path / "source" / OCRVQA_FILE, tmp_path, "val").splits) == ["val"]


def test_images_of_ocrvqa_that_are_gone_may_be_left_out(source, tmp_path, capsys):
    path = source("ocr-vqa")
    (path.parent / "images" / "more.jpg").write_bytes((path.parent / "images" / "761183272.jpg").read_bytes())
    content = {**OCRVQA, "gone": OCRVQA["761183272"], "more": OCRVQA["761183272"]}
    path.write_text(json.dumps(content))
    line = ["data", "prepare", "ocr-vqa", str(path), str(tmp_path / "shards"), "--split", "train", "--workers", "1"]
    assert main(line) == 1
    [error] = [line for line in capsys.readouterr().err.splitlines() if "gone" in line]
    assert re.search(r"holds no gone\.\*, which .*: gone lists; .*, or leave out .* with --skip-missing$", error)
    assert main([*line, "--skip-missing"]) == 0
    assert "1 sample without image skipped" in capsys.readouterr().err
    found = questions(write(read_ocrvqa(path, tmp_path, skip_missing=True), tmp_path, "train"))
    assert found.keys() == {"761183272", "more"}
    # With none of them the folder is likely another one.
    elsewhere = {"images": GOLDEN, "skip_missing": True}
    assert_refused(r"holds no 761183272\.\*, which", read_ocrvqa, path, tmp_path, **elsewhere)


def test_two_images_of_one_book_and_questions_without_their_annotations_are_refused(source, tmp_path):
    path = source("ocr-vqa")
    (path.parent / "images" / "B00.jpg").write_bytes(make_image())
    assert_refused(r"json: B00: images/B00\.gif and images/B00\.jpg both match", read_ocrvqa, path, tmp_path)
    path = source("vqa")
    (path.parent / VQA_ANSWERS_FILE).unlink()
    assert_refused(
        r"v2_mscoco_train2014_annotations\.json: cannot be read .*; put the published", read_vqa, path, tmp_path
    )


FILES = {name: (kind, content) for kind, (_, files, _) in KINDS.items() for name, content in files.items()}


@pytest.mark.parametrize(
    ("file", "path", "value", "message"),
    [
        (VQA_FILE, "", "{", r"train2014_questions\.json: is not a published file"),
        (VQA_FILE, "", [], r"train2014_questions\.json: is not a published file \(not a JSON object"),
        (VQA_FILE, "", {"images": []}, r"train2014_questions\.json: has no 'questions'"),
        (VQA_FILE, "questions.1.question", None, r"questions\.json: questions\[1\]: has no 'question'"),
        (VQA_FILE, "questions.1.question_id", "x", r"questions\[1\]: has no 'question_id'"),
        (VQA_FILE, "questions.1.question_id", True, r"questions\[1\]: has no 'question_id'"),
        (VQA_FILE, "questions.1", 3, r"questions\[1\]: has no 'question_id'"),
        (VQA_FILE, "questions.2.question_id", 9000, r"questions\[2\]: has the id 9000 of an earlier"),
        (VQA_FILE, "questions.1.question", "a \ud800", r"questions\[1\]: has a text that is not valid"),
        (VQA_FILE, "questions.1.image_id", 26, r"questions\[1\]: .*annotations\.json has no answers"),
        (VQA_FILE, "questions.1.question_id", 7, r"questions\[1\]: .*annotations\.json has no answers"),
        (VQA_FILE, "questions.2", None, r"annotations\.json: answers question 9002, which .*_questions"),
        (
            VQA_ANSWERS_FILE,
            "annotations.1.question_id",
            9002,
            r"annotations\.json: annotations\[1\]: answers question 9002 again",
        ),
        (VQA_ANSWERS_FILE, "annotations.1.answers.0.answer", 3, r"annotations\[1\]: has no 'answer'"),
        (VQA_ANSWERS_FILE, "annotations.0.answer_type", None, r"annotations\[0\]: has no 'answer_type"),
        (VQA_ANSWERS_FILE, "annotations", None, r"annotations\.json: has no 'annotations'"),
        (GQA_FILE, "07333405.imageId", 7, r"questions\.json: 07333405: has no 'imageId'"),
        (GQA_FILE, "07333405.answer", None, r"07333405: has no 'answer'"),
        (GQA_FILE, "07333405.types.structural", 1, r"07333405: has no 'structural'"),
        (GQA_FILE, "07333405.types", [], r"07333405: has no 'types'"),
        (GQA_FILE, "07333405", "?", r"07333405: has no 'question'"),
        (GQA_FILE, "07333405.imageId", "8", r"source: holds no 8\.jpg, which .*07333405 lists; .*--imag"),
        (TEXTVQA_FILE, "data.2.question_id", 34602, r"data\[2\]: has the id 34602 of an earlier"),
        (TEXTVQA_FILE, "data.1.answers", None, r"val\.json: data\[1\]: has no 'answers'"),
        (TEXTVQA_FILE, "data.1.answers.0", 10, r"data\[1\]: has 'answers' that are not texts"),
        (TEXTVQA_FILE, "data.1.image_id", 5, r"data\[1\]: has no 'image_id'"),
        (STVQA_FILE, "data.1.file_path", "a/\n.jpg", r"holds no a/\\n\.jpg, which .*data\[1\] lists"),
        (STVQA_FILE, "data.1.answers.0", "\udc80", r"data\[1\]: has a text that is not valid"),
        (OCRVQA_FILE, "B00.split", 4, r"dataset\.json: B00: has the split 4"),
        (OCRVQA_FILE, "B00.answers", [], r"B00: has 1 questions and 0 answers"),
        (OCRVQA_FILE, "", {"C": {"questions": ["?"], "answers": ["!"], "split": 2}}, r"holds no C\.\*, which"),
    ],
)
def test_an_invalid_file_is_a_one_line_error_that_names_the_entry(make, source, tmp_path, file, path, value, message):
    kind, content = FILES[file]
    first = source(kind)
    make({file: changed(content, path, value) if path else value})
    assert_refused(message, KINDS[kind][0], first, tmp_path)


@pytest.mark.parametrize("kind", ["vqa", "gqa", "textvqa", "st-vqa"])
def test_the_name_of_a_file_tells_its_split(source, tmp_path, kind):
    path, read = source(kind), KINDS[kind][0]
    assert_refused(r"has no split 'minival', only \w+; choose with --split", read, path, tmp_path, "minival")
    message = r"mine\.json: its name is not that of a published file; name one, such as "
    assert_refused(message, read, path.rename(path.with_name("mine.json")), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_writes_every_kind_from_images_in_another_place(source, tmp_path, kind):
    path = source(kind)
    moved = path.parent.rename(tmp_path / "images")
    files = KINDS[kind][1]
    path.parent.mkdir()
    for name in files:
        (moved / name).rename(path.parent / name)
    out = tmp_path / "out"
    assert main(["data", "prepare", kind, str(path), str(out), "--images", str(moved)]) == 0
    splits = sorted(folder.name for folder in out.iterdir() if folder.is_dir())
    assert splits == {"gqa": ["val"], "textvqa": ["val"], "ocr-vqa": ["test", "train", "val"]}.get(kind, ["train"])
    found = [one for split in splits for asked in questions(written(out / split)).values() for one in asked]
    assert len(found) == (4 if kind == "ocr-vqa" else 3)


def test_the_command_names_what_is_missing(make, tmp_path, capsys):
    path = make(KINDS["gqa"][1], ("2375429.jpg",))
    assert main(["data", "prepare", "gqa", str(path), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "source: holds no n161313.jpg, which" in said
    assert "07333405 lists; set its folder with --images" in said
