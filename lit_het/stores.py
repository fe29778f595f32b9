"""The file systems of fsspec, without those that do more than read and write bytes, and retries of their requests."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec

from lit_het.errors import UserError

REFUSED = {
    "reference": "evaluates templates in the file, and redirects to any other address",
    "generic": "redirects to any other address",
    "dask": "unpickles data from a server",
    "dvc": "follows the configuration of another repository",
}
"""File systems that are rejected, also in a chain such as ``simplecache::gs://...``, and why."""

# Seconds to wait before each retry of a request.
BACK_OFF = (0.5, 1.0, 2.0, 4.0, 8.0)
PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError)
"""Errors that a retry cannot fix."""

_Result = TypeVar("_Result")


def filesystem(address: str) -> tuple[Any, str]:
    """Returns fsspec's file system for an address, and the path there.

    Raises:
        UserError: the file system is in `REFUSED`, or its package is not installed.
    """
    for link in address.split("::"):
        protocol = link.partition("://")[0].lower()
        if protocol in REFUSED:
            raise UserError(f"{address}: {protocol}:// {REFUSED[protocol]}; use the address of the file itself")
    try:
        return fsspec.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UserError(f"{address}: {error}") from error


def with_retries(call: Callable[[], _Result]) -> _Result:
    """Returns the result of a call to a store, retried after each pause of `BACK_OFF`.

    Raises:
        OSError: every attempt failed. Clients of stores raise various types; all become this one.
    """
    for pause in (*BACK_OFF, None):
        try:
            return call()
        except PERMANENT_ERRORS:
            raise
        except Exception as error:
            if pause is None:
                raise OSError(reason(error)) from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def reason(error: BaseException) -> str:
    """Returns the message of an error, on one line and truncated."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
    return text or type(error).__name__
