import fcntl
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.prepare.dataset import DataSet, Sample, Split
from lit_het.data_pipelines.prepare.folder import read_folder
from lit_het.data_pipelines.prepare.images import encode_png
from lit_het.data_pipelines.prepare.writer import SplitWriter, WriteOptions, write_names
from lit_het.data_pipelines.texts.prompts import read_classnames, read_templates
from tests.data_pipelines.prepare.conftest import GOLDEN, bytes_of, unpack, write, written
from tests.refusals import assert_refused


def numbered(count: int, broken: Sequence[int] = (), **changed) -> Split:
    """Images whose colour and label tell their number."""

    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        for number in numbers:
            image = encode_png(np.full((2, 2, 3), number % 256, np.uint8))
            yield Sample(b"oops" if number in broken else image, f"image {number}")

    return Split(count, read, "numbers", **{"labels": np.arange(count, dtype=np.int32), **changed})


def advance(count: int) -> None:
    pass


def names_in(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


@pytest.mark.parametrize(("count", "most"), [(10, 4), (12, 4), (13, 4), (1, 5), (7, 1)])
def test_shards_are_balanced_and_hold_every_sample_once_in_order(tmp_path, count, most):
    steps = []
    assert SplitWriter(tmp_path / "test", numbered(count), WriteOptions(most)).write(steps.append) == count
    sizes = [len(names_in(path)) // 2 for path in (tmp_path / "test").glob("*.tar")]
    assert sum(sizes) == count == sum(steps)
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    samples = written(tmp_path / "test")
    assert [(sample.key, sample.label) for sample in samples] == [(f"s{i:07d}", i) for i in range(count)]
    assert [sample.pixels[0, 0, 0] for sample in samples] == list(range(count))
    assert (tmp_path / "test" / "nshards.txt").read_text() == f"{len(sizes)}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["test"]


def test_shards_depend_on_neither_the_number_of_workers_nor_the_run(tmp_path):
    for name, workers in (("one", 1), ("three", 3)):
        SplitWriter(tmp_path / name, numbered(20), WriteOptions(3, workers)).write(advance)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "three")


def test_a_shuffled_split_holds_every_sample_once_and_is_the_same_every_time(tmp_path):
    one, other = (write(DataSet({"x": numbered(30)}), tmp_path / n, "x", shuffle=True) for n in ("one", "other"))
    assert [sample.label for sample in one] == [sample.pixels[0, 0, 0] for sample in one] == list(range(30))
    # The key of a sample is its number in the source.
    assert [sample.key for sample in one] == [f"s{number:07d}" for number in range(30)]
    order, again = (names_in(tmp_path / name / "x" / "0.tar") for name in ("one", "other"))
    assert order == again != sorted(order)
    assert one == other


# As `numbered`, which would take seconds to import.
WRITE_SLOWLY = """
import sys, time
from pathlib import Path
import numpy as np
from lit_het.data_pipelines.prepare.dataset import Sample, Split
from lit_het.data_pipelines.prepare.images import encode_png
from lit_het.data_pipelines.prepare.writer import SplitWriter, WriteOptions

def read(numbers):
    for number in numbers:
        time.sleep(0.01)
        yield Sample(encode_png(np.full((2, 2, 3), number, np.uint8)), "")

split = Split(60, read, "numbers", np.arange(60, dtype=np.int32))
SplitWriter(Path(sys.argv[1]), split, WriteOptions(5, workers=2)).write(lambda count: None)
"""


@pytest.mark.slow
def test_an_interrupted_writer_is_resumed_without_loss_or_duplicates(tmp_path):
    SplitWriter(tmp_path / "whole", numbered(60), WriteOptions(5)).write(advance)
    folder, partial = tmp_path / "test", tmp_path / ".test.partial"
    with subprocess.Popen([sys.executable, "-c", WRITE_SLOWLY, folder]) as process:
        while len(list(partial.glob("*.tar"))) < 3 or not list(partial.glob("*.tar.partial*")):
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert not folder.exists()
    earlier = {path: path.stat().st_mtime_ns for path in partial.glob("*.tar")}
    assert 3 <= len(earlier) < 12

    writer, steps = SplitWriter(folder, numbered(60), WriteOptions(5)), []
    assert writer.num_written == 5 * len(earlier)
    assert writer.write(steps.append) == 60
    assert sum(steps) == 60 - writer.num_written
    assert {path: (folder / path.name).stat().st_mtime_ns for path in earlier} == earlier
    assert bytes_of(folder) == bytes_of(tmp_path / "whole")
    assert [sample.label for sample in written(folder)] == list(range(60))
    assert not list(tmp_path.rglob("*partial*"))


@pytest.mark.parametrize(
    ("split", "options", "difference"),
    [
        (numbered(7), WriteOptions(2), "from another source or with other options"),
        (Split(6, numbered(6).read, "other samples"), WriteOptions(2), "from another source or with other options"),
        (numbered(6), WriteOptions(3), "with another --samples-per-shard"),
        (numbered(6), WriteOptions(2, check_images=True), "with another --check-images"),
        (numbered(6), WriteOptions(2, shuffle=True, check_images=True), "with another --shuffle and --check-images"),
    ],
)
def test_shards_of_another_source_or_other_options_are_never_mixed(tmp_path, split, options, difference):
    path = tmp_path / "test"
    assert_refused("image 5: not an image", SplitWriter(path, numbered(6, broken=[5]), WriteOptions(2)).write, advance)
    message = rf"\.test\.partial was started {difference}; repeat the command that started it"
    assert_refused(message, SplitWriter, path, split, options)
    SplitWriter(path, numbered(6), WriteOptions(2)).write(advance)
    assert_refused(f"test exists, {difference}; remove it or choose another output", SplitWriter, path, split, options)


def test_a_finished_split_is_not_written_again_and_a_folder_without_a_record_not_touched(tmp_path):
    SplitWriter(tmp_path / "test", numbered(6), WriteOptions(2)).write(advance)
    assert SplitWriter(tmp_path / "test", numbered(6), WriteOptions(2)).finished
    (tmp_path / "other").mkdir()
    message = "exists, from another source or with other options"
    assert_refused(message, SplitWriter, tmp_path / "other", numbered(6), WriteOptions(2))


def test_a_broken_image_is_named_and_a_resumed_writer_skips_it_on_request(tmp_path):
    split = numbered(9, broken=[4, 7])
    message = r"image 4: not an image \(4 bytes .*oops.* with --skip-broken"
    assert_refused(message, SplitWriter(tmp_path / "test", split, WriteOptions(3)).write, advance)
    assert not (tmp_path / "test").exists()
    writer = SplitWriter(tmp_path / "test", split, WriteOptions(3, skip_broken=True))
    assert writer.num_written == 3
    assert writer.write(advance) == 7
    assert [sample.label for sample in written(tmp_path / "test")] == [0, 1, 2, 3, 5, 6, 8]


def test_broken_images_in_saved_shards_are_counted(tmp_path):
    options = WriteOptions(3, skip_broken=True)
    writer = SplitWriter(tmp_path / "test", numbered(9, broken=[1, 6, 7, 8]), options)
    assert_refused("no sample of shard 2 can be used", writer.write, advance)
    assert SplitWriter(tmp_path / "test", numbered(9, broken=[1]), options).write(advance) == 8


def test_captions_that_training_would_refuse_are_left_out_and_counted(tmp_path):
    captions = [b"a", "cat".encode("utf-16-le"), b" \n\t", b"caf\xe9", "café".encode(), "\u2003".encode()]

    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        for number in numbers:
            encoded = encode_png(np.full((2, 2, 3), number, np.uint8))
            yield Sample(encoded, f"image {number}", {"txt": captions[number]})

    split = Split(6, read, "captions", left_out={"without caption": 3})
    writer = SplitWriter(tmp_path / "test", split, WriteOptions())
    assert writer.write(advance) == 2
    assert writer.example == "image 1: text is not UTF-8 (but perhaps UTF-16; save it as UTF-8)"
    assert [sample.members["txt"].decode() for sample in written(tmp_path / "test")] == ["a", "café"]
    record = json.loads((tmp_path / "test" / "prepared.json").read_text())
    assert (record["samples"], record["left_out"]) == (2, {"without caption": 3, "broken": 4})


def test_damage_after_the_header_is_found_if_images_are_checked(tmp_path):
    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        yield Sample(encode_png(np.zeros((9, 9, 3), np.uint8))[:-30], "image")

    split = Split(1, read, "one")
    SplitWriter(tmp_path / "fast", split, WriteOptions()).write(advance)
    writer = SplitWriter(tmp_path / "checked", split, WriteOptions(check_images=True))
    assert_refused("image: damaged PNG", writer.write, advance)


def test_two_processes_do_not_write_the_same_split(tmp_path):
    writer = SplitWriter(tmp_path / "test", numbered(6), WriteOptions(2))
    (tmp_path / ".test.partial").mkdir()
    other = os.open(tmp_path / ".test.partial", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert_refused("another process is writing it", writer.write, advance)
    os.close(other)
    assert writer.write(advance) == 6


def test_a_full_disk_is_a_one_line_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lit_het.data_pipelines.prepare.writer.write_tar", full)
    writer = SplitWriter(tmp_path / "test", numbered(6), WriteOptions(2))
    assert_refused(r"No space left on device\); fix that and run the command again", writer.write, advance)


def test_interrupted_workers_stop_at_once(tmp_path):
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        SplitWriter(tmp_path / "test", numbered(250_000, labels=None), WriteOptions(100_000, 2)).write(interrupt)
    assert time.monotonic() - began < 5
    assert not list(tmp_path.rglob("*.tar*"))


def test_invalid_options_and_an_empty_split_are_refused(tmp_path):
    assert_refused("must be at least 1", WriteOptions, samples_per_shard=0)
    assert_refused("must be at least 1", WriteOptions, workers=0)
    assert_refused("holds no samples", SplitWriter, tmp_path / "test", numbered(0), WriteOptions())


def test_names_and_templates_are_read_back_and_never_overwritten(tmp_path):
    dataset = DataSet({}, ("tench", "jack-o'-lantern"), ("a photo of a {c}.", "{c}!"))
    write_names(tmp_path, dataset)
    assert read_classnames(tmp_path) == dataset.class_names
    assert read_templates(tmp_path) == dataset.templates
    (tmp_path / "zeroshot_classification_templates.txt").write_text("my {c}\n")
    write_names(tmp_path, dataset)
    assert read_templates(tmp_path) == ("my {c}",)
    assert_refused(r"classnames\.txt has other class names", write_names, tmp_path, DataSet({}, ("carp", "pumpkin")))
    for name in ("", " ", "two\nlines"):
        assert_refused("is not one line of text", write_names, tmp_path, DataSet({}, (name,)))


def test_the_layout_is_the_one_that_clip_benchmark_writes(tmp_path):
    theirs = written(GOLDEN / "wds_tiny_jpg" / "test")
    names = read_classnames(GOLDEN / "wds_tiny_jpg")
    images = {f"test/{sample.label} {names[sample.label]}/{sample.key}.jpg": sample.image for sample in theirs}
    dataset = read_folder(unpack(images, tmp_path / "source"), tmp_path)
    SplitWriter(tmp_path / "output" / "test", dataset.splits["test"], WriteOptions()).write(advance)
    write_names(tmp_path / "output", dataset)

    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".txt", ".tar")}

    assert files(tmp_path / "output") == files(GOLDEN / "wds_tiny_jpg")
    ours, golden = tmp_path / "output" / "test", GOLDEN / "wds_tiny_jpg" / "test"
    assert names_in(ours / "0.tar") == names_in(golden / "0.tar")
    assert (ours / "nshards.txt").read_bytes() == (golden / "nshards.txt").read_bytes()
    # a class without images has no folder
    ranks = {label: rank for rank, label in enumerate(sorted({sample.label for sample in theirs}))}
    assert {s.image: s.members["cls"] for s in written(ours)} == {s.image: b"%d" % ranks[s.label] for s in theirs}
