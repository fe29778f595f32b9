"""Errors of Orbax: what lies behind them in a line, and quiet for what its threads and event loops say once more."""

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
def say_errors_once() -> None:
    """Drops, from now on, errors of Orbax's threads and event loops, which its caller has got as exceptions.

    For good, as what a failed call leaves behind may complain at any time after it.
    """
    of_thread, of_object = threading.excepthook, sys.unraisablehook

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if not _is_orbax(args.exc_traceback):
            of_thread(args)

    def in_object(args: "sys.UnraisableHookArgs") -> None:
        text = str(args.exc_value)
        if not (_is_of_orbax(args.object) or "Event loop is closed" in text or "was never awaited" in text):
            of_object(args)

    threading.excepthook, sys.unraisablehook = in_thread, in_object
    logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)


def reason_of(error: BaseException) -> str:
    """Returns in a line what lies behind an error: Orbax wraps what files and TensorStore say."""
    cause = cause_of(error)
    if parts := re.search(r"Available checkpointables: \[(.*)\]", str(cause)):
        return f"of its parts only these are there: {parts[1]}" if parts[1] else "it is empty"
    text = re.sub(r"\s*\[tensorstore_spec.*", "", " ".join(str(cause).split()))
    return text[:300] or type(cause).__name__


def is_out_of_reach(error: BaseException) -> bool:
    """Returns whether files may be whole, and only cannot be read now: no permission, or storage that is not there."""
    cause = cause_of(error)
    codes = r"PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED"
    return isinstance(cause, (PermissionError, TimeoutError, ConnectionError)) or bool(re.match(codes, str(cause)))


def cause_of(error: BaseException) -> BaseException:
    """Returns the error behind all that wrap it."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _is_of_orbax(thing: Any) -> bool:
    return inspect.iscoroutine(thing) and "orbax" in thing.cr_code.co_filename


def _is_orbax(trace: types.TracebackType | None) -> bool:
    while trace is not None:
        if "orbax" in trace.tb_frame.f_globals.get("__name__", ""):
            return True
        trace = trace.tb_next
    return False
