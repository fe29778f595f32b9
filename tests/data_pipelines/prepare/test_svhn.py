"""SVHN from small MATLAB files in the official layout."""

from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.prepare.svhn import read_svhn
from tests.data_pipelines.prepare.conftest import make_mat, unpack, write
from tests.refusals import assert_refused

LABELS = {"train": [10, 1, 9, 10, 3], "test": [5, 10]}


def pixels(split: str) -> np.ndarray:
    return np.random.default_rng(len(split)).integers(0, 256, (32, 32, 3, len(LABELS[split])), np.uint8)


def file_of(images: np.ndarray, labels: list) -> bytes:
    return make_mat(True, X=images, y=np.array(labels)[:, None])


@pytest.fixture
def svhn(tmp_path, matlab_in_process) -> Path:
    files = {f"{split}_32x32.mat": file_of(pixels(split), labels) for split, labels in LABELS.items()}
    return unpack(files, tmp_path / "svhn")


@pytest.mark.parametrize(("split", "digits"), [("train", [0, 1, 9, 0, 3]), ("test", [5, 0])])
def test_every_pixel_is_kept_and_label_ten_is_the_digit_zero(svhn, tmp_path, split, digits):
    dataset = read_svhn(svhn)
    samples = write(dataset, tmp_path / "out", split)
    assert [sample.label for sample in samples] == digits
    assert dataset.class_names == tuple("0123456789")
    np.testing.assert_array_equal(np.stack([sample.pixels for sample in samples], axis=-1), pixels(split))


def test_a_file_with_a_single_image_is_read(svhn, tmp_path):
    (svhn / "test_32x32.mat").write_bytes(file_of(pixels("test")[..., :1], [10]))
    (sample,) = write(read_svhn(svhn, "test"), tmp_path / "out", "test")
    assert sample.label == 0
    np.testing.assert_array_equal(sample.pixels, pixels("test")[:, :, :, 0])


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (pixels("test")[:, :, :2], [1, 2], r"X of shape \(32, 32, 2, 2\) are not 2 images of 32 x 32"),
        (pixels("test"), [1, 2, 3], r"X of shape \(32, 32, 3, 2\) are not 3 images"),
        (pixels("test").astype(np.float64), [1, 2], r"X of shape \(32, 32, 3, 2\) are not 2 images"),
        (pixels("test"), [0, 2], "has labels that are not from 1 to 10"),
        (pixels("test"), [1.5, 2], "has labels that are not from 1 to 10"),
    ],
)
def test_images_and_labels_that_do_not_fit_are_refused(svhn, images, labels, message):
    (svhn / "test_32x32.mat").write_bytes(file_of(images, labels))
    assert_refused(rf"test_32x32\.mat: {message}", read_svhn, svhn, "test")


def test_missing_and_damaged_files_are_named(svhn):
    (svhn / "train_32x32.mat").write_bytes((svhn / "train_32x32.mat").read_bytes()[:3000])
    assert_refused(r"train_32x32\.mat: holds no readable images and labels \(.*\); download it", read_svhn, svhn)
    (svhn / "train_32x32.mat").unlink()
    assert_refused(r"svhn: holds no train_32x32\.mat; put the official file there", read_svhn, svhn)
    assert list(read_svhn(svhn, "test").splits) == ["test"]
    message = r"test_32x32\.mat: is not a folder; give the folder with train_32x32\.mat and"
    assert_refused(message, read_svhn, svhn / "test_32x32.mat")
