import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.data_pipelines.data_config import LoaderConfig, WeightedShards
from lit_het.data_pipelines.images.augment import HorizontalFlip, RandomAffine
from lit_het.data_pipelines.images.decoding import decode, encode_jpeg
from lit_het.data_pipelines.images.rand_augment import RandAugment
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.labels import CaptionWords, ClassIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.storage import content_or_raise
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.types import Batch
from tests.data_pipelines.conftest import IMAGE_SIZE, NUM_SAMPLES, joined, number_tokens, sample, take
from tests.refusals import assert_refused

RANDOM = {
    "preprocessing": Preprocessing(filter="fast"),
    "crop": InceptionCrop(0.5),
    "augmentations": (HorizontalFlip(), RandAugment(), RandomAffine()),
}
BROKEN = {"jpg": b"<html>404</html>"}


def config(directory: Path | str, **changes: object) -> LoaderConfig:
    base = LoaderConfig((str(directory),), image_size=IMAGE_SIZE, batch_size=4, labels=ClassIndex(), threads=0, seed=5)
    return dataclasses.replace(base, **changes)


def test_labels_are_read_with_the_names_of_all_folders(tmp_path: Path):
    for folder, names in (("a", "cat\ndog\n"), ("b", "dog\ncat\n")):
        write_shards(tmp_path / folder, [sample(f"{folder}{number}") for number in range(4)])
        (tmp_path / folder / "classnames.txt").write_text(names)
    both = config(tmp_path, shards=(f"{tmp_path}/a", f"{tmp_path}/b"))
    assert_refused(r"b/classnames\.txt: differs from", Loader, both)
    mixed = config(tmp_path / "a", mixture=(WeightedShards((f"{tmp_path}/b",), 0.5),))
    assert_refused(r"b/classnames\.txt: differs from", Loader, mixed)
    named = ClassIndex(f"{tmp_path}/a/classnames.txt")
    assert Loader(dataclasses.replace(both, labels=named)).num_classes == 2


def stored_image(loader: Loader, sample: int) -> bytes:
    return content_or_raise(loader.index.read([sample], ["image"])[0][0])


def assert_equal(actual: Batch, expected: Batch):
    for field in dataclasses.fields(Batch):
        np.testing.assert_array_equal(getattr(actual, field.name), getattr(expected, field.name), field.name)


def labels_of(batch: Batch) -> list[int]:
    return np.asarray(batch.label).tolist()


def from_hosts(hosts: Iterable[list[Batch]]) -> Batch:
    """Joins the batches of all hosts."""
    return joined([joined(parts) for parts in zip(*hosts, strict=True)])


def rows(batch: Batch, chosen: slice) -> Batch:
    return jax.tree.map(lambda array: array[chosen], batch)


@pytest.fixture(scope="module")
def augmented(shards: Path) -> Loader:
    return Loader(config(shards, **RANDOM), number_tokens)


@pytest.fixture(scope="module")
def uninterrupted(augmented: Loader) -> Batch:
    """The first 100 samples of the stream."""
    return joined(take(augmented, 25))


def test_a_batch_holds_each_sample_s_own_image_text_and_label(shards: Path):
    loader = Loader(config(shards), number_tokens)
    batch = joined(take(loader, 3))
    assert batch.valid.all()
    assert (batch.image.dtype, batch.text.dtype, batch.label.dtype) == (np.uint8, np.int32, np.int32)
    for image, text, label in zip(batch.image, batch.text, batch.label, strict=True):
        assert text.tolist() == [label, 99]
        np.testing.assert_array_equal(image, decode(stored_image(loader, int(label)), IMAGE_SIZE))
    assert loader.num_samples == loader.num_classes == NUM_SAMPLES


def test_captions_and_labels_are_read_only_on_request(shards: Path):
    batch = take(Loader(config(shards, labels=None)), 1)[0]
    assert batch.text is batch.label is None


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation_of_the_samples(shards: Path, seed: int, epoch: int):
    loader = Loader(config(shards, seed=seed, batch_size=NUM_SAMPLES))
    first, second = (labels_of(batch) for batch in take(loader, 2, epoch * NUM_SAMPLES))
    assert sorted(first) == sorted(second) == list(range(NUM_SAMPLES))
    assert first != second
    assert first != list(range(NUM_SAMPLES))


def test_the_next_seed_is_not_the_next_epoch(shards: Path):
    # grain's shuffle adds the number of the epoch to the seed
    second_epoch = take(Loader(config(shards, seed=5, batch_size=NUM_SAMPLES)), 2)[1]
    other_seed = take(Loader(config(shards, seed=6, batch_size=NUM_SAMPLES)), 1)[0]
    assert labels_of(second_epoch) != labels_of(other_seed)


