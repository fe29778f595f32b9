"""The lock of a run's directory: a second training would overwrite the checkpoints of the first one.

``RUN/lock.json`` names the process that trains there, which rewrites it every `BEAT` seconds. On one machine the
operating system's lock on this file decides at once, also after a kill. Not all file systems share these locks between
machines, so the lock of another machine is taken over after the file has not changed for `PATIENCE` seconds. A process
that finds another owner in the file ends.
"""

import contextlib
import datetime
import fcntl
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lit_het import distributed, untrusted
from lit_het.errors import TRY_AGAIN, Unwritable, UserError
from lit_het.untrusted import Malformed

NAME = "lock.json"
# Seconds between two heartbeats, and seconds without one after which a process on another machine counts as dead.
BEAT, PATIENCE = 10.0, 60.0
_POLL_INTERVAL = 1.0
_FIELDS = {"host", "process", "since", "machine", "start"}
_BYTES = 1024  # a constant size, so that nothing of a longer text remains


class InUse(UserError):
    """Another process trains in the directory."""

    code = TRY_AGAIN


class RunLock:
    """The lock of a process that trains in a directory.

    Args:
        path: path of the lock file.
        file: its open descriptor, with the operating system's lock if the file system supports it.
    """

    def __init__(self, path: Path, file: int):
        self._path, self._file = path, file
        self._owner = {
            "host": platform.node(),
            "process": os.getpid(),
            "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": _machine(),
            # Random, as process numbers repeat, in containers in particular.
            "start": secrets.token_hex(8),
        }
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._write()
        self._thread.start()

    def check(self) -> None:
        """Checks that no other process has taken over the directory, for example while this machine was suspended.

        Raises:
            InUse: another process has taken over.
        """
        if (found := _read(self._path)) and found["start"] != self._owner["start"]:
            raise InUse(f"{self._path.parent} was taken over by {_described(found)}; stopping")

    def release(self) -> None:
        """Releases the lock."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError, InUse):
            self.check()
            # Emptied, not removed: another process may have opened the file already and would then hold the lock of a
            # file that no longer has a name.
            os.ftruncate(self._file, 0)
        os.close(self._file)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            # No heartbeat while the disk is full or the storage is unavailable; `check` reports a takeover later.
            with contextlib.suppress(OSError, InUse):
                self.check()
                self._write()

    def _write(self) -> None:
        self._beats += 1
        content = json.dumps({**self._owner, "beats": self._beats}).encode()
        os.pwrite(self._file, content.ljust(_BYTES), 0)
        # Network file systems send the bytes to other machines at this call.
        os.fsync(self._file)


@contextlib.contextmanager
def locked(run_dir: Path, notify: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Locks a run's directory, which is created if missing; yields `RunLock.check`.

    Only the main process takes the lock.

    Args:
        run_dir: the run's directory.
        notify: called with a message before a wait.

    Raises:
        InUse: another process trains there.
        UserError: the directory cannot be written to.
    """
    lock, problem = None, None
    if distributed.is_main_process():
        try:
            lock = _acquired(run_dir, notify)
        except UserError as error:
            problem = error
    try:
        if distributed.any_process(problem is not None):
            raise problem or InUse(f"process 0 cannot train in {run_dir}")
        yield (lambda: None) if lock is None else lock.check
    finally:
        if lock is not None:
            lock.release()


def _acquired(run_dir: Path, notify: Callable[[str], None]) -> RunLock:
    path = run_dir / NAME
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # O_NOFOLLOW: a link in a shared directory must not direct the write to another file.
        file = untrusted.regular_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another run directory") from error
    try:
        has_lock = _lock(file)
        found = _read(path)
        if has_lock is False:
            raise _in_use(run_dir, found)
        if found and not (has_lock and found["machine"] == _machine()):
            notify(f"{run_dir} was in use by {_described(found)}; waiting {PATIENCE:.0f} s to see whether it still is")
            if _changes(path, found):
                raise _in_use(run_dir, found)
        return RunLock(path, file)
    except OSError as error:
        os.close(file)
        raise Unwritable(f"{path} cannot be written ({error.strerror}); free the disk and start again") from error
    except BaseException:
        os.close(file)
        raise


def _lock(file: int) -> bool | None:
    """Takes the operating system's lock; returns False if another process has it, None without support for locks."""
    try:
        # The kernel releases it when the process ends, however it ends, so no stale lock remains on this machine.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _changes(path: Path, before: dict[str, Any]) -> bool:
    """Returns whether the owner of a lock writes a heartbeat within `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)
        if (found := _read(path)) != before:
            return bool(found)  # an owner that has ended leaves an empty file
    return False


def _read(path: Path) -> dict[str, Any]:
    """Returns the owner of a lock, empty if there is none or the file cannot be read."""
    try:
        found = untrusted.read_json(path, 2**16)
    except (OSError, Malformed):
        return {}
    is_lock = isinstance(found, dict) and found.keys() >= _FIELDS and type(found["process"]) is int
    return found if is_lock and all(isinstance(found[name], str) for name in _FIELDS - {"process"}) else {}


def _machine() -> str:
    """Returns an identifier of this boot of the machine, and of the container."""
    # Two containers on one machine may not see each other's locks, if each has mounted the directory itself.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return platform.node()


def _described(owner: dict[str, Any]) -> str:
    return f"process {owner['process']} on {owner['host']}, started {owner['since']}" if owner else "another process"


def _in_use(run_dir: Path, owner: dict[str, Any]) -> InUse:
    return InUse(
        f"{run_dir} is in use: {_described(owner)}, trains there; "
        "wait for its end, stop it, or choose another run directory"
    )
