"""Shards that cannot seek are read sequentially, and their defects are counted."""

import collections
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import psutil
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.configs import experiment
from lit_het.data_pipelines.data_config import LoaderConfig, Streaming, WeightedShards
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.decoding import decode
from lit_het.data_pipelines.images.transforms import InceptionCrop
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.data_pipelines.shards import pipes, stores
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.scan import APART, DAMAGED, EMPTY, NO_TAR, REPEATED
from lit_het.data_pipelines.shards.storage import content_or_raise
from lit_het.data_pipelines.shards.stream import Stream
from lit_het.data_pipelines.shards.writing import expand, write_shards
from lit_het.errors import UserError
from lit_het.types import Batch
from tests.data_pipelines.conftest import IMAGE_SIZE, NUM_SAMPLES, joined, number_tokens, take
from tests.data_pipelines.prepare.conftest import make_tar
from tests.refusals import assert_refused


def config(*shards: Path | str, **changes: object) -> LoaderConfig:
    fields: Any = {"image_size": IMAGE_SIZE, "batch_size": 4, "threads": 0, "seed": 5, "stream": Streaming(8)}
    base = LoaderConfig(tuple(map(str, shards)), **fields)
    return dataclasses.replace(base, **changes)


def numbers(batches: list[Batch]) -> list[int]:
    """Of the samples in the valid rows."""
    batch = joined(batches)
    return batch.text[batch.valid, 0].tolist()


def stream_of(*shards: Path | str, **changes: object) -> Stream:
    return Stream(config(*shards, **changes), number_tokens)


def read(shards: Path | str, count: int, **changes: object) -> list[int]:
    return numbers(take(stream_of(shards, **changes), count))


def assert_no_child_is_left():
    # Zombies have no command line. Python's own helpers, which other tests may have started, are no one's shards.
    lines = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert [line for line in lines if "multiprocessing" not in line] == []


@pytest.mark.parametrize("threads", [0, 2])
def test_samples_of_all_shards_come_with_their_own_image_text_and_label(shards: Path, threads: int):
    batch = joined(take(stream_of(shards, labels=ClassIndex(), threads=threads), 60))
    assert batch.valid.all()
    assert set(batch.label.tolist()) == set(range(NUM_SAMPLES))
    np.testing.assert_array_equal(batch.text[:, 0], batch.label)
    found = Loader(config(shards, stream=None)).index.read(batch.label.tolist(), ["image"])
    np.testing.assert_array_equal(batch.image, [decode(content_or_raise(one), IMAGE_SIZE) for (one,) in found])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_seed_gives_the_same_batches(shards: Path, threads: int):
    random = {"crop": InceptionCrop(), "augmentations": (HorizontalFlip(),)}
    one, other = (take(stream_of(shards, threads=threads, **random), 12) for _ in range(2))
    for part, again in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(part, again)


