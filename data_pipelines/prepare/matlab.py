"""Reads variables of MATLAB's `.mat` files in a subprocess, because a damaged file can crash SciPy's reader."""

import io
import json
import os
import resource
import subprocess
import sys
from typing import Any

import numpy as np

from lit_het.untrusted import Malformed, parse_json

MAX_BYTES = 10_000_000
"""The largest accepted file; those of published data sets have 100 kB."""

MAX_VALUES = 100_000
"""The most values of a variable."""

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
    # -P: do not import modules from the current folder.
    command = [sys.executable, "-P", "-c", f"from {__name__} import write_variables; write_variables()", *names]
    # Each thread of OpenBLAS would take some of the limited memory.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    try:
        child = subprocess.run(command, input=content, capture_output=True, timeout=_SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        raise Malformed(f"it takes longer than {_SECONDS:.0f} s to read") from error
    if child.returncode < 0:
        raise Malformed(f"its reader ended by signal {-child.returncode}")
    if child.returncode:
        raise Malformed(child.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200])
    return parse_json(child.stdout, _JSON_BYTES)


def write_variables() -> None:
    """Reads a file from standard input and writes the variables named by the arguments to standard output, as JSON."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    import scipy.io  # only in the subprocess

    content = io.BytesIO(sys.stdin.buffer.read())
    variables = scipy.io.loadmat(content, squeeze_me=True, variable_names=sys.argv[1:])
    json.dump({name: _plain(variables[name]) for name in sys.argv[1:]}, sys.stdout, default=_plain)


def _plain(value: Any) -> Any:
    """Converts NumPy arrays, also nested ones, to lists."""
    array = np.atleast_1d(value)
    if array.size > MAX_VALUES:
        raise ValueError(f"a variable of {array.size:,} values, at most {MAX_VALUES:,} are read")
    if array.dtype.names:
        return {field: array[field].ravel().tolist() for field in array.dtype.names}
    return array.ravel().tolist()
