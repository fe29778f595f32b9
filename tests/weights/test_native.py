"""Checkpoints are saved on some devices and restored on others, completely or in part."""

import dataclasses
import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters, sharding
from lit_het.errors import UserError
from lit_het.sharding import MeshConfig
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers import Adafactor, Optimizer
from lit_het.training.schedules import Schedule
from lit_het.training.step import initial_state
from lit_het.types import TrainState
from lit_het.weights.native import folders
from lit_het.weights.native.saving import Checkpoints, Retention

OPTIMIZER = Optimizer(Adafactor()).build(Schedule(warmup=Duration(1)), RunLength(10, 8))
INFO = {"position": 48, "locked_checksum": "abc"}


def make_params(value=0.0):
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape) + value, jnp.float32)

    return {
        "image_tower": {"mlp": {"up": {"kernel": draw(32, 40), "bias": draw(40)}}, "norm": {"scale": draw(32)}},
        "head": {"temperature": {"log_temperature": draw()}},
    }


def make_state(step, params=None):
    state = initial_state(make_params() if params is None else params, OPTIMIZER)
    return TrainState(jnp.int32(step), state.params, state.opt_state)


def on(mesh, state):
    return jax.device_put(state, sharding.tree_shardings(state, mesh))


def assert_equal(actual, expected):
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=jax.tree_util.keystr(path))
        assert one.dtype == other.dtype


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with steps 2 and 3, saved from eight devices."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpoints(directory) as checkpoints:
        for step in (2, 3):
            state = on(MeshConfig(fsdp=2).build(), make_state(step, make_params(step)))
            checkpoints.save(state, {**INFO, "position": 16 * step})
    return directory


@pytest.mark.devices
@pytest.mark.parametrize(
    ("config", "devices"), [(MeshConfig(), 1), (MeshConfig(fsdp=4), 4), (MeshConfig(data=4, fsdp=2), 8)]
)
def test_the_newest_state_is_restored_bit_by_bit_on_any_number_of_devices(saved, config, devices):
    mesh = config.build(jax.devices()[:devices])
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.latest_step == 3
        state, info = checkpoints.restore(on(mesh, make_state(0)))
    assert info == {"position": 48, "locked_checksum": "abc"}
    assert_equal(state, make_state(3, make_params(3)))
    kernel = state.params["image_tower"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (32, 40 // config.fsdp)
    assert kernel.sharding.device_set == set(jax.devices()[:devices])
    assert state.step.dtype == jnp.int32


@pytest.mark.devices
def test_a_subtree_of_the_parameters_can_be_restored(saved):
    like = {"image_tower": jax.tree.map(jnp.zeros_like, make_params()["image_tower"])}
    with Checkpoints(saved) as checkpoints:
        params, info = checkpoints.restore_params(like)
    assert set(params) == {"image_tower"}
    assert_equal(params["image_tower"], make_params(3)["image_tower"])
    assert info["position"] == 48


def test_donating_the_state_after_saving_does_not_change_what_is_saved(tmp_path):
    state = make_state(1)
    expected = jax.tree.map(np.asarray, state.params)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, INFO)
        jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(state.params)
    with Checkpoints(tmp_path) as checkpoints:
        assert_equal(checkpoints.restore(make_state(0))[0].params, expected)


HEAD = "head/temperature/log_temperature is () in the checkpoint and"
OTHER_HEAD = {"temperature": {"log_temperature": np.zeros(3, np.float32)}}


@pytest.mark.devices
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": {}}, f"{HEAD} absent in the model"),
        (
            {"extra": {"kernel": np.zeros(2, np.float32)}},
            "extra/kernel is missing in the checkpoint and (2,) in the model",
        ),
        ({"head": OTHER_HEAD}, f"{HEAD} (3,) in the model"),
    ],
    ids=["absent", "missing", "shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_path_and_shape(saved, change, message):
    params = {name: tree for name, tree in {**make_params(), **change}.items() if tree}
    with Checkpoints(saved) as checkpoints, pytest.raises(UserError) as error:
        checkpoints.restore(make_state(0, params))
    assert message in str(error.value)
    assert str(saved) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.devices
def test_the_optimizer_state_of_another_version_is_refused_as_such(saved):
    state = make_state(0)
    other = TrainState(state.step, state.params, {"late": state.opt_state})
    with Checkpoints(saved) as checkpoints, pytest.raises(UserError) as error:
        checkpoints.restore(other)
    assert "another version of lit-het saved the optimizer state in " in str(error.value)
    assert "continue with that version" in str(error.value)


@pytest.mark.devices
def test_a_subtree_that_does_not_fit_is_refused_by_path(saved):
    like = {"image_tower": {"norm": {"scale": np.zeros(8, np.float32)}, "other": np.zeros(2, np.float32)}}
    with Checkpoints(saved) as checkpoints, pytest.raises(UserError) as error:
        checkpoints.restore_params(like)
    assert "image_tower/norm/scale is (32,) in the checkpoint and (8,) in the model (and 1 more)" in str(error.value)


def test_a_directory_without_checkpoints_raises_an_error(tmp_path):
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.latest_step is None
        for restore in (lambda: checkpoints.restore(make_state(0)), lambda: checkpoints.restore_params(make_params())):
            with pytest.raises(UserError, match=f"no checkpoint in {tmp_path / 'new'}; give the directory"):
                restore()


@pytest.mark.parametrize(
    ("retention", "steps", "retained"),
    [(Retention(newest=2), (1, 2, 3, 4), [3, 4]), (Retention(newest=1, every=3), range(1, 9), [3, 6, 8])],
)
def test_only_the_newest_checkpoints_and_every_nth_are_retained(retention, steps, retained, tmp_path):
    state = make_state(0, {"a": jnp.ones(3)})
    with Checkpoints(tmp_path, retention=retention) as checkpoints:
        for step in steps:
            checkpoints.save(dataclasses.replace(state, step=jnp.int32(step)), INFO)
    assert [entry.step for entry in folders.entries(tmp_path)] == retained
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == [str(step) for step in retained]


def test_an_interrupted_save_is_ignored_and_removed(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(2), INFO)
    # The state after a kill just before the final rename.
    partial = tmp_path / "5.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "2", partial)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step == 2
        state, _ = checkpoints.restore(make_state(0))
    assert int(state.step) == 2
    assert not partial.exists()


def test_a_checkpoint_of_the_trainable_parameters_contains_no_locked_ones(tmp_path):
    locked, trainable = parameters.partition(make_params(), ["image_tower/.*"])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(1, trainable), INFO)
    with Checkpoints(tmp_path) as checkpoints:
        _, fingerprints = checkpoints.at(1).read_info()
        assert [path for path in fingerprints if path.startswith("params/")] == [
            "params/head/temperature/log_temperature"
        ]
        with pytest.raises(UserError, match="image_tower/mlp/up/bias is missing in the checkpoint"):
            checkpoints.restore_params(locked)


@pytest.mark.slow
def test_saving_leaks_neither_threads_nor_file_descriptors(tmp_path):
    def resources():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    state = make_state(0, {"kernel": jnp.zeros(3)})
    with Checkpoints(tmp_path) as checkpoints:

        def save(*steps):
            for step in steps:
                checkpoints.save(dataclasses.replace(state, step=jnp.int32(step)), {"position": step})
            checkpoints.wait()

        save(*range(1, 5))
        first = resources()
        save(*range(5, 15))
        assert resources() == first
