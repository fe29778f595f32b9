"""Caltech-101 from an archive with all of its folders and a few images in each."""

from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.prepare.caltech101 import read_caltech101
from tests.data_pipelines.prepare.conftest import labels_of, make_tar, unpack
from tests.refusals import assert_refused

_NAMES = """
BACKGROUND_Google Faces Faces_easy Leopards Motorbikes accordion airplanes anchor ant barrel bass beaver binocular
bonsai brain brontosaurus buddha butterfly camera cannon car_side ceiling_fan cellphone chair chandelier cougar_body
cougar_face crab crayfish crocodile crocodile_head cup dalmatian dollar_bill dolphin dragonfly electric_guitar elephant
emu euphonium ewer ferry flamingo flamingo_head garfield gerenuk gramophone grand_piano hawksbill headphone hedgehog
helicopter ibis inline_skate joshua_tree kangaroo ketch lamp laptop llama lobster lotus mandolin mayfly menorah
metronome minaret nautilus octopus okapi pagoda panda pigeon pizza platypus pyramid revolver rhino rooster saxophone
schooner scissors scorpion sea_horse snoopy soccer_ball stapler starfish stegosaurus stop_sign strawberry sunflower tick
trilobite umbrella watch water_lilly wheelchair wild_cat windsor_chair wrench yin_yang
"""
FOLDERS = _NAMES.split()
# Class 0 has 31 images, class 1 has 32, ...
FILES = {name: [f"image_{image:04}.jpg" for image in range(1, 32 + place % 7)] for place, name in enumerate(FOLDERS)}


@pytest.fixture(scope="module")
def members() -> dict[str, bytes]:
    images = {f"{folder}/{base}": f"{folder} {base}".encode() for folder in FILES for base in FILES[folder]}
    files = {**images, "BACKGROUND_Google/tmp": b"no image"}
    return {f"101_ObjectCategories/{name}": content for name, content in files.items()}


@pytest.fixture(scope="module")
def archive(members, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("caltech") / "101_ObjectCategories.tar.gz"
    path.write_bytes(make_tar(members, "w:gz"))
    return path


def contents(source: Path, scratch: Path, split: str) -> dict[bytes, int]:
    """Returns the labels of a split by the content of its images."""
    dataset = read_caltech101(source, scratch)
    samples = dataset.splits[split].read(range(dataset.splits[split].num_samples))
    return {sample.image: label for sample, label in zip(samples, labels_of(dataset, split), strict=True)}


def drawn() -> set[bytes]:
    """The training images of TensorFlow Datasets where the file system lists in alphabetical order."""
    np.random.seed(1234)  # noqa: NPY002 (as there)
    found = set()
    for folder in sorted(FILES):
        names = [*FILES[folder], *["tmp"] * (folder == "BACKGROUND_Google")]
        chosen = np.random.choice(names, 30, replace=False)  # noqa: NPY002
        found |= {f"{folder} {base}".encode() for base in chosen if base != "tmp"}
    return found


def test_thirty_images_of_each_class_are_drawn_as_by_numpys_global_generator(archive, tmp_path):
    training = contents(archive, tmp_path, "train")
    assert set(training) == drawn()
    assert len(training) in (30 * 102, 30 * 102 - 1)  # "tmp" may have been drawn
    testing = contents(archive, tmp_path, "test")
    every = {f"{folder} {base}".encode() for folder in FILES for base in FILES[folder]}
    assert set(testing) == every - drawn()


def test_there_are_102_classes_in_the_order_of_names_in_lower_case(archive, tmp_path):
    names = read_caltech101(archive, tmp_path).class_names or ()
    assert len(names) == 102
    known = {0: "accordion", 4: "background google", 37: "faces", 38: "faces easy", 57: "leopards", 101: "yin yang"}
    assert {label: names[label] for label in known} == known
    labels = contents(archive, tmp_path, "test")
    assert {label for image, label in labels.items() if image.startswith(b"BACKGROUND_Google")} == {4}
    assert {label for image, label in labels.items() if image.startswith(b"Faces ")} == {37}


def test_the_draw_does_not_depend_on_the_file_that_is_no_image_or_on_the_form_of_the_source(members, archive, tmp_path):
    images = {name: content for name, content in members.items() if not name.endswith("tmp")}
    unpack(images, tmp_path / "caltech")
    for source in (tmp_path / "caltech", tmp_path / "caltech" / "101_ObjectCategories"):
        assert contents(source, tmp_path, "train") == contents(archive, tmp_path, "train")


def test_other_folders_are_refused(members, tmp_path, archive):
    path = tmp_path / "101_ObjectCategories.tar.gz"
    fewer = {name: content for name, content in members.items() if "/BACKGROUND_Google/" not in name}
    path.write_bytes(make_tar(fewer, "w:gz"))
    message = "holds 101 folders of images, not 102 with BACKGROUND_Google; give 101_Object"
    assert_refused(message, read_caltech101, path, tmp_path)
    few = {name: content for name, content in members.items() if "/crab/" not in name}
    few["101_ObjectCategories/crab/image_0001.jpg"] = b"x"
    path.write_bytes(make_tar(few, "w:gz"))
    assert_refused(
        "class crab has 1 images, fewer than 30; download Caltech-101 again", read_caltech101, path, tmp_path
    )
    path.write_bytes(archive.read_bytes()[:-100])
    assert_refused(r"101_ObjectCategories\.tar\.gz: is truncated or damaged", read_caltech101, path, tmp_path)
