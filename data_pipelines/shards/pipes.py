"""Reads the output of a shell command; no command outlives its reader."""

import contextlib
import os
import select
import signal
import subprocess

from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.data_pipelines.shards.urls import PIPE

# Seconds without output after which a command counts as stuck.
PATIENCE = 300.0
# Padding that may follow the end of an archive: tars are padded to 10 KiB, by some writers to more.
_MAX_REST_BYTES = 2**20
_READ_BYTES = 2**16


class Pipe:
    """The output of ``pipe:COMMAND``; only `kill` may be called from another thread.

    The command runs in its own process group, so that it can be killed together with its child processes.
    """

    def __init__(self, address: str):
        self._process = subprocess.Popen(
            address.removeprefix(PIPE),
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        # A blocking read could not be ended by a timeout. `bufsize=0`: `poll` does not see bytes in Python's buffer.
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)

    def read(self, size: int) -> bytes:
        """Returns the next bytes, at most ``size``; none at the end of the output.

        Raises:
            Unreadable: there was no output for `PATIENCE` seconds.
        """
        if not self._poll.poll(1000 * PATIENCE):
            raise Unreadable("command is stuck", f"no byte in {PATIENCE:g} s")
        return os.read(self._output.fileno(), size)

    def check(self) -> None:
        """Waits for the end of the command, after the archive was read.

        Raises:
            Unreadable: the command has failed.
        """
        rest = 0
        while read := len(self.read(_READ_BYTES)):
            rest += read
            if rest > _MAX_REST_BYTES:
                return  # its further output is not needed: `close` will kill it
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise Unreadable("command is stuck", f"no end {PATIENCE:g} s after its output") from error
        if code:
            raise Unreadable("command failed", f"exit code {code}")

    def kill(self) -> None:
        """Kills the command and its child processes; any thread may call it.

        The shell may have ended before its children. The group's id is not reused while one of its processes lives.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills the command if it still runs, and releases its resources."""
        self.kill()
        self._output.close()
        self._process.wait()
