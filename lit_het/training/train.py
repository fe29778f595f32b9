"""``lit-het train``: trains a run from its configuration."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh

from lit_het import distributed, parameters, sharding, stopping
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.watchdog import watched as reads_watched
from lit_het.errors import DoesNotFit, Unwritable, UserError, pluralize
from lit_het.files import cache_folder
from lit_het.models import origins
from lit_het.models.calibration.split import Split, split, split_samples
from lit_het.models.tower_fingerprints import tower_fingerprint
from lit_het.programs import shared
from lit_het.tasks.base import AnyTask
from lit_het.training import loop, preemption
from lit_het.training.build import build
from lit_het.training.cadence import Cadence
from lit_het.training.checks import (
    check_embeddings,
    check_is_trained,
    check_run_dir,
    check_source,
    report_copies,
    report_reused,
    with_saved_rule,
)
from lit_het.training.directory import checkpoint_dir, config_path
from lit_het.training.durations import RunLength
from lit_het.training.files import write_nonfinite, write_run_files
from lit_het.training.initialization import initial_params
from lit_het.training.lock import locked
from lit_het.training.log import MetricLog, read_metrics
from lit_het.training.loop import NonFinite
from lit_het.training.step import TrainStep, initial_state, jit_step
from lit_het.types import Batch, Params, TrainState
from lit_het.weights.native import checksums
from lit_het.weights.native.folders import complete_steps
from lit_het.weights.native.saving import Checkpoints, Retention

if TYPE_CHECKING:
    from lit_het.data_pipelines.shards.pipeline import AnyStream
    from lit_het.data_pipelines.texts.tokenizers import Tokenizer


Watch: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""Receives the step and the metrics of each evaluation during a training, which it ends by raising."""


def train(
    config: ExperimentConfig,
    *,
    resume: bool = False,
    allow_commands: bool = False,
    watch: Watch | None = None,
    pipeline: Iterable[Any] | None = None,
) -> TrainState:
    """Trains a run to its end, calibrates it on the samples that it holds out, and returns the last state.

    Args:
        config: configuration of the run.
        resume: whether to continue from the newest checkpoint.
        allow_commands: whether lists of shards may contain shell commands; the configuration always may.
        watch: see `loop.train`; for a single process.
        pipeline: of webdataset, read in place of the shards, see `PipelineStream`.
    """
    check_is_trained(config)
    check_source(config)
    if config.log and distributed.is_main_process():
        from lit_het.training.tracking import require

        require(config.log)  # before data and models are opened
    _cache_compiled_programs()
    mesh = config.mesh.build()
    sharding.check_batch_size(config.data.batch_size, mesh)
    if resume:
        config = with_saved_rule(config)
    check_run_dir(config, resume)
    distributed.check_same(json.dumps(experiment.to_dict(config)), "the configuration")
    # Losses read the current mesh to find the devices that share a batch.
    with locked(config.run_dir, message) as check_lock, jax.set_mesh(mesh):
        check_run_dir(config, resume)  # again: another process may have trained here meanwhile
        state, samples = _train_on(mesh, config, resume, check_lock, allow_commands, watch, pipeline)
    calibrate_held_out(config, int(state.step), samples)
    return state


