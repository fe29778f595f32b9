"""The training loop: when to step, log, evaluate, save and stop."""

import collections
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from lit_het import distributed
from lit_het.console import Bar
from lit_het.errors import UserError
from lit_het.training import preemption
from lit_het.training.cadence import Cadence
from lit_het.training.isotropic_noise import IsotropicNoise
from lit_het.training.log import MetricLog, read_metrics
from lit_het.training.preemption import Preempted
from lit_het.training.step import MUST_BE_FINITE, TrainStep
from lit_het.types import Batch, Metrics, Params, TrainState

# This many consecutive skipped steps end the run: then the cause is not a single batch.
MAX_SKIPPED = 10


@runtime_checkable
class Saver(Protocol):
    """Saves checkpoints."""

    def save(self, state: TrainState) -> None:
        """Saves the state after ``state.step`` updates."""
        ...

    def finish(self) -> None:
        """Waits for the last save, and raises a `UserError` if it has failed."""
        ...


class NonFinite(UserError):
    """The loss, its gradient or the update is not finite.

    Attributes:
        step: number of the step, counted from 1.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


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
    evaluate: Callable[[Params, int], Mapping[str, float]],
    description: str,
    evaluate_first: bool = False,
    watch: Callable[[int, Mapping[str, float]], None] | None = None,
) -> TrainState:
    """Trains from ``state.step`` to ``num_steps`` and returns the last state.

    Args:
        step: the compiled step; donates the state.
        state: initial state.
        locked: locked parameters.
        batches: global batches, beginning with that of ``state.step``.
        num_steps: optimizer updates of the whole run.
        cadence: how often to log, save and evaluate.
        log: receives metrics.
        saver: receives checkpoints.
        evaluate: trainable parameters (their average, if there is one) and the number of steps to metrics; called after
            the last step and every ``evaluate_steps``.
        description: label of the progress bar.
        evaluate_first: whether to evaluate before the first step, because this evaluation was interrupted.
        watch: called with the step and the metrics of every evaluation but the last; it ends the run by raising.

    Raises:
        NonFinite: the loss or its gradient is not finite, or too many consecutive steps were skipped.
        Preempted: SIGTERM was received; the last step is saved.
    """
    start = int(state.step)
    pending, clock = _Pending(log), _Clock(cadence.save_minutes)
    with Bar(description, num_steps, "steps", start=start) as bar:

        def measure(done: int) -> None:
            with bar.paused():
                evaluation = evaluate(state.evaluated, done)
            if evaluation:
                log.write(done, evaluation)
            if watch is not None and done < num_steps:
                watch(done, evaluation)
            pending.restart()

        def keep(done: int) -> str:
            note = pending.write(done)
            saver.save(state)
            clock.restart()
            return note

        def leave(done: int) -> Preempted:
            saver.finish()
            return Preempted(f"ended by SIGTERM after step {done}, which is saved; --resume continues from there")

        if evaluate_first:
            try:
                measure(start)
            except Preempted:
                raise leave(start) from None
        for done in range(start + 1, num_steps + 1):
            state, metrics = step(state, locked, next(batches))
            # Steps are dispatched without waiting for their results, so that the host prepares the next batch
            # meanwhile.
            pending.add(metrics)
            # Checked once per step, at the same place in every process: the count of checks synchronises them.
            ends, note, logs = preemption.is_due(), "", done % cadence.log_steps == 0
            if logs:
                note = pending.write(done)
            saves = ends or done == num_steps or done % cadence.save_steps == 0 or (logs and clock.is_due())
            if saves:
                note = keep(done) or note
            if ends:
                raise leave(done)
            if cadence.evaluates_after(done, num_steps):
                try:
                    measure(done)
                except Preempted:
                    # The evaluation was interrupted, not the training: this step is saved before leaving, and a resumed
                    # run repeats the evaluation.
                    if not saves:
                        keep(done)
                    raise leave(done) from None
            bar.advance(pending.finished(), note)
        bar.advance(pending.finished(wait=True))
    return state


class _Clock:
    """Returns whether minutes have passed; the answer is the same on all processes."""

    def __init__(self, minutes: float | None):
        self._minutes = minutes
        self.restart()

    def restart(self) -> None:
        self._began = time.monotonic()

    def is_due(self) -> bool:
        if self._minutes is None:
            return False
        passed = time.monotonic() - self._began >= 60 * self._minutes
        # The clock of process 0: a save is collective, so all processes must start it at the same step.
        return bool(distributed.gather_rows(np.array([passed]))[0])


class _Pending:
    """Metrics of the steps since the last record, on the devices: fetching them would make the host wait."""

    def __init__(self, log: MetricLog):
        self._log = log
        self._skipped = 0  # in a row
        self._isotropic = IsotropicNoise(read_metrics(log.path))
        self._metrics: list[Metrics] = []
        # One array of each step that the devices have not finished yet, as far as it is known.
        self._unfinished = collections.deque[Any]()
        self.restart()

    def restart(self) -> None:
        """Restarts the clock, after a record or an evaluation."""
        self._began = time.monotonic()

    def add(self, metrics: Metrics) -> None:
        self._metrics.append(metrics)
        self._unfinished.append(metrics["loss"])

    def finished(self, *, wait: bool = False) -> int:
        """Returns how many steps were finished since the last call; with ``wait`` all that are left are."""
        count = 0
        while self._unfinished and (wait or self._unfinished[0].is_ready()):
            self._unfinished.popleft().block_until_ready()
            count += 1
        return count

    def write(self, done: int) -> str:
        """Writes a record of the steps up to ``done``, if there are any; returns a note for the progress bar."""
        if not self._metrics:
            return ""
        # Waits for the devices.
        fetched = jax.device_get(self._metrics)
        used = [metrics for metrics in fetched if not metrics.get("skipped")]
        names = [name for name in fetched[0] if name != "skipped"]
        record = {f"train/{name}": float(sum(m[name] for m in used) / len(used)) for name in names if used}
        if "skipped" in fetched[0]:
            record["train/skipped"] = float(len(fetched) - len(used))
        record["train/steps_per_second"] = len(fetched) / (time.monotonic() - self._began)
        # Written before the check below: the record of a diverged run shows how it diverged.
        self._log.write(done, record)
        self._isotropic.check(record)
        self._metrics = []
        self.restart()
        for number, metrics in enumerate(fetched, done - len(fetched) + 1):
            self._check(metrics, number)
        return f"loss {record['train/loss']:.3f}" if used else "skipped"

    def _check(self, metrics: Mapping[str, Any], step: int) -> None:
        self._skipped = self._skipped + 1 if metrics.get("skipped") else 0
        if self._skipped == MAX_SKIPPED:
            problem = f"the loss, its gradient or the update was not finite in {MAX_SKIPPED} steps up to step {step}"
        elif self._skipped or all(math.isfinite(metrics[name]) for name in MUST_BE_FINITE):
            return
        else:
            name = next(name for name in MUST_BE_FINITE if not math.isfinite(metrics[name]))
            problem = f"the {name.replace('_', ' ')} is {float(metrics[name])} at step {step}"
        raise NonFinite(f"{problem}; start again in another run directory with a lower --schedule.learning-rate", step)
