"""The loop: when it logs, saves, evaluates and stops, and that a resumed run is the uninterrupted one."""

import dataclasses
import itertools
import os
import re
import signal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.training import isotropic_noise, loop, preemption
from lit_het.training.cadence import Cadence
from lit_het.training.isotropic_noise import IsotropicNoise
from lit_het.training.log import MetricLog, read_metrics
from lit_het.training.loop import NonFinite
from lit_het.training.preemption import Preempted, watched
from lit_het.types import Batch, Metrics, TrainState
from lit_het.weights.native.saving import Checkpoints, checksums
from tests.training.tiny_run import STEPS, Run


def fake_step(losses, norms, skips=False):
    """A step whose loss at update i is ``losses[i]`` and whose gradient has the norm ``norms[i]``."""

    def step(state, locked, batch):
        loss = jnp.float32(losses[int(state.step)])
        metrics = {"loss": loss, "gradient_norm": jnp.float32(norms[int(state.step)]), "update_norm": jnp.float32(1.0)}
        if skips:
            metrics["skipped"] = ~jnp.isfinite(loss)
        return dataclasses.replace(state, step=state.step + 1), metrics

    return step


@dataclasses.dataclass
class Recorder:
    """Keeps the steps at which the loop saves and evaluates."""

    saved: list = dataclasses.field(default_factory=list)
    evaluated: int = 0

    def save(self, state):
        self.saved.append(int(state.step))

    def finish(self):
        pass

    def evaluate(self, params, step):
        assert params == {"average": 0.0}
        self.evaluated += 1
        return {"zero_shot/x/top1": 0.5}


def train(directory, losses, cadence, *, start=0, norms=None, recorder=None, **options):
    recorder, log = recorder or Recorder(), MetricLog(directory, first_step=start)
    state = TrainState(jnp.int32(start), {}, {}, {"average": 0.0})
    batches = itertools.repeat(Batch(valid=np.ones(1, bool)))
    try:
        last = loop.train(
            fake_step(losses, norms or [1.0] * len(losses), options.pop("skips", False)),
            state,
            {},
            batches,
            num_steps=len(losses),
            cadence=cadence,
            log=log,
            saver=recorder,
            evaluate=recorder.evaluate,
            description="test",
            **options,
        )
    finally:
        log.close()
    assert int(last.step) == len(losses)
    return recorder, read_metrics(directory / "metrics.jsonl")


def test_records_average_the_steps_since_the_last_one(tmp_path):
    cadence = Cadence(log_steps=2, save_steps=100)
    recorder, records = train(tmp_path, [1.0, 3.0, 5.0, 6.0, 10.0], cadence)
    trained = [(r["step"], r["train/loss"]) for r in records if "train/loss" in r]
    assert trained == [(2, 2.0), (4, 5.5), (5, 10.0)]
    assert all(r["train/steps_per_second"] > 0 for r in records if "train/loss" in r)
    assert recorder.saved == [5]


def test_saves_follow_their_own_cadence_and_each_has_a_record(tmp_path):
    recorder, records = train(tmp_path, [1.0] * 7, Cadence(log_steps=4, save_steps=3))
    assert recorder.saved == [3, 6, 7]
    assert [r["step"] for r in records if "train/loss" in r] == [3, 4, 6, 7]


@pytest.mark.parametrize(("every", "expected"), [(0, [5]), (2, [2, 4, 5])])
def test_evaluations_run_on_their_cadence_and_at_the_end(tmp_path, every, expected):
    cadence, seen = Cadence(log_steps=10, save_steps=10, evaluate_steps=every), []
    recorder, records = train(tmp_path, [1.0] * 5, cadence, watch=lambda *pair: seen.append(pair))
    assert [r["step"] for r in records if r.get("zero_shot/x/top1") == 0.5] == expected
    assert recorder.evaluated == len(expected)
    # Those who watch could give up at each but the last.
    assert seen == [(step, {"zero_shot/x/top1": 0.5}) for step in expected[:-1]]


