"""``lit-het train``: from a configuration to a trained run."""

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from configs import experiment
from configs.experiment import ExperimentConfig
from data_pipelines.loader import Loader, LoaderConfig
from data_pipelines.stream import Stream
from data_pipelines.tokenizers import Tokenizer
from eval.sets import Sets
from lit_het import distributed, parameters, sharding
from lit_het.checkpoints.native import Checkpoints
from lit_het.cli import runs
from lit_het.cli.flags import with_flags
from lit_het.cli.models import ModelMaker
from lit_het.errors import UserError
from lit_het.tasks.classification import ClassificationConfig, ClassificationTask
from lit_het.tasks.contrastive import ContrastiveConfig, ContrastiveTask
from lit_het.training import loop
from lit_het.training.logging import Bar, MetricLog, read_metrics, say
from lit_het.training.step import TrainStep, initial_state, make_train_step
from lit_het.types import Batch, EvaluatedModel, Params, TrainState

# Fields that a resumed run may change: they alter neither the model nor the sequence of batches.
CHANGEABLE_FIELDS = (
    "run_dir",
    "mesh",
    "cadence",
    "evaluations",
    "data.threads",
    "data.prefetch_batches",
    "data.max_bad_fraction",
    "data.embeddings",
    "pretrained.run",
    "task.image_tower.weights",
    "task.text_tower.weights",
)


def parse_config(path: Path, flags: Sequence[str]) -> ExperimentConfig:
    """Returns the configuration of a file with the fields that ``flags`` change."""
    return with_flags(experiment.load_module_config(path), flags, f"lit-het train --config {path}")


def train(config: ExperimentConfig, *, resume: bool = False) -> TrainState:
    """Trains a run to its end and returns its last state.

    Raises:
        UserError: anything in the configuration, the data or the run directory that cannot work.
    """
    mesh = config.mesh.build()
    sharding.check_batch_size(config.data.batch_size, mesh)
    _check_run_dir(config, resume)
    try:
        # Losses look there for the devices that share a batch.
        with jax.set_mesh(mesh):
            return _train_on(mesh, config, resume)
    except BaseException as error:
        if jax.process_count() > 1:
            _leave(error)
        raise


def _leave(error: BaseException) -> None:
    """Ends one of several processes at once: the others wait for it in a collective, and it would wait for them."""
    line = f"lit-het: {error}\n" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
    sys.stderr.write(line)
    sys.stderr.flush()
    os._exit(1)


def _train_on(mesh: Mesh, config: ExperimentConfig, resume: bool) -> TrainState:
    tokenizer = config.tokenizer.build() if config.tokenizer else None
    loader = _open_data(config.data, tokenizer)
    _check_data(config, loader, tokenizer)
    task = config.task.build()
    optimizer = config.optimizer.build(config.schedule, config.num_steps)
    locked, trainable = _initial_params(config, task, mesh)
    checksum = parameters.checksum(locked)
    locked = parameters.cast(locked, config.task.image_tower.compute_type)
    # A hash of the whole tower, where anything needs it.
    tower = functools.cache(functools.partial(runs.tower_fingerprint, config, locked))
    _check_embeddings(loader, task, tower)
    state = jax.jit(
        lambda params: initial_state(params, optimizer),
        out_shardings=sharding.tree_shardings(jax.eval_shape(lambda p: initial_state(p, optimizer), trainable), mesh),
    )(trainable)

    with Checkpoints(runs.checkpoint_dir(config.run_dir)) as checkpoints:
        position = 0
        if resume and checkpoints.latest_step is not None:
            state, info = checkpoints.restore(state)
            position = info["position"]
            # Runs of earlier versions have no digest.
            if info.get("data_digest", loader.digest) != loader.digest:
                raise UserError(
                    f"the shards are not those of {config.run_dir}: samples have come, gone or changed; "
                    "restore them, or start another --run-dir"
                )
            if info["locked_checksum"] != checksum:
                raise UserError(
                    f"the locked parameters are not those that {config.run_dir} began with; "
                    "set --pretrained.run to the original run"
                )
            if isinstance(loader, Stream):
                say("a stream cannot seek: from here on it draws samples anew")
        _write_run_files(config, tokenizer)
        log = MetricLog(config.run_dir, first_step=int(state.step))
        try:
            evaluate = _evaluation(config, task, locked, state.params, tokenizer, mesh, tower)
            with _begun(loader, position) as batches:
                state = loop.train(
                    _compiled(make_train_step(task, optimizer, config.seed), state),
                    state,
                    locked,
                    _to_devices(batches, task, mesh),
                    num_steps=config.num_steps,
                    cadence=config.cadence,
                    log=log,
                    saver=_Saver(checkpoints, config.data.batch_size, checksum, loader.digest),
                    evaluate=evaluate,
                    description=config.run_dir.name,
                )
        finally:
            log.close()
            if checkpoints.latest_step is None and not read_metrics(log.path):
                # Nothing is lost: once the cause is mended, the same command starts anew.
                runs.config_path(config.run_dir).unlink(missing_ok=True)
    for (shard, cause), count in sorted(loader.faults.counts.items()):
        say(f"{shard}: {count} samples left out: {cause}")
    return state


