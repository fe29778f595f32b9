"""CUB-200-2011 from a small archive in the official layout."""

from pathlib import Path

import pytest

from lit_het.data_pipelines.prepare.birds import read_birds
from tests.data_pipelines.prepare.conftest import labelled, labels_of, make_image, make_tar, unpack, write
from tests.refusals import assert_refused

# Number, class and whether it is for training, as in the three official lists.
IMAGES = {1: (1, 0), 2: (1, 1), 3: (2, 1), 4: (3, 0), 5: (3, 1)}
CLASSES = ("001.Black_footed_Albatross", "002.Laysan_Albatross", "003.American_Crow")


@pytest.fixture(scope="module")
def members() -> dict[str, bytes]:
    paths = {number: f"{CLASSES[label - 1]}/Bird_{number:04}_9{number}.jpg" for number, (label, _) in IMAGES.items()}
    lists = {
        "images.txt": "".join(f"{number} {path}\n" for number, path in paths.items()),
        "image_class_labels.txt": "".join(f"{number} {label}\n" for number, (label, _) in IMAGES.items()),
        "train_test_split.txt": "".join(f"{number} {training}\n" for number, (_, training) in IMAGES.items()),
        "classes.txt": "".join(f"{number} {name}\n" for number, name in enumerate(CLASSES, 1)),
        "README": "",
    }
    pictures = {f"images/{path}": make_image(40 * number) for number, path in paths.items()}
    files = {**{name: text.encode() for name, text in lists.items()}, **pictures}
    return {"attributes.txt": b"1 x\n", **{f"CUB_200_2011/{name}": content for name, content in files.items()}}


@pytest.fixture
def archive(tmp_path, members) -> Path:
    return unpack({"CUB_200_2011.tgz": make_tar(members, "w:gz")}, tmp_path) / "CUB_200_2011.tgz"


@pytest.mark.parametrize(("split", "numbers"), [("train", [2, 3, 5]), ("test", [1, 4])])
def test_the_official_splits_keep_their_labels_and_bytes(archive, tmp_path, split, numbers):
    samples = labelled(write(read_birds(archive, tmp_path), tmp_path / "out", split))
    assert samples == [(IMAGES[number][0] - 1, make_image(40 * number)) for number in numbers]


def test_names_are_readable_and_one_split_of_the_unpacked_folder_can_be_read(members, archive, tmp_path):
    unpack(members, tmp_path / "unpacked")
    for source in (archive, tmp_path / "unpacked", tmp_path / "unpacked" / "CUB_200_2011"):
        dataset = read_birds(source, tmp_path, "test")
        assert dataset.class_names == ("Black footed Albatross", "Laysan Albatross", "American Crow")
        assert list(dataset.splits) == ["test"]
        assert (labels_of(dataset, "test"), dataset.splits["test"].published) == ([0, 2], 5_794)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("classes.txt", (b"3 003", b"7 003"), r"classes\.txt: its classes are not numbered from 1"),
        ("image_class_labels.txt", (b"5 3\n", b""), "do not list the same images"),
        ("image_class_labels.txt", (b"5 3\n", b"5 4\n"), r"image 5, 003.*jpg, has no file, class or split"),
        ("image_class_labels.txt", (b"5 3\n", b"5 x\n"), r"image 5, .* has no file, class or split"),
        ("image_class_labels.txt", (b"5 3\n", b"5 " + b"3" * 5000), r"image 5, .* has no file, class or split"),
        ("image_class_labels.txt", (b"5 3\n", b"5" * 5000 + b" 3"), r"line 5: 5{100} is not a new number"),
        ("train_test_split.txt", (b"5 1\n", b"5 2\n"), r"image 5, .* has no file, class or split"),
        ("train_test_split.txt", (b"5 1\n", b"4 1\n"), r"train_test_split\.txt line 5: 4 1 is not a new number"),
        ("images.txt", (b"_0005", b"_0006"), r"image 5, .*_0006_95\.jpg, has no file"),
        ("images.txt", (b"5 003", b"5  x 003"), r"images\.txt line 5: .* is not a new number with its value"),
        ("images.txt", (b"4 003", b"\n4 003"), r"images\.txt line 4:  is not a new number with its value"),
    ],
)
def test_lists_that_do_not_belong_together_are_refused(members, tmp_path, file, change, message):
    name = f"CUB_200_2011/{file}"
    assert change[0] in members[name]
    unpack({**members, name: members[name].replace(*change)}, tmp_path / "cub")
    assert_refused(message, read_birds, tmp_path / "cub", tmp_path)


def test_missing_truncated_and_other_archives_are_named(members, archive, tmp_path):
    fewer = {name: content for name, content in members.items() if name != "CUB_200_2011/classes.txt"}
    for content, message in (
        (make_tar(fewer, "w:gz"), r"CUB_200_2011\.tgz: holds no classes\.txt; download it again"),
        (make_tar(members, "w:gz")[:-50], r"CUB_200_2011\.tgz: is truncated or damaged"),
        (make_tar({"jpg/1.jpg": b"x"}), r"holds no images\.txt; give CUB_200_2011\.tgz, or the folder unpacked"),
    ):
        archive.write_bytes(content)
        assert_refused(message, read_birds, archive, tmp_path)
    assert_refused("CUB-200-2011: has no split 'val', only train, test", read_birds, archive, tmp_path, "val")
