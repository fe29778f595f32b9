"""Oxford Flowers-102 from a small archive in the official layout."""

from pathlib import Path

import numpy as np
import pytest
import scipy.io

from lit_het.data_pipelines.prepare.flowers import CLASS_NAMES, read_flowers
from lit_het.errors import UserError

LABELS = [3, 102, 1, 3, 77, 77, 1]  # of image_00001 and so on
SPLITS = {"trnid": [6, 1], "valid": [3], "tstid": [2, 7, 5, 4]}


@pytest.fixture
def flowers(tmp_path, make_tar, make_image) -> Path:
    folder = tmp_path / "flowers"
    folder.mkdir()
    images = {f"jpg/image_{number:05}.jpg": make_image(30 * number) for number in range(1, len(LABELS) + 1)}
    (folder / "102flowers.tgz").write_bytes(make_tar(images, "w:gz"))
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": np.array([LABELS], np.uint8)})
    scipy.io.savemat(folder / "setid.mat", {name: np.array([numbers], np.uint16) for name, numbers in SPLITS.items()})
    return folder


@pytest.mark.parametrize(("split", "official"), [("train", "trnid"), ("val", "valid"), ("test", "tstid")])
def test_the_official_splits_keep_their_labels_and_bytes(flowers, tmp_path, write, make_image, split, official):
    samples = write(read_flowers(flowers, tmp_path), tmp_path / "out", split)
    assert [sample.label for sample in samples] == [LABELS[number - 1] - 1 for number in SPLITS[official]]
    assert [sample.image for sample in samples] == [make_image(30 * number) for number in SPLITS[official]]


def test_the_unpacked_folder_equals_the_archive(flowers, tmp_path, make_image):
    (flowers / "jpg").mkdir()
    for number in range(1, len(LABELS) + 1):
        (flowers / "jpg" / f"image_{number:05}.jpg").write_bytes(make_image(30 * number))
    (flowers / "102flowers.tgz").unlink()
    dataset = read_flowers(flowers, tmp_path, "test")
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
    scipy.io.savemat(flowers / file, variables)
    with pytest.raises(UserError, match=message):
        read_flowers(flowers, tmp_path, "train")


def test_missing_or_damaged_files_are_named(flowers, tmp_path):
    (flowers / "setid.mat").write_bytes(b"<html>404</html>")
    with pytest.raises(UserError, match=r"setid\.mat: holds no readable trnid \(.*\); download it again"):
        read_flowers(flowers, tmp_path)
    (flowers / "setid.mat").unlink()
    with pytest.raises(UserError, match=r"holds no setid\.mat; put the official one there"):
        read_flowers(flowers, tmp_path)
    with pytest.raises(UserError, match=r"holds neither 102flowers\.tgz nor a folder jpg"):
        read_flowers(tmp_path, tmp_path)