def _open_data(config: LoaderConfig, tokenizer: Tokenizer | None) -> Loader | Stream:
    if config.stream is not None:
        return Stream(config, tokenizer)
    with Bar("indexing", sum(map(len, config.data_sets())), "shards") as bar:
        return Loader(config, tokenizer, bar.advance)


@contextlib.contextmanager
def _begun(loader: Loader | Stream, position: int) -> Iterator[Iterator[Batch]]:
    """Yields the batches from a position on, those of a stream when the first is there; closes them at the end."""
    place = position, jax.process_index(), jax.process_count()
    first: list[Batch] = []
    if isinstance(loader, Stream):
        with Bar("filling the shuffle buffer", loader.buffer_size, "samples") as bar:
            batches = loader.batches(*place, advance=bar.advance)
            first.append(next(batches))
    else:
        batches = loader.batches(*place)
    with contextlib.closing(batches):
        yield itertools.chain(first, batches)


def train_unless_done(config: ExperimentConfig) -> None:
    """Trains a run, goes on with one that was interrupted, and leaves a finished one alone.

    Raises:
        UserError: as `train`; the run directory holds a run of another configuration.
    """
    if not runs.config_path(config.run_dir).exists():
        train(config)
        return
    with Checkpoints(runs.checkpoint_dir(config.run_dir)) as checkpoints:
        done = checkpoints.latest_step == config.num_steps
    if not done:
        train(config, resume=True)


def _compiled(step: TrainStep, state: TrainState) -> TrainStep:
    """Returns the step under `jax.jit`: the state is donated and keeps its sharding."""
    shardings = jax.tree.map(lambda array: array.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


@dataclasses.dataclass(frozen=True)
class _Saver:
    """Saves states with what resuming needs beside them."""

    checkpoints: Checkpoints
    batch_size: int
    locked_checksum: str
    data_digest: str

    def save(self, state: TrainState) -> None:
        """Implements `loop.Saver`."""
        info = {
            "position": int(state.step) * self.batch_size,
            "locked_checksum": self.locked_checksum,
            "data_digest": self.data_digest,
        }
        self.checkpoints.save(state, info)


def _initial_params(
    config: ExperimentConfig, task: ContrastiveTask | ClassificationTask, mesh: Mesh
) -> tuple[Params, Params]:
    """Returns (locked, trainable) parameters on the mesh: what comes from elsewhere is read, only the rest drawn."""
    key = jax.random.key(config.seed)
    shapes = jax.eval_shape(task.initialize, key)
    shardings = sharding.tree_shardings(shapes, mesh)
    like = parameters.flatten(
        jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, shardings)
    )
    loaded = parameters.flatten(runs.load_weights(config.task, shapes, shardings))
    locked = parameters.flatten(parameters.partition(shapes, task.locked)[0])
    pattern = config.pretrained.pattern if config.pretrained else None
    if pattern or locked.keys() - loaded.keys():
        wanted = parameters.flatten(parameters.partition(shapes, (pattern,))[0]) if pattern else locked
        if pattern and (both := wanted.keys() & loaded.keys()):
            raise UserError(f"both `pretrained` and `weights` say where {min(both)} comes from; leave out one")
        paths = wanted.keys() - loaded.keys()
        loaded |= parameters.flatten(runs.load_pretrained(config, parameters.unflatten({p: like[p] for p in paths})))
    if missing := locked.keys() - loaded.keys():
        raise UserError(f"{min(missing)} is locked but --pretrained.pattern {pattern!r} does not load it")

    def draw(key: Any) -> dict[str, Any]:
        return {path: array for path, array in parameters.flatten(task.initialize(key)).items() if path not in loaded}

    places = {path: shape.sharding for path, shape in like.items() if path not in loaded}
    drawn = jax.jit(draw, out_shardings=places)(key)
    return parameters.partition(parameters.unflatten({**drawn, **loaded}), task.locked)


