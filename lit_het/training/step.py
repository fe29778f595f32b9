"""One training step as a pure function: how parameters change, never when."""

import dataclasses
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


def initial_state(params: Params, optimizer: optax.GradientTransformation, *, averages: bool = False) -> TrainState:
    """Returns the state before the first step; ``params`` are the trainable ones only, from which averages start."""
    # A copy, as both are donated.
    average = jax.tree.map(jnp.copy, params) if averages else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), average)


# Metrics that tell a step that went wrong, in the order in which it does.
MUST_BE_FINITE = ("loss", "gradient_norm", "update_norm")


def make_train_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    seed: int,
    average_decay: float | None = None,
    *,
    skips_nonfinite: bool = False,
) -> TrainStep:
    """Returns ``train_step(state, locked, batch) -> (state, metrics)``; states have an average if there is a decay.

    Locked parameters are an argument of their own: they are not differentiated, have no optimizer state and
    are not part of the state that is donated and saved.

    With ``skips_nonfinite`` a step of which something in `MUST_BE_FINITE` is not counts and changes nothing else;
    whether it was one is the metric ``skipped``.
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
            "update_norm": optax.tree.norm(updates),
            "valid": jnp.sum(batch.valid),
        }
        average: Any = None
        if average_decay is not None:
            assert state.average is not None
            average = optax.incremental_update(params, state.average, 1 - average_decay)
        after = TrainState(state.step + 1, params, opt_state, average)
        if skips_nonfinite:
            is_finite = jnp.isfinite(jnp.stack([metrics[name] for name in MUST_BE_FINITE])).all()
            metrics["skipped"] = ~is_finite
            before = dataclasses.replace(state, step=after.step)
            after = jax.tree.map(lambda now, then: jnp.where(is_finite, now, then), after, before)
        return after, metrics

    return train_step


def jit_step(step: TrainStep, state: TrainState) -> Any:
    """Returns the step under `jax.jit`, for a state (or its shapes) that is donated and keeps its places."""
    places = jax.tree.map(lambda array: array.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(places, None))
