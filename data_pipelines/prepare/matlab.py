"""Reads variables of MATLAB's `.mat` files in a subprocess, because a damaged file can crash SciPy's reader."""

import io
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from lit_het.untrusted import Malformed, open_regular, parse_json, parse_npy

MAX_BYTES = 10_000_000
"""The largest accepted file; those of published data sets have 100 kB."""

MAX_VALUES = 100_000
"""The most values of a variable."""

MAX_ARRAY_BYTES = 2**28
"""The largest accepted file with an array of pixels, and the largest array; those of SVHN have 182 and 225 MB."""

_SECONDS = 60.0
_MEMORY = 2**30  # limit of the subprocess in bytes; SciPy alone takes a fifth
_JSON_BYTES = 2**26


def load_variables(content: bytes, *names: str) -> dict[str, Any]:
    """Returns variables of a ``.mat`` file: a list of values, or for a structure a dict of such lists.

    Args:
        content: the file.
        names: of the variables.

    Raises:
        Malformed: it is not a ``.mat`` file, lacks a variable, or exceeds a limit of this module.
    """
    if len(content) > MAX_BYTES:
        raise Malformed(f"{len(content):,} bytes, at most {MAX_BYTES:,} are read")
    return parse_json(_read("write_variables", *names, input=content, stdout=subprocess.PIPE), _JSON_BYTES)


def load_array(path: Path, name: str) -> np.ndarray:
    """Returns a variable of a ``.mat`` file that is an array of numbers, read-only.

    Args:
        path: of the file.
        name: of the variable.

    Raises:
        OSError: the file cannot be read.
        Malformed: it is not a ``.mat`` file, lacks the variable, or exceeds a limit of this module.
    """
    with open_regular(path) as file, tempfile.TemporaryFile() as output:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_ARRAY_BYTES:
            raise Malformed(f"{size:,} bytes, at most {MAX_ARRAY_BYTES:,} are read")
        _read("write_array", name, str(MAX_ARRAY_BYTES), stdin=file, stdout=output)
        output.seek(0)
        return parse_npy(output.read())


def write_variables() -> None:
    """Reads a file from standard input and writes the variables named by the arguments to standard output, as JSON."""
    variables = _loaded(sys.argv[1:])
    json.dump({name: _plain(variables[name]) for name in sys.argv[1:]}, sys.stdout, default=_plain)


def write_array() -> None:
    """Reads a file from standard input and writes an array to standard output as ``.npy``; arguments: name, limit."""
    name, most_bytes = sys.argv[1], int(sys.argv[2])
    array = np.asarray(_loaded([name])[name])
    if array.nbytes > most_bytes:
        raise ValueError(f"an array of {array.nbytes:,} bytes, at most {most_bytes:,} are read")
    np.save(sys.stdout.buffer, array, allow_pickle=False)


def _read(function: str, *names: str, **streams: Any) -> bytes:
    """Calls a function of this module in a subprocess and returns its output, if that is a pipe."""
    # -P: do not import modules from the current folder.
    command = [sys.executable, "-P", "-c", f"from {__name__} import {function}; {function}()", *names]
    # Each thread of OpenBLAS would take some of the limited memory.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    try:
        child = subprocess.run(command, stderr=subprocess.PIPE, timeout=_SECONDS, env=environment, **streams)
    except subprocess.TimeoutExpired as error:
        raise Malformed(f"it takes longer than {_SECONDS:.0f} s to read") from error
    if child.returncode < 0:
        raise Malformed(f"its reader ended by signal {-child.returncode}")
    if child.returncode:
        raise Malformed(child.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200])
    return child.stdout or b""


def _loaded(names: list[str]) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    import scipy.io  # only in the subprocess

    content = io.BytesIO(sys.stdin.buffer.read())
    return scipy.io.loadmat(content, squeeze_me=True, variable_names=names)


def _plain(value: Any) -> Any:
    """Converts NumPy arrays, also nested ones, to lists."""
    array = np.atleast_1d(value)
    if array.size > MAX_VALUES:
        raise ValueError(f"a variable of {array.size:,} values, at most {MAX_VALUES:,} are read")
    if array.dtype.names:
        return {field: array[field].ravel().tolist() for field in array.dtype.names}
    return array.ravel().tolist()