def _evaluation(
    config: ExperimentConfig,
    task: ContrastiveTask | ClassificationTask,
    locked: Params,
    trainable: Params,
    tokenizer: Tokenizer | None,
    mesh: Mesh,
    tower: Callable[[], str],
) -> Callable[[Params], Mapping[str, float]]:
    """Opens what the run is evaluated on, and checks it; returns what measures its trainable parameters."""
    stored = any(evaluation.data.embeddings is not None for evaluation in config.evaluations)
    if stored and "image_tower" in task.trained:
        raise UserError("evaluations cannot read `embeddings` of an image tower that is trained; leave them out")
    sets = Sets(config.data.image_size, config.data.preprocessing, tower)
    evaluators = [evaluation.build(sets) for evaluation in config.evaluations]
    maker = ModelMaker(task, mesh, tokenizer)
    versions = itertools.count()

    def model_of(trainable: Params) -> EvaluatedModel:
        # A locked tower makes the same features every time: they are read once.
        version = f"version {next(versions)}" if "image_tower" in task.trained else tower() if stored else "locked"
        return maker.model(parameters.merge(locked, trainable), version)

    if evaluators:
        model = model_of(trainable)
        for evaluator in evaluators:  # hours before the first evaluation
            evaluator.check(model)

    def evaluate(trainable: Params) -> Mapping[str, float]:
        model = model_of(trainable)
        return {name: value for evaluator in evaluators for name, value in evaluator(model).metrics().items()}

    return evaluate


def _to_devices(batches: Iterator[Batch], task: ContrastiveTask | ClassificationTask, mesh: Mesh) -> Iterator[Batch]:
    for batch in batches:
        if isinstance(task, ClassificationTask):
            task.check_labels(np.asarray(batch.label))
        yield distributed.to_global(batch, mesh)


def _check_run_dir(config: ExperimentConfig, resume: bool) -> None:
    """Refuses to write over another run, and to resume with a configuration that would train another one."""
    path = runs.config_path(config.run_dir)
    if config.run_dir.exists() and not config.run_dir.is_dir():
        raise UserError(f"{config.run_dir} is a file; choose another --run-dir")
    if not path.exists():
        if resume:
            raise UserError(f"{config.run_dir} holds no run to resume; leave out --resume to start one")
        return
    if not resume:
        raise UserError(f"{config.run_dir} already holds a run; go on with --resume or choose another --run-dir")
    changed = {
        field: values
        for field, values in experiment.differences(experiment.load(path), config).items()
        if not field.startswith(CHANGEABLE_FIELDS)
    }
    if changed:
        field, (before, now) = next(iter(changed.items()))
        more = f" (and {', '.join(list(changed)[1:])})" if len(changed) > 1 else ""
        raise UserError(
            f"cannot resume {config.run_dir}: {field} was {before} and is now {now}{more}; "
            "use the same values or another --run-dir"
        )


def _check_data(config: ExperimentConfig, loader: Loader | Stream, tokenizer: Tokenizer | None) -> None:
    """Refuses data that does not fit the model, before anything is compiled."""
    task = config.task
    if config.data.image_size != task.image_tower.image_size:
        raise UserError(
            f"--data.image-size {config.data.image_size} differs from --task.image-tower.image-size "
            f"{task.image_tower.image_size}; make them equal"
        )
    match task:
        case ClassificationConfig():
            if loader.num_classes != task.num_classes:
                raise UserError(
                    f"the data has {loader.num_classes or 'no'} classes and the task {task.num_classes}; "
                    "set --task.num-classes, or `data.labels` in the configuration file"
                )
        case ContrastiveConfig(text_tower=text):
            if tokenizer is None:
                raise UserError("a contrastive task needs captions; name a `tokenizer` in the configuration file")
            if tokenizer.length != text.length or tokenizer.vocabulary_size > text.vocabulary_size:
                raise UserError(
                    f"the tokenizer yields {tokenizer.length} tokens of {tokenizer.vocabulary_size} kinds, the text "
                    f"tower takes {text.length} of {text.vocabulary_size}; set --tokenizer.length and "
                    "--task.text-tower.length, or --task.text-tower.vocabulary-size"
                )


def _check_embeddings(
    loader: Loader | Stream, task: ContrastiveTask | ClassificationTask, tower: Callable[[], str]
) -> None:
    """Refuses stored embeddings that are not what the image tower would make."""
    if isinstance(loader, Stream) or loader.stored is None:
        return
    if not isinstance(task, ContrastiveTask):
        raise UserError("a classifier is trained on pictures; leave out --data.embeddings")
    if "image_tower" in task.trained:
        raise UserError("an image tower that is trained needs pictures; lock it, or leave out --data.embeddings")
    loader.stored.check_tower(tower())


def _write_run_files(config: ExperimentConfig, tokenizer: Tokenizer | None) -> None:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    if config.pretrained is not None:
        # The run will be opened from other working directories.
        pretrained = dataclasses.replace(config.pretrained, run=config.pretrained.run.resolve())
        config = dataclasses.replace(config, pretrained=pretrained)
    config = dataclasses.replace(config, task=runs.with_absolute_weights(config.task))
    experiment.save(config, runs.config_path(config.run_dir))
    if tokenizer is not None:
        runs.tokenizer_path(config.run_dir).write_bytes(tokenizer.model_bytes)
