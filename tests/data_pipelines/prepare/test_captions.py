"""Published caption files become sets for retrieval."""

import pytest

from lit_het.cli.main import main
from lit_het.data_pipelines.prepare.captions import read_captions, read_textcaps
from tests.data_pipelines.prepare.conftest import changed, make_image, make_json, write, written
from tests.refusals import assert_refused


def sentences(*texts: str):
    return [{"raw": text, "tokens": text.split()} for text in texts]


COCO = {
    "dataset": "coco",
    "images": [
        {"filepath": "val2014", "filename": "b.jpg", "split": "test", "sentences": sentences("a cat .", "two\ncats\n")},
        {"filepath": "train2014", "filename": "c.jpg", "split": "train", "sentences": sentences("a dog")},
        {"filepath": "val2014", "filename": "a.jpg", "split": "restval", "sentences": sentences(" an\u2028owl ")},
        {"filepath": "val2014", "filename": "d.jpg", "split": "test", "sentences": []},
    ],
}
FLICKR = {
    "dataset": "flickr8k",
    "images": [{"filename": "12_3.jpg", "split": "val", "sentences": sentences("a cat", "Two cats.")}],
}
OWN = {
    "info": {},
    "images": [{"id": 7, "file_name": "0007.jpg"}, {"id": 5, "file_name": "0005.jpg"}],
    "annotations": [
        {"id": 1, "image_id": 5, "caption": "a cat"},
        {"id": 2, "image_id": 7, "caption": "a\r\ndog"},
        {"id": 3, "image_id": 5, "caption": "one cat "},
    ],
}

TEXTCAPS = {
    "dataset_type": "val",
    "data": [
        {"image_id": "0a", "caption_id": 0, "caption_str": "a sign", "reference_strs": ["a sign", "the\nword"]},
        {"image_id": "0b", "caption_id": 2, "caption_str": "a bus", "reference_strs": ["a bus"]},
        {"image_id": "0a", "caption_id": 1, "caption_str": "the\nword", "reference_strs": ["a sign", "the\nword"]},
    ],
}


@pytest.fixture
def make(tmp_path):
    """Writes a caption file, and images beside it."""
    return lambda content, *names, file="dataset_coco.json": make_json(tmp_path / "source", file, content, names)


def captions(samples) -> dict[str, str]:
    return {sample.key: sample.members["txt"].decode() for sample in samples}


def test_karpathys_splits_have_one_line_per_caption_and_restval_is_train(make, tmp_path):
    source = make(COCO, "val2014/a.jpg", "val2014/b.jpg", "train2014/c.jpg")
    dataset = read_captions(source, tmp_path)
    assert (dataset.class_names, list(dataset.splits)) == (None, ["test", "train"])
    assert list(read_captions(source, tmp_path, "test").splits) == ["test"]
    assert_refused("has no split 'val', only test, train; choose with --split", read_captions, source, tmp_path, "val")
    [cats] = write(dataset, tmp_path, "test")
    assert (cats.key, cats.members["txt"], cats.image) == ("b", b"a cat .\ntwo cats", make_image(40))
    assert captions(write(dataset, tmp_path, "train")) == {"c": "a dog", "a": "an owl"}
    test = dataset.splits["test"]
    assert (test.published, test.left_out) == (5_000, {"without caption": 1})


def test_images_may_lie_in_any_folder_of_another_place(make, tmp_path):
    source = make(FLICKR, "deep/12_3.jpg")
    elsewhere = (tmp_path / "dataset.json", tmp_path / "source")
    source.rename(elsewhere[0])
    dataset = read_captions(elsewhere[0], tmp_path, images=elsewhere[1])
    assert captions(write(dataset, tmp_path, "val")) == {"12_3": "a cat\nTwo cats."}


def test_cocos_own_files_are_joined_by_image_id(make, tmp_path):
    source = make(OWN, "val2017/0005.jpg", "val2017/0007.jpg", file="captions_val2017.json")
    dataset = read_captions(source, tmp_path)
    assert captions(write(dataset, tmp_path, "val")) == {"0007": "a dog", "0005": "a cat\none cat"}
    assert list(read_captions(source, tmp_path, "test").splits) == ["test"]


