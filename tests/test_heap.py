"""Commands that compute keep freed memory, so that the next step does not map it anew."""

import os
import platform
import subprocess
import sys

import pytest

from lit_het import heap

ALLOCATE = """
import resource
import numpy as np
from lit_het import heap
print(heap.keep())
for number in range(11):
    if number == 1:  # what the first one maps is not counted
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def kept_and_faults(value):
    environment = {**os.environ, heap.KEEPS: value, "NUMPY_MADVISE_HUGEPAGE": "0"}
    run = subprocess.run([sys.executable, "-c", ALLOCATE], env=environment, capture_output=True, text=True, check=True)
    kept, faults = run.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these options")
def test_memory_that_was_freed_is_not_mapped_again_unless_the_variable_says_so():
    pages = 10 * 8 * 2**23 // os.sysconf("SC_PAGE_SIZE")
    assert kept_and_faults("1") == (True, pytest.approx(0, abs=0.05 * pages))
    kept, faults = kept_and_faults("0")
    assert not kept
    assert faults > 0.9 * pages


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_another_library_of_c_is_left_as_it_is(monkeypatch, error):
    def missing(name):
        raise error

    monkeypatch.setenv(heap.KEEPS, "1")
    monkeypatch.setattr(heap.ctypes, "CDLL", missing)
    assert not heap.keep()
