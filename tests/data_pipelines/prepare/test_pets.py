import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from lit_het.data_pipelines.prepare.pets import CLASS_NAMES, read_pets
from tests.data_pipelines.prepare.conftest import GOLDEN, TRUTH, labels_of, write
from tests.refusals import assert_refused

PETS = GOLDEN / "pets"


@pytest.fixture
def unpacked(tmp_path) -> Path:
    for name in ("images", "annotations"):
        with tarfile.open(PETS / f"{name}.tar.gz") as tar:
            tar.extractall(tmp_path / "pets", filter="data")
    return tmp_path / "pets"


def originals() -> dict[str, bytes]:
    with tarfile.open(PETS / "images.tar.gz") as tar:
        files = ((member.name, tar.extractfile(member)) for member in tar if member.name.endswith(".jpg"))
        return {Path(name).stem: file.read() for name, file in files if file is not None}


@pytest.mark.parametrize(("split", "official"), [("train", "trainval"), ("test", "test")])
def test_the_official_splits_keep_their_labels_and_bytes(tmp_path, split, official):
    truth, images = TRUTH["pets"][official], originals()
    samples = write(read_pets(PETS, tmp_path), tmp_path, split, check_images=True)
    assert [sample.label for sample in samples] == [label for _, label in truth]
    for (name, _), sample in zip(truth, samples, strict=True):
        kind = TRUTH["pets_kinds"][name].partition("-")[0]
        extension = {"jpeg": "jpg", "png": "png", "gif": "png"}[kind]
        assert sorted(sample.members) == ["cls", extension]
        if kind == "gif":
            ours, theirs = (Image.open(io.BytesIO(data)).convert("RGB") for data in (sample.image, images[name]))
            assert ours.tobytes() == theirs.tobytes()
        else:
            assert sample.image == images[name]


def test_names_are_readable_and_in_the_order_of_the_ids():
    assert len(set(CLASS_NAMES)) == 37
    for label, name in TRUTH["pets"]["class_of_id"].items():
        assert CLASS_NAMES[int(label)].replace(" ", "_").lower() == name.lower()
    assert CLASS_NAMES[2] == "American Pit Bull Terrier"


def test_unpacked_folders_equal_the_archives(tmp_path, unpacked):
    ours, theirs = (read_pets(source, tmp_path) for source in (unpacked, PETS))
    for split in ("train", "test"):
        assert labels_of(ours, split) == labels_of(theirs, split)
    ours, theirs = ([sample.image for sample in found.splits["test"].read([3, 0])] for found in (ours, theirs))
    assert ours == theirs


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Abyssinian_7 1 1 1", r"holds no Abyssinian_7\.jpg, which test\.txt names"),
        ("Abyssinian_2 1 1 1", r"test\.txt names Abyssinian_2 twice"),
        ("Abyssinian_1 2 1 1", r"test\.txt line 13: 'Abyssinian_1 2 1 1' is not an image with its class"),
        ("Abyssinian_1", "is not an image with its class"),
        ("Abyssinian_1 38 1 1", "is not an image with its class"),
        ("Abyssinian_1 x 1 1", "is not an image with its class"),
    ],
)
def test_an_invalid_list_is_refused(tmp_path, unpacked, line, message):
    with (unpacked / "annotations" / "test.txt").open("a") as file:
        file.write(f"{line}\n")
    assert_refused(message, read_pets, unpacked, tmp_path)


def test_what_is_missing_or_truncated_is_named(tmp_path, unpacked):
    assert_refused(r"holds neither images\.tar\.gz nor a folder images", read_pets, tmp_path, tmp_path)
    (unpacked / "annotations" / "trainval.txt").unlink()
    assert_refused(r"annotations: holds no trainval\.txt", read_pets, unpacked, tmp_path)
    assert list(read_pets(unpacked, tmp_path, "test").splits) == ["test"]
    for name in ("images.tar.gz", "annotations.tar.gz"):
        (tmp_path / name).write_bytes((PETS / name).read_bytes()[: -100 if name.startswith("images") else None])
    assert_refused(r"images\.tar\.gz: is truncated or damaged .* download it again", read_pets, tmp_path, tmp_path)
