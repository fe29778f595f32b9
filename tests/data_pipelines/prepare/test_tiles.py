"""Colorectal histology and UC Merced from zip archives in the official layout, split as in the papers."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.prepare.tiles import read_colorectal, read_uc_merced
from tests.data_pipelines.conftest import encoded
from tests.data_pipelines.prepare.conftest import labels_of, make_zip, unpack, write
from tests.refusals import assert_refused

TISSUES = ("TUMOR", "STROMA", "COMPLEX", "LYMPHO", "DEBRIS", "MUCOSA", "ADIPOSE", "EMPTY")
_NAMES = """
agricultural airplane baseballdiamond beach buildings chaparral denseresidential forest freeway golfcourse harbor
intersection mediumresidential mobilehomepark overpass parkinglot river runway sparseresidential storagetanks
tenniscourt
"""
PLACES = _NAMES.split()


def tiles_of_colorectal(count: int) -> list[str]:
    return [
        f"Kather_texture_2016_image_tiles_5000/{place:02}_{tissue}/{number}_CRC-Prim-HE-01_001.tif_Row_1_Col_1.tif"
        for place, tissue in enumerate(TISSUES, 1)
        for number in range(count)
    ]


def tiles_of_uc_merced(count: int) -> list[str]:
    return [f"UCMerced_LandUse/Images/{place}/{place}{number:02}.tif" for place in PLACES for number in range(count)]


SETS = {
    "colorectal": (read_colorectal, tiles_of_colorectal, "Kather_texture_2016_image_tiles_5000.zip"),
    "uc_merced": (read_uc_merced, tiles_of_uc_merced, "UCMerced_LandUse.zip"),
}


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (5, 4, 3), np.uint8)


@pytest.fixture
def archive(tmp_path):
    def archive(name: str, count: int) -> Path:
        _, names, file = SETS[name]
        # The bytes are the paths: few bytes, and each shows which image it is.
        members = {path: path.rpartition("/")[2].encode() for path in names(count)}
        return unpack({file: make_zip({**members, "readme.txt": b"", "__MACOSX/._1.tif": b"x"})}, tmp_path) / file

    return archive


def contents(split) -> list[str]:
    return [sample.image.decode() for sample in split.read(range(split.num_samples))]


def test_the_slices_of_uc_merced_are_those_of_tensorflow_datasets(archive, tmp_path):
    splits = read_uc_merced(archive("uc_merced", 100), tmp_path).splits
    train, test = contents(splits["train"]), contents(splits["test"])
    assert (len(train), len(test)) == (1_000, 1_100)
    # Recorded: the order of these keys by `Hasher("train")` of tensorflow-datasets 4.9.10.
    assert train[:4] == ["harbor22.tif", "tenniscourt86.tif", "freeway33.tif", "mediumresidential41.tif"]
    assert (train[-1], test[0], test[-1]) == ("agricultural58.tif", "baseballdiamond38.tif", "tenniscourt42.tif")


def test_the_slices_of_colorectal_histology_are_in_the_order_of_the_hashes_of_class_and_file(archive, tmp_path):
    dataset = read_colorectal(archive("colorectal", 625), tmp_path)
    keys = {
        f"{tissue.lower()}/{number}_CRC-Prim-HE-01_001.tif_Row_1_Col_1.tif": label
        for label, tissue in enumerate(TISSUES)
        for number in range(625)
    }
    ordered = sorted((hashlib.md5(f"train{key}".encode()).hexdigest(), label) for key, label in keys.items())
    labels = [label for _, label in ordered]
    assert [labels_of(dataset, split) for split in ("train", "test")] == [labels[:2_000], labels[2_000:]]


@pytest.mark.parametrize(
    ("name", "classes", "known"),
    [
        ("colorectal", 8, {0: "tumour epithelium", 3: "immune cell conglomerates", 7: "background"}),
        ("uc_merced", 21, {0: "agricultural", 2: "baseball diamond", 13: "mobile home park", 20: "tennis court"}),
    ],
)
def test_tiles_become_png_without_loss_and_classes_have_names(tmp_path, name, classes, known):
    read, names, file = SETS[name]
    members = {path: encoded(pixels(number), "TIFF") for number, path in enumerate(names(2))}
    (tmp_path / file).write_bytes(make_zip(members))
    unpack(members, tmp_path / "unpacked")
    dataset = read(tmp_path / file, tmp_path)
    class_names = list(dataset.class_names or ())
    assert len(class_names) == classes
    assert {label: class_names[label] for label in known} == known
    samples = write(dataset, tmp_path / "out", "train", check_images=True)
    # Two images of each class, numbered in the order of the classes.
    found = {sample.pixels.tobytes(): sample.label for sample in samples}
    assert found == {pixels(number).tobytes(): number // 2 for number in range(2 * classes)}
    assert {tuple(sample.members) for sample in samples} == {("png", "cls")}
    unpacked = write(read(tmp_path / "unpacked", tmp_path), tmp_path / "again", "train")
    assert [sample.image for sample in unpacked] == [sample.image for sample in samples]


@pytest.mark.parametrize("name", SETS)
def test_other_and_damaged_archives_are_refused(tmp_path, archive, name):
    read, _, file = SETS[name]
    path = archive(name, 2)
    path.write_bytes(path.read_bytes()[:-30])
    assert_refused(r"\.zip: is truncated or damaged .*; download it again", read, path, tmp_path)
    path.write_bytes(make_zip({"jpg/image_00001.jpg": b"x"}))
    assert_refused(rf"holds no images of \w+; give {file}, or the folder unpacked from it", read, path, tmp_path)
    assert_refused("has no split 'val', only train, test", read, path, tmp_path, "val")


def test_a_tile_that_is_no_image_ends_the_command_with_its_name(tmp_path, archive):
    dataset = read_uc_merced(archive("uc_merced", 1), tmp_path)
    message = r"UCMerced_LandUse\.zip: .*\.tif: not an image .*; fix it, or skip broken"
    assert_refused(message, write, dataset, tmp_path / "out", "train")
