"""The validation images of Places365 from small archives in the official layout."""

from pathlib import Path

import pytest

from lit_het.data_pipelines.prepare.places365 import read_places365
from tests.data_pipelines.prepare.conftest import labelled, labels_of, make_image, make_tar, unpack, write
from tests.refusals import assert_refused

CATEGORIES = "/a/airfield 0\n/a/apartment_building/outdoor 1\n/z/zen_garden 2\n"
LABELS = [2, 0, 1, 2]


def image_name(number: int) -> str:
    return f"Places365_val_{number:08}.jpg"


@pytest.fixture
def lists() -> dict[str, bytes]:
    labels = "".join(f"{image_name(number)} {label}\n" for number, label in enumerate(LABELS, 1))
    train = "/a/airfield/00000001.jpg 0\n"
    texts = {"categories_places365": CATEGORIES, "places365_val": labels, "places365_train_standard": train}
    return {f"{name}.txt": text.encode() for name, text in texts.items()}


IMAGES = {f"val_256/{image_name(number)}": make_image(50 * number) for number in range(1, len(LABELS) + 1)}


@pytest.fixture
def places(tmp_path, lists) -> Path:
    files = {"val_256.tar": make_tar(IMAGES), "filelist_places365-standard.tar": make_tar(lists)}
    return unpack(files, tmp_path / "places")


def test_the_validation_set_is_the_test_split(places, tmp_path):
    dataset = read_places365(places, tmp_path)
    assert dataset.class_names == ("airfield", "apartment building outdoor", "zen garden")
    assert labelled(write(dataset, tmp_path / "out", "test")) == list(zip(LABELS, IMAGES.values(), strict=True))


def test_unpacked_archives_equal_packed_ones(places, tmp_path, lists):
    (packed,) = read_places365(places, tmp_path, "test").splits.values()
    dataset = read_places365(unpack({**lists, **IMAGES}, tmp_path / "unpacked"), tmp_path)
    (unpacked,) = dataset.splits.values()
    assert labels_of(dataset, "test") == LABELS
    assert [sample.image for sample in unpacked.read([3, 0])] == [sample.image for sample in packed.read([3, 0])]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("places365_val", (b" 1\n", b" 3\n"), r"Places365_val_00000003\.jpg, .* has no file or class"),
        ("places365_val", (b"04.jpg", b"05.jpg"), r"val_256\.tar: Places365_val_00000005\.jpg, .* put the official"),
        ("places365_val", (b"04.jpg", b"03.jpg"), r"places365_val\.txt line 4: .* is not a new name with its number"),
        ("places365_val", (b" 1\n", b"\n"), r"places365_val\.txt line 3: .* is not a new name with its number"),
        ("places365_val", (b" 1\n", b" " + b"1" * 5000 + b"\n"), r"line 3: .* is not a new name with its number"),
        ("categories_places365", (b" 2\n", b" 3\n"), "classes of categories_places365.txt are not numbered from 0"),
    ],
)
def test_lists_that_do_not_fit_are_refused(places, tmp_path, lists, file, change, message):
    changed = {**lists, f"{file}.txt": lists[f"{file}.txt"].replace(*change, 1)}
    assert changed != lists
    (places / "filelist_places365-standard.tar").write_bytes(make_tar(changed))
    assert_refused(message, read_places365, places, tmp_path)


def test_missing_files_are_named(places, tmp_path):
    message = r"val_256\.tar: is not a folder; give the folder with val_256\.tar and filelist"
    assert_refused(message, read_places365, places / "val_256.tar", tmp_path)
    (places / "val_256.tar").unlink()
    assert_refused(
        r"Places365_val_00000001\.jpg, .* put the official val_256\.tar there", read_places365, places, tmp_path
    )
    (places / "filelist_places365-standard.tar").unlink()
    message = r"holds no categories_places365\.txt; give filelist_places365-standard\.tar"
    assert_refused(message, read_places365, places, tmp_path)
    assert_refused("Places365: has no split 'train', only test", read_places365, places, tmp_path, "train")