def test_another_seed_process_or_position_gives_other_samples(shards: Path):
    stream = stream_of(shards, batch_size=8)
    draws = [numbers(take(stream, 6 // count, *arguments)) for *arguments, count in [(0, 0, 1), (8, 0, 1)]]
    draws += [numbers(take(stream, 6, 0, process, 2)) for process in range(2)]
    draws += [read(shards, 6, batch_size=8, seed=6)]
    assert len(set(map(tuple, draws))) == len(draws)
    assert [len(draw) for draw in draws] == [48, 48, 24, 24, 48]


def test_a_buffer_of_one_sample_keeps_the_order_of_each_shard_and_a_larger_one_mixes_them(shards: Path):
    found = read(shards, 30, stream=Streaming(1))
    assert all(after == before + 1 or after % 10 == 0 for before, after in itertools.pairwise(found))
    found = read(shards, 30, stream=Streaming(20))
    assert sum(before // 10 != after // 10 for before, after in itertools.pairwise(found)) > 30


def test_commands_are_shards_and_have_braces(shards: Path):
    address = f"pipe:cat {shards}/shard-00000{{0..2}}.tar"
    assert expand(address) == [f"pipe:cat {shards}/shard-00000{number}.tar" for number in range(3)]
    assert set(read(address, 60, threads=2)) == set(range(NUM_SAMPLES))
    assert_no_child_is_left()
    # Backslashes are for the shell.
    assert expand(r"pipe:cat my\ shard.tar") == [r"pipe:cat my\ shard.tar"]


def test_a_store_is_streamed(shards: Path):
    store = fsspec.filesystem("memory")
    for path in shards.glob("*.tar"):
        store.pipe_file(f"/stream/{path.name}", path.read_bytes())
    assert read("memory:///stream", 10) == read(shards, 10)


def test_a_command_cannot_be_read_at_random(shards: Path):
    with pytest.raises(UserError, match=r"pipe:cat x: a command cannot seek; read it with `data\.stream`"):
        Loader(config("pipe:cat x", stream=None))


def test_a_command_that_fails_is_counted_with_its_exit_code(shards: Path):
    failing = f"pipe:cat {shards}/shard-000001.tar; exit 3"
    stream = stream_of(shards / "shard-000000.tar", failing, max_bad_fraction=0.5)
    assert set(numbers(take(stream, 30))) == set(range(20))  # what came before it failed is sound
    assert stream.faults.counts.keys() == {(failing, "command failed")}
    assert "exit code 3" in stream.faults.examples[failing, "command failed"]
    message = r"exit 3: command failed \(exit code 3\); 1 defect in the first \d+ samples"
    assert_refused(message, read, failing, 30, stream=Streaming(1))
    assert_refused(
        r"\(exit code 1\); 1 defect before the first sample of a stream, where .* fix", read, "pipe:exit 1", 1
    )
    assert_no_child_is_left()


def test_a_command_without_output_times_out(shards: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipes, "PATIENCE", 0.05)
    stuck = "pipe:sleep 1000 & sleep 1000"
    stream = stream_of(shards / "shard-000000.tar", stuck, max_bad_fraction=0.5)
    take(stream, 30)
    assert stream.faults.counts.keys() == {(stuck, "command is stuck")}
    assert_no_child_is_left()


def test_a_command_that_keeps_running_after_its_tar_is_killed(shards: Path):
    assert_refused("damaged at byte 40960", read, f"pipe:cat {shards}/shard-000000.tar; yes", 10)
    assert_no_child_is_left()


def test_background_processes_of_a_command_are_killed_with_it(shards: Path, tmp_path: Path):
    mark = tmp_path / "mark"
    read(f"pipe:(sleep 1; touch {mark}) > /dev/null & cat {shards}/shard-000000.tar", 10)
    time.sleep(1.5)
    assert not mark.exists()


@pytest.mark.parametrize("form", ["{}", "pipe:cat {}"])
def test_every_defect_of_a_shard_is_counted(tmp_path: Path, make_shards: Callable[..., Path], form: str):
    directory = make_shards(tmp_path, s3={"jpg": b"\xff\xd8\xff\xe0 cut"}, s4={"txt": " "}, s5={"txt": b"\xff"})
    shard = (directory / "shard-000000.tar").read_bytes()
    (directory / "cut.tar").write_bytes(shard[: 3 * 1024 + 600])
    (directory / "cut-between.tar").write_bytes(shard[: shard.index(b"s1.")])
    (directory / "damaged.tar").write_bytes(shard.replace(b"s2.jpg", b"s2.jqg", 1))  # the checksum is another one
    (directory / "twice.tar").write_bytes(shard[: shard.index(b"s3.")] + shard)
    apart = {f"s1.{kind}": b"x" for kind in ("jpg", "cls")} | {"s2.0.jpg": b"x", "s2.0.txt": b"x", "s1.txt": b"x"}
    (directory / "apart.tar").write_bytes(make_tar(apart))
    (directory / "text.tar").write_bytes(b"<html>404</html>")
    (directory / "nothing.tar").write_bytes(b"")
    (directory / "zeros.tar").write_bytes(bytes(10240))
    write_shards(directory, [{"__key__": "lonely", "jpg": b"", "cls": 1}], name="y")
    names = ["shard-000000", "cut", "cut-between", "damaged", "twice", "apart", "text", "nothing", "zeros", "y-000000"]
    addresses = [form.format(directory / f"{name}.tar") for name in names]
    stream = stream_of(*addresses, max_bad_fraction=0.9)
    take(stream, 100)
    causes = collections.defaultdict(set)
    for address, cause in stream.faults.counts:
        causes[address.rpartition("/")[2].removesuffix(".tar")].add(cause)
    of_samples = {"damaged JPEG", "empty caption", "text is not UTF-8"}
    assert causes == {
        "shard-000000": of_samples,
        "cut": {DAMAGED},
        "cut-between": {DAMAGED},
        "damaged": {DAMAGED, "no .jpg/jpeg/png/webp"},  # of the sample that the damage parts
        "twice": {REPEATED, *of_samples},
        "apart": {APART, "no .jpg/jpeg/png/webp", "no .txt"},
        "text": {NO_TAR},
        "nothing": {NO_TAR},
        "zeros": {EMPTY},
        "y-000000": {"no .txt"},
    }


def test_a_run_without_readable_shards_ends(tmp_path: Path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.tar").write_bytes(b"no tar")
    message = r"none of 3 shards holds a readable sample: check --data\.shards"
    assert_refused(message, read, tmp_path, 1, max_bad_fraction=1.0, threads=2)
    message = r"pipe:exit 1: command failed \(exit code 1\); none of 1 shards"
    assert_refused(message, read, "pipe:exit 1", 1, max_bad_fraction=1.0)


def test_a_shard_that_vanishes_is_counted(tmp_path: Path, make_shards: Callable[..., Path]):
    stream = stream_of(make_shards(tmp_path), max_bad_fraction=0.5)
    (tmp_path / "shard-000001.tar").unlink()
    assert not set(numbers(take(stream, 20))) & set(range(10, 20))
    assert stream.faults.causes.keys() == {"unreadable shard"}


def test_a_broken_sample_counts_each_time_it_is_read(tmp_path: Path, make_shards: Callable[..., Path]):
    # A rate is taken over 10,000 samples at least; the one that is broken comes 11 times much earlier.
    directory = make_shards(tmp_path, s7={"jpg": b"<html>"})
    message = r"11 defects in the first [1-4]\d{2} samples of a stream"
    assert_refused(message, read, directory, 10_000, max_bad_fraction=0.001, batch_size=10)


@pytest.mark.parametrize("threads", [0, 2])
def test_closing_ends_commands_and_threads_at_once(shards: Path, threads: int):
    before = threading.active_count()
    # Five samples and a part of the sixth, then nothing: the second batch waits.
    slow = f"pipe:head -c 17000 {shards}/shard-000000.tar; sleep 1000 | sleep 1000"
    stream = stream_of(slow, threads=threads, stream=Streaming(1), prefetch_batches=8)
    batches = stream.batches()
    next(batches)
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < 2
    assert threading.active_count() == before
    assert not stream.faults.counts  # a command that was ended is no defect
    assert_no_child_is_left()


class Stumbling(MemoryFileSystem):
    """A store that opens files of which the first reads fail."""

    protocol = "stumbling-stream"
    failures = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("stumbling-stream://", "memory://"))

    def open(self, path: str, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
        file: Any = super().open(path, mode, *arguments, **options)
        return StumblingFile(self, path, file.getvalue()) if mode == "rb" else file


class StumblingFile(MemoryFile):
    def read(self, size: int | None = -1) -> bytes:
        if Stumbling.failures:
            Stumbling.failures -= 1
            raise TimeoutError("the store is busy")
        return super().read(size)


def test_failed_requests_are_retried_and_a_store_that_stays_down_counted(shards: Path, monkeypatch: pytest.MonkeyPatch):
    fsspec.register_implementation("stumbling-stream", Stumbling, clobber=True)
    monkeypatch.setattr(stores, "BACK_OFF", (0.0, 0.0))
    monkeypatch.setattr(Stumbling, "failures", 2)
    content = (shards / "shard-000000.tar").read_bytes()
    fsspec.filesystem("stumbling-stream").pipe_file("/sound.tar", content)
    assert set(read("stumbling-stream:///sound.tar", 20)) == set(range(10))
    assert Stumbling.failures == 0
    monkeypatch.setattr(Stumbling, "failures", 3)
    assert_refused(r"store does not answer \(the store is busy\)", read, "stumbling-stream:///sound.tar", 1)


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 12_000), junk=st.binary(min_size=1, max_size=600), cut=st.integers(0, 30_000))
def test_no_damage_crashes_or_hangs_a_stream(
    tmp_path_factory: pytest.TempPathFactory, shards: Path, place: int, junk: bytes, cut: int
):
    content = (shards / "shard-000000.tar").read_bytes()
    damaged = tmp_path_factory.mktemp("damaged") / "x.tar"
    damaged.write_bytes((content[:place] + junk + content[place + len(junk) :])[:cut])
    with contextlib.suppress(UserError):
        take(stream_of(damaged, max_bad_fraction=1.0), 3)


@pytest.mark.parametrize(
    ("field", "value"), [("mixture", (WeightedShards(("x",)),)), ("window", 3), ("shuffle", False), ("embeddings", "x")]
)
def test_options_that_need_random_access_are_refused(field: str, value: object):
    assert_refused(f"LoaderConfig: a `stream` has no `{field}`; leave out one of them", config, "x", **{field: value})


def test_a_stream_configuration_survives_serialisation():
    as_json = experiment.to_dict(config("x", stream=Streaming(7)))
    assert as_json["stream"] == {"type": "Streaming", "shuffle_buffer": 7}
    assert experiment.fields(config("x", stream=None))["stream"] is None
