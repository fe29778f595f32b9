import os

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
    dataset = read_folder(make("kit_fox/2.jpg", "crane/a.PNG", "kit_fox/3.jpeg", "crane/notes.md"), tmp_path)
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


def test_captions_have_no_byte_order_mark(tmp_path, make):
    source = make("1.jpg", "1.txt")
    (source / "1.txt").write_bytes("\ufeffa cat\r\na dog".encode())
    (sample,) = write(read_folder(source, tmp_path), tmp_path, "train")
    assert sample.members["txt"] == b"a cat\r\na dog"


def test_a_tar_of_folders_equals_the_folders(tmp_path):
    (tmp_path / "x.tar").write_bytes(make_tar({"b/1.jpg": make_image(), "a/1.jpg": make_image()}))
    dataset = read_folder(tmp_path / "x.tar", tmp_path)
    assert dataset.class_names == ("a", "b")


SET = ("cat/1.jpg", "cat/2.jpg", "dog/3.jpg")


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ([f"pets/{name}" for name in SET], ["train"]),
        ([f"download/pets/{name}" for name in SET], ["train"]),
        ([f"{split}/{name}" for split in ("Train", "TEST") for name in SET], ["test", "train"]),
        ([f"pets/{split}/{name}" for split in ("train", "dev") for name in SET], ["dev", "train"]),
        ([f"{split}/images/{name}" for split in ("train", "evaluation") for name in SET], ["evaluation", "train"]),
        (["train/cat/photos/1.jpg", "val/cat/photos/2.jpg", "val/dog/photos/3.jpg"], ["train", "val"]),
        (["cat/photos/1.jpg", "dog/photos/2.jpg"], ["train"]),
    ],
)
def test_classes_and_splits_are_found_below_folders_that_hold_nothing_else(tmp_path, make, names, splits):
    dataset = read_folder(make(*names), tmp_path)
    assert (dataset.class_names, sorted(dataset.splits)) == (("cat", "dog"), splits)


def test_a_class_may_have_the_name_of_a_split(tmp_path, make):
    dataset = read_folder(make("bus/1.jpg", "train/2.jpg"), tmp_path)
    assert (dataset.class_names, list(dataset.splits)) == (("bus", "train"), ["train"])


@pytest.mark.parametrize("root", ["", "00000/", "shards/00000/", "train/00000/"])
def test_captions_in_numbered_folders_become_captions(tmp_path, make, root, capsys):
    other = root.replace("00000", "00001")
    dataset = read_folder(
        make(f"{root}1.jpg", f"{root}1.txt", f"{root}1.json", f"{other}2.jpg", f"{other}2.txt"), tmp_path
    )
    assert (dataset.class_names, list(dataset.splits)) == (None, ["train"])
    assert "train: 2 images with captions from .txt files; folders are not classes" in capsys.readouterr().err
    samples = write(dataset, tmp_path, "train")
    assert [sample.members["txt"].decode() for sample in samples] == [f"caption of {root}1", f"caption of {other}2"]


