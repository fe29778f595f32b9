"""Preemption: after SIGTERM a run saves, and ends with its own exit code.

Long computations call `is_due` or `leave_if_due` between steps or blocks. With several processes all must call them at
the same places, as they stop together: JAX's preemption service, which `jax.distributed` starts, tells all processes of
a signal that one of them received.
"""

import contextlib
import signal
import threading
import types
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from lit_het import stopping
from lit_het.errors import TRY_AGAIN, UserError


class Preempted(UserError):
    """The run received SIGTERM, and has saved."""

    code = TRY_AGAIN


class _Watch:
    """Whether SIGTERM was received, and the number of checks, which all processes count alike."""

    def __init__(self) -> None:
        self._received = False
        self._num_checks = 0

    def receive(self, *_: int | types.FrameType | None) -> None:
        """Handles the signal; a second one ends the process at once."""
        self._received = True
        # Otherwise a run that hangs, for example in a collective without a partner, could only be ended by SIGKILL.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def is_due(self) -> bool:
        self._num_checks += 1
        if (
            not self._received
            and jax.process_count() > 1
            # JAX agrees on the number of a future check at which all processes stop. The numbers must therefore count
            # the same events everywhere.
            and multihost_utils.reached_preemption_sync_point(self._num_checks)
        ):
            self.receive()
        return self._received


_watch: _Watch | None = None


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Defers SIGTERM to the next `is_due` or `leave_if_due`; a second one ends the process at once."""
    global _watch
    stopping.check()
    # With several processes JAX has its own handler. An ignored signal stays ignored. Only the main thread may set
    # handlers.
    before = signal.getsignal(signal.SIGTERM)
    handles = threading.current_thread() is threading.main_thread() and before != signal.SIG_IGN
    _watch = _Watch()
    if handles and jax.process_count() == 1:
        signal.signal(signal.SIGTERM, _watch.receive)
    try:
        yield
    finally:
        _watch = None
        if handles:
            signal.signal(signal.SIGTERM, before)


def is_due() -> bool:
    """Returns whether all processes must now save and stop; always False outside `watched`."""
    return _watch is not None and _watch.is_due()


def leave_if_due() -> None:
    """Interrupts work between two steps, such as an evaluation, if `is_due`.

    Raises:
        Preempted: SIGTERM was received; the loop catches it and saves.
    """
    if is_due():
        raise Preempted("ended by SIGTERM")
