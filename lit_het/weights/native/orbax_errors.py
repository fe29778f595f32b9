"""Errors of Orbax: extracts their cause, and silences the copies that its threads and event loops print."""

import functools
import inspect
import logging
import re
import sys
import threading
import types
import warnings
from typing import Any


@functools.cache
def silence_background_errors() -> None:
    """Silences, for the rest of the process, errors that Orbax's threads and event loops print.

    Orbax 0.12 also raises these errors to its caller. The threads and coroutines of a failed call may print them at any
    later time, so the filters are never removed.
    """
    thread_hook, unraisable_hook = threading.excepthook, sys.unraisablehook

    def on_thread_error(args: threading.ExceptHookArgs) -> None:
        if not _has_orbax_frame(args.exc_traceback):
            thread_hook(args)

    def on_unraisable(args: "sys.UnraisableHookArgs") -> None:
        text = str(args.exc_value)
        if not (_is_orbax_coroutine(args.object) or "Event loop is closed" in text or "was never awaited" in text):
            unraisable_hook(args)

    threading.excepthook, sys.unraisablehook = on_thread_error, on_unraisable
    logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)


def reason_of(error: BaseException) -> str:
    """Returns the cause of an error in one line; Orbax wraps the errors of files and of TensorStore."""
    cause = cause_of(error)
    if parts := re.search(r"Available checkpointables: \[(.*)\]", str(cause)):
        return f"it holds only the items {parts[1]}" if parts[1] else "it is empty"
    text = re.sub(r"\s*\[tensorstore_spec.*", "", " ".join(str(cause).split()))
    return text[:300] or type(cause).__name__


def is_unavailable(error: BaseException) -> bool:
    """Returns whether files are unreadable only for now, because of permissions or unavailable storage."""
    cause = cause_of(error)
    codes = r"PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED"
    return isinstance(cause, (PermissionError, TimeoutError, ConnectionError)) or bool(re.match(codes, str(cause)))


def cause_of(error: BaseException) -> BaseException:
    """Returns the innermost error of a chain of causes."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _is_orbax_coroutine(value: Any) -> bool:
    return inspect.iscoroutine(value) and "orbax" in value.cr_code.co_filename


def _has_orbax_frame(trace: types.TracebackType | None) -> bool:
    while trace is not None:
        if "orbax" in trace.tb_frame.f_globals.get("__name__", ""):
            return True
        trace = trace.tb_next
    return False
