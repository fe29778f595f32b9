"""Stanford Cars from small archives in both forms in which it was published."""

from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.prepare.cars import read_cars
from tests.data_pipelines.prepare.conftest import labelled, make_image, make_mat, make_tar, unpack, write
from tests.refusals import assert_refused

NAMES = ("AM General Hummer SUV 2000", "Acura RL Sedan 2012", "smart fortwo Convertible 2012")
# Class from 1 and whether it is for testing, of 000001.jpg and so on.
CARS = ((2, 0), (3, 1), (1, 0), (3, 0), (1, 1))


def annotations(name: str, rows, flags=()) -> np.ndarray:
    """A structure with one box, one class and one file name for each row."""
    fields = ["bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", name, *flags]
    if name == "relative_im_path":  # the order of fields differs between both forms
        fields = [name, *fields[:5], *flags]
    found = np.empty((1, len(rows)), [(field, "O") for field in fields])
    for place, (image, label, *more) in enumerate(rows):
        row = {"bbox_x1": 1, "bbox_y1": 2, "bbox_x2": 3, "bbox_y2": 4, "class": np.uint8(label), name: image}
        row |= dict(zip(flags, more, strict=True))
        found[0, place] = tuple(row[field] for field in fields)
    return found


def list_of(name: str, rows, flags=()) -> bytes:
    """The file of a list and of the names of classes."""
    return make_mat(annotations=annotations(name, rows, flags), class_names=np.array([NAMES], "O"))


@pytest.fixture
def in_one(tmp_path, matlab_in_process) -> Path:
    rows = [(f"car_ims/{n:06}.jpg", label, np.uint8(test)) for n, (label, test) in enumerate(CARS, 1)]
    images = {name: make_image(40 * n) for n, (name, *_) in enumerate(rows, 1)}
    files = {"cars_annos.mat": list_of("relative_im_path", rows, ["test"]), "car_ims.tgz": make_tar(images, "w:gz")}
    return unpack(files, tmp_path / "in_one")


@pytest.fixture
def in_parts(tmp_path, matlab_in_process) -> Path:
    # Each split counts its images from 1.
    parts = {"train": [], "test": []}
    for number, (label, test) in enumerate(CARS, 1):
        rows = parts["test" if test else "train"]
        rows.append((f"{len(rows) + 1:05}.jpg", label, number))
    lists = {p: make_mat(annotations=annotations("fname", [row[:2] for row in rows])) for p, rows in parts.items()}
    meta = make_mat(class_names=np.array([NAMES], "O"))
    devkit = {"devkit/cars_meta.mat": meta, "devkit/cars_train_annos.mat": lists["train"]}
    files = {"cars_test_annos_withlabels.mat": lists["test"], "car_devkit.tgz": make_tar(devkit, "w:gz")}
    for part, rows in parts.items():
        images = {f"cars_{part}/{name}": make_image(40 * number) for name, _, number in rows}
        files[f"cars_{part}.tgz"] = make_tar(images, "w:gz")
    return unpack(files, tmp_path / "in_parts")


@pytest.mark.parametrize("form", ["in_one", "in_parts"])
@pytest.mark.parametrize(("split", "numbers"), [("train", [1, 3, 4]), ("test", [2, 5])])
def test_both_forms_give_the_official_splits(request, tmp_path, form, split, numbers):
    dataset = read_cars(request.getfixturevalue(form), tmp_path)
    assert dataset.class_names == NAMES
    expected = [(CARS[number - 1][0] - 1, make_image(40 * number)) for number in numbers]
    assert labelled(write(dataset, tmp_path / "out", split)) == expected
    assert {name: found.published for name, found in dataset.splits.items()} == {"train": 8_144, "test": 8_041}


def test_unpacked_folders_also_nested_ones_are_read(in_parts, tmp_path):
    numbers = {"train": [1, 3, 4], "test": [2, 5]}
    for part, images in numbers.items():
        (in_parts / f"cars_{part}.tgz").unlink()
        files = {f"cars_{part}/cars_{part}/{n:05}.jpg": make_image(40 * i) for n, i in enumerate(images, 1)}
        unpack(files, in_parts)
    splits = read_cars(in_parts, tmp_path).splits
    found = {part: [sample.image for sample in split.read(range(split.num_samples))] for part, split in splits.items()}
    assert found == {part: [make_image(40 * number) for number in images] for part, images in numbers.items()}


def test_one_split_needs_only_its_own_files(in_parts, tmp_path):
    (in_parts / "cars_test.tgz").unlink()
    assert_refused(
        r"holds neither cars_test\.tgz nor a folder cars_test; put the official", read_cars, in_parts, tmp_path
    )
    (in_parts / "cars_test_annos_withlabels.mat").unlink()
    assert list(read_cars(in_parts, tmp_path, "train").splits) == ["train"]
    message = r"holds neither cars_annos\.mat, which belongs to car_ims\.tgz, nor cars_test"
    assert_refused(message, read_cars, in_parts, tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("car_ims/000009.jpg", 1, 0)], r"000009\.jpg of the list has no image or class, or is listed twice"),
        ([("car_ims/000001.jpg", 4, 0)], r"cars_annos\.mat: names 3 classes, and the annotations have 4"),
        ([("car_ims/000001.jpg", 0, 0)], r"000001\.jpg of the list has no image or class"),
        ([("car_ims/000001.jpg", 1, 0)] * 2, r"000001\.jpg .* or is listed twice"),
    ],
)
def test_a_list_that_does_not_fit_the_images_is_refused(in_one, tmp_path, rows, message):
    (in_one / "cars_annos.mat").write_bytes(list_of("relative_im_path", rows, ["test"]))
    assert_refused(message, read_cars, in_one, tmp_path)


def test_damaged_and_other_lists_are_named(in_one, tmp_path):
    nameless = make_mat(annotations=annotations("relative_im_path", [("1.jpg", 1, 0)], ["test"]))
    for content, message in (
        (list_of("fname", [("1.jpg", 1)]), "its annotations have no relative_im_path and class"),
        (nameless, "holds no readable class_names and annotations .*KeyError"),
        (b"<html>404</html>", r"holds no readable class_names and annotations \(.*\); download"),
    ):
        (in_one / "cars_annos.mat").write_bytes(content)
        assert_refused(rf"cars_annos\.mat: {message}", read_cars, in_one, tmp_path)
