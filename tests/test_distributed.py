"""What tells a lost process from a mistake of the program."""

import jax
import pytest

from lit_het import distributed

GLOO = "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


def raised(error, cause=None):
    """Returns an error that was raised from another one."""
    error.__cause__ = cause
    return error


@pytest.fixture
def on_several_processes(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError, RuntimeError])
@pytest.mark.parametrize("text", [GLOO, "UNAVAILABLE: the coordination service is gone", "INTERNAL: NCCL failed"])
def test_a_failed_collective_is_found_whatever_its_class_and_whoever_wraps_it(on_several_processes, kind, text):
    lost = kind(text)
    assert distributed.fault_of_machines(lost) is lost
    assert distributed.fault_of_machines(raised(KeyError("x"), lost)) is lost


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shapes (3,) and (4,) differ"),
        KeyError("barrier"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
        ValueError("INVALID_ARGUMENT: Gloo was given nothing"),
        FileNotFoundError(2, "No such file", "gloo"),
    ],
    ids=repr,
)
def test_mistakes_of_the_program_are_none(on_several_processes, error):
    assert distributed.fault_of_machines(error) is None


def test_alone_there_is_no_other_process_to_lose():
    assert distributed.fault_of_machines(ValueError(GLOO)) is None
