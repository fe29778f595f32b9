"""Classification losses of heads whose noise comes in blocks: 16 examples, 70 samples in two blocks of 35."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import HetHConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.sharding import MeshConfig, batch_sharding
from tests.heads.references import all_at_once, mean_probabilities
from tests.losses.test_classification_losses import reference_sigmoid, reference_softmax, single

RANDOM = np.random.default_rng(0)
ROWS, D, CLASSES = 16, 6, 11
X = single(RANDOM.normal(size=(ROWS, D)))
COVARIANCE = CovarianceConfig(2, "efficient")
HEADS: dict[str, Any] = {
    "HET": HetConfig(COVARIANCE),
    "HET-H": HetHConfig(8, covariance=COVARIANCE),
    "HET-XL": HetXLConfig(COVARIANCE),
}
VALID = np.arange(ROWS) % 5 != 3
TARGETS = {"softmax": np.arange(ROWS) % CLASSES, "sigmoid": single(RANDOM.random((ROWS, CLASSES)))}


def head_with(kind, **sampling):
    config = type(HEADS[kind])(**{**vars(HEADS[kind]), "sampling": SamplingConfig(num_samples=70, **sampling)})
    return config.build(D, CLASSES, nnx.Rngs(0))


def rows(loss):
    return X, jnp.asarray(TARGETS[loss]), jnp.asarray(VALID)


def loss_and_gradient(kind, loss, **sampling):
    """Returns a compiled function of features, targets and validity."""
    graph, state = nnx.split(head_with(kind, **sampling))
    cross_entropy = {"softmax": SoftmaxCrossEntropy(), "sigmoid": SigmoidCrossEntropy()}[loss]

    @jax.jit
    def run(x, target, valid):
        def function(params, x):
            return cross_entropy(nnx.merge(graph, params)(x, jax.random.key(5)), target, valid).loss

        value, (of_params, of_x) = jax.value_and_grad(function, argnums=(0, 1))(state, x)
        return value, {**nnx.to_pure_dict(of_params), "x": of_x}

    return run


@functools.cache
def in_one_block(kind, loss):
    return loss_and_gradient(kind, loss, block_size=10**6, order="direct")(*rows(loss))


@functools.cache
def logits_of_samples(kind):
    head = head_with(kind)
    return np.asarray(jax.jit(lambda x: all_at_once(head(x, jax.random.key(5))))(X), np.float64)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), actual[1], expected[1])


@pytest.mark.parametrize(
    ("kind", "loss"), [("HET", "softmax"), ("HET-H", "sigmoid"), ("HET-XL", "softmax"), ("HET-XL", "sigmoid")]
)
def test_the_loss_of_a_head_is_that_of_all_of_its_samples_at_once(kind, loss):
    slow = reference_softmax if loss == "softmax" else reference_sigmoid
    expected = slow(logits_of_samples(kind), np.asarray(TARGETS[loss]))[VALID].mean()
    np.testing.assert_allclose(in_one_block(kind, loss)[0], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "loss", "block_size", "order"),
    [
        ("HET", "softmax", 1, "direct"),
        ("HET-XL", "softmax", 150, "direct"),
        ("HET-XL", "sigmoid", 150, "factored"),
        ("HET-H", "sigmoid", 300, "direct"),
        ("HET-H", "softmax", 300, "factored"),
    ],
)
def test_neither_the_size_of_a_block_nor_the_order_of_products_changes_a_loss_or_a_gradient(
    kind, loss, block_size, order
):
    run = loss_and_gradient(kind, loss, block_size=block_size, order=order)
    assert_close(run(*rows(loss)), in_one_block(kind, loss))


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "loss", "order"), [("HET-XL", "softmax", "factored"), ("HET-H", "sigmoid", "direct")])
def test_eight_devices_give_the_loss_and_the_gradient_of_one(kind, loss, order):
    """Blocks of one example a device, which are not the blocks of one device: the noise must not notice."""
    mesh = MeshConfig(fsdp=2).build()
    run = loss_and_gradient(kind, loss, block_size=50, order=order)
    with jax.set_mesh(mesh):
        batch = jax.device_put(rows(loss), batch_sharding(mesh))
        actual = run(*batch)
    assert len(batch[0].sharding.device_set) == 8
    assert_close(actual, in_one_block(kind, loss))


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_give_the_probabilities_of_one():
    mesh, head = MeshConfig().build(), head_with("HET-XL", block_size=50)

    @jax.jit
    def run(x):
        return mean_probabilities(head(x, jax.random.key(5), 70), jax.nn.log_softmax)

    with jax.set_mesh(mesh):
        actual = run(jax.device_put(X, batch_sharding(mesh)))
    expected = np.exp(logits_of_samples("HET-XL"))
    expected = (expected / expected.sum(axis=-1, keepdims=True)).mean(axis=1)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
