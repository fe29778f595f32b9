"""Corrupted copies of shards: same keys, same members, other images."""

import numpy as np
import pytest

from lit_het.data_pipelines.images.corruptions import corrupt
from lit_het.data_pipelines.images.decoding import decode_whole, encode_jpeg
from lit_het.data_pipelines.prepare.corrupted import CleanShards, copy_names
from lit_het.data_pipelines.prepare.images import encode_png
from lit_het.data_pipelines.prepare.writer import SplitWriter, WriteOptions
from lit_het.data_pipelines.shards.writing import expand, write_shards
from tests.data_pipelines.prepare.conftest import bytes_of, unpack, written
from tests.refusals import assert_refused

NAMES = {
    "classnames.txt": b"a\nb\nc\n",
    "zeroshot_classification_templates.txt": b"{c}\n",
    "candidates.txt": b"a\nb\nc\nd\n",
}


def make_image(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (20, 30, 3), np.uint8)


@pytest.fixture
def clean(tmp_path):
    samples = [
        {"__key__": f"p{n:02d}", "png": encode_png(make_image(n)), "cls": n % 3, "soft.npy": b"x", "txt": f"text {n}"}
        for n in range(9)
    ]
    write_shards(tmp_path / "set" / "test", samples, samples_per_shard=4)
    unpack(NAMES, tmp_path / "set")
    return expand(tmp_path / "set" / "test")


def write(clean, folder, corruption="gaussian_noise", severity=2, seed=0, **options):
    split = CleanShards(clean).corrupted(corruption, severity, seed)
    SplitWriter(folder, split, WriteOptions(**options)).write(lambda count: None)


def test_keys_labels_and_captions_stay_and_images_are_corrupted(tmp_path, clean):
    write(clean, tmp_path / "out" / "fog" / "3", "fog", 3, samples_per_shard=5)
    samples = written(tmp_path / "out" / "fog" / "3")
    assert [sample.key for sample in samples] == [f"p{n:02d}" for n in range(9)]
    assert [sample.label for sample in samples] == [n % 3 for n in range(9)]
    assert [sample.members["txt"].decode() for sample in samples] == [f"text {n}" for n in range(9)]
    assert {sample.members["soft.npy"] for sample in samples} == {b"x"}
    for number, sample in enumerate(samples):
        assert sample.pixels.shape == (20, 30, 3)
        assert np.abs(sample.pixels.astype(float) - make_image(number)).mean() > 10


def test_images_depend_on_the_seed_and_the_key_only(tmp_path, clean):
    write(clean, tmp_path / "a", workers=1)
    write(clean, tmp_path / "b", workers=3)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    write(clean, tmp_path / "c", samples_per_shard=2)
    write(clean[1:2], tmp_path / "d")
    a, c, d = ({s.key: s.image for s in written(tmp_path / name)} for name in "acd")
    assert a == c
    assert d.items() <= a.items()
    write(clean, tmp_path / "e", seed=1)
    assert bytes_of(tmp_path / "e") != bytes_of(tmp_path / "a")


def test_an_interrupted_split_is_resumed_and_another_one_is_refused(tmp_path, clean):
    split = CleanShards(clean).corrupted("contrast", 1, 0)
    SplitWriter(tmp_path / "1", split, WriteOptions()).write(lambda count: None)
    assert SplitWriter(tmp_path / "1", split, WriteOptions()).finished
    other = CleanShards(clean).corrupted("contrast", 1, seed=5)
    message = "exists, from another source or with other options"
    assert_refused(message, SplitWriter, tmp_path / "1", other, WriteOptions())


def test_names_and_prompts_are_copied_from_beside_the_shards_or_above(tmp_path, clean):
    copy_names(clean[0], tmp_path / "fog")
    assert {path.name: path.read_bytes() for path in (tmp_path / "fog").iterdir()} == NAMES


def test_a_broken_image_a_repeated_key_and_an_unknown_corruption_are_named(tmp_path, clean):
    write_shards(tmp_path / "broken", [{"__key__": "x", "jpg": b"\xff\xd8\xff oops", "cls": 0}])
    broken = expand(tmp_path / "broken")
    assert_refused(r"shard-000000.tar: x: damaged JPEG .*lit-het data check", write, broken, tmp_path / "out")
    write_shards(tmp_path / "again", [{"__key__": "p01", "jpg": encode_jpeg(make_image(0)), "cls": 0}])
    assert_refused("key p01 occurs 2 times", CleanShards, [*clean, *expand(tmp_path / "again")])
    assert_refused(
        "--corruptions rain is none of gaussian_noise, shot_noise, ", CleanShards(clean).corrupted, "rain", 1, 0
    )


def test_an_image_that_is_too_long_for_a_corruption_is_named(tmp_path):
    write_shards(tmp_path / "long", [{"__key__": "x", "png": encode_png(np.zeros((4, 33_000, 3), np.uint8)), "cls": 0}])
    message = "shard-000000.tar: x: OpenCV cannot corrupt it"
    assert_refused(message, write, expand(tmp_path / "long"), tmp_path / "out", "glass_blur")


def test_whole_images_keep_their_size_and_pixels():
    pixels = make_image(0)
    np.testing.assert_array_equal(decode_whole(encode_png(pixels)), pixels)
    assert np.abs(decode_whole(encode_jpeg(pixels, 100)).astype(int) - pixels).mean() < 2
    grey = encode_jpeg(pixels[:, :, :1])
    assert decode_whole(grey).shape == (20, 30, 3)
    assert corrupt(decode_whole(grey), "saturate", 5, np.random.default_rng(0)).shape == (20, 30, 3)
