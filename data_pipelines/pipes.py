"""What a shell command writes, read to its end; no command outlives its reader."""

import contextlib
import os
import select
import signal
import subprocess

from lit_het.data_pipelines.storage import PIPE, Unreadable

# Seconds without a byte after which a command is taken for stuck.
PATIENCE = 300.0
# What may follow the end of an archive: tars are filled up to 10 KiB, with some writers to more.
_MAX_REST_BYTES = 2**20
_READ_BYTES = 2**16


class Pipe:
    """The output of ``pipe:COMMAND``; all methods but `kill` are for one thread.

    The command has a process group of its own, so that it ends together with all that it has started.
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
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)

    def read(self, size: int) -> bytes:
        """Returns what has come, at most ``size`` bytes, and none at the end.

        Raises:
            Unreadable: nothing comes any more.
        """
        if not self._poll.poll(1000 * PATIENCE):
            raise Unreadable("command is stuck", f"no byte in {PATIENCE:g} s")
        return os.read(self._output.fileno(), size)

    def check(self) -> None:
        """Waits for the end of the command, after all that is of interest was read.

        Raises:
            Unreadable: the command has failed.
        """
        rest = 0
        while read := len(self.read(_READ_BYTES)):
            rest += read
            if rest > _MAX_REST_BYTES:
                return  # it goes on for no one, and will not be waited for
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise Unreadable("command is stuck", f"no end {PATIENCE:g} s after its output") from error
        if code:
            raise Unreadable("command failed", f"exit code {code}")

    def kill(self) -> None:
        """Ends the command and what it has started at once, for whichever thread.

        The shell may have gone before: as long as one of its group is left, no other can have the group's number.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the command, if it runs still, and lets go of it."""
        self.kill()
        self._output.close()
        self._process.wait()
