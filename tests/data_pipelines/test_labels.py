import io
from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.labels import CaptionWords, ClassIndex, MultiHot
from lit_het.data_pipelines.storage import Unreadable
from lit_het.errors import UserError


def test_class_indices_count_the_names_beside_the_shards(tmp_path: Path):
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    labels = ClassIndex().build(str(tmp_path))
    assert labels.num_classes == 2
    assert labels.encode(b"1\n") == 1
    assert labels.zeros(3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("content", [b"-1", b"cat", b"", b"1.0", b"1" * 5000])
def test_a_class_without_a_name_is_an_error(tmp_path: Path, content: bytes):
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    with pytest.raises(Unreadable, match=r"is not an index below 2; make .*names\.txt and the shards agree"):
        ClassIndex(str(tmp_path / "names.txt")).build("elsewhere").encode(content)


def test_a_label_beyond_the_names_reports_too_few_names(tmp_path: Path):
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    with pytest.raises(
        Unreadable, match=r"label is out of range \('2' is not an index below 2; .*names\.txt has too few"
    ):
        ClassIndex(str(tmp_path / "names.txt")).build("elsewhere").encode(b"2")


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


def test_a_vocabulary_that_is_missing_empty_or_repeats_a_word_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"words\.txt: cannot be read"):
        CaptionWords().build(str(tmp_path))
    (tmp_path / "words.txt").write_text("")
    with pytest.raises(UserError, match=r"words\.txt: the file is empty"):
        CaptionWords().build(str(tmp_path))
    (tmp_path / "words.txt").write_text("a\nb\na\n")
    with pytest.raises(UserError, match="a word is repeated"):
        CaptionWords().build(str(tmp_path))


def as_npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def test_several_classes_are_marked_in_a_vector(tmp_path: Path):
    (tmp_path / "classnames.txt").write_text("cat\ndog\nowl\n")
    label = MultiHot().build(str(tmp_path)).encode(as_npy(np.array([1, 0, 1], np.int64)))
    assert isinstance(label, np.ndarray)
    assert label.tolist() == [1, 0, 1]
    assert label.dtype == np.float32


@pytest.mark.parametrize(
    "content",
    [
        as_npy(np.array([1, 0])),
        as_npy(np.array([2, 0, 0])),
        as_npy(np.array([None] * 3)),
        as_npy(np.array(["1", "0", "1"])),
        as_npy(np.zeros(3, [("a", "i4")])),
        as_npy(np.zeros(3, "M8[s]")),
        as_npy(np.array([1, 0, 1]))[:-1],
        as_npy(np.array([1, 0, 1])).replace(b"(3,)", b'(3""'),
        as_npy(np.array([1, 0, 1])).replace(b"(3,)", b"9**9"),
        b"PK\3\4",
        b"",
        b"1 0 1",
    ],
)
def test_labels_that_are_not_multi_hot_vectors_are_refused_and_never_unpickled(tmp_path: Path, content: bytes):
    (tmp_path / "classnames.txt").write_text("cat\ndog\nowl\n")
    with pytest.raises(Unreadable, match="label is not a"):
        MultiHot().build(str(tmp_path)).encode(content)


def test_a_text_of_more_than_a_mebibyte_is_refused_before_it_is_decoded(tmp_path: Path):
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    with pytest.raises(Unreadable, match=r"text too long \(2,000,000 bytes, at most 1,048,576 are read\)"):
        ClassIndex(str(tmp_path / "names.txt")).build("elsewhere").encode(b" " * 2_000_000)
