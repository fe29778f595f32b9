"""Only one process trains in a directory: a second start is refused, and the lock of a dead process is released."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from lit_het.errors import UserError
from lit_het.training import lock
from lit_het.training.lock import InUse, locked

HOLDS = """
import sys, time
from pathlib import Path
from lit_het.training.run_lock import locked
with locked(Path(sys.argv[1]), print):
    print("holds", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holder(run_dir):
    """Another process that holds the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(run_dir)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


def fail_if_notified(line):
    pytest.fail(f"waits: {line}")


def refused(directory, match=None, *, error: type[UserError] = InUse, notify=fail_if_notified):
    """Returns the error of a start in a directory."""
    with pytest.raises(error, match=match) as caught, locked(directory, notify):
        pytest.fail("is in")
    return caught.value


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The lock of a process on another machine, and a function that changes it as a heartbeat."""
    monkeypatch.setattr(lock, "PATIENCE", 0.2)
    monkeypatch.setattr(lock, "_POLL_INTERVAL", 0.01)
    owner = {"host": "far", "process": 7, "since": "2026-01-01T00:00:00+00:00", "machine": "another", "start": "ab"}
    path = tmp_path / lock.NAME

    def beat(number):
        path.write_text(json.dumps({**owner, "beats": number}).ljust(1024))

    beat(1)
    return beat


def test_a_second_start_is_refused_with_the_name_of_the_first(tmp_path):
    with holder(tmp_path) as process:
        error = refused(tmp_path)
    message = str(error)
    assert message.startswith(f"{tmp_path} is in use: process {process.pid} on ")
    assert "another run directory" in message
    assert "\n" not in message
    assert error.code == 75  # it may succeed when it is started again


def test_a_second_start_in_the_same_process_is_refused(tmp_path):
    with locked(tmp_path, fail_if_notified):
        refused(tmp_path)


def test_after_a_kill_on_this_machine_the_next_start_begins_at_once(tmp_path):
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        assert json.loads((tmp_path / lock.NAME).read_text())["process"] == process.pid
        with locked(tmp_path, fail_if_notified) as check:
            check()


def test_consecutive_starts_leave_no_owner(tmp_path):
    for _ in range(2):
        with locked(tmp_path / "new", fail_if_notified) as check:
            check()
        assert (tmp_path / "new" / lock.NAME).read_bytes() == b""


def test_a_start_on_another_machine_with_heartbeats_is_not_disturbed(tmp_path, elsewhere):
    refused(tmp_path, "process 7 on far", notify=lambda line: elsewhere(2))


def test_a_start_on_another_machine_that_ends_during_the_wait_or_has_no_heartbeats_is_taken_over(tmp_path, elsewhere):
    with locked(tmp_path, lambda line: (tmp_path / lock.NAME).write_bytes(b"")) as check:
        check()
    elsewhere(1)
    lines = []
    with locked(tmp_path, lines.append) as check:
        check()
    assert len(lines) == 1
    assert "was in use by process 7 on far" in lines[0]


def test_a_start_whose_directory_was_taken_over_ends_and_keeps_the_lock_file(tmp_path, elsewhere):
    (tmp_path / lock.NAME).unlink()
    with locked(tmp_path, fail_if_notified) as check:
        elsewhere(5)  # as after this machine stood still
        with pytest.raises(InUse, match="was taken over by process 7 on far"):
            check()
    assert json.loads((tmp_path / lock.NAME).read_text())["beats"] == 5


def test_an_owner_writes_heartbeats(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.01)
    path = tmp_path / lock.NAME
    with locked(tmp_path, fail_if_notified):
        first = json.loads(path.read_text())
        while (now := json.loads(path.read_text()))["beats"] < first["beats"] + 3:
            pass
    assert {**now, "beats": 0} == {**first, "beats": 0}


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"host": 1}'])
def test_a_lock_that_cannot_be_read_has_no_owner(tmp_path, content):
    (tmp_path / lock.NAME).write_bytes(content)
    with locked(tmp_path, fail_if_notified) as check:
        check()


def test_without_locks_of_the_system_an_owner_on_this_machine_needs_heartbeats_too(tmp_path, monkeypatch, elsewhere):
    (tmp_path / lock.NAME).unlink()
    monkeypatch.setattr(lock, "_lock", lambda file: None)
    with locked(tmp_path, fail_if_notified):
        content = json.loads((tmp_path / lock.NAME).read_text())

        def beat(line):
            (tmp_path / lock.NAME).write_text(json.dumps({**content, "beats": 99}).ljust(1024))

        refused(tmp_path, notify=beat)


def test_a_named_pipe_in_place_of_the_lock_and_a_directory_that_cannot_be_written_to_are_one_line_errors(tmp_path):
    os.mkfifo(tmp_path / lock.NAME)
    refused(tmp_path, r"lock\.json cannot be written \(not a regular file\)", error=UserError)
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file" / "run", "choose another run directory", error=UserError)
