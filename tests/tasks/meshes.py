"""Tasks with their parameters, and their losses and gradients on one device and on eight.

What differs on several devices is written down for the forward pass; gradients through it are compared on eight devices
in tests/losses, tests/towers/test_experts.py, tests/training/test_step.py and test_microbatches.py.
"""

import functools

import jax
import numpy as np

from lit_het import parameters
from lit_het.random import keys_at
from lit_het.sharding import MeshConfig, batch_sharding, tree_shardings
from tests.towers.models import like_initial

KEYS = keys_at(0, 0)
EIGHT_DEVICES = MeshConfig(data=2, fsdp=4)
OF_GROUPS = {f"image_{name}" for name in ("importance_loss", "load_loss", "dropped_tokens", "busiest_expert")}


@functools.cache
def task_of(config):
    return config.build()


@functools.cache
def start(config, seed=0):
    """Returns the task and its parameters, which all tests of a file share.

    Heads have their initial ones. The others are drawn by NumPy: to compile that takes as long as a gradient.
    """
    task = task_of(config)

    def of_heads(tree):
        flat = parameters.flatten(tree)
        return {path: x for path, x in flat.items() if path.startswith(("head/", "captioner/head/"))}

    drawn = parameters.flatten(like_initial(task.shapes, seed))
    heads = jax.jit(lambda key: of_heads(task.initialize(key)))(jax.random.key(seed))
    return task, jax.device_put(parameters.unflatten(drawn | heads))


@functools.cache
def forward(loss):
    """One program serves every test with the same loss of a task and the same shapes."""
    return jax.jit(loss)


@functools.cache
def compiled(loss):
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def placed(params, mesh):
    """Splits parameters over a mesh, from the host: to split those of a device takes a program for every shape."""
    return jax.device_put(jax.device_get(params), tree_shardings(params, mesh))


def loss_and_gradient(loss, params, batch, mesh=None, keys=KEYS):
    """Returns ``((loss, metrics), gradient)``, with parameters and rows split over a mesh where one is given."""
    if mesh is None:
        return compiled(loss)(params, batch, keys)
    with jax.set_mesh(mesh):
        return compiled(loss)(placed(params, mesh), jax.device_put(batch, batch_sharding(mesh)), keys)


def assert_same(found, expected, atol=None):
    """Compares losses and gradients; by default relative to the largest entry of each gradient."""
    np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-5)
    gradient, expected = (parameters.flatten(jax.device_get(tree)) for tree in (found[1], expected[1]))
    assert gradient.keys() == expected.keys()
    for path, array in expected.items():
        # Some gradients are 0 but for rounding: those of a softmax's bias and of keys' biases in attention.
        tolerance = max(1e-5 * np.abs(array).max(), 1e-6) if atol is None else atol
        np.testing.assert_allclose(gradient[path], array, rtol=0, atol=tolerance, err_msg=path)


def on_devices(function, mesh, params, batch, *more):
    """Returns what a compiled function returns with parameters and rows split over a mesh."""
    mesh = mesh.build()
    with jax.set_mesh(mesh):
        return function(placed(params, mesh), jax.device_put(batch, batch_sharding(mesh)), *more)


def assert_same_loss(found, expected):
    """Compares losses and metrics, but those of groups of tokens: on several devices experts have others."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name in expected[1].keys() - OF_GROUPS:
        metric = expected[1][name]
        np.testing.assert_allclose(found[1][name], metric, rtol=1e-5, atol=1e-6, err_msg=name)


def assert_eight_devices_have_the_loss_of_one(loss, params, batch, mesh=EIGHT_DEVICES):
    """Compares both, and metrics."""
    found = on_devices(forward(loss), mesh, params, batch, KEYS)
    assert_same_loss(found, forward(loss)(params, batch, KEYS))
