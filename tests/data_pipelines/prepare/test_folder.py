import pytest

from lit_het.data_pipelines.prepare.folder import read_folder
from tests.data_pipelines.prepare.conftest import labelled, labels_of, make_image, make_tar, unpack, write
from tests.refusals import assert_refused


@pytest.fixture
def make(tmp_path):
    def content(number: int, name: str) -> bytes:
        return f" caption of {name[:-4]}\n".encode() if name.endswith(".txt") else make_image(number)

    return lambda *names: unpack({n: content(i, n) for i, n in enumerate(names)}, tmp_path / "source")


def test_subfolders_are_classes_in_the_order_of_their_names(tmp_path, make):
    dataset = read_folder(make("kit_fox/2.jpg", "crane/a.PNG", "kit_fox/deep/1.jpeg", "crane/notes.md"), tmp_path)
    assert dataset.class_names == ("crane", "kit fox")
    samples = write(dataset, tmp_path, "train")
    # the content of a.PNG is a JPEG
    assert labelled(samples) == [(0, make_image(1)), (1, make_image(0)), (1, make_image(2))]
    assert all(sorted(sample.members) == ["cls", "jpg"] for sample in samples)


def test_splits_share_their_classes(tmp_path, make):
    source = make("train/b/1.jpg", "train/a/1.jpg", "val/b/1.jpg", "val/b/2.jpg")
    dataset = read_folder(source, tmp_path)
    assert dataset.class_names == ("a", "b")
    assert {name: labels_of(dataset, name) for name in dataset.splits} == {"train": [0, 1], "val": [1, 1]}
    assert list(read_folder(source, tmp_path, "val").splits) == ["val"]
    assert_refused("has no split 'test', only train, val", read_folder, source, tmp_path, "test")


def test_images_without_a_caption_beside_them_are_counted(tmp_path, make):
    source = make("1.jpg", "1.txt", "2.b.jpg", "2.b.txt", "3.jpg", "4.jpg")
    (source / "4.txt").write_text("")
    dataset = read_folder(source, tmp_path)
    assert dataset.class_names is None
    assert dataset.splits["train"].left_out == {"without caption": 2}
    samples = write(dataset, tmp_path, "train")
    assert [sample.members["txt"] for sample in samples] == [b"caption of 1", b"caption of 2.b"]


def test_a_tar_of_folders_equals_the_folders(tmp_path):
    (tmp_path / "x.tar").write_bytes(make_tar({"b/1.jpg": make_image(), "a/1.jpg": make_image()}))
    dataset = read_folder(tmp_path / "x.tar", tmp_path)
    assert dataset.class_names == ("a", "b")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/notes.md"], "holds no images"),
        (["1.jpg", "2.jpg"], r"neither class folders nor captions"),
        (["1.jpg", "1.txt", "a/2.jpg"], r"a/2\.jpg: lies in a subfolder, other images do not"),
        (["a/1.jpg", "b/notes.md"], "class b has no images; add some or remove its folder"),
        (["train/a/1.jpg", "test/1.jpg", "test/1.txt"], r"train/a/1\.jpg: lies in a subfolder"),
    ],
)
def test_invalid_folders_are_refused(tmp_path, make, names, message):
    assert_refused(message, read_folder, make(*names), tmp_path)


def test_a_source_without_splits_has_the_requested_name_and_no_empty_class(tmp_path, make):
    source = make("a/1.jpg")
    assert list(read_folder(source, tmp_path, "test").splits) == ["test"]
    (source / "b").mkdir()
    assert_refused("class b has no images", read_folder, source, tmp_path)


def test_suffixes_have_any_case_and_images_that_are_not_read_are_counted(tmp_path, make, capsys):
    source = make("A.JPG", "A.TXT", "b.JPE", "b.txt", "c.Jfif", "c.Txt", "d.avif", "e.HEIC", "f.heic")
    assert read_folder(source, tmp_path).splits["train"].num_samples == 3
    assert "left out 1 .avif, 2 .heic; to use them, save them as JPEG, PNG or WebP" in capsys.readouterr().err
