"""The evaluations of a training: printed, logged, and saved in the run's folder for reports."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from lit_het import parameters
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import message
from lit_het.data_pipelines.texts.tokenizers import Tokenizer
from lit_het.errors import UserError
from lit_het.eval.evaluation import Drawing, Evaluation, line, opened_evaluations, write_record
from lit_het.eval.sets.open_sets import Sets
from lit_het.eval.suite import EvaluationConfig
from lit_het.models.predictor import Programs
from lit_het.tasks.base import AnyTask
from lit_het.training.preemption import Preempted
from lit_het.types import EvaluatedModel, Params


def evaluated_in_training(
    config: ExperimentConfig,
    task: AnyTask,
    locked: Params,
    trainable: Params,
    tokenizer: Tokenizer | None,
    mesh: Mesh,
    tower: Callable[[], str],
    num_steps: int,
) -> Callable[[Params, int], Mapping[str, float]]:
    """Opens and checks the evaluation sets; returns the function that evaluates trainable parameters after a step.

    It prints and saves each evaluation, and returns the metrics of all.
    """
    stored = any(evaluation.data.embeddings is not None for evaluation in config.evaluations)
    if stored and "image_tower" in task.trained:
        raise UserError("evaluations cannot use `embeddings` if the image tower is trained; leave them out")
    # Evaluated as it is when it is opened: without tuning of towers.
    plain = config.task.untuned()
    whole = (lambda params: params) if plain is config.task else jax.jit(config.task.untuned_params)
    programs = Programs(plain.build(), mesh, tokenizer, config.data.prompts)
    versions = itertools.count()

    def model_of(trainable: Params) -> EvaluatedModel:
        # The features of a locked tower do not change and are cached under one version.
        version = f"version {next(versions)}" if "image_tower" in task.trained else tower() if stored else "locked"
        return programs.model(whole(parameters.merge(locked, trainable)), version)

    data = config.data
    sets = Sets(data.image_size, data.preprocessing, tower, data.source, tokenizer)
    # An error shows at the start, not at the first evaluation.
    evaluations = opened_evaluations(config.evaluations, sets, model_of(trainable))

    def evaluate(trainable: Params, step: int) -> Mapping[str, float]:
        model, metrics = model_of(trainable), {}
        # Not on the mesh of training: beside the model, a process computes what it needs on its own devices.
        with jax.set_mesh(None):
            for evaluation, found in evaluations(model):
                metrics |= found.metrics()
                message(f"step {step}: {line(found)}")
                _save(found, evaluation, config.run_dir, step, draws=step == num_steps)
        return metrics

    return evaluate


def _save(found: Evaluation, evaluation: EvaluationConfig, run_dir: Path, step: int, *, draws: bool) -> None:
    # Drawings read images and run the model, and a report shows only the last ones.
    if not draws:
        found = dataclasses.replace(found, draw=Drawing)
    try:
        write_record(found, run_dir, step, experiment.to_dict(evaluation))
    except Preempted:
        raise
    except UserError as error:
        message(f"{error}; the training continues, and metrics.jsonl has the figures")
