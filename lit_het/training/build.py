"""A run's optimizer and step, put together from its configuration."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import optax

from lit_het.configs.experiment import ExperimentConfig
from lit_het.objectives.base import with_starts
from lit_het.tasks.base import AnyTask
from lit_het.tasks.patch_sizes import at_patch_sizes
from lit_het.training.durations import RunLength
from lit_het.training.optimizers import signal_to_noise
from lit_het.training.stacked_members import mean_of_each, of_each
from lit_het.training.step import (
    TaskLoss,
    TrainStep,
    ValueAndGrad,
    advanced,
    averaged,
    drawn,
    make_step,
    measuring_covariances,
    of_trainable,
    plain_gradient,
    skipping_nonfinite,
)


class Built(NamedTuple):
    """What a training consists of.

    Attributes:
        task: the task.
        optimizer: the optimizer.
        losses: of all parameters, at each patch size; a step draws one.
        gradients: of these losses by the trainable parameters.
        step: the step.
    """

    task: AnyTask
    optimizer: optax.GradientTransformationExtraArgs
    losses: Sequence[TaskLoss]
    gradients: Sequence[ValueAndGrad]
    step: TrainStep


def build(config: ExperimentConfig, run: RunLength, *, at_end: bool = False) -> Built:
    """Returns the task, the optimizer and the step of a run.

    Args:
        config: of the run.
        run: its length.
        at_end: whether all objectives have begun at the first step, as for plans.
    """
    task = with_starts(config.task, None if at_end else run).build()
    task.check_trained()
    optimizer = config.optimizer.build(
        config.schedule, run, task.layers_above, task.learning_rates, late=task.late_parts
    )
    measure = functools.partial(signal_to_noise, config.optimizer)
    if task.num_members > 1:
        optimizer, measure = of_each(optimizer), mean_of_each(measure)
    tower = config.task.image_tower
    losses = [task.loss] if tower is None else at_patch_sizes(task.loss, tower)
    gradients = [of_trainable(loss, config.gradient_of(run) or plain_gradient) for loss in losses]
    step = make_step(drawn(gradients), optimizer, config.seed)
    step = advanced(step, task.advanced, config.seed)
    step = measuring_covariances(step, measure)
    if config.average_decay is not None:
        step = averaged(step, config.average_decay)
    if config.on_nonfinite == "skip":
        step = skipping_nonfinite(step)
    return Built(task, optimizer, losses, gradients, step)
