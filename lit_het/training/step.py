"""One training step as a pure function, and functions around it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from lit_het import parameters
from lit_het.random import Keys, keys_at
from lit_het.tasks.base import Gradient, Loss, LossAndGradient, Progress
from lit_het.types import Batch, Metrics, Params, TrainState

TrainStep: TypeAlias = Callable[[TrainState, Params, Batch], tuple[TrainState, Metrics]]

ValueAndGrad: TypeAlias = Callable[[TrainState, Params, Batch, Keys], LossAndGradient]
"""Arguments are the state, the locked parameters, a batch and random keys; the gradient is by the trainable ones."""

TaskLoss: TypeAlias = Callable[[Params, Batch, Keys, Progress], Any]
"""`Task.loss`, of all parameters."""

# Metrics that reveal a failed step, in the order in which a value that is not finite spreads.
MUST_BE_FINITE = ("loss", "gradient_norm", "update_norm")

_COVARIANCES = r"head/(\w+_)?covariance/.*"


def initial_state(params: Params, optimizer: optax.GradientTransformation, *, averages: bool = False) -> TrainState:
    """Returns the state before the first step; ``params`` are the trainable parameters, where averages start."""
    # A copy, as a donated buffer cannot be an input twice.
    average = jax.tree.map(jnp.copy, params) if averages else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), average)


def make_step(value_and_grad: ValueAndGrad, optimizer: optax.GradientTransformation, seed: int) -> TrainStep:
    """Returns ``step(state, locked, batch) -> (state, metrics)``.

    Locked parameters are a separate argument: they are not differentiated, have no optimizer state, and are not part
    of the state, which is donated and saved.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def step(state: TrainState, locked: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        keys = keys_at(seed, state.step)
        (loss, metrics), gradient = value_and_grad(state, locked, batch, keys)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params, train_step=state.step)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            **metrics,
            "gradient_norm": optax.tree.norm(gradient),
            "update_norm": optax.tree.norm(updates),
            "valid": jnp.sum(batch.valid),
        }
        return TrainState(state.step + 1, params, opt_state, state.average), metrics

    return step


def plain_gradient(loss: Loss, params: Params, batch: Batch, keys: Keys, step: Int[Array, ""]) -> LossAndGradient:
    """Returns the loss and its gradient by all parameters, a temperature as well (HET-XL Sec. 4.1)."""
    return jax.value_and_grad(loss, has_aux=True)(params, batch, keys)


def of_trainable(task_loss: TaskLoss, gradient: Gradient = plain_gradient) -> ValueAndGrad:
    """Returns the gradient of a task's loss by the trainable parameters alone."""

    def value_and_grad(state: TrainState, locked: Params, batch: Batch, keys: Keys) -> LossAndGradient:
        average = None if state.average is None else parameters.merge(locked, state.average)

        def loss(trainable: Params, batch: Batch, keys: Keys) -> tuple[Any, Metrics]:
            # Differentiated with respect to ``trainable`` only: the backward pass never enters a locked tower.
            return task_loss(parameters.merge(locked, trainable), batch, keys, Progress(state.step, average))

        return gradient(loss, state.params, batch, keys, state.step)

    return value_and_grad


def drawn(choices: Sequence[ValueAndGrad]) -> ValueAndGrad:
    """Returns one of several gradients, drawn in each step."""

    # The gradient is inside of the choice: outside, the values saved for it would be those of all losses together.
    def value_and_grad(state: TrainState, locked: Params, batch: Batch, keys: Keys) -> LossAndGradient:
        number = jax.random.randint(keys("loss"), (), 0, len(choices))
        return jax.lax.switch(number, choices, state, locked, batch, keys)

    return value_and_grad if len(choices) > 1 else choices[0]


def advanced(step: TrainStep, advance: Callable[[Params, Any, Keys], tuple[Params, Metrics]], seed: int) -> TrainStep:
    """Returns the step with the parameters that follow statistics of the batch, see `Task.advanced`."""

    def with_statistics(state: TrainState, locked: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        after, metrics = step(state, locked, batch)
        params, metrics = advance(after.params, metrics, keys_at(seed, state.step))
        return dataclasses.replace(after, params=params), metrics

    return with_statistics


def averaged(step: TrainStep, decay: float) -> TrainStep:
    """Returns the step with the moving average of the parameters."""

    def with_average(state: TrainState, locked: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        after, metrics = step(state, locked, batch)
        assert state.average is not None
        # Without bias correction, from the initial parameters on (docs/paper_map.md, 48).
        average: Any = optax.incremental_update(after.params, state.average, 1 - decay)
        return dataclasses.replace(after, average=average), metrics

    return with_average


def skipping_nonfinite(step: TrainStep) -> TrainStep:
    """Returns a step that changes only its number where a value in `MUST_BE_FINITE` is not: the metric ``skipped``."""

    def skipping(state: TrainState, locked: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        after, metrics = step(state, locked, batch)
        # Decided on the device: fetching the loss in every step would make the host wait for it.
        is_finite = jnp.isfinite(jnp.stack([metrics[name] for name in MUST_BE_FINITE])).all()
        before = dataclasses.replace(state, step=after.step)
        after = jax.tree.map(lambda now, then: jnp.where(is_finite, now, then), after, before)
        return after, metrics | {"skipped": ~is_finite}

    return skipping


def measuring_covariances(step: TrainStep, signal_to_noise: Callable[[Any, str], Array | None]) -> TrainStep:
    """Returns the step with the signal-to-noise ratio of the gradient of noise covariances, where there are some.

    ``signal_to_noise`` is that of `lit_het.training.optimizers.Optimizer`.
    """

    def measuring(state: TrainState, locked: Params, batch: Batch) -> tuple[TrainState, Metrics]:
        after, metrics = step(state, locked, batch)
        ratio = signal_to_noise(after.opt_state, _COVARIANCES)
        return after, metrics if ratio is None else metrics | {"covariance_signal_to_noise": ratio}

    return measuring


def jit_step(step: TrainStep, state: TrainState) -> Any:
    """Returns the step under `jax.jit`, which donates the state (given by arrays or shapes) and keeps its shardings."""
    # Without out_shardings the compiler may choose others for the new state, and the next call would compile again.
    shardings = jax.tree.map(lambda array: array.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