@settings(max_examples=15, deadline=None)
@given(position=st.integers(0, 80), process_count=st.sampled_from([1, 2, 4]))
def test_any_position_on_any_number_of_hosts_continues_the_same_stream(
    augmented: Loader, uninterrupted: Batch, position: int, process_count: int
):
    hosts = (take(augmented, 3, position, process, process_count) for process in range(process_count))
    assert_equal(from_hosts(hosts), rows(uninterrupted, slice(position, position + 12)))


def test_a_new_loader_with_threads_continues_where_the_old_one_stopped(shards: Path, uninterrupted: Batch):
    resumed = Loader(config(shards, **RANDOM, threads=3, prefetch_batches=5), number_tokens)
    assert_equal(joined(take(resumed, 15, 40)), rows(uninterrupted, slice(40, None)))


def test_a_sample_is_augmented_differently_in_each_epoch(augmented: Loader, uninterrupted: Batch):
    labels, images = np.asarray(uninterrupted.label), np.asarray(uninterrupted.image)
    one, other, *_ = np.flatnonzero(labels == labels[0])
    assert not np.array_equal(images[one], images[other])


def test_a_stream_in_order_and_a_batch_larger_than_the_data_set_repeat_it(shards: Path):
    batch = joined(take(Loader(config(shards, shuffle=False)), 12))
    assert labels_of(batch) == [i % NUM_SAMPLES for i in range(48)]
    (large,) = take(Loader(config(shards, batch_size=2 * NUM_SAMPLES)), 1)
    assert sorted(labels_of(large)) == sorted([*range(NUM_SAMPLES)] * 2)


@pytest.mark.parametrize("process_count", [1, 2])
def test_an_evaluation_epoch_is_in_order_and_ends_in_invalid_rows(augmented: Loader, process_count: int):
    hosts = [list(augmented.epoch(8, process, process_count)) for process in range(process_count)]
    assert {len(host) for host in hosts} == {3}
    batch: Any = from_hosts(hosts)
    assert batch.valid.tolist() == [True] * NUM_SAMPLES + [False]
    assert labels_of(batch) == [*range(NUM_SAMPLES), 0]
    assert not batch.image[-1].any()
    assert not batch.text[-1].any()
    neither_cropped_nor_augmented = decode(stored_image(augmented, 7), IMAGE_SIZE, filter="fast")
    np.testing.assert_array_equal(batch.image[7], neither_cropped_nor_augmented)


def test_captions_become_multi_hot_labels(shards: Path):
    loader = Loader(config(shards, labels=CaptionWords()))
    batch = next(loader.epoch(5))
    np.testing.assert_array_equal(batch.label, np.eye(5, NUM_SAMPLES, dtype=np.float32))
    assert loader.num_classes == NUM_SAMPLES


def test_the_first_broken_image_stops_the_run_by_name(tmp_path: Path, make_shards: Callable[..., Path]):
    epoch = Loader(config(make_shards(tmp_path, s13=BROKEN), threads=2)).epoch()
    assert_refused(r"shard-000001\.tar: key s13: not an image .*<html>.*allow more with max_bad_fraction", list, epoch)


def test_a_broken_sample_is_masked_and_counted_and_does_not_move_the_others(
    tmp_path: Path, shards: Path, make_shards: Callable[..., Path]
):
    broken = make_shards(tmp_path, s13=BROKEN, s2={"txt": b"\xff\xfe"}, s5={"jpg": b"\xff\xd8\xff\xe0"})
    loader = Loader(config(broken, max_bad_fraction=3 / NUM_SAMPLES), number_tokens)
    batch = joined(take(loader, 23))  # four epochs
    whole = joined(take(Loader(config(shards), number_tokens), 23))
    labels = np.asarray(whole.label)
    np.testing.assert_array_equal(batch.valid, ~np.isin(labels, [2, 5, 13]))
    for name in ("image", "text", "label"):
        expected = getattr(whole, name).copy()
        expected[~batch.valid] = 0
        np.testing.assert_array_equal(getattr(batch, name), expected)
    assert loader.faults.causes == {"not an image": 1, "text is not UTF-8": 1, "damaged JPEG": 1}


def test_more_broken_samples_than_allowed_stop_the_run(tmp_path: Path, make_shards: Callable[..., Path]):
    directory = make_shards(tmp_path, s13=BROKEN, s2=BROKEN, s20=BROKEN)
    epoch = Loader(config(directory, max_bad_fraction=2.9 / NUM_SAMPLES)).epoch()
    assert_refused(r"key s20: .* 3 bad of 23 samples, where a fraction of 0\.126 is allowed", list, epoch)


