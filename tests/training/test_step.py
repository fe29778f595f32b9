"""One step: who changes, and that the number of devices makes no difference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.random import keys_at
from lit_het.sharding import MeshConfig
from tests.training.pieces import STEPS, TASK, Run

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
    before = parameters.checksum(run.locked)
    trainable = jax.tree.map(np.asarray, run.state.params)
    return run, metrics_of(run), before, trainable


def test_the_locked_tower_is_bit_identical_after_training_and_everything_else_has_moved(one_device):
    run, _, before, trainable = one_device
    assert parameters.checksum(run.locked) == before
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


def test_the_backward_pass_does_not_enter_the_locked_tower():
    """The image tower's products stand in the compiled loss once; only the text tower's stand in its gradient."""
    task = TASK.build()
    run = Run()
    batch = next(run.batches())

    def products(locked_patterns):
        params = parameters.merge(run.locked, run.state.params)
        locked, trainable = parameters.partition(params, locked_patterns)

        def loss(trainable, locked):
            return task.loss(parameters.merge(locked, trainable), batch, keys_at(0, 0))[0]

        return jax.jit(jax.grad(loss)).lower(trainable, locked).as_text().count("stablehlo.dot_general")

    assert products(["image_tower/.*"]) < products([])


@pytest.mark.parametrize("mesh", [MeshConfig(data=8), MeshConfig(data=4, fsdp=2)], ids=["data=8", "data=4 fsdp=2"])
def test_eight_devices_give_the_losses_of_one_device_noise_included(mesh, one_device):
    run = Run(mesh.build())
    np.testing.assert_allclose(losses(metrics_of(run)), losses(one_device[1]), rtol=1e-5)
    kernel = run.state.params["text_tower"]["encoder"]["blocks"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape)[-1] == 32 // mesh.fsdp
    expected = parameters.flatten(one_device[0].state.params)
    for path, actual in parameters.flatten(run.state.params).items():
        if path not in UNSEEN:
            np.testing.assert_allclose(actual, expected[path], rtol=1e-3, atol=1e-4, err_msg=path)


def test_the_seed_and_the_step_decide_the_noise():
    run, task = Run(), TASK.build()
    batch = next(run.batches())
    params = parameters.merge(run.locked, run.state.params)

    @jax.jit
    def loss(keys):
        return task.loss(params, batch, keys)[0]

    first = float(loss(keys_at(0, 0)))
    assert float(loss(keys_at(0, 0))) == first
    assert len({first, float(loss(keys_at(1, 0))), float(loss(keys_at(0, 1)))}) == 3


def test_metrics_count_valid_rows_and_measure_the_gradient(one_device):
    batch, metrics = next(one_device[0].batches()), one_device[1][0]
    assert int(metrics["valid"]) == int(np.asarray(batch.valid).sum()) < 16
    assert float(metrics["temperature"]) == pytest.approx(1 / 3)
    assert float(metrics["image_noise_norm"]) == pytest.approx(0.5, rel=0.3)
    assert float(metrics["gradient_norm"]) > 0
    assert all(jnp.shape(value) == () for value in metrics.values())
