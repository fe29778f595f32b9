"""Gauss-Newton Hessians of a batch against automatic differentiation of single examples, and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.heads.contrastive import unit
from lit_het.losses.contrastive.gauss_newton import sigmoid_hessian, softmax_hessian
from tests.losses.contrastive_cases import mesh_of, split_rows

B, K, D = 16, 7, 5
TAU, BIAS = jnp.float32(0.3), jnp.float32(-1.0)


def pairs():
    queries, keys = (np.random.default_rng(seed).normal(size=(n, D)) for seed, n in ((0, B), (1, K)))
    return jnp.asarray(queries, jnp.float32), unit(jnp.asarray(keys, jnp.float32))  # queries of any norm


def negative_log_likelihood(loss):
    """Returns the loss of an example's logits; the first key is its partner."""
    if loss == "softmax":
        return lambda logits: jax.nn.logsumexp(logits) - logits[0]
    signs = 2 * (jnp.arange(K) == 0) - 1
    return lambda logits: -jnp.sum(jax.nn.log_sigmoid(signs * logits))


def reference(loss, queries, keys):
    """Σ Jᵀ H J by `jax.jacobian` and `jax.hessian`, example by example."""
    total = np.zeros((D, D))
    for query in queries:

        def logits(g):
            return keys @ (g / jnp.linalg.norm(g)) / TAU + (BIAS if loss == "sigmoid" else 0)

        jacobian = np.asarray(jax.jacobian(logits)(query), np.float64)
        total += jacobian.T @ np.asarray(jax.hessian(negative_log_likelihood(loss))(logits(query))) @ jacobian
    return total


def found(loss, queries, keys, counted):
    if loss == "softmax":
        return softmax_hessian(queries, keys, counted, TAU)
    return sigmoid_hessian(queries, keys, counted, TAU, BIAS)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_sum_is_that_of_exact_gauss_newton_hessians(loss):
    queries, keys = pairs()
    expected = reference(loss, queries, keys)
    np.testing.assert_allclose(found(loss, queries, keys, jnp.ones(B)), expected, rtol=1e-4, atol=1e-3)
    # Padding counts nothing, whatever stands there.
    padded, counted = jnp.concatenate([queries, jnp.ones((3, D))]), jnp.concatenate([jnp.ones(B), jnp.zeros(3)])
    np.testing.assert_allclose(found(loss, padded, keys, counted), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_sum_is_positive_semidefinite_and_equal_on_eight_devices(loss):
    queries, keys = pairs()
    expected = np.asarray(found(loss, queries, keys, jnp.ones(B)))
    assert np.linalg.eigvalsh(expected).min() > -1e-4
    mesh = mesh_of(8)
    with jax.set_mesh(mesh):
        rows = split_rows((queries, jnp.ones(B)), mesh)
        on_eight = jax.jit(lambda queries, counted: found(loss, queries, keys, counted))(*rows)
    np.testing.assert_allclose(on_eight, expected, rtol=1e-5, atol=1e-4)
