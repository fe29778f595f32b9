"""One step: who changes, and that the number of devices makes no difference."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.random import keys_at
from lit_het.sharding import MeshConfig
from lit_het.towers.tuning_config import LoRA, Tuning
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers import SGD, Optimizer
from lit_het.training.schedules import Linear, Schedule
from lit_het.training.step import averaged, drawn, initial_state, make_step, of_trainable, skipping_nonfinite
from lit_het.types import Batch
from lit_het.weights.native import checksums
from tests.training.tiny_run import ONE_DEVICE, STEPS, TASK, Run

# Softmax over tokens does not see a shift that all keys share: its gradient is rounding, which Adam scales up.
UNSEEN = {"text_tower/encoder/blocks/attention/key/bias"}


def metrics_of(run):
    """Trains the run to its end and returns the metrics of every step."""
    found = []
    for batch in run.batches():
        run.state, metrics = run.step(run.state, run.locked, batch)
        found.append(metrics)
    return found


def losses(metrics):
    return np.array([(m["loss"], m["gradient_norm"]) for m in metrics])


@pytest.fixture(scope="module")
def one_device():
    run = Run()
    before = checksums.digest(run.locked)
    trainable = jax.tree.map(np.asarray, run.state.params)
    return run, metrics_of(run), before, trainable


def test_the_locked_tower_is_bit_identical_after_training_and_everything_else_has_moved(one_device):
    run, _, before, trainable = one_device
    assert checksums.digest(run.locked) == before
    assert set(run.locked) == {"image_tower"}
    after = parameters.flatten(run.state.params)
    still = {path for path, array in parameters.flatten(trainable).items() if np.array_equal(array, after[path])}
    assert still <= UNSEEN
    assert any(path.startswith("head/image_covariance/") for path in after)


def test_the_locked_tower_is_absent_from_state_and_gradient(one_device):
    run = one_device[0]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(run.state)]
    assert paths
    assert not any("image_tower" in path for path in paths)
    assert set(run.state.params) == {"text_tower", "head"}
    assert int(run.state.step) == STEPS


def test_the_backward_pass_does_not_enter_the_locked_tower(one_device):
    """The image tower's products stand in the compiled loss once; only the text tower's stand in its gradient."""
    task, run = TASK.build(), one_device[0]
    batch, params = next(run.batches()), parameters.merge(run.locked, run.state.params)

    def products(locked_patterns):
        locked, trainable = parameters.partition(params, locked_patterns)

        def loss(trainable, locked):
            return task.loss(parameters.merge(trainable, locked), batch, keys_at(0, 0))[0]

        return jax.jit(jax.grad(loss)).lower(trainable, locked).as_text().count("stablehlo.dot_general")

    assert products(["image_tower/.*"]) < products([])


@pytest.mark.devices
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(data=8), id="data=8", marks=pytest.mark.slow),
        pytest.param(MeshConfig(data=4, fsdp=2), id="data=4 fsdp=2"),
    ],
)
def test_eight_devices_give_the_losses_of_one_device_noise_included(mesh, one_device):
    run = Run(mesh.build())
    np.testing.assert_allclose(losses(metrics_of(run)), losses(one_device[1]), rtol=1e-5)
    kernel = run.state.params["text_tower"]["encoder"]["blocks"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape)[-1] == 32 // mesh.fsdp
    expected = parameters.flatten(one_device[0].state.params)
    for path, actual in parameters.flatten(run.state.params).items():
        if path not in UNSEEN:
            np.testing.assert_allclose(actual, expected[path], rtol=1e-3, atol=1e-4, err_msg=path)


@pytest.mark.devices
def test_eight_devices_train_a_part_of_a_tower_as_one_device_does():
    tuning = Tuning(last_blocks=1, lora=LoRA(rank=2, pattern="encoder/.*", dora=True))
    tower = dataclasses.replace(TASK.image_tower.with_encoder(depth=2), tuning=tuning)
    config = dataclasses.replace(TASK, image_tower=tower, locked=())
    found = []
    for mesh in (MeshConfig(data=4, fsdp=2).build(), ONE_DEVICE):
        run = Run(mesh, config)
        found.append((losses(metrics_of(run)), parameters.flatten(run.state.params)))
    (on_eight, params), (on_one, expected) = found
    np.testing.assert_allclose(on_eight, on_one, rtol=1e-5)
    assert "image_tower/encoder/lower_blocks/mlp/up/lora/magnitude" in expected
    assert "image_tower/encoder/lower_blocks/mlp/up/kernel" not in expected
    for path, array in params.items():
        if not path.endswith("key/bias"):
            np.testing.assert_allclose(array, expected[path], rtol=1e-3, atol=1e-4, err_msg=path)


def test_the_seed_and_the_step_decide_the_noise(one_device):
    run, loss = one_device[0], jax.jit(TASK.build().loss)
    batch, params = next(run.batches()), parameters.merge(run.locked, run.state.params)
    first, again, *others = (
        float(loss(params, batch, keys_at(*place))[0]) for place in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert first == again
    assert len({first, *others}) == 3


def test_metrics_count_valid_rows_and_measure_the_gradient(one_device):
    batch, metrics = next(one_device[0].batches()), one_device[1][0]
    assert int(metrics["valid"]) == int(np.asarray(batch.valid).sum()) < 16
    assert float(metrics["temperature"]) == pytest.approx(1 / 20)
    assert float(metrics["image_noise_norm"]) == pytest.approx(0.5, rel=0.3)
    assert float(metrics["gradient_norm"]) > 0
    assert all(jnp.shape(value) == () for value in metrics.values())


class Task:
    """A task with one parameter w, and a loss of it, of the batch and of the keys."""

    locked, trained = (), ("w",)

    def __init__(self, loss, w: Any = 1.0):
        self.of_w, self.params = loss, {"w": jnp.asarray(w, jnp.float32)}

    def initialize(self, key):
        return self.params

    def layers_above(self, params):
        return {"w": 0}

    def loss(self, params, batch, keys, progress=None):
        return self.of_w(params["w"], batch, keys), {}


PARABOLA = Task(lambda w, batch, keys: w**2)
BATCH = Batch(valid=np.array([True]))


def sgd(rate, num_steps):
    """Returns the optimizer that subtracts the gradient times a constant rate."""
    rule = Optimizer(SGD(momentum=0.0), weight_decay=0.0, clip_norm=None)
    return rule.build(Schedule(rate, Duration(0), decay=Linear(1.0)), RunLength(num_steps, 1))


@pytest.mark.parametrize(
    ("valid", "rate", "problem"),
    [(True, 1e-2, None), (False, 1e-2, "gradient_norm"), (True, 3e38, "update_norm")],
    ids=["finite", "a loss that is not finite", "an update that alone is not finite"],
)
def test_a_step_that_is_not_finite_counts_and_changes_nothing_else(valid, rate, problem):
    """The loss is a square, or the square root of a negative number where the batch is invalid."""
    task = Task(lambda w, batch, keys: jnp.sum(jnp.sqrt(w**4 * jnp.where(batch.valid[0], 1.0, -1.0))), [2.0] * 3)
    optimizer = Optimizer().build(Schedule(rate, Duration(1), initial_rate=rate), RunLength(5, 1))
    step = jax.jit(skipping_nonfinite(make_step(of_trainable(task.loss), optimizer, 0)))
    before = initial_state(task.params, optimizer)
    after, metrics = step(before, {}, Batch(valid=np.array([valid])))
    assert bool(metrics["skipped"]) is (problem is not None)
    assert int(after.step) == 1
    same = jax.tree.map(np.array_equal, (before.opt_state, before.params), (after.opt_state, after.params))
    assert all(jax.tree.leaves(same)) is (problem is not None)
    assert np.isfinite(after.params["w"]).all()
    assert np.isfinite([metrics["loss"], metrics["gradient_norm"]]).all() == (problem != "gradient_norm")
    assert np.isfinite(metrics["update_norm"]) == (problem is None)


def test_every_step_of_every_seed_draws_its_own_noise():
    task, optimizer, noise = Task(lambda w, batch, keys: w**2 + jax.random.normal(keys("noise")), 0.0), sgd(0.1, 5), []
    for seed in (0, 1):
        step = jax.jit(make_step(of_trainable(task.loss), optimizer, seed))
        state = initial_state(task.params, optimizer)
        for _ in range(3):
            state, metrics = step(state, {}, BATCH)
            noise.append(float(metrics["loss"]))
    assert len(set(noise)) == len(noise)


def test_the_average_follows_the_parameters_and_does_not_change_them():
    """w ← w - 0.25 · 2 w = w / 2 and a ← 0.75 a + 0.25 w, from w = a = 1."""
    optimizer = sgd(0.25, 4)
    state = initial_state(PARABOLA.params, optimizer, averages=True)
    step, found = jax.jit(averaged(make_step(of_trainable(PARABOLA.loss), optimizer, 0), 0.75)), []
    for _ in range(3):
        state, _ = step(state, {}, BATCH)
        found.append((float(state.params["w"]), float(state.average["w"])))
    assert found == [(0.5, 0.875), (0.25, 0.71875), (0.125, 0.5703125)]
    assert state.evaluated is state.average
    assert initial_state(PARABOLA.params, optimizer).evaluated == {"w": 1.0}


def test_each_step_draws_one_of_several_losses_and_takes_its_gradient():
    slopes = [lambda params, batch, keys, _, a=a: (a * params["w"], {"slope": jnp.float32(a)}) for a in (1.0, 2.0, 3.0)]
    optimizer, found = sgd(1.0, 300), []
    step, state = (
        jax.jit(make_step(drawn([of_trainable(slope) for slope in slopes]), optimizer, 0)),
        initial_state(PARABOLA.params, optimizer),
    )
    for _ in range(300):
        state, metrics = step(state, {}, BATCH)
        found.append(float(metrics["slope"]))
        assert float(metrics["gradient_norm"]) == found[-1]
    # 100 of each with a standard deviation of 8.
    assert all(70 < found.count(slope) < 130 for slope in (1.0, 2.0, 3.0))
