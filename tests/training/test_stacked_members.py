"""A run with several text members trains each of them as it would be trained alone."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from lit_het import parameters
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.shards.loader import LoaderConfig
from lit_het.random import Keys
from lit_het.training.build import build
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers import Optimizer
from lit_het.training.optimizers_config import SGD, Adafactor, AdamW
from lit_het.training.schedules import Schedule
from lit_het.training.step import initial_state, make_step, of_trainable
from tests.tasks import test_text_members
from tests.tasks.meshes import EIGHT_DEVICES, placed, start
from tests.tasks.test_text_members import B
from tests.training.tiny_run import host_batches

STEPS = 3
# Without a bias, whose gradient by the softmax loss is rounding alone.
HEAD = dataclasses.replace(test_text_members.CONFIG.head, initial_bias=None)
CONFIG = dataclasses.replace(test_text_members.CONFIG, head=HEAD)
# The text tower has layers, a gradient that is clipped, and kernels with weight decay.
OPTIMIZER = Optimizer(rule=AdamW(), clip_norm=0.05, weight_decay=0.01, layer_decay=0.5)


def experiment(task, optimizer):
    schedule = Schedule(learning_rate=1e-2, warmup=Duration(1))
    data = LoaderConfig(shards=(), batch_size=B)
    return ExperimentConfig(
        run_dir=Path(), task=task, data=data, length=Duration(STEPS), optimizer=optimizer, schedule=schedule
    )


def trained(step, optimizer, params, locked=CONFIG.locked):
    """Returns the trained parameters after `STEPS` batches, and the metrics of the last one."""
    fixed, trainable = parameters.partition(params, locked)
    state, step, metrics = initial_state(trainable, optimizer), jax.jit(step), {}
    for batch in host_batches(STEPS):
        state, metrics = step(state, fixed, batch)
    return state.params, metrics


def of_run(config, optimizer, params):
    built = build(experiment(config, optimizer), RunLength(STEPS, B))
    return trained(built.step, built.optimizer, params)


@pytest.mark.parametrize(
    "rule", [AdamW(), pytest.param(Adafactor(), marks=pytest.mark.slow), pytest.param(SGD(), marks=pytest.mark.slow)]
)
def test_each_member_has_the_parameters_of_a_run_with_it_alone(rule):
    optimizer, alone = dataclasses.replace(OPTIMIZER, rule=rule), dataclasses.replace(CONFIG, text_members=1)
    task, params = start(CONFIG)
    found, metrics = of_run(CONFIG, optimizer, params)
    assert all(np.isfinite(value) and np.shape(value) == () for value in metrics.values())
    one = build(experiment(alone, optimizer), RunLength(STEPS, B))
    for number in range(CONFIG.text_members):

        def loss(params, batch, keys, progress, number=number):
            own = Keys(jax.random.fold_in(keys.base, number)) if number else keys
            return one.task.loss(params, batch, own, progress)

        step = make_step(of_trainable(loss), one.optimizer, 0)
        expected, _ = trained(step, one.optimizer, task.member(params, number))
        own = jax.tree.map(lambda x, number=number: x[number], found)
        initial = {part: tree for part, tree in task.member(params, number).items() if part != "image_tower"}
        moved = parameters.flatten(jax.tree.map(lambda x, y: np.abs(x - y).max(), expected, initial))
        for path, array in parameters.flatten(expected).items():
            # A key's bias has no gradient but rounding, of which Adam makes whole steps.
            if not path.endswith("key/bias"):
                np.testing.assert_allclose(parameters.flatten(own)[path], array, atol=2e-5, err_msg=path)
        assert max(moved.values()) > 1e-3


def test_the_gradient_of_covariances_is_measured_as_the_mean_over_members():
    task, params = start(CONFIG)
    _, metrics = of_run(CONFIG, OPTIMIZER, params)
    _, alone = of_run(dataclasses.replace(CONFIG, text_members=1), OPTIMIZER, task.member(params, 0))
    assert metrics.keys() == alone.keys()
    assert np.isfinite(metrics["covariance_signal_to_noise"])


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_that_share_parameters_train_as_one():
    _, params = start(CONFIG)
    expected, _ = of_run(CONFIG, OPTIMIZER, params)
    mesh = EIGHT_DEVICES.build()
    with jax.set_mesh(mesh):
        found, _ = of_run(CONFIG, OPTIMIZER, placed(params, mesh))
    for path, array in parameters.flatten(jax.device_get(expected)).items():
        if not path.endswith("key/bias"):
            np.testing.assert_allclose(parameters.flatten(found)[path], array, atol=1e-4, err_msg=path)
