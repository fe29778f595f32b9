"""Reads the pickles of CIFAR's archives safely: arrays, bytes, numbers and containers, nothing else."""

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np

from lit_het.errors import UserError

_CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


class _DType:
    """A pickled NumPy dtype. NumPy's own unpickling also builds types whose fields lie outside of the array."""

    def __init__(self, code: object, align: object, copy: object):
        if code not in _CODES:
            raise ValueError(f"an array of type {code!r:.20}")
        self.dtype = np.dtype(str(code))

    def __setstate__(self, state: Any) -> None:
        _, order, subarray, names, fields, size, alignment, flags = state
        if order not in ("<", ">", "|", "=") or (subarray, names, fields, size, alignment, flags) != _PLAIN:
            raise ValueError("an array with an unsupported dtype")
        self.dtype = self.dtype.newbyteorder("=" if order == "|" else order)


_PLAIN = (None, None, None, -1, -1, 0)
_NDARRAY = object()  # in place of the class, which a pickle could call with any shape


class _Array:
    """A pickled NumPy array: an empty array, whose state follows."""

    def __init__(self, kind: object, shape: object, code: object):
        if kind is not _NDARRAY or shape != (0,):
            raise ValueError("an array that NumPy did not write")

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        # Python 2 pickles bytes as text.
        self.content = content.encode("latin1") if isinstance(content, str) else content
        self.shape, self.dtype, self.is_fortran = shape, kind.dtype, bool(is_fortran)
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("an array with an invalid shape")
        if math.prod(shape) * self.dtype.itemsize != len(self.content):
            raise ValueError("an array with fewer or more bytes than it declares")

    def array(self) -> np.ndarray:
        """Returns a copy as a NumPy array."""
        return np.frombuffer(self.content, self.dtype).reshape(self.shape, order="F" if self.is_fortran else "C").copy()


# NumPy 2 renamed the module.
_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DType,
}


def load_arrays(data: bytes, source: str) -> Any:
    """Reads a pickle, of Python 2 or 3, without running code from it.

    Args:
        data: the pickle.
        source: where it comes from, for error messages.
    """
    try:
        _check_memo(data)
        return _with_arrays(_Unpickler(io.BytesIO(data), encoding="latin1").load())
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except Exception as error:  # damaged pickles raise arbitrary exceptions
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{source}: is damaged ({reason}); download the archive again") from error


def _with_arrays(value: Any) -> Any:
    """Replaces every `_Array` by a NumPy array."""
    match value:
        case _Array():
            return value.array()
        case list() | tuple():
            return type(value)(_with_arrays(item) for item in value)
        case dict():
            return {name: _with_arrays(item) for name, item in value.items()}
        case bool() | int() | float() | str() | bytes() | None:
            return value
        case _:
            raise ValueError(f"a value of type {type(value).__name__}")


def _check_memo(data: bytes) -> None:
    """Checks that memo indices are within the pickle's size: the unpickler allocates all entries up to an index."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "LONG_BINPUT") and not (isinstance(argument, int) and 0 <= argument <= len(data)):
            raise ValueError("a memo index beyond its size")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A pickle may name any function to call; only these names, all replaced by our own classes, are resolved.
        if (module, name) not in _ADMITTED:
            raise UserError(f"its pickle loads {module}.{name}, which no published archive does; do not trust it")
        return _ADMITTED[module, name]