def test_the_classes_of_each_split_are_named_with_their_counts(tmp_path, make, capsys):
    names = [f"{number}/1.jpg" for number in range(10, 20)]
    read_folder(make(*names, "10/2.jpg"), tmp_path)
    found = "train: 10 classes, with images: 10 (2), 11 (1), 12 (1), 13 (1), 14 (1), 15 (1), 16 (1), 17 (1) and 2 more"
    assert found in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/notes.md"], "holds no images"),
        (["1.jpg", "2.jpg"], r"neither class folders nor captions"),
        (["1.jpg", "a/2.jpg"], r"a/2\.jpg: lies in a subfolder, unlike other images; give each image a caption, or"),
        (["1.jpg", "1.txt", "a/2.jpg"], r"a/2\.jpg: has no \.txt beside it, unlike other images"),
        (["a/1.jpg", "a/1.txt", "b/2.jpg"], r"b/2\.jpg: has no \.txt beside it, unlike other images"),
        (["a/1.jpg", "b/notes.md"], "class b has no images; add some or remove its folder"),
        (["train/a/1.jpg", "test/1.jpg", "test/1.txt"], r"train/a/1\.jpg: has no \.txt beside it"),
        (["train/a/1.jpg", "extra/a/1.jpg"], r"extra/a/1\.jpg: lies in no split, others in train; name its"),
        (["train/1.jpg", "train/1.txt", "b/2.jpg", "b/2.txt"], r"b/2\.jpg: lies in no split"),
        (["train/a/1.jpg", "2.jpg"], r"2\.jpg: lies in no split"),
        (["train/a/1.jpg", "Train/b/2.jpg"], "Train, train differ only in case"),
        (["train2017/1.jpg", "val2017/2.jpg"], "train2017: may be a split; name it train, val or test"),
        (["train2017/1.jpg", "train2017/1.txt", "val2017/2.jpg", "val2017/2.txt"], "train2017: may be a split"),
        (["pets_train/cat/1.jpg", "pets_test/cat/2.jpg"], "pets_test: may be a split"),
        (
            ["train/a/images/1.jpg", "train/b/images/2.jpg", "val/images/3.jpg"],
            "val/images: holds all images of val, and is a class of no other split",
        ),
        (
            ["a_b/1.jpg", "a b/2.jpg"],
            "'a b' and 'a_b' are of one class, as they differ only in case, spaces or Unicode",
        ),
        (["cat/1.jpg", "Cat/2.jpg"], "'Cat' and 'cat' are of one class"),
        (["train/Cat/1.jpg", "train/dog/1.jpg", "test/cat/1.jpg", "test/dog/2.jpg"], "'Cat' and 'cat' are of one"),
        (["train/k\u00e4se/1.jpg", "train/b/1.jpg", "test/ka\u0308se/1.jpg", "test/b/1.jpg"], "are of one class"),
        (["k\udce4se/1.jpg", "cat/1.jpg"], r"the name of the class 'k\\udce4se' is not UTF-8; rename it"),
        (["cat/1.jpg", "cat/thumbs/1.jpg", "dog/1.jpg"], "cat: its images lie in several folders, .* cat/thumbs,"),
        (["train/cat/1.jpg", "test/dog/2.jpg"], "test/dog: holds all images of test, and is a class of no other split"),
        (["A.jpg", "A.TXT", "A.txt"], r"A\.txt: is of the same image as A\.TXT; keep one of them"),
        (["pets/cat/1.jpg", "pets/dog/2.jpg", "food/pie/3.jpg"], "pets: its images lie in several folders, .*pets/cat"),
        (
            ["cat/train/1.jpg", "cat/test/2.jpg", "dog/train/1.jpg"],
            "cat: its images lie in several folders, .*cat/test",
        ),
    ],
)
def test_invalid_folders_are_refused(tmp_path, make, names, message):
    assert_refused(message, read_folder, make(*names), tmp_path)


def test_a_source_without_splits_has_the_requested_name_and_no_empty_class(tmp_path, make):
    source = make("a/1.jpg")
    assert list(read_folder(source, tmp_path, "test").splits) == ["test"]
    (source / "b").mkdir()
    assert_refused("class b has no images", read_folder, source, tmp_path)


def test_pipes_and_devices_in_a_folder_or_in_its_place_are_refused(tmp_path, make):
    source = make("a/1.jpg", "b/2.jpg")
    for name in ("a/3.jpg", "pipe"):
        os.mkfifo(source / name)
        assert_refused(f"{name}: is a pipe or a device", read_folder, source, tmp_path)
        (source / name).rename(tmp_path / "pipe")
    assert_refused("pipe: cannot be read .not a regular file", read_folder, tmp_path / "pipe", tmp_path)
    (source / "a/3.jpg").symlink_to("/dev/zero")
    assert_refused("3.jpg: is a pipe or a device", read_folder, source, tmp_path)


def test_suffixes_have_any_case_and_images_that_are_not_read_are_counted(tmp_path, make, capsys):
    source = make("A.JPG", "A.TXT", "b.JPE", "b.txt", "c.Jfif", "c.Txt", "d.avif", "e.HEIC", "f.heic")
    assert read_folder(source, tmp_path).splits["train"].num_samples == 3
    assert "left out 1 .avif, 2 .heic; to use them, save them as JPEG, PNG or WebP" in capsys.readouterr().err


def test_files_that_are_not_used_are_counted_by_suffix(tmp_path, make, capsys):
    beside = ["cat/1.caption", "cat/1.json", "cat/1.jpg.txt", "cat/2", "cat/2.JSON", "cat/3.jpg_large"]
    read_folder(make("cat/1.jpg", "dog/1.jpg", *beside), tmp_path)
    line = "not used: 2 .json, 1 .caption, 1 .txt, 1 without suffix, 1 .jpg_large; images end in .jpg"
    assert line in capsys.readouterr().err


def test_a_source_that_is_a_split_itself_has_its_name(tmp_path, make):
    source = make("a/1.jpg").rename(tmp_path / "Validation")
    assert list(read_folder(source, tmp_path).splits) == ["validation"]
