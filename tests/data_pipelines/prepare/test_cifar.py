import gzip
import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.prepare.cifar import read_cifar10, read_cifar10h, read_cifar100
from lit_het.data_pipelines.prepare.unpickler import load_arrays
from tests.data_pipelines.conftest import npy
from tests.data_pipelines.prepare.conftest import GOLDEN, TRUTH, labels_of, make_tar, unpack, write
from tests.refusals import assert_refused

ARCHIVE = GOLDEN / "cifar-10-python.tar.gz"
LABELS = TRUTH["cifar10"]["labels"]
SPLITS = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}


def python2_pickle(value) -> bytes:
    """What Python 2's cPickle made of dictionaries, lists, strings, numbers and arrays of bytes."""
    return b"\x80\x02" + _pickled(value) + b"."


def _pickled(value) -> bytes:
    if isinstance(value, str):
        return b"T" + struct.pack("<i", len(value)) + value.encode("latin1")
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(_pickled, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_pickled(part) for item in value.items() for part in item) + b"u"
    assert isinstance(value, np.ndarray)
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + _pickled(0) + b"t" + _pickled("b") + b"tR"
    kind = b"cnumpy\ndtype\n(" + _pickled("u1") + _pickled(0) + _pickled(1) + b"tR("
    kind += _pickled(3) + _pickled("|") + b"NNN" + _pickled(-1) * 2 + _pickled(0) + b"tb"
    shape = b"(" + b"".join(map(_pickled, value.shape)) + b"t"
    content = b"T" + struct.pack("<i", value.nbytes) + value.tobytes()
    return array + b"(" + _pickled(1) + shape + kind + b"\x89" + content + b"tb"


