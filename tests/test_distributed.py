"""Errors of lost processes are distinguished from errors of the program."""

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
def test_a_failed_collective_is_found_for_every_class_and_as_a_cause(on_several_processes, kind, text):
    lost = kind(text)
    assert distributed.lost_process_error(lost) is lost
    assert distributed.lost_process_error(raised(KeyError("x"), lost)) is lost


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
def test_errors_of_the_program_are_not_lost_processes(on_several_processes, error):
    assert distributed.lost_process_error(error) is None


def test_a_single_process_cannot_lose_another_one():
    assert distributed.lost_process_error(ValueError(GLOO)) is None
