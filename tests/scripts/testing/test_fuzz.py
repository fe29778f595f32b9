"""Changed files of every format break no reader; and the fuzzer would see it if they did."""

import io
import random
import tarfile
import zipfile
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from scripts.testing.fuzz import Budget, Fuzzer, main, replay
from scripts.testing.fuzzing import containers, mutators, structures, trees
from scripts.testing.fuzzing.readers import TARGETS
from scripts.testing.fuzzing.seeds import write_files
from tests.scripts.testing import planted_readers

pytestmark = pytest.mark.slow
INPUTS = 3
# Or, as the vocabulary, not to be read without further packages; the first test counts them.
SLOW = ("vocab.txt", "report", "checkpoint")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Processes that read use no cache of the user: they have the environment of their first server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_no_changed_file_breaks_its_reader(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # which is set anew
    # The limit of time is generous: other tests may take the processors.
    code = main(["--inputs", "60", "--seed", "0", "--limit", "60", "--failures", str(tmp_path)])
    found = capsys.readouterr().out
    assert code == 0, found
    rows = (line.removeprefix("| ").split(" | ") for line in found.splitlines() if line.startswith("| "))
    accepted = {name: count for name, _, count, *_ in rows}
    assert set(TARGETS) < set(accepted)
    # A vocabulary needs TensorFlow Text.
    assert {name for name in TARGETS if accepted[name] == "0"} <= {"vocab.txt"}


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in SLOW])
def test_the_files_that_are_changed_are_whole(tmp_path, name):
    for number, files in enumerate(TARGETS[name].seeds()):
        write_files(tmp_path / str(number), files)
        TARGETS[name].read(tmp_path / str(number))


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """What is found of readers with a defect each."""
    scratch, failures = (tmp_path_factory.mktemp(name) for name in ("scratch", "failures"))
    fuzzer = Fuzzer(planted_readers.TARGETS, Budget(INPUTS, limit=2.0), 0, scratch, failures)
    fuzzer.run()
    return fuzzer


def test_defects_of_every_kind_are_found_and_grouped_by_reader_kind_and_place(planted):
    here = "tests/scripts/testing/planted_readers.py"
    assert set(planted.defects) == {
        ("key_error", "crash", f"KeyError: {here}:key_error"),
        ("two_lines", "crash", f"message of several lines: TwoLinesError: {here}:two_lines"),
        ("spins", "hang", f"no end: {here}:spins"),
        ("allocates", "memory", f"MemoryError: {here}:allocates"),
        ("allocates_and_refuses", "memory", f"UserError: {here}:allocates_and_refuses"),
        ("dies", "death", f"exit code -11: {here}:dies"),
    }


def test_every_input_counts_once_and_the_first_is_unchanged(planted):
    counts = {name: dict(tally.counts) for name, tally in planted.tallies.items()}
    assert counts.pop("sound") == {"accepted": 1, "refused": INPUTS - 1}
    for (name, verdict, _), defect in planted.defects.items():
        assert counts[name] == {"accepted": 1, verdict: INPUTS - 1}
        assert defect.count == INPUTS - 1


def test_the_report_lists_failures_and_how_to_replay_them(planted):
    report = planted.report()
    assert f"| dies | {INPUTS} | 1 | 0 | 0 | {INPUTS - 1} | 0 | 0 | " in report
    saved = planted.defects["key_error", "crash", "KeyError: tests/scripts/testing/planted_readers.py:key_error"].saved
    assert f"python -m scripts.testing.fuzz --replay {saved[0]}" in report


def test_a_saved_input_fails_again(planted, capsys):
    for (name, verdict, _), defect in planted.defects.items():
        if verdict == "crash":
            assert replay(defect.saved[0], planted_readers.TARGETS) == 1
            assert capsys.readouterr().out.startswith("crash, "), name


def test_the_same_seed_makes_the_same_inputs(planted, tmp_path):
    again = Fuzzer({"key_error": planted_readers.TARGETS["key_error"]}, Budget(6), 0, tmp_path, tmp_path / "cases")
    again.run()
    ((_, defect),) = again.defects.items()
    before = planted.defects["key_error", "crash", "KeyError: tests/scripts/testing/planted_readers.py:key_error"]
    assert [held(path) for path in before.saved] == [held(path) for path in defect.saved[:2]]
    assert (defect.count, len({held(path) for path in defect.saved})) == (5, 3)


def held(path):
    with zipfile.ZipFile(path) as archive:
        return archive.read("text")


@given(st.binary(max_size=2000), st.integers(0, 2**32))
def test_whatever_the_bytes_are_they_can_be_changed_again_and_again(content, seed):
    for _ in range(3):
        content = mutators.changed(content, [content], random.Random(seed))
        assert len(content) <= containers.MOST_BYTES


@pytest.fixture(scope="module")
def files():
    """A seed of each class, and for each of its files what changes its structure."""
    return {name: next(iter(target.seeds())) for name, target in TARGETS.items() if name != "checkpoint"}


STRUCTURED = {
    "shard in order": ("shard.tar", containers.tar),
    "index": ("shard.tar.index.npz", containers.zip_archive),
    "CIFAR": ("cifar-10-python.tar.gz", containers.gzipped),
    "member": ("sample.npy", structures.npy),
    "image": ("image", structures.jpeg),
    "parquet": ("train-00000-of-00001.parquet", structures.parquet),
    "caption file": ("dataset_coco.json", trees.json_text),
    "Hugging Face": ("model.safetensors", structures.safetensors),
    "V-MoE": ("x.index", trees.msgpacked),
    "SentencePiece": ("spiece.model", structures.protobuf),
    "class names": ("classnames.txt", structures.text),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structures_are_recognised_and_changed(files, name):
    file, change = STRUCTURED[name]
    content = files[name][file]
    assert change is next(other for is_of, other in mutators.STRUCTURES if is_of(content))
    changed = {change(content, lambda part, seed=seed: part[:seed], random.Random(seed)) for seed in range(20)}
    assert len(changed) > 5


def test_changed_archives_keep_their_checksums(files):
    tar, archive = files["shard in order"]["shard.tar"], files["index"]["shard.tar.index.npz"]
    for seed in range(40):
        header = containers.tar(tar, bytes, random.Random(seed))[:512]
        assert int(header[148:154], 8) in tarfile.calc_chksums(header)  # pyright: ignore[reportAttributeAccessIssue]
        packed = containers.zip_archive(archive, bytes, random.Random(seed))
        assert zipfile.is_zipfile(io.BytesIO(packed))


def test_changed_images_keep_the_checksums_of_their_chunks(files):
    image = io.BytesIO()
    Image.new("RGB", (5, 4)).save(image, "PNG")
    sizes = set()
    for seed in range(60):
        changed = structures.png(image.getvalue(), bytes, random.Random(seed))
        length = int.from_bytes(changed[8:12])
        assert changed[16 + length : 20 + length] == zlib.crc32(changed[12 : 16 + length]).to_bytes(4)
        sizes.add(changed[16:24])
    assert len(sizes) > 10
