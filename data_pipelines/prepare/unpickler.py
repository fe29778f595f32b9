"""Pickles of the archives that CIFAR is published in: arrays, bytes, numbers and containers, nothing else."""

import io
import pickle
import pickletools
from typing import Any

import numpy as np

from lit_het.errors import UserError

# How NumPy pickles an array, under the name of its old and its new module.
_NDARRAY = "numpy.ndarray"


def _reconstruct(kind: object, shape: object, code: object) -> np.ndarray:
    """Returns the empty array that NumPy begins with; any other shape would take as much memory as it says."""
    if kind != _NDARRAY or shape != (0,):
        raise ValueError("an array that NumPy does not write so")
    return np.ndarray.__new__(np.ndarray, (0,), "b")


_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _NDARRAY,  # a name, as the class itself could be called with any shape
    ("numpy", "dtype"): np.dtype,
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
        return _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except Exception as error:  # a damaged pickle makes it trip over anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{source}: is damaged ({reason}); download the archive again") from error


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
