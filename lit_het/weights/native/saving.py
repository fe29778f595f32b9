"""Saves and restores checkpoints: asynchronous, atomic, verified, restorable on any number of devices.

The directory of a step holds three items. ``params`` holds the trainable parameters; with parameter averaging, their
average. ``optimizer`` holds the optimizer state; with averaging, also the parameters that training continues from.
``info`` is JSON with its SHA-256: the loader position, the checksum of the locked parameters and the fingerprint of
every array. A save that is interrupted stays under a temporary name, which is never restored.
"""

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from lit_het import distributed, parameters
from lit_het.errors import TRY_AGAIN, UserError
from lit_het.types import Params, TrainState
from lit_het.weights.native import checksums, folders
from lit_het.weights.native.folders import DAMAGED, HALF_WRITTEN, directory_size
from lit_het.weights.native.orbax_errors import reason_of, silence_background_errors
from lit_het.weights.native.saved_step import Damaged, SavedStep, select_item

# Orbax 0.12 and TensorStore raise these when files cannot be written.
_UNWRITABLE = (AssertionError, KeyError, OSError, ValueError)

# Seconds in which threads of a failed save find that they can no longer write, and how often that is prepared.
_SETTLING, _TRIES = 0.5, 100
# Seconds between two measurements of how much of an imported model is on disk.
_POLL_INTERVAL = 0.2


