"""Fits a head that has nothing to train to the stored embeddings of a finished model."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import message
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.errors import UserError
from lit_het.heads.base import Pairs
from lit_het.models import origins
from lit_het.models.calibration.saved import read_calibration
from lit_het.models.tower_fingerprints import tower_fingerprint
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.training.checks import check_embeddings, check_run_dir
from lit_het.training.directory import checkpoint_dir, config_path
from lit_het.training.files import write_run_files
from lit_het.training.initialization import initial_params
from lit_het.training.lock import locked
from lit_het.training.train import calibrate_held_out, identity, open_data
from lit_het.weights.native import checksums
from lit_het.weights.native.folders import complete_steps
from lit_het.weights.native.saving import save_imported


def fit_unless_done(config: ExperimentConfig) -> None:
    """Fits the head of a run and calibrates it; does nothing where that is done."""
    check_fitted(config)
    # An interrupted pass starts again: the embeddings, which take the time, are stored.
    if config_path(config.run_dir).exists():
        check_run_dir(config, resume=True)
    with locked(config.run_dir, message):
        is_done = config_path(config.run_dir).exists() and complete_steps(checkpoint_dir(config.run_dir))
        if not is_done:
            _fit(config)
    if config.calibration is not None and read_calibration(config.run_dir, 0) is None:
        calibrate_held_out(config, 0, open_data(config, None, allow_commands=False)[1])
    if is_done:
        message(f"{config.run_dir} is finished")


def check_fitted(config: ExperimentConfig) -> None:
    """Checks that a head can be fitted, before anything is embedded."""
    for field in ("embeddings", "text_embeddings"):
        if getattr(config.data, field) is None:
            flag = field.replace("_", "-")
            raise UserError(f"a posterior is fitted to stored embeddings; leave out --data.{flag} None")
    if jax.process_count() > 1:
        raise UserError("a posterior is fitted by a single process; start one")


def _fit(config: ExperimentConfig) -> None:
    """Writes the run with the head's fitted parameters."""
    mesh, tokenizer = config.mesh.build(), config.tokenizer.build() if config.tokenizer else None
    loader, _ = open_data(config, tokenizer, allow_commands=False)
    assert isinstance(loader, Loader)
    config.task.check_data(config, loader, tokenizer)
    task: Any = config.task.build()  # of an image-text model, as its head says
    frozen, head = initial_params(config, task, mesh)
    check_embeddings(
        loader, task, lambda: tower_fingerprint(config, frozen), lambda: tower_fingerprint(config, frozen, tokenizer)
    )
    pairs = Pairs(
        count=loader.num_samples,
        batches=functools.partial(_batches, loader, task),
        hessian=task.config.loss.hessian,
        towers={"image": task.config.image_tower, "text": task.config.text_tower},
        params=frozen,
        mesh=mesh,
    )
    fitted = task.model({**frozen, **head}).head.fitted(pairs)
    write_run_files(config, tokenizer)
    info = {"position": 0, **identity(loader, checksums.digest(frozen), origins.of_start(config, frozen))}
    save_imported(checkpoint_dir(config.run_dir), {"head": {**head["head"], **fitted}}, info)


def _batches(loader: Loader, task: ContrastiveTask, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the embeddings of both sides of all pairs, in the shuffled order of training; the last few are left out.

    A batch of fewer pairs would have fewer candidates, and so another Hessian: it is there only if no batch is filled.
    """
    held: list[tuple[np.ndarray, np.ndarray]] = []
    is_filled = False
    for pairs in _pairs(loader, task):
        held.append(pairs)
        while sum(len(image) for image, _ in held) >= size:
            image, text = (np.concatenate(side) for side in zip(*held, strict=True))
            yield image[:size], text[:size]
            held, is_filled = [(image[size:], text[size:])], True
    if is_filled:
        return
    image, text = (np.concatenate(side) for side in zip(*held, strict=True))
    if len(image) < 2:
        raise UserError(f"fewer than two pairs of {loader.config.shards[0]} can be read; a posterior needs two or more")
    yield image, text


def _pairs(loader: Loader, task: ContrastiveTask) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields embeddings of images and texts, once of every pair that can be read."""
    rows, left = loader.config.batch_size, loader.num_samples
    with contextlib.closing(loader.batches()) as batches:
        for batch in itertools.islice(batches, -(-left // rows)):
            assert batch.image_embedding is not None
            assert batch.text_embedding is not None
            image = task.features.embedding(jnp.asarray(batch.image_embedding, jnp.float32))
            # The stream is endless: the last batch ends in the next epoch.
            valid = batch.valid[:left]
            yield np.asarray(image)[:left][valid], np.asarray(batch.text_embedding, np.float32)[:left][valid]
            left -= rows