def test_every_kind_of_fault_is_counted_by_shard_and_cause(tmp_path: Path, make_shards: Callable[..., Path]):
    images = {"s2": {"jpg": b""}, "s3": {"jpg": b"\xff\xd8\xff\xe0 cut"}, "s15": BROKEN}
    directory = make_shards(tmp_path, **images, s1={"txt": "  \n"}, s14={"txt": b"\xff"})
    write_shards(directory, [{"__key__": "lonely", "jpg": b"", "cls": 1}], name="y")
    (directory / "z.tar").write_bytes(b"no tar at all")
    os.truncate(directory / "shard-000002.tar", 3 * 1024 + 600)
    loader = Loader(config(directory, max_bad_fraction=0.9, threads=2), number_tokens)
    valid = sum(int(batch.valid.sum()) for batch in loader.epoch(8))
    shards = [str(directory / f"shard-00000{i}.tar") for i in range(3)]
    assert loader.faults.counts == {
        (shards[0], "empty caption"): 1,
        (shards[0], "not an image"): 1,
        (shards[0], "damaged JPEG"): 1,
        (shards[1], "text is not UTF-8"): 1,
        (shards[1], "not an image"): 1,
        (shards[2], "truncated or damaged shard"): 1,
        (str(directory / "y-000000.tar"), "no .txt"): 1,
        (str(directory / "z.tar"), "not an uncompressed tar"): 1,
    }
    assert loader.faults.causes["not an image"] == 2
    assert valid == loader.num_samples - 5


def test_captions_may_be_fields_of_json(tmp_path: Path, make_shards: Callable[..., Path]):
    texts = {f"s{i}": {"json": {"caption": f"word{i}"}, "txt": "other"} for i in range(NUM_SAMPLES)}
    texts["s4"] = {"json": {"caption": None}}
    texts["s5"] = {"json": b"{"}
    texts["s6"] = {"json": b'{"caption": "half of a pair \\ud83d"}'}
    texts["s7"] = {"json": b"[" * 100_000}
    of_json = config(make_shards(tmp_path, **texts), captions="json/caption", max_bad_fraction=0.5)
    loader = Loader(of_json, number_tokens)
    batch = joined(list(loader.epoch(8)))
    assert np.asarray(batch.text)[[3, 8], 0].tolist() == [3, 8]
    assert loader.faults.causes == {"empty caption": 1, "nothing in .json/caption": 3}


def test_a_data_set_of_a_mixture_that_cannot_be_used_is_named(tmp_path: Path, shards: Path):
    write_shards(tmp_path / "none", [{"__key__": "a", "jpg": b"x"}])
    both = config(shards, mixture=(WeightedShards((str(tmp_path / "none"),)),), max_bad_fraction=0.9)
    assert_refused("none: no sample can be used; fix it, or leave it out of the mixture", Loader, both, number_tokens)


@pytest.fixture(scope="module")
def mixtures(shards: Path) -> dict[int | None, tuple[Loader, Batch]]:
    """Mixtures with a third shard by their window, and the first 300 samples of their streams."""
    more = (WeightedShards((str(shards / "shard-000002.tar"),), 0.5),)
    loaders = {window: Loader(config(shards, mixture=more, window=window)) for window in (None, 1, 2)}
    return {window: (loader, joined(take(loader, 75))) for window, loader in loaders.items()}


@settings(max_examples=15, deadline=None)
@given(position=st.integers(0, 200), process_count=st.sampled_from([1, 2, 4]), window=st.sampled_from([None, 1, 2]))
def test_a_mixture_is_the_same_stream_on_any_number_of_hosts(mixtures, position: int, process_count: int, window):
    mixed, whole = mixtures[window]
    assert mixed.num_samples == NUM_SAMPLES + 3
    hosts = (take(mixed, 3, position, process, process_count) for process in range(process_count))
    assert_equal(from_hosts(hosts), rows(whole, slice(position, position + 12)))
    # A third of the stream comes from the three samples of the second set, and a few from the first set's own.
    of_second = np.isin(labels_of(whole), [20, 21, 22]).mean()
    assert of_second == pytest.approx(1 / 3 + 2 / 3 * 3 / NUM_SAMPLES, abs=0.03)


