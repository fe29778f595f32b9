"""Oxford Flowers-102 from a small archive in the official layout."""

from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.prepare.flowers import CLASS_NAMES, read_flowers
from tests.data_pipelines.prepare.conftest import labelled, make_image, make_mat, make_tar, unpack, write
from tests.refusals import assert_refused

LABELS = [3, 102, 1, 3, 77, 77, 1]  # of image_00001 and so on
SPLITS = {"trnid": [6, 1], "valid": [3], "tstid": [2, 7, 5, 4]}


IMAGES = {f"jpg/image_{number:05}.jpg": make_image(30 * number) for number in range(1, len(LABELS) + 1)}


@pytest.fixture
def flowers(tmp_path, matlab_in_process) -> Path:
    lists = {name: np.array([numbers], np.uint16) for name, numbers in SPLITS.items()}
    files = {"imagelabels.mat": make_mat(labels=np.array([LABELS], np.uint8)), "setid.mat": make_mat(**lists)}
    return unpack({"102flowers.tgz": make_tar(IMAGES, "w:gz"), **files}, tmp_path / "flowers")


@pytest.mark.parametrize(("split", "official"), [("train", "trnid"), ("val", "valid"), ("test", "tstid")])
def test_the_official_splits_keep_their_labels_and_bytes(flowers, tmp_path, split, official):
    samples = labelled(write(read_flowers(flowers, tmp_path), tmp_path / "out", split))
    assert samples == [(LABELS[number - 1] - 1, make_image(30 * number)) for number in SPLITS[official]]


def test_the_unpacked_folder_equals_the_archive(flowers, tmp_path):
    (flowers / "102flowers.tgz").unlink()
    dataset = read_flowers(unpack(IMAGES, flowers), tmp_path, "test")
    assert list(dataset.splits) == ["test"]
    assert [sample.image for sample in dataset.splits["test"].read([1])] == [make_image(210)]


def test_there_are_102_names():
    assert len(set(CLASS_NAMES)) == 102
    named = {1: "pink primrose", 51: "petunia", 73: "water lily", 77: "passion flower", 102: "blackberry lily"}
    assert {label: CLASS_NAMES[label - 1] for label in named} == named


@pytest.mark.parametrize(
    ("file", "variables", "message"),
    [
        ("setid.mat", {"trnid": [8]}, r"image_00008\.jpg, which setid\.mat names, has no image or label"),
        ("setid.mat", {"tstid": [1]}, r"setid\.mat: holds no readable trnid"),
        ("imagelabels.mat", {"labels": [103] * 7}, r"imagelabels\.mat: has labels that are not from 1 to 102"),
        ("imagelabels.mat", {"labels": [0.5] * 7}, r"imagelabels\.mat: labels are not valid image numbers"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(flowers, tmp_path, file, variables, message):
    (flowers / file).write_bytes(make_mat(**variables))
    assert_refused(message, read_flowers, flowers, tmp_path, "train")


def test_missing_or_damaged_files_are_named(flowers, tmp_path):
    (flowers / "setid.mat").write_bytes(b"<html>404</html>")
    assert_refused(r"setid\.mat: holds no readable trnid \(.*\); download it again", read_flowers, flowers, tmp_path)
    (flowers / "setid.mat").unlink()
    assert_refused(r"holds no setid\.mat; put the official one there", read_flowers, flowers, tmp_path)
    assert_refused(r"holds neither 102flowers\.tgz nor a folder jpg", read_flowers, tmp_path, tmp_path)
