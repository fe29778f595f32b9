"""The file systems of fsspec, without those that do more than read and write bytes, and retries of their requests."""

import logging
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec

from lit_het import stopping
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
    """Returns fsspec's file system for an address, and the path there."""
    protocols = [link.partition("://")[0].lower() for link in address.split("::")]
    for protocol in protocols:
        if protocol in REFUSED:
            raise UserError(f"{address}: {protocol}:// {REFUSED[protocol]}; use the address of the file itself")
    if "hf" in protocols:
        _check_hub(address)
    try:
        found = fsspec.url_to_fs(address)
    except ImportError as error:
        extra = ": pip install 'lit-het[gcs]'" if {"gs", "gcs"} & {*protocols} else ""
        raise UserError(f"{address}: {error}{extra}") from error
    except ValueError as error:
        raise UserError(f"{address}: {error}") from error
    # It warns before each retry of its own, and sets its level when it is imported. `with_retries` raises the last one.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    return found


def _check_hub(address: str) -> None:
    """Raises a `UserError` for an invalid name, one without an owner, or if the Hub is off, before any request."""
    from huggingface_hub import constants, errors, utils  # here, as only these addresses need it

    repository = re.sub("^(datasets|spaces|buckets)/", "", address.rpartition("hf://")[2])
    owner, _, rest = repository.partition("/")
    if not rest:
        raise UserError(f"{address}: names no owner; write hf://owner/{owner or 'name'}")
    try:
        utils.validate_repo_id(f"{owner}/{rest.partition('/')[0].partition('@')[0]}")
    except errors.HFValidationError as error:
        raise UserError(f"{address:.200}: {reason(error).rstrip('.')}; write hf://owner/name") from error
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{address}: HF_HUB_OFFLINE is set; unset it, or give the folder of a download")


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
            stopping.check()
            if pause is None:
                raise OSError(reason(error)) from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def reason(error: BaseException) -> str:
    """Returns the message of an error, on one line and truncated."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
    return text or type(error).__name__
