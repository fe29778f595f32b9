"""Checkpoints of a run: asynchronous, atomic, checked, restorable on another number of devices. The only user of Orbax.

A step's directory holds three items: ``params`` (trainable parameters only), ``optimizer`` and ``info`` (as JSON, with
its SHA-256: loader position, checksum of the locked parameters, and the mark of every array). Where there is an average
of parameters it is what ``params`` holds, and those that training goes on from are in ``optimizer``. A save that a kill
interrupts stays under a temporary name and is ignored.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from lit_het import distributed, parameters
from lit_het.checkpoints import checksums
from lit_het.checkpoints.checksums import Mark
from lit_het.checkpoints.folders import DAMAGED, HALF_WRITTEN, size_below
from lit_het.checkpoints.orbax_errors import cause_of, is_out_of_reach, reason_of, say_errors_once
from lit_het.errors import UserError
from lit_het.types import Params, TrainState

# What Orbax and TensorStore raise when files cannot be written.
_UNWRITABLE = (AssertionError, KeyError, OSError, ValueError)

# Seconds between two looks at how much of an imported model is on disk.
_LOOK_INTERVAL = 0.2


class Damaged(UserError):
    """A checkpoint is not what was saved."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """Which checkpoints stay on disk.

    Attributes:
        newest: so many of the last; None keeps all.
        every: multiples of so many steps stay for ever; None keeps no more than the newest.
    """

    newest: int | None = 2
    every: int | None = None


class Checkpoints:
    """The checkpoints of one run; use as a context manager, which waits for the last save.

    Of one process, a save that fails is told and left to the next; of several, it ends them all.

    Args:
        directory: created if missing, unless read-only.
        kept: which of them stay on disk.
        read_only: leaves everything as it is, also a save that another process has under way.
        tell: called with a line when a save has failed, or a damaged step is passed over.

    Raises:
        UserError: read-only and there is no such directory; it cannot be written; at the end, the last save failed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        kept: Kept = Kept(),
        read_only: bool = False,
        tell: Callable[[str], None] = lambda line: None,
    ):
        self.directory, self._tell = directory, tell
        self._saving: int | None = None
        self._failure: UserError | None = None
        say_errors_once()
        if read_only and not directory.is_dir():
            raise UserError(f"no checkpoints in {directory}; give the directory of a run that has saved one")
        try:
            self._checkpointer = ocp.training.Checkpointer(
                str(directory.resolve()),
                preservation_policy=_policy(kept),
                cleanup_tmp_directories=not read_only,
                context=_context(),
            )
        except (OSError, ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            way = "written" if isinstance(error, OSError) else "read: move the step with the damaged metadata away"
            raise UserError(f"{directory} cannot be {way} ({reason_of(error)}); mend it, or its permissions") from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.finish()
        except UserError:
            if kind is None:
                raise
        finally:
            with contextlib.suppress(*_UNWRITABLE):
                self._checkpointer.close()

    @property
    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        latest = self._checkpointer.latest
        return None if latest is None else int(latest.step)

    @property
    def steps(self) -> list[int]:
        """The complete steps, oldest first."""
        return [int(checkpoint.step) for checkpoint in self._checkpointer.checkpoints]

    def save(self, state: TrainState, info: Mapping[str, Any]) -> None:
        """Starts saving ``state`` in the background; arrays are copied before this returns, so they may be donated.

        Raises:
            UserError: with several processes, a save has failed.
        """
        self.wait()
        self._failure, self._saving = None, int(state.step)
        items = _items(state)
        items["info"] = checksums.sealed(info, checksums.marks(items))
        try:
            self._checkpointer.save_checkpointables_async(self._saving, items, force=True)
        except _UNWRITABLE as error:
            self._fail(error)

    def wait(self) -> None:
        """Waits until what is being saved is on disk.

        Raises:
            UserError: with several processes, it could not be saved.
        """
        if self._saving is None:
            return
        try:
            self._checkpointer.wait()
        except _UNWRITABLE as error:
            self._fail(error)
        self._saving = None

    def finish(self) -> None:
        """Waits for the last save.

        Raises:
            UserError: it has failed.
        """
        self.wait()
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception) -> None:
        folder, self._saving = self.directory / str(self._saving), None
        if isinstance(cause := cause_of(error), jax.errors.JaxRuntimeError):
            raise cause  # another process is gone, or its part has failed
        self._failure = UserError(
            f"the checkpoint {folder} could not be saved ({reason_of(error)}); the last one that was stays"
        )
        if jax.process_count() > 1:
            raise self._failure from error
        # On a full disk its part would be missing for the next.
        shutil.rmtree(folder.with_name(folder.name + HALF_WRITTEN), ignore_errors=True)
        self._checkpointer.reload()
        self._tell(f"{self._failure}; the next save tries again")

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Returns the newest state that is whole, in the shapes and shardings of ``like``, and its info.

        Newer ones, which are damaged, get names that are no checkpoints' so that nothing takes them for one.

        Raises:
            UserError: there is none, all are damaged, or one does not fit ``like``.
        """
        self.newest_step()
        damaged: list[Damaged] = []
        for step in reversed(self.steps):
            try:
                restored = self._restore(step, like)
            except Damaged as error:
                damaged.append(error)
                self._tell(str(error))
                continue
            if damaged:
                self._set_aside([other for other in self.steps if other > step])
                self._tell(
                    f"the run goes on from step {step}; what is damaged is set aside as {self.directory}/*{DAMAGED}"
                )
            return restored
        raise UserError(f"{damaged[0]}; no other step is whole: bring back a copy, or start another --run-dir")

    def _restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        wanted = _items(like)
        info, saved = self.about(step)
        checksums.check_fit(_below("params", saved), checksums.forms(wanted["params"]), self.directory)
        if any(path.startswith("optimizer/") for path in saved):
            checksums.check_fit(_below("optimizer", saved), checksums.forms(wanted["optimizer"]), self.directory)
        found = self._load(step, wanted, saved)
        count = jax.device_put(jnp.int32(step), like.step.sharding)
        params, optimizer = found["params"], found["optimizer"]
        if like.average is None:
            return TrainState(count, params, optimizer), info
        return TrainState(count, optimizer["params"], optimizer["state"], params), info

    def _set_aside(self, steps: list[int]) -> None:
        if jax.process_index() == 0:
            for folder in (self.directory / str(step) for step in steps):
                shutil.rmtree(folder.with_name(folder.name + DAMAGED), ignore_errors=True)
                folder.rename(folder.with_name(folder.name + DAMAGED))
        distributed.wait_for_all("damaged checkpoints are set aside")
        self._checkpointer.reload()

    def restore_params(self, like: Params) -> tuple[Params, dict[str, Any]]:
        """Returns the newest step's parameters under the paths in ``like``, and the step's info.

        ``like`` may be a part of the saved tree, e.g. the image tower alone.

        Raises:
            UserError: there is no checkpoint, it is damaged, or it does not fit ``like``.
        """
        step = self.newest_step()
        info, marks = self.about(step)
        saved, flat = _below("params", marks), parameters.flatten(like)
        checksums.check_fit(
            {path: saved[path] for path in flat if path in saved}, checksums.forms(like), self.directory
        )
        wanted = {**{path: ocp.PLACEHOLDER for path in saved}, **flat}
        try:
            found = self._load(
                step, {"params": parameters.unflatten(wanted)}, marks, {f"params/{path}" for path in flat}
            )
        except Damaged as error:
            raise UserError(f"{error}; move this folder away to use the step before") from error
        loaded = parameters.flatten(found["params"])
        return parameters.unflatten({path: loaded[path] for path in flat}), info

    def about(self, step: int) -> tuple[dict[str, Any], dict[str, Mark]]:
        """Returns the info of a step, and the marks of its arrays below ``params/`` and ``optimizer/``.

        Raises:
            Damaged: it cannot be read, or is not what was saved.
        """
        info = self._read(step, lambda: self._items_of(step, {"info": None})["info"])
        if checksums.SEAL in info:
            opened = checksums.unsealed(info)
            if opened is None:
                raise Damaged(f"the checkpoint {self.directory / str(step)} is damaged (info is not what was saved)")
            return opened
        # Written by an earlier version, without checksums.
        metadata = self._read(step, lambda: self._checkpointer.checkpointables_metadata(step).metadata)
        return info, checksums.forms({"params": metadata["params"]})

    def _load(
        self, step: int, wanted: dict[str, Any], saved: Mapping[str, Mark], checked: set[str] | None = None
    ) -> dict[str, Any]:
        """Returns items of a step whose arrays, or those ``checked``, are what was saved."""
        found = self._read(step, lambda: self._items_of(step, wanted))
        leaves = jax.tree_util.tree_leaves_with_path(found)
        named = {checksums.name_of(path): leaf for path, leaf in leaves}
        named = {path: leaf for path, leaf in named.items() if checked is None or path in checked}
        marks = {path: mark for path, mark in checksums.marks(named).items() if path in saved and saved[path].checksum}
        differing = sorted(path for path, mark in marks.items() if mark != saved[path])
        if distributed.anywhere(bool(differing)):
            which = differing[0] if differing else "an array of another process"
            raise Damaged(f"the checkpoint {self.directory / str(step)} is damaged ({which} is not what was saved)")
        return found

    def _items_of(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
        """Returns what Orbax reads, without its barriers: a process that fails would never come to them."""
        context, here = ocp.Context(), jax.process_index()
        context.multiprocessing.primary_host, context.multiprocessing.active_processes = here, {here}
        with context:
            return ocp.load_checkpointables(str((self.directory / str(step)).resolve()), wanted)

    def _read(self, step: int, read: Callable[[], Any]) -> Any:
        """Returns what a call to Orbax returns; of several processes all raise where one cannot read.

        That is `Damaged`, or another `UserError` where files are out of reach.
        """
        found, reason, may_be_whole = None, "", False
        try:
            found = read()
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise
        except Exception as error:  # a damaged file may raise anything
            # The error itself is let go: it holds what Orbax has begun, which would complain at its end.
            reason, may_be_whole = reason_of(error), is_out_of_reach(error)
        if distributed.anywhere(bool(reason)):
            told = f"the checkpoint {self.directory / str(step)} cannot be read ({reason or 'by another process'})"
            if distributed.anywhere(may_be_whole):
                raise UserError(f"{told}; it may be whole: nothing was changed, try again once it can be")
            raise Damaged(told)
        return found

    def newest_step(self) -> int:
        """Returns how many updates the newest checkpoint has seen.

        Raises:
            UserError: there is none.
        """
        step = self.latest_step
        if step is None:
            raise UserError(f"no checkpoint in {self.directory}; give the directory of a run that has saved one")
        return step

    def arrays(self, step: int, saved: Mapping[str, Mark]) -> Iterator[tuple[str, np.ndarray | Damaged]]:
        """Yields path and content of every array of a step, one after the other on the host, or why it has none.

        Args:
            step: a complete one.
            saved: its marks, from `about`.
        """
        here = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        for item in sorted({path.partition("/")[0] for path in saved}):
            of_item = _below(item, saved)
            try:
                metadata = self._read(step, lambda: self._checkpointer.checkpointables_metadata(step).metadata)[item]
            except Damaged as error:
                yield from ((f"{item}/{path}", error) for path in of_item)
                continue
            paths, tree = jax.tree_util.tree_flatten_with_path(metadata)
            places = {checksums.name_of(path): number for number, (path, _) in enumerate(paths)}
            for path, mark in of_item.items():
                wanted: list[Any] = [ocp.PLACEHOLDER] * len(paths)
                try:
                    wanted[places[path]] = jax.ShapeDtypeStruct(mark.shape, mark.dtype, sharding=here)
                    asked = {item: jax.tree.unflatten(tree, wanted)}
                    found = self._load(step, asked, saved, {f"{item}/{path}"})[item]
                    yield f"{item}/{path}", np.asarray(jax.tree.leaves(found)[places[path]])
                except KeyError:
                    yield f"{item}/{path}", Damaged("it is missing")
                except Damaged as error:
                    yield f"{item}/{path}", error


def _items(state: TrainState) -> dict[str, Any]:
    """Returns what is saved: ``params`` are those that others use, so that nobody else need know of averages."""
    if state.average is None:
        return {"params": state.params, "optimizer": state.opt_state}
    return {"params": state.average, "optimizer": {"state": state.opt_state, "params": state.params}}


def _policy(kept: Kept) -> Any:
    policies = ocp.training.preservation_policies
    newest = policies.LatestN(kept.newest)
    return newest if kept.every is None else policies.AnyPreservationPolicy([newest, policies.EveryNSteps(kept.every)])


def _context() -> ocp.Context:
    context = ocp.Context()
    # Orbax compiles a slice for every replicated array, to spread the writing over replicas: not for small ones.
    context.array.saving.min_slice_bytes_for_replica_parallel = 2**20
    return context


def _below(item: str, marks: Mapping[str, Mark]) -> dict[str, Mark]:
    return {path.removeprefix(f"{item}/"): mark for path, mark in marks.items() if path.startswith(f"{item}/")}


def save_imported(
    directory: Path, params: Params, info: Mapping[str, Any], advance: Callable[[int], None] = lambda count: None
) -> None:
    """Saves parameters that no training here has made as step 0: to open or to start from, not to resume.

    Args:
        directory: where there are no checkpoints yet.
        params: written from where they lie; nothing may change them meanwhile.
        info: what `Checkpoints.restore_params` returns beside them.
        advance: told how many more bytes of the arrays are on disk.

    Raises:
        UserError: the disk is full, or cannot be written to.
    """
    context = ocp.Context()
    context.memory.deepcopy_host_arrays = False
    context.array.saving.use_compression = False  # as compressed copies of everything would wait to be written
    items: dict[str, Any] = {"params": jax.tree.map(np.asarray, params)}
    total, written = sum(array.nbytes for array in jax.tree.leaves(items["params"])), 0
    items["info"] = checksums.sealed(info, checksums.marks(items))
    say_errors_once()
    with (
        ocp.training.Checkpointer(str(directory.resolve()), context=context) as checkpointer,
        ThreadPoolExecutor(1) as pool,
    ):
        saved = pool.submit(checkpointer.save_checkpointables, 0, items)
        while wait([saved], timeout=_LOOK_INTERVAL).not_done:
            on_disk = min(size_below(directory), total)
            advance(on_disk - written)
            written = on_disk
        try:
            saved.result()
        except _UNWRITABLE as error:
            raise UserError(f"{directory} cannot be written: {reason_of(error)}") from error
    advance(total - written)
