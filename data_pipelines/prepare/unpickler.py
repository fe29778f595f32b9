"""Pickles of the archives that CIFAR is published in: arrays, bytes, numbers and containers, nothing else."""

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np

from lit_het.errors import UserError

_CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


class _DType:
    """What NumPy pickles a type as; NumPy itself would also build types whose elements lie outside of an array."""

    def __init__(self, code: object, align: object, copy: object):
        if code not in _CODES:
            raise ValueError(f"an array of type {code!r:.20}")
        self.dtype = np.dtype(str(code))

    def __setstate__(self, state: Any) -> None:
        _, order, subarray, names, fields, size, alignment, flags = state
        if order not in ("<", ">", "|", "=") or (subarray, names, fields, size, alignment, flags) != _PLAIN:
            raise ValueError("an array of a type that NumPy does not write so")
        self.dtype = self.dtype.newbyteorder("=" if order == "|" else order)


_PLAIN = (None, None, None, -1, -1, 0)
_NDARRAY = object()  # stands for the class, which could be called with any shape


class _Array:
    """What NumPy pickles an array as: an empty one, and then its state."""

    def __init__(self, kind: object, shape: object, code: object):
        if kind is not _NDARRAY or shape != (0,):
            raise ValueError("an array that NumPy does not write so")

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        # Python 2 pickles bytes as text.
        self.content = content.encode("latin1") if isinstance(content, str) else content
        self.shape, self.dtype, self.is_fortran = shape, kind.dtype, bool(is_fortran)
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("an array with a shape that is none")
        if math.prod(shape) * self.dtype.itemsize != len(self.content):
            raise ValueError("an array that has not as many bytes as it declares")

    def array(self) -> np.ndarray:
        """Returns a copy, as an array."""
        return np.frombuffer(self.content, self.dtype).reshape(self.shape, order="F" if self.is_fortran else "C").copy()


# NumPy has given its module another name.
_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DType,
}


def load_arrays(data: bytes, source: str) -> Any:
    """Reads a pickle that Python 2 may have written; it cannot run anything.

    Args:
        data: the pickle.
        source: where it comes from, for messages.

    Raises:
        UserError: it asks for something other than arrays and plain values, or is damaged.
    """
    try:
        _check_memo(data)
        return _with_arrays(_Unpickler(io.BytesIO(data), encoding="latin1").load())
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except Exception as error:  # a damaged pickle makes it trip over anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{source}: is damaged ({reason}); download the archive again") from error


def _with_arrays(value: Any) -> Any:
    """Returns NumPy's arrays in place of what stands for them."""
    match value:
        case _Array():
            return value.array()
        case list() | tuple():
            return type(value)(_with_arrays(one) for one in value)
        case dict():
            return {name: _with_arrays(one) for name, one in value.items()}
        case bool() | int() | float() | str() | bytes() | None:
            return value
        case _:
            raise ValueError(f"a value of type {type(value).__name__}")


def _check_memo(data: bytes) -> None:
    """Refuses places in the memo beyond the pickle's own size: memory is taken for all places up to them at once."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "LONG_BINPUT") and not (isinstance(argument, int) and 0 <= argument <= len(data)):
            raise ValueError("a place beyond its end")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise UserError(f"its pickle asks for {module}.{name}, which no published archive does; do not trust it")
        return _ADMITTED[module, name]
