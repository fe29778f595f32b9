"""Parsers for bytes that others wrote: JSON, NumPy arrays, and the headers of safetensors files.

Parsers of libraries trust what a file declares and raise whatever damage makes them trip over. Here declared sizes are
compared with the bytes that are there before anything is allocated, nothing is unpickled, and all that is wrong is one
`Malformed`, whose message fits into a line.
"""

import ast
import dataclasses
import errno
import io
import json
import math
import os
import stat
import struct
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MAX_JSON_BYTES = 2**24
"""JSON of more bytes is refused where no other limit is given: parsed, it may take 27 times as much memory."""

MAX_JSON_DEPTH = 100
"""JSON that is nested deeper is refused: who walks through it would run out of stack."""

MAX_NPY_HEADER_BYTES = 10_000
"""NumPy's own limit for the header of an array that is not trusted."""

MAX_NPZ_MEMBERS = 100_000
"""Archives of more arrays are refused."""

MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
"""The format's own limit."""

MAX_AXES = 64
"""Arrays of more axes are refused: NumPy takes as many at most."""

# Python's parser counts its depth over all threads (CPython 3.11): two at a time were seen to end in a SystemError.
_PYTHON_PARSER = threading.Lock()
_NPY_MAGIC = b"\x93NUMPY"
_SAFETENSORS_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16},
    **{"U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64},
}


class Malformed(ValueError):
    """Bytes that are not of the format that they should be, or beyond its limits."""


@dataclasses.dataclass(frozen=True)
class NpyHeader:
    """What a ``.npy`` file declares.

    Attributes:
        shape: of the array.
        dtype: of its elements, no objects.
        fortran_order: whether the first index varies fastest.
        offset: of the elements, bytes from the start of the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran_order: bool
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """What a safetensors file declares of one array.

    Attributes:
        dtype: the format's name of its type, such as ``BF16``.
        shape: of the array.
        start: first byte of its elements, from the start of the file.
        stop: one more than their last.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_json(content: bytes | str, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Returns the value of a JSON text in UTF-8.

    Raises:
        Malformed: it is none, nested too deeply, or longer than ``most_bytes``.
    """
    if len(content) > most_bytes:
        raise Malformed(f"JSON of {len(content):,} bytes, at most {most_bytes:,} are read")
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise Malformed("JSON that is nested too deeply") from error
    except (ValueError, MemoryError) as error:
        raise Malformed(f"no JSON ({error or 'out of memory'})") from error
    is_bytes = isinstance(content, bytes)
    opening = content.count(b"[") + content.count(b"{") if is_bytes else content.count("[") + content.count("{")
    if opening > MAX_JSON_DEPTH and _is_deep(value):
        raise Malformed("JSON that is nested too deeply")
    return value


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [child for children in inside for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def read_json(path: Path, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Returns the value in a JSON file.

    Raises:
        OSError: it cannot be read.
        Malformed: as `parse_json`.
    """
    return parse_json(read_bytes(path, most_bytes + 1), most_bytes)


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Returns the content of a file, or the first ``most_bytes`` of it; raises as `open_regular`."""
    with open_regular(path) as file:
        return file.read(most_bytes)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading.

    Raises:
        OSError: it cannot be read, or is a device or pipe, which might have no end or never begin.
    """
    return open(descriptor_of_regular(path, os.O_RDONLY), "rb")


def descriptor_of_regular(path: Path, flags: int) -> int:
    """Opens a file with the flags of `os.open`, and creates it for all to read; raises as `open_regular`."""
    # Without O_NONBLOCK, opening a named pipe would wait for someone at its other end.
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "no regular file", str(path))


def parse_npy(content: bytes) -> np.ndarray:
    """Returns the array of a ``.npy`` file, read-only.

    Raises:
        Malformed: it is none, holds pickled objects, or has not as many bytes as it declares.
    """
    file = io.BytesIO(content)
    header = read_npy_header(file)
    if header.nbytes != len(content) - header.offset:
        raise Malformed(f"{len(content) - header.offset:,} bytes of elements, the header declares {header.nbytes:,}")
    try:
        array = np.frombuffer(content, header.dtype, math.prod(header.shape), header.offset)
        return array.reshape(header.shape, order="F" if header.fortran_order else "C")
    except (ValueError, TypeError, OverflowError) as error:
        raise Malformed(f"no NumPy array ({error})") from error


def read_npy_header(file: Any) -> NpyHeader:
    """Returns the header of a ``.npy`` file, which `read` gives from its beginning.

    Raises:
        Malformed: there is none, or the array holds objects, which NumPy would unpickle.
    """
    start = file.read(len(_NPY_MAGIC) + 2)
    if start[:-2] != _NPY_MAGIC or len(start) != len(_NPY_MAGIC) + 2 or start[-2] not in (1, 2, 3):
        raise Malformed(f"no NumPy array: it starts with {start!r}")
    form = "<H" if start[-2] == 1 else "<I"
    length = file.read(struct.calcsize(form))
    size = struct.unpack(form, length)[0] if len(length) == struct.calcsize(form) else 0
    if size > MAX_NPY_HEADER_BYTES:
        raise Malformed(f"the header of the array has {size:,} bytes, at most {MAX_NPY_HEADER_BYTES:,} are read")
    text = file.read(size).decode("utf-8" if start[-2] == 3 else "latin1", "replace").strip()
    try:
        with _PYTHON_PARSER:
            header = ast.literal_eval(text)
        shape, fortran_order, dtype = (header[name] for name in ("shape", "fortran_order", "descr"))
        found = np.lib.format.descr_to_dtype(dtype)
    except Exception as error:  # whatever the damage makes Python's parser and NumPy trip over
        raise Malformed(f"the header of the array is damaged ({type(error).__name__})") from error
    if not (isinstance(shape, tuple) and all(type(size) is int and abs(size) < 2**63 for size in shape)):
        raise Malformed("the array has no shape, or one beyond any array's")
    if any(size < 0 for size in shape):
        raise Malformed(f"the array has the shape {str(shape)[:100]}")
    if not isinstance(fortran_order, bool):
        raise Malformed("the header of the array is damaged (fortran_order)")
    if found.itemsize == 0 or len(shape) > MAX_AXES:
        raise Malformed(f"the array has elements of {found.itemsize} bytes and {len(shape)} axes")
    if found.hasobject:
        raise Malformed("the array holds pickled objects, which are never loaded")
    return NpyHeader(shape, found, fortran_order, len(start) + len(length) + size)


