"""Keeps quiet what Orbax says beside the errors that it raises: each is shown again by its threads and event loops."""

import functools
import inspect
import logging
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


def _is_of_orbax(thing: Any) -> bool:
    return inspect.iscoroutine(thing) and "orbax" in thing.cr_code.co_filename


def _is_orbax(trace: types.TracebackType | None) -> bool:
    while trace is not None:
        if "orbax" in trace.tb_frame.f_globals.get("__name__", ""):
            return True
        trace = trace.tb_next
    return False
