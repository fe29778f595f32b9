"""Leaving in good order: a run that is sent SIGTERM saves, and ends with an exit code of its own.

Whoever works long asks here between two steps or blocks. Several processes must ask at the same places, as all leave at
the same one: JAX's preemption service, which `jax.distributed` starts, tells each of the signal that any of them got.
"""

import contextlib
import signal
import threading
import types
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from lit_het.errors import TRY_AGAIN, UserError


class Preempted(UserError):
    """The run was asked to end, and has saved."""

    code = TRY_AGAIN


class _Watch:
    """Whether the end was asked for, and how often we have looked."""

    def __init__(self) -> None:
        self._asked = False
        self._looks = 0

    def ask(self, *_: int | types.FrameType | None) -> None:
        """Handles the signal; the next one has its usual effect, at once."""
        self._asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def is_due(self) -> bool:
        self._looks += 1
        if not self._asked and jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(self._looks):
            self.ask()
        return self._asked


_watch: _Watch | None = None


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Makes SIGTERM wait for `is_due` and `leave_if_due`; a second one ends the process at once."""
    global _watch
    # Of several processes JAX has taken the signal; one that is ignored stays so, and handlers are for the main thread.
    before = signal.getsignal(signal.SIGTERM)
    takes = threading.current_thread() is threading.main_thread() and before != signal.SIG_IGN
    _watch = _Watch()
    if takes and jax.process_count() == 1:
        signal.signal(signal.SIGTERM, _watch.ask)
    try:
        yield
    finally:
        _watch = None
        if takes:
            signal.signal(signal.SIGTERM, before)


def is_due() -> bool:
    """Returns whether all processes are to save and leave at this place; never where nobody watches."""
    return _watch is not None and _watch.is_due()


def leave_if_due() -> None:
    """Ends what a run does between two steps, such as an evaluation, where `is_due`.

    Raises:
        Preempted: for the loop, which saves.
    """
    if is_due():
        raise Preempted("ended by SIGTERM")
