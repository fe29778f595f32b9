"""Pickles of the archives that CIFAR is published in: arrays, bytes, numbers and containers, nothing else."""

import io
import pickle
from typing import Any

import numpy as np

from lit_het.errors import UserError

# How NumPy pickles an array, under the name of its old and its new module.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
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
        return _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except Exception as error:  # a damaged pickle makes it trip over anything
        raise UserError(f"{source}: is damaged ({error}); download the archive again") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise UserError(f"its pickle asks for {module}.{name}, which no published archive does; do not trust it")
        return _ADMITTED[module, name]