def read_npz_headers(file: Path | io.BytesIO) -> dict[str, NpyHeader]:
    """Returns what the arrays of an ``.npz`` archive declare, by their names without ``.npy``.

    Raises:
        OSError: it cannot be read.
        Malformed: it is no such archive, or an array has not as many bytes as it declares.
    """
    with _opened_zip(file) as archive:
        members = archive.infolist()
        if len(members) > MAX_NPZ_MEMBERS:
            raise Malformed(f"an archive of {len(members):,} arrays, at most {MAX_NPZ_MEMBERS:,} are read")
        found = {}
        for member in members:
            try:
                header = _within_zip(lambda member=member: _header_of_member(archive, member))
            except Malformed as error:
                raise Malformed(f"{member.filename!r:.200}: {error}") from error
            if header.nbytes != member.file_size - header.offset:
                raise Malformed(f"{member.filename!r:.200} has not as many bytes as it declares")
            found[member.filename.removesuffix(".npy")] = header
        return found


def read_npz_array(file: Path | io.BytesIO, name: str) -> np.ndarray:
    """Returns one array of an ``.npz`` archive, read-only; memory is taken for no more than its header declares.

    Raises:
        OSError: the archive cannot be read.
        Malformed: as `read_npz_headers`, or its bytes are damaged.
    """
    with _opened_zip(file) as archive:
        return parse_npy(_within_zip(lambda: archive.read(f"{name}.npy")))


def parse_safetensors_header(read: Callable[[int, int], bytes], size: int) -> tuple[dict[str, TensorHeader], Any]:
    """Returns what a safetensors file declares of its arrays, and its metadata.

    Args:
        read: returns so many bytes from an offset of the file.
        size: bytes of the file.

    Raises:
        Malformed: it is no such file, or an array lies beyond its end.
    """
    length = int.from_bytes(read(0, 8), "little") if size >= 8 else 0
    if not 2 <= length <= min(MAX_SAFETENSORS_HEADER_BYTES, size - 8):
        raise Malformed(f"no safetensors: {size:,} bytes, of which the header would have {length:,}")
    header = parse_json(read(8, length), MAX_SAFETENSORS_HEADER_BYTES)
    if not isinstance(header, dict):
        raise Malformed("no safetensors: the header is no object")
    metadata = header.pop("__metadata__", {})
    try:
        return {name: _tensor(name, fields, 8 + length, size) for name, fields in header.items()}, metadata
    except Malformed:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise Malformed(f"no safetensors: a field is missing or of another type ({error})") from error


def parse_sentencepiece(content: bytes) -> Any:
    """Returns the protocol buffer of a SentencePiece model.

    Raises:
        Malformed: it is none.
    """
    from sentencepiece import sentencepiece_model_pb2  # here alone, where a model is read

    models: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    try:
        return models.ModelProto.FromString(content)
    except Exception as error:  # protobuf's own, which differs with its implementation
        raise Malformed("no SentencePiece model") from error


def _tensor(name: str, fields: Any, base: int, size: int) -> TensorHeader:
    shape, (first, last) = tuple(fields["shape"]), fields["data_offsets"]
    if len(shape) > MAX_AXES:
        raise Malformed(f"{name} has {len(shape)} axes, at most {MAX_AXES} are read")
    if any(type(number) is not int or number < 0 for number in (*shape, first, last)):
        raise Malformed(f"{name} has no whole numbers for shape and place")
    if fields["dtype"] not in _SAFETENSORS_BITS:
        raise Malformed(f"{name} is of the unknown type {fields['dtype']!r}")
    if 8 * (last - first) != math.prod(shape) * _SAFETENSORS_BITS[fields["dtype"]] or base + last > size:
        raise Malformed(f"{name} of shape {shape} does not fit into its {last - first:,} bytes, or not into the file")
    return TensorHeader(fields["dtype"], shape, base + first, base + last)


def _header_of_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NpyHeader:
    with archive.open(member) as file:
        return read_npy_header(file)


def _opened_zip(file: Path | io.BytesIO) -> zipfile.ZipFile:
    return _within_zip(lambda: zipfile.ZipFile(file))


def _within_zip(call: Callable[[], Any]) -> Any:
    """Returns what a call to zipfile returns, whose reader and decompressors have many ways to fail."""
    try:
        return call()
    except (OSError, Malformed):
        raise
    except Exception as error:
        raise Malformed(f"no readable .npz archive ({type(error).__name__}: {str(error)[:200]})") from error
