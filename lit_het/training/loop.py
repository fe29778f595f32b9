"""The training loop: when to step, log, evaluate and save."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import jax

from lit_het.errors import UserError, require_at_least
from lit_het.training.logging import Bar, MetricLog
from lit_het.training.step import TrainStep
from lit_het.types import Batch, Metrics, Params, TrainState


@runtime_checkable
class Saver(Protocol):
    """Where the loop leaves its state."""

    def save(self, state: TrainState) -> None:
        """Saves the state after ``state.step`` updates."""
        ...


@dataclasses.dataclass(frozen=True)
class Cadence:
    """How often things happen, in steps.

    Attributes:
        log_steps: between two records; the host waits for the device only then.
        save_steps: between two checkpoints; the last step always saves. Each follows a record of its own, so that no
            checkpoint holds a loss that nobody looked at, and a resumed run averages over the same steps.
        evaluate_steps: between two evaluations; 0 evaluates only after the last step.
    """

    log_steps: int = 50
    save_steps: int = 1000
    evaluate_steps: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, self, "log_steps", "save_steps")
        require_at_least(0, self, "evaluate_steps")


def train(
    step: TrainStep,
    state: TrainState,
    locked: Params,
    batches: Iterator[Batch],
    *,
    num_steps: int,
    cadence: Cadence,
    log: MetricLog,
    saver: Saver,
    evaluate: Callable[[Params], Mapping[str, float]],
    description: str,
) -> TrainState:
    """Trains from ``state.step`` to ``num_steps`` and returns the last state.

    Args:
        step: the compiled step; donates the state.
        state: where to start.
        locked: parameters that never change.
        batches: global batches, beginning with the one of ``state.step``.
        num_steps: optimizer updates of the whole run.
        cadence: how often to log, save and evaluate.
        log: where metrics go.
        saver: where checkpoints go.
        evaluate: trainable parameters to metrics, run after the last step and every ``evaluate_steps``.
        description: shown beside the progress bar.

    Raises:
        UserError: the loss or its gradient is not finite.
    """
    start = int(state.step)
    pending: list[Metrics] = []
    began = time.monotonic()
    with Bar(description, num_steps, "steps", start=start) as bar:
        for done in range(start + 1, num_steps + 1):
            state, metrics = step(state, locked, next(batches))
            pending.append(metrics)
            note = ""
            saves = done % cadence.save_steps == 0 or done == num_steps
            if saves or done % cadence.log_steps == 0:
                record = _average(pending)
                record["train/steps_per_second"] = len(pending) / (time.monotonic() - began)
                log.write(done, record)
                note = f"loss {record['train/loss']:.3f}"
                _check_finite(record, done)
                pending, began = [], time.monotonic()
            if saves:
                saver.save(state)
            if done == num_steps or (cadence.evaluate_steps and done % cadence.evaluate_steps == 0):
                with bar.paused():
                    evaluation = evaluate(state.params)
                if evaluation:
                    log.write(done, evaluation)
                began = time.monotonic()
            bar.advance(1, note)
    return state


def _check_finite(record: Mapping[str, float], done: int) -> None:
    for name in ("loss", "gradient_norm"):
        value = record[f"train/{name}"]
        if not math.isfinite(value):
            raise UserError(
                f"the {name.replace('_', ' ')} is {value} at step {done}; start again in another --run-dir with a "
                "lower --schedule.learning-rate"
            )


def _average(pending: list[Metrics]) -> dict[str, float]:
    fetched = jax.device_get(pending)
    return {f"train/{name}": float(sum(m[name] for m in fetched) / len(fetched)) for name in fetched[0]}
