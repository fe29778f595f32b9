import hashlib

import numpy as np
import pytest

from lit_het.cli.main import main
from lit_het.data_pipelines.prepare.imagenet21k import WITHOUT_IMAGES, class_names, classes_of, read_imagenet21k
from tests.data_pipelines.prepare.conftest import labelled, labels_of, make_image, make_tar, unpack, write, written
from tests.refusals import assert_refused

WNIDS = ("n00004475", "n01440764", "n12998815")
WORDS = "n00004475\torganism, being\nn01440764\ttench, Tinca tinca\nn02012849\tcrane\nn12998815\ttench\n"


def class_tars(per_class: int = 4, skipping: int = 2) -> dict[str, bytes]:
    """A tar for each class, with images whose colour tells their class and number."""
    found = {}
    for place, wnid in enumerate(WNIDS):
        images = {f"{wnid}_{skipping * n}.JPEG": make_image(80 * place + 10 * n) for n in range(per_class)}
        found[f"{wnid}.tar"] = make_tar(images)
    return found


def colours(per_class: int = 4) -> list[tuple[int, bytes]]:
    return sorted((place, make_image(80 * place + 10 * n)) for place in range(3) for n in range(per_class))


@pytest.fixture
def whole(tmp_path):
    """The release as one tar of tars, in the order of nothing."""
    tars = dict(reversed(class_tars().items()))
    return unpack({"fall11_whole.tar": make_tar(tars)}, tmp_path / "source") / "fall11_whole.tar"


def test_a_tar_of_tars_and_a_folder_of_tars_are_the_same_data_set(tmp_path, whole):
    dataset = read_imagenet21k(whole, test_images=5)
    train, test = (write(dataset, tmp_path / "one", split, samples_per_shard=3) for split in ("train", "test"))
    assert (len(train), len(test)) == (7, 5)
    assert sorted(labelled(train) + labelled(test)) == colours()
    folder = unpack(class_tars(), tmp_path / "tars")
    others = read_imagenet21k(folder, test_images=5)
    assert others.splits["test"].fingerprint == dataset.splits["test"].fingerprint
    assert labelled(write(others, tmp_path / "two", "test", samples_per_shard=3)) == labelled(test)


def test_the_images_whose_names_have_the_least_hashes_are_the_test_split(whole):
    def rank(name: str) -> int:
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")

    names = [f"{wnid}/{wnid}_{2 * number}.JPEG" for wnid in WNIDS for number in range(4)]
    least = sorted(names, key=rank)[:5]
    expected = sorted(WNIDS.index(name.partition("/")[0]) for name in least)
    assert sorted(labels_of(read_imagenet21k(whole, test_images=5), "test")) == expected
    # Of more images, those that were chosen before stay chosen as far as their hashes are among the least.
    assert sorted(labels_of(read_imagenet21k(whole, test_images=11), "train")) == [
        WNIDS.index(max(names, key=rank).partition("/")[0])
    ]


def test_the_release_of_2011_has_two_classes_without_images_in_the_order_of_published_models():
    numbers = [1, *range(3_931_045, 3_931_045 + 21_840)]
    present = [f"n{number:08d}" for number in numbers]
    found = classes_of(present)
    # BiT's list has n03931044 before what follows, and n09859684.
    assert (len(found), found[:3], found[-1]) == (21_843, (present[0], "n03931044", present[1]), "n09859684")
    assert set(found) == {*present, *WITHOUT_IMAGES}
    assert classes_of(present[:5]) == tuple(sorted(present[:5]))


def test_a_file_of_classes_says_which_label_each_class_has(tmp_path, whole):
    order = tmp_path / "classes.txt"
    order.write_text("n12998815\nn00000001\nn01440764\nn00004475\n")
    dataset = read_imagenet21k(whole, "test", classes=order, test_images=11)
    assert set(labels_of(dataset, "test")) == {0, 2, 3}
    assert dataset.class_names == ("n12998815", "n00000001", "n01440764", "n00004475")
    for content, message in (
        ("n12998815\n", r"lacks n00004475 \(2 classes in all\)"),
        ("n12998815\nn12998815\n", "lists a WNID twice"),
        ("tench\n", "'tench' is not a WNID"),
    ):
        order.write_text(content)
        assert_refused(message, read_imagenet21k, whole, classes=order, test_images=1)


