"""Parsers for untrusted bytes: JSON, NumPy arrays, and the headers of safetensors files.

Library parsers trust the sizes that a file declares, and raise many kinds of exceptions. Here declared sizes are
compared with the size of the file before memory is allocated, nothing is unpickled, and every error is a `Malformed`
with a message of one line.
"""

import ast
import contextlib
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MAX_JSON_BYTES = 2**24
"""Default limit of a JSON text; parsed, it may take 27 times as much memory."""

MAX_JSON_DEPTH = 100
"""Maximum nesting of JSON; recursive functions on deeper values would exceed Python's stack."""

MAX_NPY_HEADER_BYTES = 10_000
"""Maximum header of an array, NumPy's own limit for untrusted files."""

MAX_NPZ_MEMBERS = 100_000
"""Maximum number of arrays in an archive."""

MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
"""Maximum header of a safetensors file, the format's own limit."""

MAX_AXES = 64
"""Maximum number of axes of an array, NumPy's own limit."""

# CPython 3.11 counts the parser's depth over all threads: two threads at a time have ended in a SystemError.
_PYTHON_PARSER = threading.Lock()
_NPY_MAGIC = b"\x93NUMPY"
_SAFETENSORS_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16},
    **{"U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64},
}


class Malformed(ValueError):
    """Bytes that are not of the expected format, or exceed its limits."""


