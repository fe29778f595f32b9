"""Stops of a command by SIGTERM or SIGHUP: an exception in the main thread, which cannot get lost."""

import contextlib
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator

# Seconds between attempts to raise the exception, and after which it is raised within an import as well.
_AGAIN, _LONGEST_IMPORT = 0.5, 10.0

_received: signal.Signals | None = None


class Stopped(BaseException):
    """The process received a signal to stop."""

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = signal.Signals(number)


def check() -> None:
    """Raises `Stopped` if a signal was received.

    To be called before an error is taken for damage: event loops of libraries turn exceptions of a signal into others.
    """
    if _received is not None:
        raise Stopped(_received)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise `Stopped`, so that commands that streams read from are stopped as well.

    Python prints and drops an exception that is raised in a weak reference's callback, in ``__del__`` or while garbage
    is collected. So it is not printed there, and raised again and again, until it is on its way. The initialization of
    extension modules such as NumPy's and XLA's prints it or crashes, so that a stop waits for the end of an import.
    """
    # Signals that are ignored (nohup) or handled elsewhere stay so. Only the main thread may set handlers.
    is_main = threading.current_thread() is threading.main_thread()
    handled = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(number) == signal.SIG_DFL
    ]
    has_alarm = bool(handled) and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL

    latest = 0.0

    def end(number: int, frame: types.FrameType | None) -> None:
        global _received
        nonlocal latest
        _received, latest = signal.Signals(number), time.monotonic() + _LONGEST_IMPORT
        for other in handled:
            signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
            again(number, frame)
        else:
            check()

    def again(_: int, frame: types.FrameType | None) -> None:
        if not _is_stopping(sys.exception()) and (time.monotonic() > latest or not _is_importing(frame)):
            check()

    report = sys.unraisablehook

    def unraisable(dropped: "sys.UnraisableHookArgs") -> None:
        if not isinstance(dropped.exc_value, Stopped):
            report(dropped)

    sys.unraisablehook = unraisable
    for number in handled:
        signal.signal(number, end)
    if has_alarm:
        signal.signal(signal.SIGALRM, again)
    try:
        yield
    except Exception:
        check()  # what fails because of a stop has not failed
        raise
    finally:
        _forget(handled, has_alarm)
        sys.unraisablehook = report


def _forget(handled: list[signal.Signals], has_alarm: bool) -> None:
    global _received
    if has_alarm:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in handled:
        signal.signal(number, signal.SIG_DFL)
    _received = None


def _is_importing(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _is_stopping(error: BaseException | None) -> bool:
    """Returns whether a `Stopped` is among the errors that are being handled, as in the clean-up that it causes."""
    while error is not None:
        if isinstance(error, Stopped):
            return True
        error = error.__context__
    return False
