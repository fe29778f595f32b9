"""One step of a run on disk, read and checked: its facts, its arrays, and what is wrong with them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from lit_het import distributed
from lit_het.checkpoints.native import checksums
from lit_het.checkpoints.native.checksums import Mark
from lit_het.checkpoints.native.orbax_errors import is_out_of_reach, reason_of
from lit_het.errors import UserError


class Damaged(UserError):
    """A checkpoint is not what was saved."""


class SavedStep:
    """The checkpoint of one step; of several processes, all must ask for the same.

    Args:
        folder: of the step.
    """

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self._shown = folder

    def about(self) -> tuple[dict[str, Any], dict[str, Mark]]:
        """Returns the info of the step, and the marks of its arrays below ``params/`` and ``optimizer/``.

        Raises:
            Damaged: it cannot be read, or is not what was saved.
        """
        info = self._read(lambda: self._items({"info": None})["info"])
        if not isinstance(info, dict) or checksums.SEAL in info:
            opened = checksums.unsealed(info)
            if opened is None:
                raise Damaged(f"the checkpoint {self._shown} is damaged (info is not what was saved)")
            return opened
        # Written by an earlier version, without checksums.
        return info, checksums.forms({"params": self._metadata()["params"]})

    def load(
        self, wanted: dict[str, Any], saved: Mapping[str, Mark], checked: set[str] | None = None
    ) -> dict[str, Any]:
        """Returns items of the step whose arrays, or those ``checked``, are what was saved.

        Args:
            wanted: item → tree of shapes, as Orbax wants them.
            saved: from `about`.
            checked: paths of arrays; None for all.

        Raises:
            Damaged: they are not.
            UserError: files are out of reach.
        """
        found = self._read(lambda: self._items(wanted))
        leaves = jax.tree_util.tree_leaves_with_path(found)
        named = {checksums.name_of(path): leaf for path, leaf in leaves}
        named = {path: leaf for path, leaf in named.items() if checked is None or path in checked}
        marks = {path: mark for path, mark in checksums.marks(named).items() if path in saved and saved[path].checksum}
        differing = sorted(path for path, mark in marks.items() if mark != saved[path])
        if distributed.anywhere(bool(differing)):
            which = differing[0] if differing else "an array of another process"
            raise Damaged(f"the checkpoint {self._shown} is damaged ({which} is not what was saved)")
        return found

    def arrays(self, saved: Mapping[str, Mark]) -> Iterator[tuple[str, np.ndarray | Damaged]]:
        """Yields path and content of every array, one after the other on the host, or why it has none.

        Args:
            saved: from `about`.
        """
        here = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        for item in sorted({path.partition("/")[0] for path in saved}):
            of_item = below(item, saved)
            try:
                metadata = self._metadata()[item]
            except (Damaged, KeyError) as error:
                found = error if isinstance(error, Damaged) else Damaged(f"{self._shown / item} is missing")
                yield from ((f"{item}/{path}", found) for path in of_item)
                continue
            paths, tree = jax.tree_util.tree_flatten_with_path(metadata)
            places = {checksums.name_of(path): number for number, (path, _) in enumerate(paths)}
            for path, mark in of_item.items():
                wanted: list[Any] = [ocp.PLACEHOLDER] * len(paths)
                try:
                    wanted[places[path]] = jax.ShapeDtypeStruct(mark.shape, mark.dtype, sharding=here)
                    found = self.load({item: jax.tree.unflatten(tree, wanted)}, saved, {f"{item}/{path}"})[item]
                    yield f"{item}/{path}", np.asarray(jax.tree.leaves(found)[places[path]])
                except KeyError:
                    yield f"{item}/{path}", Damaged("it is missing")
                except Damaged as error:
                    yield f"{item}/{path}", error

    def _metadata(self) -> Mapping[str, Any]:
        """Returns item → tree of what Orbax knows of its arrays."""
        return self._read(lambda: ocp.checkpointables_metadata(str(self.folder)).metadata)

    def _items(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Returns what Orbax reads, without its barriers: a process that fails would never come to them."""
        context, here = ocp.Context(), jax.process_index()
        context.multiprocessing.primary_host, context.multiprocessing.active_processes = here, {here}
        with context:
            return ocp.load_checkpointables(str(self.folder), wanted)

    def _read(self, read: Callable[[], Any]) -> Any:
        """Returns what a call to Orbax returns; of several processes all raise where one cannot read.

        That is `Damaged`, or another `UserError` where files are out of reach.
        """
        found, reason, may_be_whole = None, "", False
        try:
            found = read()
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:  # a damaged file may raise anything
            # The error itself is let go: it holds what Orbax has begun, which would complain at its end.
            reason, may_be_whole = reason_of(error), is_out_of_reach(error)
        if distributed.anywhere(bool(reason)):
            told = f"the checkpoint {self._shown} cannot be read ({reason or 'by another process'})"
            if distributed.anywhere(may_be_whole):
                raise UserError(f"{told}; it may be whole: nothing was changed, try again once it can be")
            raise Damaged(told)
        return found


def below(item: str, marks: Mapping[str, Mark]) -> dict[str, Mark]:
    """Returns the marks of the arrays of one item, by their paths in it."""
    return {path.removeprefix(f"{item}/"): mark for path, mark in marks.items() if path.startswith(f"{item}/")}
