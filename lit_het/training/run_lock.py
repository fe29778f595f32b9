"""One training at a time in a run's directory: a second start would write over the first one's checkpoints.

``RUN/lock.json`` says who trains there, and changes every `BEAT` seconds as long as they do. The operating system's
lock on this file answers at once for processes of one machine, also after a kill. Another machine's, which file systems
do not all pass on, is taken over only after nothing in the file has changed for `PATIENCE` seconds; whoever finds there
another start than its own, ends.
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
# Seconds between two signs of life, and without one after which a start on another machine counts as dead.
BEAT, PATIENCE = 10.0, 60.0
_LOOK_INTERVAL = 1.0
_FIELDS = {"host", "process", "since", "machine", "start"}
_BYTES = 1024  # always as many, so that nothing of a longer one is left


class InUse(UserError):
    """Another process trains in the directory, and may end soon."""

    code = TRY_AGAIN


class RunLock:
    """What a process holds that trains in a directory.

    Args:
        path: of the lock, open.
        file: its descriptor, with the operating system's lock if there is one.
    """

    def __init__(self, path: Path, file: int):
        self._path, self._file = path, file
        self._owner = {
            "host": platform.node(),
            "process": os.getpid(),
            "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": _machine(),
            "start": secrets.token_hex(8),
        }
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="run lock", daemon=True)
        self._write()
        self._thread.start()

    def check(self) -> None:
        """Ends a training whose directory another start has taken, as after a machine that stood still.

        Raises:
            InUse: it has.
        """
        if (found := _read(self._path)) and found["start"] != self._owner["start"]:
            raise InUse(f"{self._path.parent} was taken over by {_described(found)}; this one ends")

    def release(self) -> None:
        """Lets the next start begin."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError, InUse):
            self.check()
            os.ftruncate(self._file, 0)
        os.close(self._file)

    def _live(self) -> None:
        while not self._ended.wait(BEAT):
            # On a full disk, or while storage is away, there is no sign of life: `check` tells what came of it.
            with contextlib.suppress(OSError, InUse):
                self.check()
                self._write()

    def _write(self) -> None:
        self._beats += 1
        content = json.dumps({**self._owner, "beats": self._beats}).encode()
        os.pwrite(self._file, content.ljust(_BYTES), 0)
        os.fsync(self._file)


@contextlib.contextmanager
def locked(run_dir: Path, tell: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Keeps other starts out of a directory, which is created if missing; yields `RunLock.check`.

    Of several processes the main one holds the lock for all.

    Args:
        run_dir: of the run.
        tell: called with a line before a wait.

    Raises:
        InUse: another process trains there.
        UserError: the directory cannot be written to.
    """
    lock, problem = None, None
    if distributed.is_first():
        try:
            lock = _acquired(run_dir, tell)
        except UserError as error:
            problem = error
    try:
        if distributed.anywhere(problem is not None):
            raise problem or InUse(f"process 0 cannot train in {run_dir}")
        yield (lambda: None) if lock is None else lock.check
    finally:
        if lock is not None:
            lock.release()


def _acquired(run_dir: Path, tell: Callable[[str], None]) -> RunLock:
    path = run_dir / NAME
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = untrusted.descriptor_of_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another --run-dir") from error
    try:
        has_lock = _lock(file)
        found = _read(path)
        if has_lock is False:
            raise _in_use(run_dir, found)
        if found and not (has_lock and found["machine"] == _machine()):
            tell(f"{run_dir} was in use by {_described(found)}; looking for {PATIENCE:.0f} s whether it still is")
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
    """Takes the operating system's lock; returns False where another has it, and None where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _changes(path: Path, before: dict[str, Any]) -> bool:
    """Returns whether the owner of a lock gives a sign of life within `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        time.sleep(_LOOK_INTERVAL)
        if (found := _read(path)) != before:
            return bool(found)  # one that has ended leaves nothing
    return False


def _read(path: Path) -> dict[str, Any]:
    """Returns what a lock says, nothing if nobody holds it; one that cannot be read is nobody's."""
    try:
        found = untrusted.read_json(path, 2**16)
    except (OSError, Malformed):
        return {}
    is_lock = isinstance(found, dict) and found.keys() >= _FIELDS and type(found["process"]) is int
    return found if is_lock and all(isinstance(found[name], str) for name in _FIELDS - {"process"}) else {}


def _machine() -> str:
    """Returns what tells machines apart, a machine before and after it was started anew, and containers on it.

    Two containers may each have mounted the directory for itself, and then do not see each other's locks.
    """
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
        "wait for its end, stop it, or choose another --run-dir"
    )