def _train_on(
    mesh: Mesh,
    config: ExperimentConfig,
    resume: bool,
    check_lock: Callable[[], None],
    allow_commands: bool,
    watch: Watch | None,
    pipeline: Iterable[Any] | None,
) -> tuple[TrainState, Split]:
    tokenizer = config.tokenizer.build() if config.tokenizer else None
    loader, samples = open_data(config, tokenizer, allow_commands, pipeline)
    if samples.problem:
        message(f"nothing is held out to calibrate on: {samples.problem}")
    config.task.check_data(config, loader, tokenizer)
    report_copies(config, loader.num_samples if isinstance(loader, Loader) else config.data.batch_size)
    report_reused(config)
    if (tower := config.task.image_tower) is not None and (remark := tower.unseen_pixels()):
        message(remark)
    task = config.task.build()
    run = _run_length(config, loader)
    programs = _programs(_decides_the_step(config), run, mesh)
    locked, trainable = initial_params(config, task, mesh)
    checksum = checksums.digest(locked)
    locked = parameters.cast(locked, config.task.compute_type)
    # Cached, and computed only if needed: it hashes the whole tower.
    tower = functools.cache(functools.partial(tower_fingerprint, config, locked))
    check_embeddings(loader, task, tower, lambda: tower_fingerprint(config, locked, tokenizer))
    state = programs.initial(trainable)

    retention = Retention(config.cadence.keep, config.cadence.keep_steps)
    with Checkpoints(
        checkpoint_dir(config.run_dir),
        retention=retention,
        max_failed_saves=config.cadence.max_failed_saves,
        warn=message,
    ) as checkpoints:
        if resume and checkpoints.latest_step is not None:
            state, position, origin = _resumed(checkpoints, state, config, loader, checksum)
        else:
            position, origin = 0, origins.of_start(config, parameters.merge(locked, trainable))
        try:
            write_run_files(config, tokenizer)
            tracker = None
            if config.log and distributed.is_main_process():
                from lit_het.training.tracking import Tracker

                tracker = Tracker(config.log, config.run_dir, experiment.fields(config))
            log = MetricLog(config.run_dir, first_step=int(state.step), tracker=tracker)
        except OSError as error:
            problem = f"{error.filename or config.run_dir} cannot be written ({error.strerror})"
            raise Unwritable(f"{problem}; free the disk and start again") from error
        watchdog = reads_watched(config.data.slow_read_seconds, config.data.stuck_read_seconds)
        try:
            evaluate = _evaluations(config, task, locked, state.params, tokenizer, mesh, tower, run.num_steps)
            with watchdog, _opened_batches(loader, position) as batches, preemption.watched():
                state = loop.train(
                    programs.step,
                    state,
                    locked,
                    _to_devices(batches, task, mesh),
                    num_steps=run.num_steps,
                    cadence=config.cadence,
                    log=log,
                    saver=_Saver(checkpoints, check_lock, config.data.batch_size, identity(loader, checksum, origin)),
                    evaluate=evaluate,
                    description=config.run_dir.name,
                    evaluate_first=lacks_evaluation(config, int(state.step), run.num_steps),
                    watch=watch,
                )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DoesNotFit(
                f"a step does not fit into the memory of a device ({str(error).splitlines()[0]}); lower "
                "--data.batch-size or raise --task.microbatches, and see lit-het plan"
            ) from error
        except NonFinite as error:
            named = write_nonfinite(config, loader, error.step)
            raise NonFinite(f"{error}; {named} lists its samples", error.step) from error
        finally:
            log.close()
            if distributed.is_main_process() and checkpoints.latest_step is None and not read_metrics(log.path):
                # Nothing was trained yet: after the cause is fixed, the same command starts again.
                config_path(config.run_dir).unlink(missing_ok=True)
    for (shard, cause), count in sorted(loader.faults.counts.items()):
        message(f"{shard}: {pluralize(count, 'sample')} skipped: {cause}", on_all_processes=True)
    return state, samples


class _Programs(NamedTuple):
    """Compiled functions: the trainable parameters to the first state, and the step."""

    initial: Callable[[Params], TrainState]
    step: TrainStep