def test_neighbours_of_a_windowed_stream_come_from_few_shards(shards: Path):
    labels = labels_of(*take(Loader(config(shards, window=1, batch_size=NUM_SAMPLES)), 1))
    assert sorted(labels) == list(range(NUM_SAMPLES))
    visits = [shard for shard, _ in itertools.groupby(label // 10 for label in labels)]
    assert len(visits) == 3
    assert labels != sorted(labels)


def test_a_loader_reads_a_store(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = fsspec.filesystem("memory")
    for path in shards.glob("*.tar"):
        store.pipe_file(f"/loader/{path.name}", path.read_bytes())
    store.pipe_file("/loader/classnames.txt", (shards / "classnames.txt").read_bytes())
    here = joined(take(Loader(config(shards), number_tokens), 6))
    there = joined(take(Loader(config("memory:///loader"), number_tokens), 6))
    # Images are distinguished by the addresses of their shards too.
    assert_equal(dataclasses.replace(here, image_id=None), dataclasses.replace(there, image_id=None))


def test_an_invalid_label_names_the_sample(tmp_path: Path, make_shards: Callable[..., Path]):
    directory = make_shards(tmp_path, s4={"cls": 23, "txt": "strange"})
    for labels, message in (
        (ClassIndex(), r"label is out of range \('23' is not an index below 23.*has too few names\)(?!;)"),
        (CaptionWords(), r"unknown word \('strange' is not in"),
    ):
        assert_refused(f"key s4: {message}", list, Loader(config(directory, labels=labels)).epoch())


def test_a_sample_without_caption_is_found_before_training(tmp_path: Path, make_shards: Callable[..., Path]):
    shards = make_shards(tmp_path)
    write_shards(shards, [{"__key__": "lonely", "jpg": b"", "cls": 1}], name="z")
    assert_refused(r"z-000000\.tar: key lonely has no \.txt", Loader, config(shards), number_tokens)


def test_hosts_that_cannot_share_a_batch_are_refused_at_once(shards: Path):
    loader = Loader(config(shards))
    assert_refused("a batch of 4 cannot be divided among 3 processes", loader.batches, 0, 0, 3)
    assert_refused("a batch of 10 cannot be divided among 4 processes", loader.epoch, 10, 0, 4)
    assert_refused("cannot start at position -1", loader.batches, -1)


def test_stopping_early_ends_the_threads(shards: Path):
    before = set(threading.enumerate())
    batches = Loader(config(shards, threads=3)).batches()
    next(batches)
    assert set(threading.enumerate()) - before
    batches.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
    assert set(threading.enumerate()) <= before


def test_progress_counts_shards(shards: Path):
    steps: list[int] = []
    Loader(config(shards), advance=steps.append)
    assert steps == [1, 1, 1]


def test_random_crops_of_an_epoch_depend_on_the_shard_the_key_and_their_number(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    for name in ("a", "b"):
        samples = [{"__key__": f"s{number}", "jpg": encode_jpeg(pixels)} for number in range(2)]
        write_shards(tmp_path, samples, name=name)
    loaders = [Loader(config(tmp_path / name, labels=None, crop=InceptionCrop(0.1))) for name in ("", "b-000000.tar")]
    all_crops, same = (joined(list(loader.epoch(12, num_crops=3))).image for loader in loaders)
    assert len({crop.tobytes() for crop in all_crops}) == 12
    np.testing.assert_array_equal(same[:6], all_crops[6:])


def test_a_broken_sample_counts_once_however_often_it_is_read(tmp_path: Path, make_shards: Callable[..., Path]):
    loader = Loader(config(make_shards(tmp_path, s4=BROKEN), max_bad_fraction=0.5))
    take(loader, 5 * NUM_SAMPLES // 4)
    assert loader.faults.causes == {"not an image": 1}


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_an_invalid_weight_or_fraction_of_bad_samples_is_refused(value: float):
    for weight in (value, 0.0):
        assert_refused(
            r"WeightedShards: weight = .* must be more than 0 and finite", WeightedShards, ("a.tar",), weight
        )
    for bad in (value, 1.5):
        message = r"LoaderConfig: max_bad_fraction = .* must be from 0 to 1"
        assert_refused(message, LoaderConfig, ("a.tar",), max_bad_fraction=bad)


@pytest.mark.parametrize("count", [1, 7, NUM_SAMPLES, 100])
def test_some_samples_of_an_epoch_are_spread_over_it(shards: Path, count: int):
    loader = Loader(config(shards), number_tokens)
    found, everything = joined(list(loader.epoch(num_samples=count))), joined(list(loader.epoch()))
    remaining = min(count, NUM_SAMPLES)
    wanted = [place * NUM_SAMPLES // remaining for place in range(remaining)]
    np.testing.assert_array_equal(found.text[found.valid, 0], everything.text[everything.valid, 0][wanted])
