"""Tasks with their parameters, and their losses and gradients on one device and on eight."""

import functools

import jax
import numpy as np

from lit_het import parameters
from lit_het.random import keys_at
from lit_het.sharding import MeshConfig, batch_sharding, tree_shardings
from tests.towers.models import like_initial

KEYS = keys_at(0, 0)
ONE_DEVICE = MeshConfig(data=1).build(jax.devices()[:1])
EIGHT_DEVICES = MeshConfig(data=2, fsdp=4)


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


def assert_eight_devices_equal_one(loss, params, batch, mesh=EIGHT_DEVICES, atol=None):
    """Compares both, and returns what one device and eight found."""
    one, eight = (loss_and_gradient(loss, params, batch, some) for some in (None, mesh.build()))
    assert_same(eight, one, atol)
    return one, eight
