"""One training step as a pure function."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from lit_het import parameters
from lit_het.random import Keys, keys_at
from lit_het.tasks.base import DistillingTask, Gradient, Loss, LossAndGradient, Task
from lit_het.types import Batch, Metrics, Params, TrainState

TrainStep = Callable[[TrainState, Params, Batch], tuple[TrainState, Metrics]]

_COVARIANCES = r"head/(\w+_)?covariance/.*"


def initial_state(params: Params, optimizer: optax.GradientTransformation, *, averages: bool = False) -> TrainState:
    """Returns the state before the first step; ``params`` are the trainable parameters, where averages start."""
    # A copy, as a donated buffer cannot be an input twice.
    average = jax.tree.map(jnp.copy, params) if averages else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), average)


# Metrics that reveal a failed step, in the order in which a value that is not finite spreads.
MUST_BE_FINITE = ("loss", "gradient_norm", "update_norm")


def _simple_training(loss: Loss, params: Params, batch: Batch, keys: Keys, step: Int[Array, ""]) -> LossAndGradient:
    """Returns the loss and its gradient by all parameters, a temperature as well (HET-XL Sec. 4.1)."""
    return jax.value_and_grad(loss, has_aux=True)(params, batch, keys)


def make_train_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    seed: int,
    average_decay: float | None = None,
    *,
    gradient_of: Gradient | None = None,
    distilled_from: int | None = None,
    skips_nonfinite: bool = False,
    signal_to_noise: Callable[[Any, str], Array | None] | None = None,
    losses: Sequence[Loss] = (),
) -> TrainStep:
    """Returns ``train_step(state, locked, batch) -> (state, metrics)``.

    Locked parameters are a separate argument: they are not differentiated, have no optimizer state, and are not part
    of the state, which is donated and saved.

    Args:
        task: defines the loss.
        optimizer: updates the trainable parameters.
        seed: seed of all random keys.
        average_decay: decay of the moving average of parameters; None for no average.
        gradient_of: the gradient by the trainable parameters, such as that of a `TemperatureGradient`; None for that of
            the loss.
        distilled_from: the step from which the task's `distillation_loss` is added, whose teacher is the average;
            None for never.
        skips_nonfinite: whether a step with a value in `MUST_BE_FINITE` that is not finite changes only the step
            number; the metric ``skipped`` reports it.
        signal_to_noise: see `lit_het.optimizers.Optimizer`; for a metric of the gradient of noise covariances.
        losses: one of them is drawn in each step, in place of the task's; empty for that of the task.
    """
    choices = tuple(losses) or (task.loss,)

    def train_step(state: TrainState, locked: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        keys = keys_at(seed, state.step)

        def loss(chosen: Loss, trainable: Params, batch: Batch, keys: Keys) -> tuple[Any, Metrics]:
            # Differentiated with respect to ``trainable`` only: the backward pass never enters a locked tower.
            params = parameters.merge(locked, trainable)
            value, metrics = chosen(params, batch, keys)
            if distilled_from is None:
                return value, metrics
            assert isinstance(task, DistillingTask)
            assert state.average is not None
            arguments = params, parameters.merge(locked, state.average), batch, keys
            distillation_loss = functools.partial(task.distillation_loss, *arguments)
            added, found = _computed_if(state.step >= distilled_from, distillation_loss)
            return value + added, metrics | found

        # The gradient is inside of the choice: outside, the values saved for it would be those of all losses together.
        gradients = [
            functools.partial(gradient_of or _simple_training, functools.partial(loss, chosen)) for chosen in choices
        ]
        number = jax.random.randint(keys("loss"), (), 0, len(gradients))
        (value, metrics), gradient = jax.lax.switch(number, gradients, state.params, batch, keys, state.step)
        updates: Any
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        if distilled_from is not None:
            # Weight decay would shrink parameters that have no gradient yet.
            has_begun = state.step >= distilled_from
            updates["distillation"] = jax.tree.map(lambda x: x * has_begun, updates["distillation"])
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": value,
            **metrics,
            "gradient_norm": optax.tree.norm(gradient),
            "update_norm": optax.tree.norm(updates),
            "valid": jnp.sum(batch.valid),
        }
        if signal_to_noise is not None and (ratio := signal_to_noise(opt_state, _COVARIANCES)) is not None:
            metrics["covariance_signal_to_noise"] = ratio
        average: Any = None
        if average_decay is not None:
            assert state.average is not None
            # Without bias correction, from the initial parameters on (docs/paper_map.md, 48).
            average = optax.incremental_update(params, state.average, 1 - average_decay)
        after = TrainState(state.step + 1, params, opt_state, average)
        if skips_nonfinite:
            # Decided on the device: fetching the loss in every step would make the host wait for it.
            is_finite = jnp.isfinite(jnp.stack([metrics[name] for name in MUST_BE_FINITE])).all()
            metrics["skipped"] = ~is_finite
            before = dataclasses.replace(state, step=after.step)
            after = jax.tree.map(lambda now, then: jnp.where(is_finite, now, then), after, before)
        return after, metrics

    return train_step


def _computed_if(is_true: Bool[Array, ""], function: Callable[[], Any]) -> Any:
    """Returns what a function returns, or zeros without computing it."""
    shapes = jax.eval_shape(function)
    return jax.lax.cond(is_true, function, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def jit_step(step: TrainStep, state: TrainState) -> Any:
    """Returns the step under `jax.jit`, which donates the state (given by arrays or shapes) and keeps its shardings."""
    # Without out_shardings the compiler may choose others for the new state, and the next call would compile again.
    shardings = jax.tree.map(lambda array: array.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
