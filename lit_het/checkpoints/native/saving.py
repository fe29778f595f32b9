"""Checkpoints of a run: asynchronous, atomic, checked, restorable on another number of devices.

A step's directory holds three items: ``params`` (trainable parameters only), ``optimizer`` and ``info`` (as JSON, with
its SHA-256: loader position, checksum of the locked parameters, and the mark of every array). Where there is an average
of parameters it is what ``params`` holds, and those that training goes on from are in ``optimizer``. A save that a kill
interrupts stays under a temporary name and is ignored.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from lit_het import distributed, parameters
from lit_het.checkpoints.native import checksums, folders
from lit_het.checkpoints.native.folders import DAMAGED, HALF_WRITTEN, size_below
from lit_het.checkpoints.native.orbax_errors import reason_of, say_errors_once
from lit_het.checkpoints.native.saved_step import Damaged, SavedStep, below
from lit_het.errors import TRY_AGAIN, UserError
from lit_het.types import Params, TrainState

# What Orbax and TensorStore raise when files cannot be written.
_UNWRITABLE = (AssertionError, KeyError, OSError, ValueError)

# Seconds between two looks at how much of an imported model is on disk.
_LOOK_INTERVAL = 0.2


class SaveFailed(UserError):
    """What a run has learned could not be saved."""

    code = TRY_AGAIN


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
        max_failed_saves: so many in a row end the run, which would otherwise train for nothing.
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
        max_failed_saves: int = 3,
        read_only: bool = False,
        tell: Callable[[str], None] = lambda line: None,
    ):
        self.directory, self._tell = directory, tell
        self._kept, self._max_failed_saves = kept, max_failed_saves
        self._saving: tuple[int, Any] | None = None  # the step, and what Orbax promises
        self._failures: list[SaveFailed] = []  # since the last save that succeeded
        say_errors_once()
        self._checkpointer: ocp.training.Checkpointer | None = None  # opened by the first save
        if read_only:
            if not directory.is_dir():
                raise UserError(f"no checkpoints in {directory}; give the directory of a run that has saved one")
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{directory} cannot be written ({reason_of(error)}); free its disk, or change its permissions"
            ) from error
        self._remove_half_written()

    def _opened(self) -> ocp.training.Checkpointer:
        """Opens the folder, where Orbax reads the metadata of every step: those that it cannot read are set aside."""
        unreadable = [step for step in self.steps if not folders.has_metadata(self.directory / str(step))]
        for step in unreadable:  # such as an old one that a kill has left half deleted
            self._tell(f"{self.directory / str(step)} is not whole: it is set aside as {step}{DAMAGED}")
        self._set_aside(unreadable)
        return ocp.training.Checkpointer(
            str(self.directory.resolve()),
            preservation_policy=_policy(self._kept),
            cleanup_tmp_directories=True,
            context=_context(),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.finish()
        except UserError:
            if kind is None:
                raise
        finally:
            self._close()

    def _close(self) -> None:
        # Orbax raises the error of a save again where anyone waits for it next, here to be dropped.
        if self._checkpointer is not None:
            for end in (self._checkpointer.wait, self._checkpointer.close):
                with contextlib.suppress(*_UNWRITABLE):
                    end()
        self._checkpointer = None

    @property
    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> list[int]:
        """The complete steps, oldest first."""
        return folders.complete_steps(self.directory)

    def save(self, state: TrainState, info: Mapping[str, Any]) -> None:
        """Starts saving ``state`` in the background; arrays are copied before this returns, so they may be donated.

        Raises:
            SaveFailed: ``max_failed_saves`` in a row have failed, or, with several processes, one has.
        """
        self.wait()
        step, items = int(state.step), _items(state)
        items["info"] = checksums.sealed(info, checksums.marks(items))
        try:
            if self._checkpointer is None:
                self._checkpointer = self._opened()
            # Orbax frees the thread of a save, and its three descriptors, only where its response is waited for.
            self._saving = step, self._checkpointer.save_checkpointables_async(step, items, force=True)
        except _UNWRITABLE as error:
            self._fail(step, error)

    def wait(self) -> None:
        """Waits until what is being saved is on disk.

        Raises:
            SaveFailed: as `save`.
        """
        if self._saving is None:
            return
        (step, response), self._saving = self._saving, None
        try:
            response.result()
            self._failures = []
        except _UNWRITABLE as error:
            self._fail(step, error)

    def finish(self) -> None:
        """Waits for the last save.

        Raises:
            SaveFailed: it has failed.
        """
        self.wait()
        if self._failures:
            raise self._failures[-1]

    def _fail(self, step: int, error: Exception) -> None:
        if lost := distributed.fault_of_machines(error):
            raise lost
        failure = SaveFailed(
            f"the checkpoint {self.directory / str(step)} could not be saved ({reason_of(error)}); "
            "the last one that was stays"
        )
        if jax.process_count() > 1:
            raise failure from error
        # What Orbax still writes may come back after it is removed: the next save, or start, removes that.
        self._close()
        self._remove_half_written()
        self._failures.append(failure)
        if len(self._failures) >= self._max_failed_saves:
            raise SaveFailed(
                f"{len(self._failures)} saves in a row have failed, the last with: {failure}; "
                "free the disk, or mend the storage, and go on with --resume"
            ) from error
        self._tell(f"{failure}; the next save tries again")

    def _remove_half_written(self) -> None:
        if jax.process_index():
            return
        for folder in self.directory.glob(f"*{HALF_WRITTEN}"):
            shutil.rmtree(folder, ignore_errors=True)

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
        saved_step = self.at(step)
        info, saved = saved_step.about()
        checksums.check_fit(below("params", saved), checksums.forms(wanted["params"]), self.directory)
        if any(path.startswith("optimizer/") for path in saved):
            checksums.check_fit(below("optimizer", saved), checksums.forms(wanted["optimizer"]), self.directory)
        found = saved_step.load(wanted, saved)
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

    def restore_params(self, like: Params) -> tuple[Params, dict[str, Any]]:
        """Returns the newest step's parameters under the paths in ``like``, and the step's info.

        ``like`` may be a part of the saved tree, e.g. the image tower alone.

        Raises:
            UserError: there is no checkpoint, it is damaged, or it does not fit ``like``.
        """
        newest = self.at(self.newest_step())
        info, marks = newest.about()
        saved, flat = below("params", marks), parameters.flatten(like)
        checksums.check_fit(
            {path: saved[path] for path in flat if path in saved}, checksums.forms(like), self.directory
        )
        wanted = {**{path: ocp.PLACEHOLDER for path in saved}, **flat}
        try:
            found = newest.load({"params": parameters.unflatten(wanted)}, marks, {f"params/{path}" for path in flat})
        except Damaged as error:
            raise UserError(f"{error}; move this folder away to use the step before") from error
        loaded = parameters.flatten(found["params"])
        return parameters.unflatten({path: loaded[path] for path in flat}), info

    def at(self, step: int) -> SavedStep:
        """Returns what is on disk of a step."""
        return SavedStep(self.directory / str(step))

    def newest_step(self) -> int:
        """Returns how many updates the newest checkpoint has seen.

        Raises:
            UserError: there is none.
        """
        step = self.latest_step
        if step is None:
            raise UserError(f"no checkpoint in {self.directory}; give the directory of a run that has saved one")
        return step


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
    # Where a directory cannot be made in the background, Orbax's threads wait for it for five minutes.
    context.asynchronous.create_directories_asynchronously = False
    return context


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