def test_a_finished_run_does_nothing_more_than_repeat_an_interrupted_evaluation(tmp_path):
    recorder, records = train(tmp_path, [1.0] * 3, Cadence(1, 1), start=3)
    assert (recorder.saved, recorder.evaluated, records) == ([], 0, [])
    recorder, records = train(tmp_path, [1.0] * 3, Cadence(1, 1), start=3, evaluate_first=True)
    assert [r["step"] for r in records] == [3]
    assert (recorder.saved, recorder.evaluated) == ([], 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(tmp_path, bad):
    with pytest.raises(NonFinite) as error:
        train(tmp_path, [1.0, 1.0, bad, 1.0, 1.0, 1.0], Cadence(log_steps=100, save_steps=2))
    assert re.fullmatch(
        r"the loss is (nan|inf|-inf) at step 3; .*run directory.*--schedule.learning-rate", str(error.value)
    )
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [2, 4]
    assert error.value.step == 3


def test_a_gradient_that_is_not_finite_stops_the_run_as_well(tmp_path):
    with pytest.raises(UserError, match="the gradient norm is nan at step 2; start again"):
        train(tmp_path, [1.0] * 3, Cadence(1, 1), norms=[1.0, float("nan"), 1.0])


NAN = float("nan")


def test_skipped_steps_are_counted_and_left_out_of_averages(tmp_path):
    _, records = train(tmp_path, [1.0, NAN, 3.0, NAN, NAN], Cadence(3, 100), skips=True)
    trained = [(r["step"], r.get("train/loss"), r["train/skipped"]) for r in records if "train/skipped" in r]
    assert trained == [(3, 2.0, 1.0), (5, None, 2.0)]


def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path):
    with pytest.raises(UserError, match="not finite in 10 steps up to step 14; start again"):
        train(tmp_path, [NAN] * 3 + [1.0] + [NAN] * 20, Cadence(4, 100), skips=True)


def test_a_save_by_minutes_waits_for_a_record_and_counts_from_the_last_save(tmp_path, monkeypatch):
    minutes, add = [], loop._Pending.add
    monkeypatch.setattr(loop._Pending, "add", lambda pending, metrics: (minutes.append(1), add(pending, metrics)))
    monkeypatch.setattr(loop.time, "monotonic", lambda: 60.0 * len(minutes))  # a step takes a minute
    recorder, _ = train(tmp_path, [1.0] * 14, Cadence(log_steps=2, save_steps=100, save_minutes=5.0))
    assert recorder.saved == [6, 12, 14]


@pytest.mark.parametrize(("field", "nothing"), [("keep", 0), ("keep_steps", 0), ("save_minutes", 0.0)])
def test_a_cadence_of_zero_steps_is_refused(field, nothing):
    with pytest.raises(UserError, match=f"Cadence: {field} = 0"):
        Cadence(**{field: nothing})


class SignalledAt(Recorder):
    """Gets SIGTERM in the evaluation after a step, or while it saves one."""

    def __init__(self, *, saving=None, evaluating=False):
        super().__init__()
        self.saving, self.evaluating = saving, evaluating

    def save(self, state):
        super().save(state)
        if int(state.step) == self.saving:
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluate(self, params, step):
        if self.evaluating:
            os.kill(os.getpid(), signal.SIGTERM)
        preemption.leave_if_due()
        return super().evaluate(params, step)


@pytest.mark.parametrize(
    "recorder", [SignalledAt(saving=2), SignalledAt(evaluating=True)], ids=["while saving", "in an evaluation"]
)
def test_after_sigterm_the_run_saves_and_ends_within_a_step(tmp_path, recorder):
    cadence = Cadence(log_steps=100, save_steps=2, evaluate_steps=3)
    with pytest.raises(Preempted, match="ended by SIGTERM after step 3, which is saved; --resume") as error, watched():
        train(tmp_path, [1.0] * 9, cadence, recorder=recorder)
    assert recorder.saved == [2, 3]
    assert error.value.code == 75
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [2, 3]
    assert recorder.evaluated == 0


def test_sigterm_is_handled_as_before_where_nothing_trains():
    before = signal.getsignal(signal.SIGTERM)
    with watched():
        assert signal.getsignal(signal.SIGTERM) != before
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.is_due()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # a second one ends the process
    assert signal.getsignal(signal.SIGTERM) == before
    assert not preemption.is_due()