def _decides_the_step(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration without what makes no difference to a step."""
    nothing: dict[str, Any] = {"tokenizer": None, "pretrained": None, "evaluations": ()}
    # Of the data, only a held-out data set is part of the step.
    data = config.data
    if data.held_out_share is None:
        data = LoaderConfig(shards=(), batch_size=data.batch_size)
    nothing |= {"calibration": None, "calibration_by": "order"}
    return dataclasses.replace(config, run_dir=Path(), data=data, cadence=Cadence(), log=None, **nothing)


@shared
def _programs(config: ExperimentConfig, run: RunLength, mesh: Mesh) -> _Programs:
    built = build(config, run)
    initial = functools.partial(initial_state, optimizer=built.optimizer, averages=config.average_decay is not None)
    _, trainable = parameters.partition(built.task.shapes, built.task.locked)
    like = jax.eval_shape(initial, trainable)
    places = sharding.tree_shardings(like, mesh)
    like = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like, places)
    return _Programs(jax.jit(initial, out_shardings=places), jit_step(built.step, like))


def calibrate_held_out(config: ExperimentConfig, step: int, samples: Split) -> None:
    """Fits the temperatures of a finished run; failures are logged and not raised, as the training is saved."""
    if samples.calibration is None:
        if samples.problem:
            message(f"not calibrated: {samples.problem}")
        return
    command = ("lit-het", "calibrate", str(config.run_dir), "--data", *config.data.shards)
    by_hand = f"run {shlex.join((*command, '--portion', str(samples.calibration)))}"
    if jax.process_count() > 1:
        message(f"not calibrated, which needs a single process: {by_hand}")
        return
    from lit_het.models.calibration.images import CalibrateOptions, SeenByModel, calibrate
    from lit_het.models.calibration.saved import read_calibration

    try:
        if read_calibration(config.run_dir, step) is None:
            options = CalibrateOptions(config.data.shards, samples.calibration, embeddings=config.data.embeddings)
            calibrate(config.run_dir, options)
    except SeenByModel as error:
        message(f"not calibrated: {error}")
    except Exception as error:  # of any kind, such as too little memory
        stopping.check()
        message(f"not calibrated: {error}; after a correction, {by_hand}")


def _evaluations(config: ExperimentConfig, *arguments: Any) -> Callable[[Params, int], Mapping[str, float]]:
    """Returns what `evaluated_in_training` does; without evaluations there are no metrics."""
    if not config.evaluations:
        return lambda *_: {}
    from lit_het.training.evaluating import evaluated_in_training

    return evaluated_in_training(config, *arguments)


def _cache_compiled_programs() -> None:
    """Caches compiled programs for restarts, unless the user has set JAX's cache."""
    # Programs for CPUs depend on the CPU's features, which may differ between machines with one home directory.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and jax.default_backend() != "cpu":
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("compiled")))


def open_data(
    config: ExperimentConfig,
    tokenizer: "Tokenizer | None",
    allow_commands: bool,
    pipeline: Iterable[Any] | None = None,
) -> tuple["Loader | AnyStream", Split]:
    """Opens the samples to train on; the others of the split are left out of them."""
    if config.data.stream is not None or pipeline is not None:
        from lit_het.data_pipelines.shards.pipeline import open_stream

        return open_stream(config.data, tokenizer, allow_commands, pipeline), split(config, 0)
    with Bar("indexing", sum(map(len, config.data.data_sets())), "shards") as bar:
        loader = Loader(config.data, tokenizer, bar.advance)
    return split_samples(config, loader)


def _run_length(config: ExperimentConfig, loader: "Loader | AnyStream | None") -> RunLength:
    epoch_size = loader.num_samples if isinstance(loader, Loader) else None
    return RunLength.resolve(config.length, config.data.batch_size, epoch_size)


def _resumed(
    checkpoints: Checkpoints,
    state: TrainState,
    config: ExperimentConfig,
    loader: "Loader | AnyStream",
    checksum: str,
) -> tuple[TrainState, int, str | None]:
    """Returns the newest intact state, the position of the next sample, and the recorded digest of the start."""
    state, info = checkpoints.restore(state)
    # Runs of earlier versions have no data_digest.
    if info.get("data_digest", loader.digest) != loader.digest:
        raise UserError(
            f"the shards differ from those of {config.run_dir}: samples were added, removed or changed, or "
            "others are left out; restore them and the tables of data.suspects and data.exclude, or choose another "
            "run directory"
        )
    if info.get("locked_checksum") != checksum:
        raise UserError(
            f"the locked parameters are not those that {config.run_dir} started with; "
            "set --pretrained.run to the original run"
        )
    if not isinstance(loader, Loader):
        message("a stream cannot seek; it continues with new samples")
    position = info.get("position")
    if not isinstance(position, int) or not 0 <= position < 2**63:
        raise UserError(f"the checkpoint in {config.run_dir} has no position in the data; choose another run directory")
    return state, position, info.get("origin")