def test_textcaps_has_one_line_per_caption_and_its_test_set_none(make, tmp_path):
    dataset = read_textcaps(make(TEXTCAPS, "0a.jpg", "0b.jpg", file="TextCaps_0.1_val.json"), tmp_path)
    assert dataset.splits["val"].published == 3_166
    assert captions(write(dataset, tmp_path, "val")) == {"0a": "a sign\nthe word", "0b": "a bus"}
    bare = {"data": [{"image_id": "0a"}, {"image_id": "0b"}]}
    dataset = read_textcaps(make(bare, file="TextCaps_0.1_test.json"), tmp_path)
    found = {one.key: one.members.keys() for one in write(dataset, tmp_path, "test")}
    assert found == {"0a": {"jpg"}, "0b": {"jpg"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"coco\.json: is not a published file"),
        ("[" * 100_000, r"coco\.json: is not a published file .*nested too deeply"),
        (changed(COCO, "images.1.split", "../../where"), r"images\[1\]: has the invalid split '\.\./\.\./where'"),
        (changed(COCO, "images.2.sentences.0.raw", "a \ud800"), r"images\[2\]: has a caption that is not valid text"),
        ([], r"coco\.json: is not a published file \(not a JSON object"),
        ({"type": "captions"}, r"coco\.json: has no 'images', unlike published"),
        (changed(COCO, "images.1.split", None), r"images\[1\]: has no 'split'"),
        (changed(COCO, "images.2.sentences.0.raw", 3), r"images\[2\]: has no 'raw'"),
        (changed(COCO, "images.2.sentences.0.raw", " \n"), r"images\[2\]: has an empty caption"),
        (changed(COCO, "images.3.filename", 3), r"images\[3\]: has no 'filename'"),
        (changed(COCO, "images.1.filename", "e.jpg"), r"holds no train2014/e\.jpg, which .*images\[1\] lists"),
        (changed(COCO, "images.2", COCO["images"][1]), r"images\[2\]: train2014/c\.jpg has the name of .*images\[1\]"),
        (changed(OWN, "annotations.1.image_id", 8), r"annotations\[1\]: has the unknown image 8"),
        (changed(OWN, "annotations.1.caption", ""), r"annotations\[1\]: has an empty caption"),
        (changed(OWN, "images.1.id", "5"), r"images\[1\]: has no 'id'"),
        (OWN, r"holds no 0007\.jpg"),
    ],
)
def test_an_invalid_file_is_a_one_line_error_that_names_the_entry(make, tmp_path, content, message):
    assert_refused(message, read_captions, make(content, "val2014/a.jpg", "val2014/b.jpg", "train2014/c.jpg"), tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (COCO, r"val\.json: has no 'data'"),
        (changed(TEXTCAPS, "data.2.caption_str", None), r"data\[2\]: has no 'caption_str'"),
        (changed(TEXTCAPS, "data.1.caption_str", " "), r"data\[1\]: has an empty caption"),
        (changed(TEXTCAPS, "data.1.image_id", 7), r"data\[1\]: has no 'image_id'"),
        (changed(TEXTCAPS, "data.1.image_id", "0c"), r"holds no 0c\.jpg, which .*data\[1\] lis"),
    ],
)
def test_an_invalid_file_of_textcaps_is_a_one_line_error(make, tmp_path, content, message):
    path = make(content, "0a.jpg", "0b.jpg", file="TextCaps_0.1_val.json")
    assert_refused(message, read_textcaps, path, tmp_path)
    message = r"mine\.json: its name is not that of a published file; name one, such as TextCaps"
    assert_refused(message, read_textcaps, path.rename(path.with_name("mine.json")), tmp_path)


def test_a_name_in_two_folders_needs_the_path_in_the_file(make, tmp_path):
    source = make(COCO, "val2014/a.jpg", "val2014/b.jpg", "train2014/c.jpg", "train2014/b.jpg")
    assert len(write(read_captions(source, tmp_path), tmp_path, "test")) == 1
    source = make(FLICKR, "one/12_3.jpg", "two/12_3.jpg")
    assert_refused(r"one/12_3\.jpg and two/12_3\.jpg both match; choose with --images", read_captions, source, tmp_path)


def test_the_commands_write_textcaps_and_name_what_is_missing(make, tmp_path, capsys):
    source = make(TEXTCAPS, "0a.jpg", "0b.jpg", file="TextCaps_0.1_val.json")
    assert main(["data", "prepare", "textcaps", str(source), str(tmp_path / "out")]) == 0
    assert captions(written(tmp_path / "out" / "val")) == {"0a": "a sign\nthe word", "0b": "a bus"}
    source = make(OWN, "0005.jpg", file="captions_val2017.json")
    assert main(["data", "prepare", "captions", str(source), str(tmp_path / "out")]) == 1
    assert "source: holds no 0007.jpg" in capsys.readouterr().err.splitlines()[-1]
