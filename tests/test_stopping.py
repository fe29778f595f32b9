"""SIGTERM stops a command wherever it arrives."""

import importlib
import signal
import sys
import time

import pytest

from lit_het import stopping
from lit_het.stopping import Stopped, signals_as_exceptions
from lit_het.weights.native.saved_step import SavedStep


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(stopping, "_AGAIN", 0.05)


class Finalized:
    """Receives SIGTERM where Python drops exceptions."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_in_a_finalizer_is_raised_after_it_and_not_printed():
    def command():
        Finalized()
        time.sleep(5)

    with pytest.raises(Stopped) as error, signals_as_exceptions():
        command()
    assert error.value.signal == signal.SIGTERM


def test_a_stop_waits_for_the_end_of_an_import_which_extension_modules_do_not_survive(tmp_path, monkeypatch):
    code = "import signal, time; signal.raise_signal(signal.SIGTERM); time.sleep(0.2); is_whole = True"
    (tmp_path / "stopped_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)

    def command():
        importlib.import_module("stopped_module")
        time.sleep(5)

    with pytest.raises(Stopped), signals_as_exceptions():
        command()
    assert sys.modules.pop("stopped_module").is_whole


def test_an_import_that_takes_long_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "_LONGEST_IMPORT", 0.1)
    (tmp_path / "long_module.py").write_text(
        "import signal, time; signal.raise_signal(signal.SIGTERM); time.sleep(5); is_whole = True"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Stopped), signals_as_exceptions():
        importlib.import_module("long_module")
    assert "long_module" not in sys.modules


def test_a_stop_interrupts_no_clean_up():
    cleaned = []

    def command():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            time.sleep(0.2)
            cleaned.append(True)

    with pytest.raises(Stopped), signals_as_exceptions():
        command()
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def swallowed(*_):
    """Stands for a library whose event loop turns an exception of a signal into another one."""
    try:
        signal.raise_signal(signal.SIGTERM)
    except Stopped as error:
        raise ValueError(str(error)) from None


def test_what_a_stop_has_made_fail_is_a_stop():
    with pytest.raises(Stopped), signals_as_exceptions():
        swallowed()


def test_a_checkpoint_is_not_damaged_because_its_reading_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_het.weights.native.saved_step.ocp.load_checkpointables", swallowed)
    (tmp_path / "1").mkdir()
    with signals_as_exceptions(), pytest.raises(Stopped):
        SavedStep(tmp_path / "1").read_info()
