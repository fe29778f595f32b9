"""Checkpoints of a run: asynchronous, atomic, restorable on another number of devices. The only user of Orbax.

A step's directory holds three items: ``params`` (trainable parameters only), ``optimizer`` and ``info`` (JSON: loader
position, checksum of the locked parameters). A save that a kill interrupts stays under a temporary name and is ignored.
"""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.types import Params, TrainState

# What Orbax and TensorStore raise when files of a checkpoint are missing or cut short.
_BROKEN = (AssertionError, KeyError, OSError, ValueError)

# Seconds between two looks at how much of an imported model is on disk.
_LOOK_INTERVAL = 0.2


class Checkpoints:
    """The checkpoints of one run, newest kept; use as a context manager, which waits for the last save.

    Args:
        directory: created if missing, unless read-only.
        keep: how many of the newest steps stay on disk; None keeps all.
        read_only: leaves everything as it is, also a save that another process has under way.

    Raises:
        UserError: read-only and there is no such directory.
    """

    def __init__(self, directory: Path, *, keep: int | None = 2, read_only: bool = False):
        self.directory = directory
        context = ocp.Context()
        # Orbax compiles a slice for every replicated array, to spread the writing over replicas: not worth it for
        # small ones.
        context.array.saving.min_slice_bytes_for_replica_parallel = 2**20
        if read_only and not directory.is_dir():
            raise UserError(f"no checkpoints in {directory}; give the directory of a run that has saved one")
        self._checkpointer = ocp.training.Checkpointer(
            str(directory.resolve()),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),  # pyright: ignore[reportArgumentType]
            cleanup_tmp_directories=not read_only,
            context=context,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    @property
    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        latest = self._checkpointer.latest
        return None if latest is None else int(latest.step)

    def save(self, state: TrainState, info: Mapping[str, Any]) -> None:
        """Starts saving ``state`` in the background; arrays are copied before this returns, so they may be donated."""
        items = {"params": state.params, "optimizer": state.opt_state, "info": dict(info)}
        self._checkpointer.save_checkpointables_async(int(state.step), items, force=True)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Returns the newest state, in the shapes and shardings of ``like``, and its info.

        Raises:
            UserError: there is none, or it does not fit ``like``.
        """
        step = self.newest_step()
        _check_fit(self._shapes(step), like.params, self.directory)
        wanted = {"params": like.params, "optimizer": like.opt_state, "info": None}
        found = self._load(step, wanted)
        count = jax.device_put(jnp.int32(step), like.step.sharding)
        return TrainState(count, found["params"], found["optimizer"]), found["info"]

    def restore_params(self, like: Params) -> tuple[Params, dict[str, Any]]:
        """Returns the newest step's parameters under the paths in ``like``, and the step's info.

        ``like`` may be a part of the saved tree, e.g. the image tower alone.

        Raises:
            UserError: there is no checkpoint, or it does not fit ``like``.
        """
        step = self.newest_step()
        saved = self._shapes(step)
        _check_fit({path: saved[path] for path in parameters.flatten(like) if path in saved}, like, self.directory)
        wanted = {**{path: ocp.PLACEHOLDER for path in saved}, **parameters.flatten(like)}
        found = self._load(step, {"params": parameters.unflatten(wanted), "info": None})
        loaded = parameters.flatten(found["params"])
        return parameters.unflatten({path: loaded[path] for path in parameters.flatten(like)}), found["info"]

    def _load(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._checkpointer.load_checkpointables(step, wanted)
        except _BROKEN as error:
            raise self._broken(step, error) from error

    def _broken(self, step: int, error: Exception) -> UserError:
        reason = " ".join(str(error).split())[:200]
        return UserError(
            f"the checkpoint {self.directory / str(step)} cannot be read ({type(error).__name__}: {reason}); "
            "move this folder away to use the step before"
        )

    def newest_step(self) -> int:
        """Returns how many updates the newest checkpoint has seen.

        Raises:
            UserError: there is none.
        """
        step = self.latest_step
        if step is None:
            raise UserError(f"no checkpoint in {self.directory}; give the directory of a run that has saved one")
        return step

    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns path and shape of every parameter in the newest step."""
        return self._shapes(self.newest_step())

    def _shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        try:
            metadata = self._checkpointer.checkpointables_metadata(step).metadata["params"]
        except _BROKEN as error:
            raise self._broken(step, error) from error
        return {path: tuple(array.shape) for path, array in parameters.flatten(metadata).items()}


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
    items = {"params": jax.tree.map(np.asarray, params), "info": dict(info)}
    total, written = sum(array.nbytes for array in jax.tree.leaves(items["params"])), 0
    with (
        ocp.training.Checkpointer(str(directory.resolve()), context=context) as checkpointer,
        ThreadPoolExecutor(1) as pool,
    ):
        saved = pool.submit(checkpointer.save_checkpointables, 0, items)
        while wait([saved], timeout=_LOOK_INTERVAL).not_done:
            on_disk = min(_size_below(directory), total)
            advance(on_disk - written)
            written = on_disk
        try:
            saved.result()
        except _BROKEN as error:
            raise UserError(f"{directory} cannot be written: {' '.join(str(error).split())[:200]}") from error
    advance(total - written)


def _size_below(directory: Path) -> int:
    size = 0
    # Folders are given their last names while we look.
    with contextlib.suppress(FileNotFoundError):
        for path in directory.rglob("*"):
            size += path.stat().st_size if path.is_file() else 0
    return size


def _check_fit(saved: Mapping[str, tuple[int, ...]], like: Params, directory: Path) -> None:
    wanted = {path: tuple(array.shape) for path, array in parameters.flatten(like).items()}
    differing = [
        f"{path} is {saved.get(path, 'missing')} in the checkpoint and {wanted.get(path, 'absent')} in the model"
        for path in sorted(saved.keys() | wanted.keys())
        if saved.get(path) != wanted.get(path)
    ]
    if differing:
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise UserError(
            f"the configuration contradicts the checkpoint in {directory}: {differing[0]}{more}; "
            "use the configuration that it was trained with"
        )