@dataclasses.dataclass(frozen=True)
class NpyHeader:
    """The header of a ``.npy`` file.

    Attributes:
        shape: shape of the array.
        dtype: type of the elements, never objects.
        fortran_order: whether the first index varies fastest.
        offset: first byte of the elements, from the start of the file.
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
    """The entry of one array in the header of a safetensors file.

    Attributes:
        dtype: the format's name of the type, such as ``BF16``.
        shape: shape of the array.
        start: first byte of the elements, from the start of the file.
        stop: the byte after the last one.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_json(content: bytes | str, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Returns the value of a JSON text in UTF-8.

    Raises:
        Malformed: the text is not JSON, nested too deeply, or longer than ``most_bytes``.
    """
    if len(content) > most_bytes:
        raise Malformed(f"JSON of {len(content):,} bytes is longer than the limit of {most_bytes:,}")
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise Malformed("JSON that is nested too deeply") from error
    except (ValueError, MemoryError) as error:
        raise Malformed(f"not JSON ({error or 'out of memory'})") from error
    # Only a text with many brackets can be nested deeply: others need no walk through the value.
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
        OSError: the file cannot be read.
        Malformed: as `parse_json`.
    """
    return parse_json(read_bytes(path, most_bytes + 1), most_bytes)


def read_json_object(path: Path, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Returns the object in a JSON file; raises as `read_json`, and for another value."""
    content = read_json(path, most_bytes)
    if not isinstance(content, dict):
        raise Malformed("not a JSON object")
    return content


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Returns the content of a file, or the first ``most_bytes`` of it; raises as `open_regular`."""
    with open_regular(path) as file:
        return file.read(most_bytes)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading.

    Raises:
        OSError: the file cannot be read, or is not a regular file: a device or pipe may block or never end.
    """
    return open(regular_descriptor(path, os.O_RDONLY), "rb")


def regular_descriptor(path: Path, flags: int) -> int:
    """Opens a file with the flags of `os.open`, creating it with mode 0o644 if asked to; raises as `open_regular`."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def parse_npy(content: bytes | memoryview) -> np.ndarray:
    """Returns the array of a ``.npy`` file, read-only; that of a mapped file is not read into memory.

    Raises:
        Malformed: the content is not an array, has pickled objects, or has not as many bytes as it declares.
    """
    # Of a mapped file, only what a header may take is copied.
    header = read_npy_header(io.BytesIO(content[: MAX_NPY_HEADER_BYTES + 2**6]))
    if header.nbytes != len(content) - header.offset:
        raise Malformed(f"{len(content) - header.offset:,} bytes of elements, the header declares {header.nbytes:,}")
    try:
        array = np.frombuffer(content, header.dtype, math.prod(header.shape), header.offset)
        return array.reshape(header.shape, order="F" if header.fortran_order else "C")
    except (ValueError, TypeError, OverflowError) as error:
        raise Malformed(f"not a NumPy array ({error})") from error


def read_npy_header(file: Any) -> NpyHeader:
    """Returns the header of a ``.npy`` file, which must be at its beginning.

    Raises:
        Malformed: there is no valid header, or the array has objects, which NumPy would unpickle.
    """
    start = file.read(len(_NPY_MAGIC) + 2)
    if start[:-2] != _NPY_MAGIC or len(start) != len(_NPY_MAGIC) + 2 or start[-2] not in (1, 2, 3):
        raise Malformed(f"not a NumPy array: it starts with {start!r}")
    form = "<H" if start[-2] == 1 else "<I"
    length = file.read(struct.calcsize(form))
    size = struct.unpack(form, length)[0] if len(length) == struct.calcsize(form) else 0
    if size > MAX_NPY_HEADER_BYTES:
        raise Malformed(f"the header of the array has {size:,} bytes, more than {MAX_NPY_HEADER_BYTES:,}")
    text = file.read(size).decode("utf-8" if start[-2] == 3 else "latin1", "replace").strip()
    try:
        with _PYTHON_PARSER:
            header = ast.literal_eval(text)
        shape, fortran_order, dtype = (header[name] for name in ("shape", "fortran_order", "descr"))
        found = np.lib.format.descr_to_dtype(dtype)
    except Exception as error:  # Python's parser and NumPy raise many kinds of exceptions for damaged headers
        raise Malformed(f"the header of the array is damaged ({type(error).__name__})") from error
    if not (isinstance(shape, tuple) and all(type(size) is int and abs(size) < 2**63 for size in shape)):
        raise Malformed("the array has no valid shape")
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
    """Returns the headers of the arrays of an ``.npz`` archive by their names without ``.npy``.

    Raises:
        OSError: the archive cannot be read.
        Malformed: it is not an archive, or an array has not as many bytes as it declares.
    """
    with _opened_zip(file) as archive:
        members = archive.infolist()
        if len(members) > MAX_NPZ_MEMBERS:
            raise Malformed(f"the archive has {len(members):,} arrays, more than {MAX_NPZ_MEMBERS:,}")
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
    """Returns one array of an ``.npz`` archive, read-only; allocates no more memory than its header declares.

    Raises:
        OSError: the archive cannot be read.
        Malformed: as `read_npz_headers`, or the data is damaged.
    """
    with _opened_zip(file) as archive:
        return parse_npy(_within_zip(lambda: archive.read(f"{name}.npy")))


def parse_safetensors_header(read: Callable[[int, int], bytes], size: int) -> tuple[dict[str, TensorHeader], Any]:
    """Returns the entries of a safetensors header by the names of their arrays, and the metadata.

    Args:
        read: (offset, number of bytes) to these bytes of the file.
        size: bytes of the file.

    Raises:
        Malformed: the file is not safetensors, or an array lies beyond its end.
    """
    length = int.from_bytes(read(0, 8), "little") if size >= 8 else 0
    if not 2 <= length <= min(MAX_SAFETENSORS_HEADER_BYTES, size - 8):
        raise Malformed(f"not safetensors: a file of {size:,} bytes declares a header of {length:,}")
    header = parse_json(read(8, length), MAX_SAFETENSORS_HEADER_BYTES)
    if not isinstance(header, dict):
        raise Malformed("not safetensors: the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    try:
        return {name: _tensor(name, fields, 8 + length, size) for name, fields in header.items()}, metadata
    except Malformed:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise Malformed(f"not safetensors: a field is missing or has another type ({error})") from error


def parse_sentencepiece(content: bytes) -> Any:
    """Returns the protocol buffer of a SentencePiece model.

    Raises:
        Malformed: the content is not a SentencePiece model.
    """
    from sentencepiece import sentencepiece_model_pb2  # only here, as few commands read a model

    models: Any = sentencepiece_model_pb2  # its classes are created at import: unknown to type checkers
    try:
        return models.ModelProto.FromString(content)
    except Exception as error:  # the exception depends on the implementation of protobuf
        raise Malformed("not a SentencePiece model") from error


def _tensor(name: str, fields: Any, base: int, size: int) -> TensorHeader:
    shape, (first, last) = tuple(fields["shape"]), fields["data_offsets"]
    if len(shape) > MAX_AXES:
        raise Malformed(f"{name} has {len(shape)} axes, more than {MAX_AXES}")
    if any(type(number) is not int or number < 0 for number in (*shape, first, last)):
        raise Malformed(f"the shape and the offsets of {name} are not whole numbers")
    if fields["dtype"] not in _SAFETENSORS_BITS:
        raise Malformed(f"{name} has the unknown type {fields['dtype']!r}")
    if 8 * (last - first) != math.prod(shape) * _SAFETENSORS_BITS[fields["dtype"]] or base + last > size:
        raise Malformed(f"{name} of shape {shape} does not match its {last - first:,} bytes, or exceeds the file")
    return TensorHeader(fields["dtype"], shape, base + first, base + last)


def _header_of_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NpyHeader:
    with archive.open(member) as file:
        return read_npy_header(file)


@contextlib.contextmanager
def _opened_zip(file: Path | io.BytesIO) -> Iterator[zipfile.ZipFile]:
    with contextlib.nullcontext(file) if isinstance(file, io.BytesIO) else open_regular(file) as opened:
        yield _within_zip(lambda: zipfile.ZipFile(opened))


def _within_zip(call: Callable[[], Any]) -> Any:
    """Calls a function of zipfile; its reader and decompressors raise many kinds of exceptions."""
    try:
        return call()
    except (OSError, Malformed):
        raise
    except Exception as error:
        raise Malformed(f"not a readable .npz archive ({type(error).__name__}: {str(error)[:200]})") from error