def cifar100(**changed) -> dict[str, bytes]:
    """Files of a CIFAR-100 whose fine label is 5 times the coarse one, for 3 images to train on and 2 to test."""
    batches = {}
    for name, fine in (("train", [95, 0, 50]), ("test", [5, 10])):
        pixels = np.random.default_rng(len(fine)).integers(0, 256, (len(fine), 3072), np.uint8)
        coarse = [label // 5 for label in fine]
        batch = {"data": pixels, "fine_labels": fine, "coarse_labels": coarse, "batch_label": name, **changed}
        batches[f"cifar-100-python/{name}"] = python2_pickle(batch)
    names = {"fine_label_names": [f"fine_{i}" for i in range(100)], "coarse_label_names": [f"c_{i}" for i in range(20)]}
    return {**batches, "cifar-100-python/meta": python2_pickle(names), "cifar-100-python/file.txt~": b""}


@pytest.fixture
def archive(tmp_path) -> Callable[..., Path]:
    name = "cifar-100-python.tar.gz"
    return lambda **changed: unpack({name: make_tar(cifar100(**changed), "w:gz")}, tmp_path) / name


@pytest.mark.parametrize("split", SPLITS)
def test_every_label_and_pixel_of_the_archive_is_written(tmp_path, split):
    dataset = read_cifar10(ARCHIVE, tmp_path)
    assert dataset.class_names == tuple(TRUTH["cifar10"]["label_names"])
    samples = write(dataset, tmp_path, split, samples_per_shard=30, workers=2)
    truth = [(batch, row) for batch in SPLITS[split] for row in range(20)]
    assert [sample.label for sample in samples] == [LABELS[batch][row] for batch, row in truth]
    for (batch, row), sample in zip(truth, samples, strict=True):
        assert sorted(sample.members) == ["cls", "png"]
        # the rule of the recorded archive: R = 2 label + 1, G = 8 row, B = 8 column
        rows, columns = np.indices((32, 32))
        expected = np.stack([np.full((32, 32), 2 * LABELS[batch][row] + 1), 8 * rows, 8 * columns], axis=-1)
        np.testing.assert_array_equal(sample.pixels, expected)


def test_an_unofficial_archive_is_warned_about_in_one_line(tmp_path, caplog):
    read_cifar10(ARCHIVE, tmp_path)
    assert len(caplog.messages) == 1
    assert "is not the published archive" in caplog.messages[0]


def test_the_unpacked_folder_equals_the_archive_and_one_split_can_be_read(tmp_path, archive):
    unpack(cifar100(), tmp_path)
    of_folder, of_archive = (read_cifar100(p, tmp_path, "test") for p in (tmp_path / "cifar-100-python", archive()))
    assert list(of_folder.splits) == list(of_archive.splits) == ["test"]
    assert of_folder.splits["test"].fingerprint == of_archive.splits["test"].fingerprint
    assert_refused("CIFAR-100: has no split 'val', only train, test", read_cifar100, archive(), tmp_path, "val")


@pytest.mark.parametrize(("level", "labels", "names"), [("fine", [95, 0, 50], 100), ("coarse", [19, 0, 10], 20)])
def test_cifar100_has_two_levels_of_labels(tmp_path, archive, level, labels, names):
    dataset = read_cifar100(archive(), tmp_path, labels=level)
    class_names = list(dataset.class_names or ())
    assert (len(class_names), class_names[1]) == (names, "fine 1" if level == "fine" else "c 1")
    samples = write(dataset, tmp_path, "train")
    assert [sample.label for sample in samples] == labels
    pixels = np.random.default_rng(3).integers(0, 256, (3, 3, 32, 32), np.uint8)
    np.testing.assert_array_equal([sample.pixels for sample in samples], pixels.transpose(0, 2, 3, 1))


class Malicious:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def touch(path: Path) -> None:
    path.touch()


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("call", [(touch, ("PATH",)), (eval, ("open('PATH', 'w')",)), (np.load, ("PATH",))])
def test_a_pickle_that_would_run_code_is_a_one_line_error(tmp_path, protocol, call):
    ran = tmp_path / "ran"
    function, arguments = call
    arguments = tuple(ran if argument == "PATH" else argument.replace("PATH", str(ran)) for argument in arguments)
    files = {**cifar100(), "cifar-100-python/train": pickle.dumps(Malicious(function, arguments), protocol)}
    (tmp_path / "bad.tar.gz").write_bytes(make_tar(files, "w:gz"))
    message = r"bad\.tar\.gz: cifar-100-python/train: its pickle loads .*do not trust it"
    assert_refused(message, read_cifar100, tmp_path / "bad.tar.gz", tmp_path)
    assert not ran.exists()


RECONSTRUCT = np.empty(0).__reduce__()[0]
# Beyond their array: as large as 8 MB an element although equal to uint8; a field outside of the element; flags.
TYPES = [
    ("u1", (3, "|", (np.dtype("i8"), (2**20,)), None, None, 16, 1, 0)),
    ("V16", (3, "|", None, ("a",), {"a": (np.dtype("u8"), 2**40)}, 16, 1, 16)),
    ("u1", (3, "|", None, None, None, -1, -1, 63)),
    ("O", (3, "|", None, None, None, -1, -1, 63)),
]
# Allocated without content.
SHAPES = [(np.ndarray, ((2**33,), "b")), (RECONSTRUCT, (np.ndarray, (2**33,), "b"))]


@pytest.mark.parametrize("call", [*((np.dtype, (code, False, True), state) for code, state in TYPES), *SHAPES])
def test_types_and_shapes_that_reach_beyond_an_array_are_refused_before_memory_is_allocated(call):
    assert_refused("here: is damaged", load_arrays, pickle.dumps(Malicious(*call), 2), "here")


def test_a_wrong_number_of_bytes_and_a_memo_index_beyond_the_pickles_size_are_refused():
    content = python2_pickle(np.zeros((3, 4), np.uint8)).replace(b"J\x04\0\0\0", b"J\x05\0\0\0")
    assert_refused("with fewer or more bytes than it declares", load_arrays, content, "here")
    # LONG_BINPUT: Python takes 8 bytes for each place up to this one.
    content = b"\x80\x02]r" + struct.pack("<I", 2**31 - 1) + b"."
    assert_refused(r"here: is damaged \(a memo index beyond its size\)", load_arrays, content, "here")
    assert load_arrays(b"\x80\x02]r" + struct.pack("<I", 5) + b".", "here") == []


def test_arrays_and_plain_values_of_new_pickles_are_read_too():
    value = {"a": np.arange(6, dtype=np.uint8).reshape(2, 3), "b": [1, "x", b"y", None, 2.5, (True,)]}
    loaded = load_arrays(pickle.dumps(value, 4), "x")
    np.testing.assert_array_equal(loaded["a"], value["a"])
    assert loaded["b"] == value["b"]


@pytest.mark.parametrize("data", [b"", b"\x80\x02", b"garbage", python2_pickle({"a": [1, 2]})[:-6], b"\x80\x02N)R."])
def test_a_damaged_pickle_is_a_one_line_error(data):
    assert_refused(r"here: is damaged .*download the archive again", load_arrays, data, "here")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": np.zeros((3, 3071), np.uint8)}, "are not rows of 3072 bytes"),
        ({"data": [1, 2]}, "are not rows of 3072 bytes"),
        ({"data": np.zeros((4, 3072), np.uint8)}, "has 3 fine_labels for 4 images of 100 classes"),
        ({"fine_labels": [1, 2, 100]}, "has 3 fine_labels for 3 images of 100 classes"),
        ({"fine_labels": [1, 2, -1]}, "has 3 fine_labels for 3 images of 100 classes"),
        ({"fine_labels": ["x", "y", "z"]}, "train holds no fine_labels"),
    ],
)
def test_batches_that_do_not_fit_together_are_refused(tmp_path, archive, changed, message):
    assert_refused(message, read_cifar100, archive(**changed), tmp_path, "train")