def test_classes_with_one_name_take_more_words(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text(WORDS + "n03126707\tcrane\n")
    wnids = [*WNIDS, "n02012849", "n03126707"]
    assert class_names(wnids, words) == (
        "organism",
        "tench, Tinca tinca",
        "tench",
        "crane (n02012849)",
        "crane (n03126707)",
    )
    assert_refused("has no line of n99999999", class_names, ["n99999999"], words)
    words.write_text("n00004475 organism\n")
    assert_refused("line 1 is not a WNID, a tab and names", class_names, WNIDS, words)


def test_the_processed_data_set_has_splits_of_its_own(tmp_path, capsys):
    root = "imagenet21k_resized/imagenet21k"
    names = [f"{root}_{part}/{wnid}/{wnid}_{n}.JPEG" for part, wnid, n in (
        ("train", "n00004475", 1), ("train", "n01440764", 2), ("val", "n01440764", 3), ("small_classes", "n12998815", 4)
    )]  # fmt: skip
    tar = unpack({"p.tar": make_tar({name: make_image(20 * n) for n, name in enumerate(names)})}, tmp_path) / "p.tar"
    dataset = read_imagenet21k(tar)
    assert labelled(write(dataset, tmp_path / "out", "train")) == [(0, make_image(0)), (1, make_image(20))]
    assert labelled(write(dataset, tmp_path / "out", "test")) == [(1, make_image(40))]
    assert dataset.class_names == WNIDS[:2], "the classes that it leaves out are none"
    assert dataset.splits["train"].left_out == {"of classes outside of train and val": 1}


def test_a_damaged_inner_tar_is_named_or_used_as_far_as_it_is_whole(tmp_path, capsys):
    tars = class_tars()
    cut = 1024 + len(make_image())
    tars["n01440764.tar"] = tars["n01440764.tar"][: cut + 700]
    tars["n12998815.tar"] = b"<html>404 not found</html>".ljust(1024)
    source = unpack({"whole.tar": make_tar(tars)}, tmp_path) / "whole.tar"
    assert_refused(r"whole\.tar: n01440764\.tar: is truncated or damaged", read_imagenet21k, source, test_images=1)
    dataset = read_imagenet21k(source, test_images=1, skip_broken=True)
    assert sum(split.num_samples for split in dataset.splits.values()) == 5
    told = capsys.readouterr().err
    assert "n01440764.tar: is truncated or damaged" in told
    assert "n12998815.tar: is not a tar archive" in told
    folder = unpack({"n01440764.tar": tars["n01440764.tar"]}, tmp_path / "folder")
    assert_refused(r"folder/n01440764\.tar: is truncated", read_imagenet21k, folder, test_images=1)


def test_the_command_skips_and_counts_broken_images(tmp_path, capsys):
    tars = class_tars()
    tars["n00004475.tar"] = make_tar({"n00004475_1.JPEG": b"no image", "n00004475_2.JPEG": make_image(1)})
    source = unpack(tars, tmp_path / "source")
    words = tmp_path / "words.txt"
    words.write_text(WORDS)
    command = ["data", "prepare", "imagenet21k", str(source), str(tmp_path / "out"), "--words", str(words)]
    command += ["--test-images", "2"]
    assert main(command) == 1
    assert "n00004475.tar: n00004475_1.JPEG: " in capsys.readouterr().err
    assert main([*command, "--skip-broken"]) == 0
    told = capsys.readouterr().err
    assert "1 broken image skipped, such as" in told
    samples = [*written(tmp_path / "out/train"), *written(tmp_path / "out/test")]
    assert np.bincount([sample.label for sample in samples]).tolist() == [1, 4, 4]
    assert (tmp_path / "out/classnames.txt").read_text().splitlines() == ["organism", "tench, Tinca tinca", "tench"]


def test_sources_that_cannot_be_read_are_refused(tmp_path, whole):
    assert_refused(r"has 12 images, and 102,400 of them would be the test split", read_imagenet21k, whole)
    assert_refused("--test-images 0: must be at least 1", read_imagenet21k, whole, test_images=0)
    assert_refused(r"folders of images are read by lit-het data prepare folder", read_imagenet21k, tmp_path)
    zipped = unpack({"winter21_whole.tar.gz": make_tar(class_tars(), "w:gz")}, tmp_path) / "winter21_whole.tar.gz"
    assert_refused(r"winter21_whole\.tar\.gz: is gzipped, .* unpack it with gunzip", read_imagenet21k, zipped)
    empty = unpack({"x.tar": make_tar({"cat/1.jpg": make_image()})}, tmp_path) / "x.tar"
    assert_refused("holds no images of classes", read_imagenet21k, empty)
    twice = unpack({**class_tars(), "whole.tar": make_tar(class_tars())}, tmp_path / "twice")
    assert_refused(r"whole\.tar: has (n\d+)_\d+\.JPEG, which is in .*\1\.tar, too; keep one", read_imagenet21k, twice)