class SaveFailed(UserError):
    """A checkpoint could not be saved."""

    code = TRY_AGAIN


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints to retain on disk.

    Attributes:
        newest: number of latest checkpoints to retain; None retains all.
        every: also retain each step that is a multiple of this number; None retains only the newest.
    """

    newest: int | None = 2
    every: int | None = None


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for the last save on exit.

    With one process a failed save is reported, and the next save tries again. With several processes a failed save
    raises on all of them.

    Args:
        directory: created if missing, unless read-only.
        retention: which checkpoints to retain on disk.
        max_failed_saves: number of consecutive failed saves that end the run.
        read_only: changes nothing on disk, not even a half-written save of another process.
        warn: called with one line when a save has failed or a damaged step is skipped.
    """

    def __init__(
        self,
        directory: Path,
        *,
        retention: Retention = Retention(),
        max_failed_saves: int = 3,
        read_only: bool = False,
        warn: Callable[[str], None] = lambda line: None,
    ):
        self.directory, self._warn = directory, warn
        self._retention, self._max_failed_saves = retention, max_failed_saves
        self._saving: tuple[int, Any] | None = None  # step and Orbax's response
        self._failures: list[SaveFailed] = []  # since the last save that succeeded
        silence_background_errors()
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
        """Opens the folder with Orbax."""
        # On opening, Orbax 0.12 reads the metadata of every step and fails on a damaged one, such as an old step whose
        # deletion was interrupted. These steps are set aside first.
        unreadable = [step for step in self.steps if not folders.has_metadata(self.directory / str(step))]
        for step in unreadable:
            self._warn(f"{self.directory / str(step)} is incomplete: it is renamed to {step}{DAMAGED}")
        self._set_aside(unreadable)
        return ocp.training.Checkpointer(
            str(self.directory.resolve()),
            preservation_policy=_policy(self._retention),
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
        # Orbax 0.12 raises the error of a failed save again at the next wait. `_fail` has already reported it.
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
        """Starts saving ``state`` in the background. Arrays are copied before this returns, so they may be donated.

        Raises:
            SaveFailed: ``max_failed_saves`` consecutive saves have failed; with several processes, one save.
        """
        # At most one save is pending, since its copy of the state takes memory.
        self.wait()
        step, items = int(state.step), _items(state)
        items["info"] = checksums.encode_info(info, checksums.fingerprints(items))
        try:
            if self._checkpointer is None:
                self._checkpointer = self._opened()
            # `wait` must await this response: only then does Orbax 0.12 free the thread and the three file descriptors
            # of the save.
            self._saving = step, self._checkpointer.save_checkpointables_async(step, items, force=True)
        except _UNWRITABLE as error:
            self._fail(step, error)

    def wait(self) -> None:
        """Waits until the pending save is on disk.

        Raises:
            SaveFailed: as for `save`.
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
            SaveFailed: the last save has failed.
        """
        self.wait()
        if self._failures:
            raise self._failures[-1]

    def _fail(self, step: int, error: Exception) -> None:
        if lost := distributed.lost_process_error(error):
            raise lost
        failure = SaveFailed(
            f"the checkpoint {self.directory / str(step)} could not be saved ({reason_of(error)}); "
            f"{'earlier checkpoints are unchanged' if self.steps else 'there is no earlier one'}"
        )
        if jax.process_count() > 1:
            raise failure from error
        self._close()
        self._remove_failed(step)
        self._failures.append(failure)
        if len(self._failures) >= self._max_failed_saves:
            raise SaveFailed(
                f"{len(self._failures)} saves in a row have failed, the last with: {failure}; free disk space or fix "
                f"the storage, then {'continue' if self.steps else 'begin again'} with --resume"
            ) from error
        self._warn(f"{failure}; the next save tries again")

    def _remove_failed(self, step: int) -> None:
        """Removes what a failed save has written, and what its threads are about to write."""
        # When one array fails, Orbax 0.12 does not wait for the others: TensorStore's threads write them into the space
        # that the removal frees, and create the folder again. They cannot if a file has its name.
        folder = self.directory / f"{step}{HALF_WRITTEN}"
        for _ in range(_TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            try:
                folder.touch(exist_ok=False)
                time.sleep(_SETTLING)
                folder.unlink()
                return
            except FileExistsError:
                continue  # a thread was faster
            except OSError:
                return  # nothing can be written here, by no thread

    def _remove_half_written(self) -> None:
        if jax.process_index():
            return
        for folder in self.directory.glob(f"*{HALF_WRITTEN}"):
            shutil.rmtree(folder, ignore_errors=True)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Returns the newest undamaged state, in the shapes and shardings of ``like``, and its info.

        Damaged steps that are newer are renamed, so that they no longer count as checkpoints.
        """
        self.newest_step()
        damaged: list[Damaged] = []
        for step in reversed(self.steps):
            try:
                restored = self._restore(step, like)
            except Damaged as error:
                damaged.append(error)
                self._warn(str(error))
                continue
            if damaged:
                self._set_aside([other for other in self.steps if other > step])
                self._warn(
                    f"the run continues from step {step}; damaged steps are renamed to {self.directory}/*{DAMAGED}"
                )
            return restored
        raise UserError(
            f"{damaged[0]}; all other steps are damaged too: restore a backup, or start with another run directory"
        )

    def _restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        wanted = _items(like)
        saved_step = self.at(step)
        info, saved = saved_step.read_info()
        checksums.check_fit(select_item("params", saved), checksums.specs(wanted["params"]), self.directory)
        if any(path.startswith("optimizer/") for path in saved):
            # The configuration and the parameters fit: objectives that start late had no state of their own once.
            checksums.check_fit(
                select_item("optimizer", saved),
                checksums.specs(wanted["optimizer"]),
                self.directory,
                "another version of lit-het saved the optimizer state",
                "continue with that version, whose commit is in the run's starts.jsonl, or train anew",
            )
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
                # Renamed, not removed: its undamaged arrays may be all that is left of a run.
                folder.rename(folder.with_name(folder.name + DAMAGED))
        distributed.wait_for_all("damaged checkpoints are set aside")

    def restore_params(self, like: Params) -> tuple[Params, dict[str, Any]]:
        """Returns the parameters of the newest step at the paths of ``like``, and the step's info.

        ``like`` may be a subtree of the saved tree, for example only the image tower.
        """
        newest = self.at(self.newest_step())
        info, fingerprints = newest.read_info()
        saved, flat = select_item("params", fingerprints), parameters.flatten(like)
        checksums.check_fit(
            {path: saved[path] for path in flat if path in saved}, checksums.specs(like), self.directory
        )
        # Orbax does not read placeholders: one tower of a large model costs only its own bytes.
        wanted = {**{path: ocp.PLACEHOLDER for path in saved}, **flat}
        try:
            checked = {f"params/{path}" for path in flat}
            found = newest.load({"params": parameters.unflatten(wanted)}, fingerprints, checked)
        except Damaged as error:
            raise UserError(f"{error}; move this folder away to use the previous step") from error
        loaded = parameters.flatten(found["params"])
        return parameters.unflatten({path: loaded[path] for path in flat}), info

    def at(self, step: int) -> SavedStep:
        """Returns the checkpoint of a step, not yet read."""
        return SavedStep(self.directory / str(step))

    def newest_step(self) -> int:
        """Returns the step of the newest checkpoint."""
        step = self.latest_step
        if step is None:
            raise UserError(f"no checkpoint in {self.directory}; give the directory of a run that has saved one")
        return step


def _items(state: TrainState) -> dict[str, Any]:
    """Returns the items ``params`` and ``optimizer`` of a state."""
    # With averaging, the average is saved as ``params``: readers of a checkpoint then need not handle averaging.
    if state.average is None:
        return {"params": state.params, "optimizer": state.opt_state}
    return {"params": state.average, "optimizer": {"state": state.opt_state, "params": state.params}}


def _policy(retention: Retention) -> Any:
    policies = ocp.training.preservation_policies
    newest = policies.LatestN(retention.newest)
    if retention.every is None:
        return newest
    return policies.AnyPreservationPolicy([newest, policies.EveryNSteps(retention.every)])


def _context() -> ocp.Context:
    context = ocp.Context()
    # Orbax 0.12 compiles a slicing program for every replicated array, so that replicas share the writing. Small arrays
    # are not worth compiling for.
    context.array.saving.min_slice_bytes_for_replica_parallel = 2**20
    # If a directory cannot be created in the background, Orbax 0.12's threads wait five minutes for it.
    context.asynchronous.create_directories_asynchronously = False
    return context


def save_imported(
    directory: Path, params: Params, info: Mapping[str, Any], advance: Callable[[int], None] = lambda count: None
) -> None:
    """Saves imported parameters as step 0, which can be opened or fine-tuned but not resumed.

    Args:
        directory: a folder without checkpoints.
        params: must not change meanwhile, because they are not copied.
        info: returned by `Checkpoints.restore_params` together with the parameters.
        advance: called with the number of bytes written since the last call.
    """
    context = ocp.Context()
    context.memory.deepcopy_host_arrays = False
    # With compression Orbax 0.12 would hold compressed copies of all arrays in memory until they are written.
    context.array.saving.use_compression = False
    items: dict[str, Any] = {"params": jax.tree.map(np.asarray, params)}
    total, written = sum(array.nbytes for array in jax.tree.leaves(items["params"])), 0
    items["info"] = checksums.encode_info(info, checksums.fingerprints(items))
    silence_background_errors()
    with (
        ocp.training.Checkpointer(str(directory.resolve()), context=context) as checkpointer,
        ThreadPoolExecutor(1) as pool,
    ):
        saved = pool.submit(checkpointer.save_checkpointables, 0, items)
        while wait([saved], timeout=_POLL_INTERVAL).not_done:
            on_disk = min(directory_size(directory), total)
            advance(on_disk - written)
            written = on_disk
        try:
            saved.result()
        except _UNWRITABLE as error:
            raise UserError(f"{directory} cannot be written: {reason_of(error)}") from error
    advance(total - written)
