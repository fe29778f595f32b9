"""Schedules against big_vision's recorded learning rates and hand numbers."""

import json
from pathlib import Path

import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.training.durations import Duration, RunLength
from lit_het.training.schedules import Cosine, Linear, ReverseSquareRoot, Schedule

GOLDEN = Path(__file__).parent / "golden"
SCHEDULES = {
    "cosine_w10": Schedule(0.3, Duration(10)),
    # big_vision multiplies the rate by batch size / 256.
    "cosine_scaled": Schedule(0.6, Duration(1, "epochs")),
    "linear_w10_end": Schedule(0.3, Duration(10, "percent"), decay=Linear(1e-5 / 0.3)),
    "rsqrt": Schedule(0.3, Duration(5120, "examples"), decay=ReverseSquareRoot(Duration(20), Duration(15))),
}


def rates(schedule, run, steps):
    built = schedule.build(run)
    return [float(built(step)) for step in steps]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_equal_big_visions(name):
    with np.load(GOLDEN / "lr_schedules.npz") as golden:
        meta = json.loads(golden["__meta__"].tobytes())
        run = RunLength(meta["total_steps"], meta["batch_size"], meta["data_size"])
        assert (run.num_steps, run.batch_size, run.epoch_size, meta["base"]) == (100, 512, 5120, 0.3)
        actual = rates(SCHEDULES[name], run, golden["steps"].tolist())
        np.testing.assert_allclose(actual, golden[name], rtol=1e-5, atol=1e-7)


def test_decays_can_end_above_zero():
    run = RunLength(10, 8)
    assert rates(Schedule(2.0, Duration(0), decay=Cosine(0.25)), run, (0, 5, 10)) == pytest.approx([2.0, 1.25, 0.5])
    assert rates(Schedule(2.0, Duration(0), decay=Linear(0.25)), run, (0, 2, 10)) == pytest.approx([2.0, 1.7, 0.5])


def test_the_reverse_square_root_halves_after_three_timescales_and_needs_no_cool_down():
    schedule = Schedule(2.0, Duration(1), decay=ReverseSquareRoot(Duration(10, "percent")))
    assert rates(schedule, RunLength(100, 8), (1, 31, 81)) == pytest.approx([2.0, 1.0, 2 / 3])


def test_the_reverse_square_root_of_the_original_transformer():
    """Vaswani et al. 2017, Eq. 3, where the timescale is the warm-up and the peak (d warmup)^-0.5."""
    width, warmup, steps = 512, 4000, np.asarray([1, 400, 3999, 4000, 4001, 16_000, 100_000])
    schedule = Schedule((width * warmup) ** -0.5, Duration(warmup), decay=ReverseSquareRoot(Duration(warmup)))
    expected = width**-0.5 * np.minimum(steps**-0.5, steps * warmup**-1.5)
    found = rates(schedule, RunLength(100_001, 800), steps.tolist())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-10)


def test_a_warm_up_may_begin_above_zero():
    """HET-XL App. N.1: from 1e-5 to 1e-3 in 10,000 steps."""
    schedule = Schedule(1e-3, Duration(10_000), initial_rate=1e-5)
    run = RunLength(281_250, 4096)
    assert rates(schedule, run, (0, 5_000, 10_000)) == pytest.approx([1e-5, 5.05e-4, 1e-3], rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule(warmup=Duration(10)), "--schedule.warmup 10 steps must be shorter than the run's 10 steps"),
        (Schedule(warmup=Duration(100, "percent")), "--schedule.warmup 100 percent must be shorter"),
        (Schedule(warmup=Duration(1, "epochs")), "--schedule.warmup 1 epochs: a stream has no epochs"),
        (
            Schedule(warmup=Duration(4), decay=ReverseSquareRoot(cooldown=Duration(7))),
            "--schedule.decay.cooldown 7 steps is longer than the 6 steps after the warm-up",
        ),
    ],
)
def test_durations_that_do_not_fit_the_run_are_refused_with_their_flags(schedule, message):
    with pytest.raises(UserError) as error:
        schedule.build(RunLength(10, 8))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule(0.0),
        lambda: Schedule(initial_rate=-1.0),
        lambda: Linear(-0.1),
        lambda: ReverseSquareRoot(Duration(0)),
    ],
)
def test_invalid_rates_and_timescales_are_refused(make):
    with pytest.raises(UserError):
        make()
