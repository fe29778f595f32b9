"""The warning when noise grows in all directions alike."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.training import isotropic_noise, loop
from lit_het.training.isotropic_noise import IsotropicNoise
from lit_het.training.loop import Cadence
from lit_het.training.metric_log import MetricLog
from lit_het.types import Batch, Metrics, TrainState
from tests.training.test_loop import Recorder


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
