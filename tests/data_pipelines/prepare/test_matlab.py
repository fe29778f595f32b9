"""MATLAB's files are read in a subprocess, and an invalid one is a one-line error."""

import struct

import numpy as np
import pytest

from lit_het.data_pipelines.prepare import matlab
from lit_het.data_pipelines.prepare.matlab import load_array, load_variables
from lit_het.untrusted import Malformed
from tests.data_pipelines.prepare.conftest import make_mat


def test_numbers_and_structures_are_lists():
    rows = np.empty((2, 1), [("name", "O"), ("parts", "O")])
    rows[:, 0] = [("a", [1, 2]), ("b", [3])]
    content = make_mat(numbers=np.arange(3)[None], one=np.array([[7]]), rows=rows)
    assert load_variables(content, "numbers", "one", "rows") == {
        "numbers": [0, 1, 2],
        "one": [7],
        "rows": {"name": ["a", "b"], "parts": [[1, 2], 3]},
    }


def test_a_file_that_crashes_its_reader_is_a_one_line_error():
    content = make_mat(numbers=np.arange(2, dtype=np.int64))
    # The type of the elements, beyond SciPy's table of types (SciPy 1.17 then reads beyond the table's end).
    damaged = content.replace(b"\x0c\x00\x00\x00\x10\x00\x00\x00", b"\x0c\x10\x00\x00\x10\x00\x00\x00")
    assert damaged != content
    with pytest.raises(Malformed):
        load_variables(damaged, "numbers")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>404</html>", "MatReadError|ValueError"),
        (make_mat(other=[1]), "KeyError: 'numbers'"),
        (make_mat(True, numbers=np.zeros(2**20, np.uint8)), "a variable of 1,048,576 values, at most 100,000"),
        (struct.pack("<5i", 0, 2**15, 2**15, 0, 8) + b"numbers\0", "Not enough bytes"),  # 8 GiB of doubles
        (bytes(matlab.MAX_BYTES + 1), "10,000,001 bytes, at most 10,000,000 are read"),
    ],
    ids=["page", "variable", "values", "declared", "bytes"],
)
def test_damaged_or_too_large_files_are_refused(content, message):
    with pytest.raises(Malformed, match=message):
        load_variables(content, "numbers")


@pytest.mark.parametrize("compress", [False, True])
def test_an_array_keeps_its_shape_type_and_values(tmp_path, compress):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 2, 5), np.uint8)
    (tmp_path / "x.mat").write_bytes(make_mat(compress, X=pixels, y=np.arange(5)[:, None]))
    loaded = load_array(tmp_path / "x.mat", "X")
    assert loaded.dtype == np.uint8
    np.testing.assert_array_equal(loaded, pixels)
    np.testing.assert_array_equal(load_array(tmp_path / "x.mat", "y"), np.arange(5))


def test_other_files_and_variables_are_not_arrays(tmp_path):
    path = tmp_path / "x.mat"
    path.write_bytes(make_mat(X=np.zeros((3, 4), np.uint8), rows=np.array([["a", 1]], object)))
    with pytest.raises(Malformed, match="KeyError: 'z'"):
        load_array(path, "z")
    with pytest.raises(Malformed, match="Object arrays cannot be saved"):
        load_array(path, "rows")
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(Malformed, match=r"MatReadError|ValueError"):
        load_array(path, "X")


def test_a_file_or_an_array_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.mat"
    path.write_bytes(make_mat(True, X=np.zeros(10_000, np.uint8)))
    monkeypatch.setattr(matlab, "MAX_ARRAY_BYTES", 9_999)
    with pytest.raises(Malformed, match="an array of 10,000 bytes, at most 9,999 are read"):
        load_array(path, "X")
    monkeypatch.setattr(matlab, "MAX_ARRAY_BYTES", 100)
    with pytest.raises(Malformed, match=r"\d+ bytes, at most 100 are read"):
        load_array(path, "X")
