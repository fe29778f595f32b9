"""Bytes that others wrote: what is whole is read as its own library reads it, and all else is one `Malformed`."""

import io
import json
import os
import struct
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lit_het import untrusted
from lit_het.untrusted import Malformed


def npy(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def check_damaged(read):
    """Reads damaged bytes, which may hold an array still."""
    problem = ""
    try:
        read()
    except Malformed as error:
        problem = str(error)
    assert "\n" not in problem


ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.int64, np.bool_, ">f8", "S5", "U3", np.complex64]),
    hnp.array_shapes(min_dims=0, min_side=0),
)


@given(ARRAYS, st.sampled_from([(1, 0), (2, 0), (3, 0)]), st.booleans())
def test_an_array_is_read_as_numpy_reads_it(array, version, fortran):
    content = npy(np.asfortranarray(array) if fortran else array, version)
    found, expected = untrusted.parse_npy(content), np.load(io.BytesIO(content))
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@given(st.data())
def test_a_damaged_array_is_malformed_or_still_an_array(data):
    content = bytearray(npy(np.arange(6, dtype=np.float32).reshape(2, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    check_damaged(lambda: untrusted.parse_npy(bytes(content)))


def _declared(header: bytes) -> bytes:
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header


@pytest.mark.parametrize(
    "content",
    [
        _declared(b"{'descr':'|S0','fortran_order':False,'shape':(%d,)}" % 2**70),
        _declared(b"{'descr':'<f4','fortran_order':False,'shape':(0x" + b"f" * 8000 + b",)}"),
        b"PK\3\4",
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\1\0" + struct.pack("<H", 4) + b"'''a",
        b"\x93NUMPY\1\0" + struct.pack("<H", 9000) + b"(" * 9000,
        b"\x93NUMPY\2\0" + struct.pack("<I", 2**31) + b"{}",
        b"\x93NUMPY\1\0" + struct.pack("<H", 64) + b"{'descr':'<f4','fortran_order':False,'shape':(4294967296,)}     ",
        b"\x93NUMPY\1\0" + struct.pack("<H", 64) + b"{'descr':'<f4','fortran_order':False,'shape':(-1,)}             ",
        b"\x93NUMPY\1\0" + struct.pack("<H", 64) + b"{'descr':[1],'fortran_order':False,'shape':()}                  ",
        b"\x93NUMPY\1\0" + struct.pack("<H", 64) + b"{'descr':'|O','fortran_order':False,'shape':()}                 ",
    ],
)
def test_bytes_that_only_begin_like_an_array_are_malformed(content):
    with pytest.raises(Malformed):
        untrusted.parse_npy(content)


def test_objects_are_never_unpickled():
    with pytest.raises(Malformed, match="pickled objects"):
        untrusted.parse_npy(npy(np.array([{}], object)))


def test_arrays_of_an_archive_are_read_one_by_one():
    arrays = {"a/b": np.arange(6).reshape(2, 3), "c": np.ones((), ml_dtypes.bfloat16)}
    content = npz(**arrays)
    headers = untrusted.read_npz_headers(io.BytesIO(content))
    assert {name: header.shape for name, header in headers.items()} == {"a/b": (2, 3), "c": ()}
    np.testing.assert_array_equal(untrusted.read_npz_array(io.BytesIO(content), "a/b"), arrays["a/b"])
    assert untrusted.read_npz_array(io.BytesIO(content), "c").view(ml_dtypes.bfloat16) == 1


def test_a_bomb_in_an_archive_takes_no_memory():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy(np.zeros(3)) + bytes(2**26))
    tracemalloc.start()
    with pytest.raises(Malformed, match="as many bytes"):
        untrusted.read_npz_headers(file)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@given(st.binary(max_size=200), st.integers(0, 400))
def test_a_damaged_archive_is_malformed(noise, place):
    content = bytearray(npz(a=np.arange(3)))
    content[place : place + len(noise)] = noise
    file = io.BytesIO(content)
    check_damaged(lambda: [untrusted.read_npz_array(file, name) for name in untrusted.read_npz_headers(file)])


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", "\xff", "1" * 5000, ""])
def test_invalid_json_is_malformed(text):
    with pytest.raises(Malformed):
        untrusted.parse_json(text.encode("latin1"))


def test_long_json_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(list(range(100))))
    assert untrusted.read_json(path) == list(range(100))
    with pytest.raises(Malformed, match="longer than the limit of 100"):
        untrusted.read_json(path, 100)


def header_of(content):
    return untrusted.parse_safetensors_header(lambda offset, size: content[offset : offset + size], len(content))


def test_a_safetensors_header_has_the_offsets_of_arrays():
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.ones(5, np.float16)}
    content = safetensors.numpy.save(arrays, {"made": "here"})
    found, metadata = header_of(content)
    assert metadata == {"made": "here"}
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        assert content[found[name].start : found[name].stop] == array.tobytes()


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a":{}}',
        b'{"a":1}',
        b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}',
        b'{"a":{"dtype":"F3","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":[],"shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}}',
        b'{"a":' * 50_000,
    ],
)
def test_a_wrong_safetensors_header_is_malformed(header):
    with pytest.raises(Malformed):
        header_of(struct.pack("<Q", len(header)) + header + bytes(8))


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_a_safetensors_file_without_its_header_is_malformed(content):
    with pytest.raises(Malformed):
        header_of(content)


def test_the_array_of_a_mapped_file_is_not_read_into_memory(tmp_path):
    (tmp_path / "x.npy").write_bytes(npy(np.arange(10**6)))
    mapped = np.memmap(tmp_path / "x.npy", np.uint8, "r").data
    tracemalloc.start()
    found = untrusted.parse_npy(mapped)
    assert tracemalloc.get_traced_memory()[1] < 10**5
    tracemalloc.stop()
    assert np.shares_memory(found, np.frombuffer(mapped, np.uint8))
    assert found[-1] == 10**6 - 1


def test_an_archive_that_is_a_pipe_or_a_device_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "zero.npz").symlink_to("/dev/zero")
    for name in ("pipe.npz", "zero.npz"):
        with pytest.raises(OSError, match="not a regular file"):
            untrusted.read_npz_headers(tmp_path / name)
