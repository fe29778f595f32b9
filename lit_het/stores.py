"""The file systems of fsspec, without those that do more than hand over bytes."""

from typing import Any

import fsspec

from lit_het.errors import UserError

REFUSED = {
    "reference": "fills in templates of whoever wrote it, and sends readers to any other address",
    "generic": "sends readers to any other address",
    "dask": "unpickles what a server sends",
    "dvc": "follows the configuration of somebody's repository",
}
"""File systems that no address may name, nor a link of a chain such as ``simplecache::gs://...``, and why."""


def filesystem(address: str) -> tuple[Any, str]:
    """Returns fsspec's file system for an address, and the path there.

    Raises:
        UserError: it is one of those that are `REFUSED`, or no installed package knows this kind of address.
    """
    for link in address.split("::"):
        protocol = link.partition("://")[0].lower()
        if protocol in REFUSED:
            raise UserError(f"{address}: {protocol}:// {REFUSED[protocol]}; give the address of the file itself")
    try:
        return fsspec.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UserError(f"{address}: {error}") from error