def identity(loader: "Loader | AnyStream", checksum: str, origin: str | None) -> dict[str, str | None]:
    """Returns by what a checkpoint knows the locked parameters and the samples that it was trained with, and its start.

    Args:
        loader: of the samples.
        checksum: of the locked parameters.
        origin: the digest of the towers that it started from; None if it is a start itself.
    """
    # The digest of the data includes what is left out; that of the shards alone is what copies of them are known by.
    shards = {"shards_digest": loader.index.digest} if isinstance(loader, Loader) else {}
    return {"locked_checksum": checksum, "data_digest": loader.digest, "origin": origin, **shards}


@contextlib.contextmanager
def _opened_batches(loader: "Loader | AnyStream", position: int) -> Iterator[Iterator[Batch]]:
    """Yields the batches from a position on and closes them at the end; a stream's buffer is filled first."""
    place = position, jax.process_index(), jax.process_count()
    first: list[Batch] = []
    if isinstance(loader, Loader):
        batches = loader.batches(*place)
    else:
        with Bar("filling the shuffle buffer", loader.buffer_size, "samples") as bar:
            batches = loader.batches(*place, advance=bar.advance)
            first.append(next(batches))
    with contextlib.closing(batches):
        yield itertools.chain(first, batches)


def train_unless_done(config: ExperimentConfig, *, allow_commands: bool = False, watch: Watch | None = None) -> None:
    """Starts or resumes a run; does nothing if it is finished. Arguments are those of `train`."""
    if not config_path(config.run_dir).exists():
        train(config, allow_commands=allow_commands, watch=watch)
        return
    config = with_saved_rule(config)
    check_run_dir(config, resume=True)
    # `Checkpoints` is not opened for writing here: that would remove a save in progress of another process.
    newest = max(complete_steps(checkpoint_dir(config.run_dir)), default=None)
    # The data is needed only to convert epochs to steps.
    loader = open_data(config, None, allow_commands)[0] if config.length.unit == "epochs" else None
    num_steps = _run_length(config, loader).num_steps
    if newest is None or newest < num_steps or lacks_evaluation(config, newest, num_steps):
        train(config, resume=True, allow_commands=allow_commands, watch=watch)
        return
    from lit_het.models.calibration.saved import read_calibration
    from lit_het.weights.native.inspection import damage

    with Checkpoints(checkpoint_dir(config.run_dir), read_only=True) as checkpoints:
        damaged = damage(checkpoints, newest)
    if damaged:
        train(config, resume=True, allow_commands=allow_commands, watch=watch)
        return
    if config.calibration is not None and read_calibration(config.run_dir, newest) is None:
        calibrate_held_out(config, newest, open_data(config, None, allow_commands)[1])
    message(f"{config.run_dir} is finished: {pluralize(newest, 'step')}")


@dataclasses.dataclass(frozen=True)
class _Saver:
    """Saves states together with the info needed to resume."""

    checkpoints: Checkpoints
    check_lock: Callable[[], None]
    batch_size: int
    identity: Mapping[str, str | None]

    def save(self, state: TrainState) -> None:
        """Implements `loop.Saver`."""
        self.check_lock()
        self.checkpoints.save(state, {"position": int(state.step) * self.batch_size, **self.identity})

    def finish(self) -> None:
        """Implements `loop.Saver`."""
        self.checkpoints.finish()


def _to_devices(batches: Iterator[Batch], task: AnyTask, mesh: Mesh) -> Iterator[Batch]:
    for batch in batches:
        task.check_batch(batch)
        yield distributed.to_global(batch, mesh)


def lacks_evaluation(config: ExperimentConfig, step: int, num_steps: int) -> bool:
    """Returns whether the evaluation after the last saved step is missing, as the run was stopped in it."""
    if not step or not config.evaluations or not config.cadence.evaluates_after(step, num_steps):
        return False
    records = [record for record in read_metrics(config.run_dir / "metrics.jsonl") if record["step"] == step]
    return all(any(name.startswith("train/") for name in record) for record in records)
