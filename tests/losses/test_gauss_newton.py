"""Gauss-Newton Hessians of a batch against automatic differentiation of single examples, and devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.heads.base import unit
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

    def of_query(query):
        def logits(g):
            return keys @ (g / jnp.linalg.norm(g)) / TAU + (BIAS if loss == "sigmoid" else 0)

        return jax.jacobian(logits)(query), jax.hessian(negative_log_likelihood(loss))(logits(query))

    of_query, total = jax.jit(of_query), np.zeros((D, D))
    for query in queries:
        jacobian, hessian = (np.asarray(x, np.float64) for x in of_query(query))
        total += jacobian.T @ hessian @ jacobian
    return total


@functools.cache
def compiled(loss):
    function, more = (softmax_hessian, (TAU,)) if loss == "softmax" else (sigmoid_hessian, (TAU, BIAS))
    return jax.jit(lambda queries, keys, counted: function(queries, keys, counted, *more))


@pytest.mark.devices
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_sum_is_that_of_exact_gauss_newton_hessians_and_equal_on_eight_devices(loss):
    (queries, keys), found = pairs(), compiled(loss)
    expected = reference(loss, queries, keys)
    one_device = found(queries, keys, jnp.ones(B))
    np.testing.assert_allclose(one_device, expected, rtol=1e-4, atol=1e-3)
    assert np.linalg.eigvalsh(one_device).min() > -1e-4
    # Padding counts nothing, whatever stands there.
    padded, counted = np.concatenate([queries, np.ones((3, D), np.float32)]), np.arange(B + 3) < B
    of_padded = found(jnp.asarray(padded), keys, jnp.asarray(counted, jnp.float32))
    np.testing.assert_allclose(of_padded, expected, rtol=1e-4, atol=1e-3)
    mesh = mesh_of(8)
    with jax.set_mesh(mesh):
        queries, counted = split_rows((queries, jnp.ones(B)), mesh)
        np.testing.assert_allclose(found(queries, keys, counted), one_device, rtol=1e-5, atol=1e-4)
