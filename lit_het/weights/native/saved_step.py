"""Reads and verifies the checkpoint of one step: its info and its arrays."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from lit_het import distributed, stopping
from lit_het.errors import UserError
from lit_het.weights.native import checksums
from lit_het.weights.native.checksums import Fingerprint
from lit_het.weights.native.orbax_errors import is_unavailable, reason_of

# Read together: a call to Orbax takes 20 ms, however small the array. But `lit-het checkpoint` must work where the
# model does not fit into the devices.
_BATCH_BYTES = 2**28


class Damaged(UserError):
    """A checkpoint differs from what was saved."""


class SavedStep:
    """The checkpoint of one step. With several processes, all must call the same methods.

    Args:
        folder: of the step.
    """

    def __init__(self, folder: Path):
        # Orbax 0.12 takes absolute paths only; messages show the path as it was given.
        self.folder = folder.resolve()
        self._path_in_messages = folder

    def read_info(self) -> tuple[dict[str, Any], dict[str, Fingerprint]]:
        """Returns the info of the step and path → fingerprint of its arrays, ``params/...`` and ``optimizer/...``.

        Raises:
            Damaged: the info cannot be read, or differs from what was saved.
            UserError: files are unavailable for now.
        """
        info = self._read(lambda: self._items({"info": None})["info"])
        if not isinstance(info, dict) or checksums.DIGEST_KEY in info:
            decoded = checksums.decode_info(info)
            if decoded is None:
                raise Damaged(f"the checkpoint {self._path_in_messages} is damaged (info is not what was saved)")
            return decoded
        # Written by an earlier version, without checksums.
        return info, checksums.specs({"params": self._metadata()["params"]})

    def load(
        self, wanted: dict[str, Any], saved: Mapping[str, Fingerprint], checked: set[str] | None = None
    ) -> dict[str, Any]:
        """Returns items of the step after verifying their checksums.

        Args:
            wanted: item → tree of shapes, in Orbax's form.
            saved: fingerprints from `read_info`.
            checked: paths of the arrays to verify; None for all.

        Raises:
            Damaged: an array cannot be read, or differs from what was saved.
            UserError: files are unavailable for now.
        """
        found = self._read(lambda: self._items(wanted))
        leaves = jax.tree_util.tree_leaves_with_path(found)
        named = {checksums.path_string(path): leaf for path, leaf in leaves}
        named = {path: leaf for path, leaf in named.items() if checked is None or path in checked}
        found_fingerprints = checksums.fingerprints(named)
        differing = sorted(
            path
            for path, fingerprint in found_fingerprints.items()
            if path in saved and saved[path].checksum and fingerprint != saved[path]
        )
        if distributed.any_process(bool(differing)):
            which = differing[0] if differing else "an array of another process"
            raise Damaged(f"the checkpoint {self._path_in_messages} is damaged ({which} is not what was saved)")
        return found

    def arrays(self, saved: Mapping[str, Fingerprint]) -> Iterator[tuple[str, np.ndarray | Damaged]]:
        """Yields the path and the content of every array, on the host; or why it cannot be read.

        Args:
            saved: fingerprints from `read_info`.
        """
        for item in sorted({path.partition("/")[0] for path in saved}):
            fingerprints = select_item(item, saved)
            try:
                metadata = self._metadata()[item]
            except (Damaged, KeyError) as error:
                found = error if isinstance(error, Damaged) else Damaged(f"{self._path_in_messages / item} is missing")
                yield from ((f"{item}/{path}", found) for path in fingerprints)
                continue
            for batch in _batches(fingerprints):
                try:
                    yield from self._arrays_of(item, metadata, batch, saved)
                except (Damaged, KeyError):
                    for path, fingerprint in batch.items():  # which of them?
                        try:
                            yield from self._arrays_of(item, metadata, {path: fingerprint}, saved)
                        except KeyError:
                            yield f"{item}/{path}", Damaged("it is missing")
                        except Damaged as error:
                            yield f"{item}/{path}", error

    def _arrays_of(
        self, item: str, metadata: Any, batch: Mapping[str, Fingerprint], saved: Mapping[str, Fingerprint]
    ) -> list[tuple[str, np.ndarray]]:
        """Returns paths and arrays of an item, read together; raises KeyError if one is missing."""
        on_host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        paths, tree = jax.tree_util.tree_flatten_with_path(metadata)
        indices = {checksums.path_string(path): number for number, (path, _) in enumerate(paths)}
        wanted: list[Any] = [ocp.PLACEHOLDER] * len(paths)
        for path, fingerprint in batch.items():
            wanted[indices[path]] = jax.ShapeDtypeStruct(fingerprint.shape, fingerprint.dtype, sharding=on_host)
        checked = {f"{item}/{path}" for path in batch}
        found = jax.tree.leaves(self.load({item: jax.tree.unflatten(tree, wanted)}, saved, checked)[item])
        return [(f"{item}/{path}", np.asarray(found[indices[path]])) for path in batch]

    def _metadata(self) -> Mapping[str, Any]:
        """Returns item → tree of Orbax's metadata of its arrays."""
        return self._read(lambda: ocp.checkpointables_metadata(str(self.folder)).metadata)

    def _items(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Returns items as Orbax reads them."""
        context, process = ocp.Context(), jax.process_index()
        # Each process reads alone. Orbax's barriers between processes would hang if reading fails on one of them.
        context.multiprocessing.primary_host, context.multiprocessing.active_processes = process, {process}
        with context:
            return ocp.load_checkpointables(str(self.folder), wanted)

    def _read(self, read: Callable[[], Any]) -> Any:
        """Returns the result of a call to Orbax. If reading fails on one process, it raises on all.

        Raises:
            Damaged: files are missing or damaged.
            UserError: files are unavailable for now.
        """
        found, reason, unavailable = None, "", False
        try:
            found = read()
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:  # a damaged file may raise any exception
            stopping.check()
            # Only the text is stored. The error's frames hold Orbax 0.12's pending coroutines, which would print
            # warnings when they are collected.
            reason, unavailable = reason_of(error), is_unavailable(error)
        if distributed.any_process(bool(reason)):
            message = f"the checkpoint {self._path_in_messages} cannot be read ({reason or 'by another process'})"
            if distributed.any_process(unavailable):
                raise UserError(f"{message}; it may be complete: nothing was changed, try again when it can be read")
            raise Damaged(message)
        return found


def _batches(fingerprints: Mapping[str, Fingerprint]) -> Iterator[dict[str, Fingerprint]]:
    """Yields the arrays of an item in batches that fit into the memory of a host."""
    batch: dict[str, Fingerprint] = {}
    size = 0
    for path, fingerprint in fingerprints.items():
        added = math.prod(fingerprint.shape) * jax.numpy.dtype(fingerprint.dtype).itemsize
        if batch and size + added > _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[path] = fingerprint
        size += added
    yield batch


def select_item(item: str, fingerprints: Mapping[str, Fingerprint]) -> dict[str, Fingerprint]:
    """Returns the fingerprints of the arrays of one item, by their paths in the item."""
    prefix = f"{item}/"
    return {path.removeprefix(prefix): one for path, one in fingerprints.items() if path.startswith(prefix)}
