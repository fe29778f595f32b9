from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.labels import CaptionWords, ClassIndex, MultiHot, check_names_beside, text_of
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.data_pipelines.texts.captions import Text, TextPlace
from tests.data_pipelines.conftest import npy
from tests.refusals import assert_refused


@pytest.fixture
def names(tmp_path: Path) -> Path:
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    return tmp_path / "classnames.txt"


def test_class_indices_count_the_names_beside_the_shards(names: Path):
    labels = ClassIndex().build(str(names.parent))
    assert labels.num_classes == 2
    assert labels.encode(b"1\n") == 1
    assert labels.zeros(3).tolist() == [0, 0, 0]


DISAGREE = r"is not an index below 2; make .*names\.txt and the shards agree"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, DISAGREE) for content in (b"-1", b"cat", b"", b"1.0", b"1" * 5000)),
        (b"2", r"label is out of range \('2' is not an index below 2; .*names\.txt has too few"),
        (b" " * 2_000_000, r"text too long \(2,000,000 bytes, at most 1,048,576 are read\)"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_a_class_without_a_name_is_an_error(names: Path, content: bytes, message: str):
    with pytest.raises(Unreadable, match=message):
        ClassIndex(str(names)).build("elsewhere").encode(content)


def test_a_byte_order_mark_is_no_part_of_a_text(names: Path):
    mark = b"\xef\xbb\xbf"
    assert ClassIndex(str(names)).build("elsewhere").encode(mark + b"1\r\n") == 1
    assert TextPlace("txt").read({"txt": mark + b"a red cat\r\n"}) == [Text("", "a red cat")]
    assert TextPlace("json/caption").read({"json": mark + b'{"caption": "a red cat"}'}) == [Text("", "a red cat")]
    with pytest.raises(Unreadable, match="empty caption"):
        TextPlace("txt").read({"txt": mark})


def test_folders_of_shards_whose_class_names_differ_are_refused(tmp_path: Path):
    for folder, names in {"a": "cat\ndog\n", "b": "cat\ndog\n", "c": "dog\ncat\n"}.items():
        (tmp_path / folder / "train").mkdir(parents=True)
        (tmp_path / folder / "classnames.txt").write_text(names)
    shards = [f"{tmp_path}/{folder}/train/{number}.tar" for folder in "abc" for number in range(2)]
    check_names_beside([*shards[:4], f"{tmp_path}/without/0.tar"])
    message = r"c/classnames\.txt: differs from .*a/classnames\.txt, so one number is of two classes"
    assert_refused(message, check_names_beside, shards)


@pytest.mark.parametrize(
    ("encoding", "guess"),
    [("utf-16", "UTF-16"), ("utf-16-be", "UTF-16"), ("latin-1", "Latin-1"), ("cp1252", "Latin-1")],
)
def test_the_encoding_of_a_text_that_is_not_utf8_is_guessed(encoding: str, guess: str):
    with pytest.raises(Unreadable, match=rf"text is not UTF-8 \(but perhaps {guess}; save it as UTF-8\)"):
        text_of("a café".encode(encoding))


def test_words_of_a_caption_are_marked_once_each_and_hyphens_stay(tmp_path: Path):
    (tmp_path / "words.txt").write_text("double-struck\nn\ncapital\nstruck\n")
    labels = CaptionWords().build(str(tmp_path / "train"))
    label = labels.encode(b"Double-Struck  capital N capital")
    assert isinstance(label, np.ndarray)
    assert label.dtype == labels.zeros(1).dtype == np.float32
    assert label.tolist() == [1, 1, 1, 0]
    assert labels.encode(b"").tolist() == [0, 0, 0, 0]  # type: ignore[union-attr]


def test_a_word_that_is_not_in_the_vocabulary_is_named(tmp_path: Path):
    (tmp_path / "words.txt").write_text("a\nb\n")
    with pytest.raises(Unreadable, match=r"unknown word \('c' is not in .*words\.txt"):
        CaptionWords(tmp_path / "words.txt").build(str(tmp_path)).encode(b"a c")


def test_other_words_than_those_of_the_vocabulary_are_left_out_on_request(tmp_path: Path):
    (tmp_path / "words.txt").write_text("a\nb\n")
    labels = CaptionWords(ignore_others=True).build(str(tmp_path))
    assert [labels.encode(text).tolist() for text in (b"a c", b"c")] == [[1, 0], [0, 0]]  # type: ignore[union-attr]


def test_a_vocabulary_that_is_missing_empty_or_repeats_a_word_is_refused(tmp_path: Path):
    assert_refused(r"words\.txt: cannot be read", CaptionWords().build, str(tmp_path))
    for content, message in (("", r"words\.txt: the file is empty"), ("a\nb\na\n", "a word is repeated")):
        (tmp_path / "words.txt").write_text(content)
        assert_refused(message, CaptionWords().build, str(tmp_path))


def test_several_classes_are_marked_in_a_vector(tmp_path: Path):
    (tmp_path / "classnames.txt").write_text("cat\ndog\nowl\n")
    label = MultiHot().build(str(tmp_path)).encode(npy(np.array([1, 0, 1], np.int64)))
    assert isinstance(label, np.ndarray)
    assert label.tolist() == [1, 0, 1]
    assert label.dtype == np.float32


@pytest.mark.parametrize(
    "content",
    [
        npy(np.array([1, 0])),
        npy(np.array([2, 0, 0])),
        npy(np.array([None] * 3)),
        npy(np.array(["1", "0", "1"])),
        npy(np.zeros(3, [("a", "i4")])),
        npy(np.zeros(3, "M8[s]")),
        npy(np.array([1, 0, 1]))[:-1],
        npy(np.array([1, 0, 1])).replace(b"(3,)", b'(3""'),
        npy(np.array([1, 0, 1])).replace(b"(3,)", b"9**9"),
        b"PK\3\4",
        b"",
        b"1 0 1",
    ],
)
def test_labels_that_are_not_multi_hot_vectors_are_refused_and_never_unpickled(tmp_path: Path, content: bytes):
    (tmp_path / "classnames.txt").write_text("cat\ndog\nowl\n")
    with pytest.raises(Unreadable, match="label is not a"):
        MultiHot().build(str(tmp_path)).encode(content)
