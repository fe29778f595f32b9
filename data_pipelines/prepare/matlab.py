"""Variables of MATLAB's `.mat` files, which a process of its own reads: SciPy's reader can die of a damaged one."""

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
"""Larger files are refused; those of published data sets have 100 kB."""

MAX_VALUES = 100_000
"""Variables of more values are refused."""

_SECONDS = 60.0
_MEMORY = 2**30  # bytes that the process may take, of which SciPy takes a fifth
_JSON_BYTES = 2**26


def load_variables(content: bytes, *names: str) -> dict[str, Any]:
    """Returns variables of a ``.mat`` file: a list of values each, or for a structure such a list of every field.

    Args:
        content: the file.
        names: of the variables.

    Raises:
        Malformed: it is no such file, lacks a variable, or is beyond the limits of this module.
    """
    if len(content) > MAX_BYTES:
        raise Malformed(f"{len(content):,} bytes, at most {MAX_BYTES:,} are read")
    # -P: nothing is imported from the current folder.
    command = [sys.executable, "-P", "-c", f"from {__name__} import write_variables; write_variables()", *names]
    # Each thread of OpenBLAS would take memory, of which there is little.
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
    """Reads a file from standard input and writes the variables that the arguments name to standard output, as JSON."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    import scipy.io  # here alone, in the process that reads

    content = io.BytesIO(sys.stdin.buffer.read())
    variables = scipy.io.loadmat(content, squeeze_me=True, variable_names=sys.argv[1:])
    json.dump({name: _plain(variables[name]) for name in sys.argv[1:]}, sys.stdout, default=_plain)


def _plain(value: Any) -> Any:
    """Returns lists in place of NumPy's arrays, also where an array holds others."""
    array = np.atleast_1d(value)
    if array.size > MAX_VALUES:
        raise ValueError(f"a variable of {array.size:,} values, at most {MAX_VALUES:,} are read")
    if array.dtype.names:
        return {field: array[field].ravel().tolist() for field in array.dtype.names}
    return array.ravel().tolist()