def test_the_archive_of_the_other_data_set_is_refused(tmp_path, archive):
    assert_refused(
        r"holds no batches\.meta; use the archive called 'python version'", read_cifar10, archive(), tmp_path
    )
    assert_refused("holds no meta", read_cifar100, ARCHIVE, tmp_path)


def test_a_truncated_archive_is_a_one_line_error_and_leaves_no_files(tmp_path):
    path, whole = tmp_path / "cut.tar.gz", ARCHIVE.read_bytes()
    damaged = gzip.compress(gzip.decompress(whole)[:40_000])
    for content, place in (*((whole[:size], ".*") for size in (10, 3000, -9)), (damaged, r"at byte \d+")):
        path.write_bytes(content)
        assert_refused(
            rf"cut\.tar\.gz: is truncated or damaged {place}; download it again", read_cifar10, path, tmp_path
        )
    assert [*tmp_path.iterdir()] == [path]


# One in fifty takes image n for class n % 10, the others for the last class.
DISTRIBUTIONS = 0.02 * np.eye(10)[np.arange(20) % 10] + 0.98 * np.eye(10)[[9] * 20]


def human(folder: Path, answers: np.ndarray = DISTRIBUTIONS) -> Path:
    """Makes a folder with CIFAR-10's archive and distributions of answers for its 20 test images."""
    return unpack({ARCHIVE.name: ARCHIVE.read_bytes(), "cifar10h-probs.npy": npy(answers)}, folder / "10h")


def test_human_answers_stand_beside_the_images_of_the_test_set(tmp_path):
    dataset = read_cifar10h(human(tmp_path), tmp_path)
    assert list(dataset.splits) == ["test"]
    split, clean = dataset.splits["test"], read_cifar10(ARCHIVE, tmp_path).splits["test"]
    assert labels_of(dataset, "test") == LABELS["test_batch"]
    assert split.fingerprint != clean.fingerprint
    numbers = [13, 4]
    for number, sample, image in zip(numbers, split.read(numbers), clean.read(numbers), strict=True):
        assert sample.image == image.image
        answers = np.load(io.BytesIO(sample.members["soft.npy"]))
        np.testing.assert_allclose(answers, DISTRIBUTIONS[number], rtol=1e-6)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (DISTRIBUTIONS[:-1], r"has the shape \(19, 10\) .* 20 images and 10 classes; download it again"),
        (np.eye(10, dtype=int)[[0] * 20], ".* the type int64, not a probability"),
        (2 * DISTRIBUTIONS, "has rows that are not probabilities"),
        (DISTRIBUTIONS - 0.5 * (np.eye(10)[[0] * 20] - np.eye(10)[[1] * 20]), "has rows that are not probabilities"),
        (np.full((20, 10), np.nan), "has rows that are not probabilities"),
        (np.full((20, 10), None), "cannot be read .the array holds pickled objects"),
    ],
)
def test_human_answers_that_are_no_distributions_of_the_test_set_are_refused(tmp_path, answers, message):
    assert_refused(rf"cifar10h-probs\.npy: {message}", read_cifar10h, human(tmp_path, answers), tmp_path)


def test_human_answers_without_their_images_are_refused(tmp_path):
    message = r"10h: must hold cifar10h-probs\.npy and cifar-10-python\.tar\.gz"
    for name in ("cifar10h-probs.npy", ARCHIVE.name):
        (human(tmp_path) / name).unlink()
        assert_refused(message, read_cifar10h, tmp_path / "10h", tmp_path)