def real_run(directory, run, *, first=0, until=STEPS, saves=True):
    """Trains from batch ``first`` to update ``until``, a checkpoint at the end."""
    directory.mkdir(exist_ok=True)
    log = MetricLog(directory, first_step=first)
    with Checkpoints(directory / "checkpoints") as checkpoints:
        if first:
            run.state, info = checkpoints.restore(run.state)
            assert info == {"position": first}

        class Saver:
            def save(self, state):
                checkpoints.save(state, {"position": int(state.step)})

            def finish(self):
                checkpoints.finish()

        state = loop.train(
            run.step,
            run.state,
            run.locked,
            run.batches(first),
            num_steps=until,
            cadence=Cadence(log_steps=1, save_steps=100),
            log=log,
            saver=Saver(),
            evaluate=lambda params, step: {},
            description="test",
        )
    log.close()
    records = read_metrics(directory / "metrics.jsonl")
    return state, [{k: v for k, v in r.items() if "per_second" not in k} for r in records]


def test_three_steps_saved_and_restored_and_three_more_are_six_steps_bit_by_bit(tmp_path):
    expected, records = real_run(tmp_path / "whole", Run())
    real_run(tmp_path, Run(), until=3)
    actual, resumed = real_run(tmp_path, Run(), first=3)
    assert resumed == records
    assert checksums.digest(actual.params) == checksums.digest(expected.params)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        opened, _ = checkpoints.restore_params(actual.params)
        # It holds no locked parameter.
        like = {"image_tower": jax.tree.map(np.asarray, Run().locked["image_tower"])}
        with pytest.raises(UserError, match=r"image_tower/.* is missing in the checkpoint"):
            checkpoints.restore_params(like)
    assert checksums.digest(opened) == checksums.digest(expected.average)
    assert checksums.digest(opened) != checksums.digest(expected.params)


# The warning when noise becomes isotropic.


def record(norm, alignment):
    return {"train/image_noise_norm": norm, "train/image_noise_alignment": alignment, "train/loss": 1.0}


@pytest.mark.parametrize(
    ("last", "warns"),
    [(record(0.3, 1.0), True), (record(0.3, 2.0), False), (record(0.15, 1.0), False), ({"train/loss": 1.0}, False)],
    ids=["grown alike", "grown along the keys", "hardly grown", "no noise"],
)
def test_growth_in_all_directions_is_reported_once(monkeypatch, last, warns):
    lines = []
    monkeypatch.setattr(isotropic_noise, "message", lines.append)
    watch = IsotropicNoise()
    for one in (record(0.1, 1.0), last, last):
        watch.check(one)
    assert len(lines) == warns
    if warns:
        assert "the noise of images has grown from 0.1 to 0.3 alike in all directions" in lines[0]
        assert "--task.head.num-samples" in lines[0]


@pytest.mark.parametrize(("norm", "warns"), [(0.3, True), (0.15, False)])
def test_a_resumed_run_compares_with_the_noise_before_the_interruption(monkeypatch, tmp_path, norm, warns):
    lines = []
    monkeypatch.setattr(isotropic_noise, "message", lines.append)
    log = MetricLog(tmp_path)
    for number, before in ((1, 0.1), (2, 0.14)):
        log.write(number, record(before, 1.0))
    log.close()

    def step(state, locked, batch):
        names = ("loss", "gradient_norm", "update_norm", "image_noise_norm", "image_noise_alignment")
        metrics: Metrics = dict(zip(names, map(jnp.float32, (1.0, 1.0, 1.0, norm, 1.0)), strict=True))
        return dataclasses.replace(state, step=state.step + 1), metrics

    log, recorder = MetricLog(tmp_path, first_step=2), Recorder()
    loop.train(
        step,
        TrainState(jnp.int32(2), {}, {}, {"average": 0.0}),
        {},
        itertools.repeat(Batch(valid=np.ones(1, bool))),
        num_steps=4,
        cadence=Cadence(log_steps=1),
        log=log,
        saver=recorder,
        evaluate=recorder.evaluate,
        description="resumed",
    )
    log.close()
    assert [line for line in lines if "has grown from 0.1 to" in line] == lines
    assert len(lines) == warns


def test_the_progress_bar_counts_steps_that_the_devices_have_finished(tmp_path):
    log = MetricLog(tmp_path, first_step=0)
    pending = loop._Pending(log)
    log.close()
    arrays = (mock.Mock(**{"is_ready.return_value": is_ready}) for is_ready in (True, False, True))
    pending._unfinished.extend(arrays)
    assert pending.finished() == 1
    assert pending.finished() == 0  # the third is not asked before the second
    assert pending.finished(wait=True) == 2
