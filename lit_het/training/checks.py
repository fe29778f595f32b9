"""Checks of a configuration, its data and its run directory before training starts."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import message
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.errors import UserError
from lit_het.eval.sets.folders import overlaps
from lit_het.tasks.base import AnyTask
from lit_het.training.directory import config_path, load_config

if TYPE_CHECKING:
    from lit_het.data_pipelines.shards.pipeline import AnyStream

# Fields that a resumed run may change. Apart from rounding and the grouping of tokens for experts, they change neither
# the model nor the sequence of batches.
CHANGEABLE_FIELDS = (
    "run_dir",
    "mesh",
    "cadence",
    "on_nonfinite",
    "evaluations",
    "log",
    "data.threads",
    "data.prefetch_batches",
    "data.max_bad_fraction",
    "data.slow_read_seconds",
    "data.stuck_read_seconds",
    "data.embeddings",
    "data.text_embeddings",
    "pretrained.run",
    "task.oracle_run",
    "task.image_tower.weights",
    "task.text_tower.weights",
    "task.decoder.encoder.remat",
    "task.decoder.encoder.unrolled",
    "task.image_tower.encoder.remat",
    "task.image_tower.encoder.unrolled",
    "task.text_tower.encoder.remat",
    "task.text_tower.encoder.unrolled",
    "task.loss.form",
    "task.loss.block_size",
    "task.microbatches",
)


def check_run_dir(config: ExperimentConfig, resume: bool, flag: str = "--run-dir") -> None:
    """Checks that training does not overwrite a run, and that a resumed run has the same configuration.

    Args:
        config: of the run.
        resume: whether it is continued.
        flag: that names its directory.
    """
    path = config_path(config.run_dir)
    if config.run_dir.exists() and not config.run_dir.is_dir():
        raise UserError(f"{config.run_dir} is a file; choose another {flag}")
    if not path.exists():
        if resume:
            raise UserError(f"{config.run_dir} contains no run to resume; leave out --resume to start one")
        return
    if not resume:
        raise UserError(f"{config.run_dir} already holds a run; continue it with --resume or choose another {flag}")
    changed = {
        field: values
        for field, values in experiment.differences(load_config(config.run_dir), config).items()
        if not field.startswith(CHANGEABLE_FIELDS)
    }
    if changed:
        field, (before, now) = next(iter(changed.items()))
        more = f" (and {', '.join(list(changed)[1:])})" if len(changed) > 1 else ""
        raise UserError(
            f"cannot resume {config.run_dir}: {field} was {before} and is now {now}{more}; "
            f"use the same values or another {flag}"
        )


def with_saved_rule(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration of a resumed run with the rule by which the run holds samples out.

    The default of earlier versions was another one, and a run must not train on what it held out.
    """
    if not config_path(config.run_dir).is_file():
        return config
    return dataclasses.replace(config, calibration_by=load_config(config.run_dir).calibration_by)


def check_is_trained(config: ExperimentConfig) -> None:
    """Checks that the head learns by gradients."""
    if config.task.head is not None and config.task.head.is_fitted:
        raise UserError(
            "this --task.head has nothing to train: train with --task.head deterministic, then fit this head with "
            "lit-het add-noise --model RUN --task.head ..."
        )


def check_source(config: ExperimentConfig) -> None:
    """Raises a `UserError` if a model that translates has no texts to translate, or a model of images has some."""
    translates = config.task.reads == "text"
    if translates and config.data.source is None:
        raise UserError("a translation model needs texts to translate: set --data.source, such as json/FIELD")
    if not translates and config.data.source is not None:
        raise UserError("--data.source is the text that a translation model reads; leave it out")


def report_copies(config: ExperimentConfig, num_samples: int) -> None:
    """Warns if a batch is larger than the training data; errors are those of `TaskOptions.check_copies`."""
    size = config.data.batch_size
    if consequence := config.task.check_copies(size, num_samples):
        message(
            f"a batch of {size:,} holds copies of the {num_samples:,} samples: {consequence}; --data.batch-size "
            f"{num_samples} or less has none"
        )


def report_reused(config: ExperimentConfig) -> None:
    """Warns if images by which τ is trained are evaluated, too."""
    for one in config.data.mixture:
        for evaluation in config.evaluations if one.held_out else ():
            if overlaps(evaluation.data, one.shards, one.portion):
                message(
                    f"{evaluation.data.name} has images that are held out to train τ ({one.shards[0]}): its figures "
                    "are not held out; evaluate other images"
                )


def check_embeddings(
    loader: "Loader | AnyStream", task: AnyTask, tower: Callable[[], str], text_tower: Callable[[], str]
) -> None:
    """Checks that stored embeddings are those of the locked towers, given by their fingerprints."""
    if not isinstance(loader, Loader):
        return
    sides = (
        ("image", "images", "embeddings", loader.stored, tower),
        ("text", "captions", "text-embeddings", loader.beside.get("text_embedding"), text_tower),
    )
    for side, inputs, flag, stored, fingerprint in sides:
        if stored is None:
            continue
        if f"{side}_tower" not in task.config.towers:
            raise UserError(f"the model is trained on {inputs}; leave out --data.{flag}")
        if f"{side}_tower" in task.trained:
            raise UserError(f"a trainable {side} tower needs {inputs}; lock it, or leave out --data.{flag}")
        task.config.check_stored(stored)
        stored.check_tower(fingerprint())
    read = {"text_embedding"}.union(*(objective.inputs for objective in task.config.objectives.values()))
    for field, stored in loader.beside.items():
        if field not in read:
            raise UserError(
                f"no objective of the task reads {stored.address}: give it a weight, or leave the folder out"
            )
