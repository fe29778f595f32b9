"""One training step as a pure function: how parameters change, never when."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lit_het import parameters
from lit_het.random import keys_at
from lit_het.tasks.base import Task
from lit_het.types import Batch, Metrics, Params, TrainState

TrainStep = Callable[[TrainState, Params, Batch], tuple[TrainState, Metrics]]


def initial_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step; ``params`` are the trainable ones only."""
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))


def make_train_step(task: Task, optimizer: optax.GradientTransformation, seed: int) -> TrainStep:
    """Returns ``train_step(state, locked, batch) -> (state, metrics)``.

    Locked parameters are an argument of their own: they are not differentiated, have no optimizer state and
    are not part of the state that is donated and saved.
    """

    def train_step(state: TrainState, locked: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        def loss(trainable: Params) -> tuple[Any, Metrics]:
            return task.loss(parameters.merge(locked, trainable), batch, keys_at(seed, state.step))

        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": value,
            **metrics,
            "gradient_norm": optax.tree.norm(gradient),
            "valid": jnp.sum(batch.valid),
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step
