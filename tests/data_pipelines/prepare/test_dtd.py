"""The Describable Textures Dataset from a small archive in the official layout."""

from pathlib import Path

import pytest

from lit_het.data_pipelines.prepare.dtd import read_dtd
from tests.data_pipelines.prepare.conftest import labelled, labels_of, make_image, make_tar, unpack, write
from tests.refusals import assert_refused

LISTS = {
    "train1": ["zigzagged/zigzagged_0003.jpg", "banded/banded_0002.jpg"],
    "val1": ["polka-dotted/polka-dotted_0001.jpg"],
    "test1": ["banded/banded_0005.jpg", "zigzagged/zigzagged_0001.jpg"],
    "train2": ["banded/banded_0005.jpg"],  # of another partition
}
LABELS = {"banded": 0, "polka-dotted": 1, "zigzagged": 2}


def grey(path: str) -> int:
    return int(path[-5]) * 20 + LABELS[path.partition("/")[0]]


@pytest.fixture
def members() -> dict[str, bytes]:
    paths = {path for paths in LISTS.values() for path in paths}
    lists = {f"dtd/labels/{name}.txt": "".join(f"{path}\n" for path in paths) for name, paths in LISTS.items()}
    images = {f"dtd/images/{path}": make_image(grey(path)) for path in paths}
    return {**{name: text.encode() for name, text in lists.items()}, **images, "dtd/imdb/imdb.mat": b""}


@pytest.fixture
def archive(tmp_path, members) -> Path:
    # Despite its name the published file is not compressed.
    return unpack({"dtd-r1.0.1.tar.gz": make_tar(members)}, tmp_path) / "dtd-r1.0.1.tar.gz"


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_the_first_official_partition_keeps_its_labels_and_bytes(archive, tmp_path, split):
    dataset = read_dtd(archive, tmp_path)
    assert dataset.class_names == ("banded", "polka-dotted", "zigzagged")
    expected = [(LABELS[path.partition("/")[0]], make_image(grey(path))) for path in LISTS[f"{split}1"]]
    assert labelled(write(dataset, tmp_path / "out", split)) == expected


def test_labels_of_one_split_of_the_unpacked_folder_are_the_same(members, tmp_path):
    unpack(members, tmp_path / "unpacked")
    for source in (tmp_path / "unpacked", tmp_path / "unpacked" / "dtd"):
        dataset = read_dtd(source, tmp_path, "val")
        assert (list(dataset.splits), labels_of(dataset, "val")) == (["val"], [1])
        assert dataset.splits["val"].published == 1_880


def test_lists_and_archives_that_do_not_fit_are_refused(members, archive, tmp_path):
    name = "dtd/labels/test1.txt"
    for line in (b"banded/banded_0009.jpg\n", b"banded/banded_0005.jpg\n", b"../labels/train1.txt\n"):
        archive.write_bytes(make_tar({**members, name: members[name] + line}))
        assert_refused(r"test1\.txt: .* is not an image, or named twice", read_dtd, archive, tmp_path)
    del members[name]
    archive.write_bytes(make_tar(members))
    assert_refused(r"tar\.gz: holds no labels/test1\.txt; download it again", read_dtd, archive, tmp_path)
    archive.write_bytes(make_tar({"jpg/1.jpg": make_image()}))
    assert_refused(
        r"holds no labels/train1\.txt; give dtd-r1\.0\.1\.tar\.gz, or the folder", read_dtd, archive, tmp_path
    )
    archive.write_bytes(make_tar(members)[:-9000])
    assert_refused(r"tar\.gz: is truncated or damaged", read_dtd, archive, tmp_path)
