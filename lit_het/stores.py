"""The file systems of fsspec, without those that do more than read and write bytes."""

from typing import Any

import fsspec

from lit_het.errors import UserError

REFUSED = {
    "reference": "evaluates templates in the file, and redirects to any other address",
    "generic": "redirects to any other address",
    "dask": "unpickles data from a server",
    "dvc": "follows the configuration of another repository",
}
"""File systems that are rejected, also in a chain such as ``simplecache::gs://...``, and why."""


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
