"""Means over noise samples estimate what they should: E[σ(u)] (HET-XL Eq. 2, 5, 9), without bias, and its gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import HetHConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature
from tests.heads import references
from tests.heads.references import mean_probabilities

pytestmark = pytest.mark.slow

B, D, K, MANY = 2, 6, 5, 20_000
X = jnp.asarray(np.random.default_rng(1).normal(size=(B, D)), jnp.float32)
COVARIANCE = CovarianceConfig(2, "efficient")
PLAIN = FixedTemperature(1.0)
HEADS = {
    "HET, full": HetConfig(dataclasses.replace(COVARIANCE, form="full"), PLAIN),
    "HET-H, diagonal": HetHConfig(
        3, covariance=dataclasses.replace(COVARIANCE, second_term="diagonal"), temperature=BoundedTemperature(0.5, 1.0)
    ),
    "HET-XL": HetXLConfig(COVARIANCE, temperature=PLAIN),
    "unshared": HetXLConfig(COVARIANCE, unshared_size=4, temperature=PLAIN),
    "rank 0": HetXLConfig(CovarianceConfig(0), temperature=PLAIN),
}


@functools.cache
def make(kind):
    return references.with_random_parameters(lambda: HEADS[kind].build(D, K, nnx.Rngs(0)))


def rebuilt(kind, num_samples):
    """Returns the head's graph for another S, and its parameters."""
    sampling = SamplingConfig(num_samples)
    config = dataclasses.replace(HEADS[kind], sampling=sampling)
    graph = nnx.graphdef(nnx.eval_shape(lambda: config.build(D, K, nnx.Rngs(0))))
    return graph, nnx.state(make(kind))


def class_covariance(kind, params, x):
    """Σ(x) of the noise in the logits, [n k k]: Lᵀ Σ' L with L the identity, the hash, W or W'."""
    config = HEADS[kind]
    of_noise = {path.removeprefix("covariance/"): leaf for path, leaf in params.items()}
    covariance = references.covariance(of_noise, config.covariance, x)
    match config:
        case HetConfig():
            linear = np.eye(K)
        case HetHConfig():
            linear = np.eye(config.num_buckets)[:, make(kind).bucket_of_class]
        case HetXLConfig(unshared_size=None):
            linear = params["logits/kernel"]
        case _:
            linear = params["unshared/kernel"]
    return linear.T @ covariance @ linear


@pytest.mark.parametrize("kind", HEADS)
def test_mean_probabilities_of_20000_samples_are_those_of_an_independent_monte_carlo(kind):
    """NumPy draws the logits from their own distribution, N(Wᵀφ + b, Lᵀ Σ L), and not from the factors of the noise."""
    graph, state = rebuilt(kind, MANY)

    @jax.jit
    def probabilities(state, x):
        return mean_probabilities(nnx.merge(graph, state)(x, jax.random.key(0)), jax.nn.log_softmax)

    params, x = references.in_float64(make(kind)), np.asarray(X, np.float64)
    covariance = class_covariance(kind, params, x)
    tau = references.temperature(params, HEADS[kind].temperature)
    random = np.random.default_rng(3)
    for n, actual in enumerate(np.asarray(probabilities(state, X))):
        mean = x[n] @ params["logits/kernel"] + params["logits/bias"]
        logits = random.multivariate_normal(mean, covariance[n], MANY, tol=1e-6) / tau
        draws = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
        # Two independent means of 20,000: five standard errors of their difference, which 10 entries pass but once in
        # 100,000 times.
        error = draws.std(axis=0) * np.sqrt(2 / MANY)
        assert np.all(error > 0)
        assert np.all(np.abs(actual - draws.mean(axis=0)) < 5 * error)
        # The noise matters: without it the probabilities would be others.
        noiseless = np.exp(mean / tau) / np.exp(mean / tau).sum()
        assert np.any(np.abs(noiseless - draws.mean(axis=0)) > 10 * error)


def test_more_samples_approach_the_expected_probability_like_one_over_the_square_root():
    """1/S Σ_s softmax(u_s) has the standard error sd/√S around E softmax(u): errors shrink 8-fold from 16 to 1024."""

    def estimates(num_samples, count):
        graph, state = rebuilt("HET-XL", num_samples)

        @jax.jit
        def run(state, keys):
            def one(key):
                return mean_probabilities(nnx.merge(graph, state)(X, key), jax.nn.log_softmax)

            return jax.lax.map(one, keys)

        return np.asarray(run(state, jax.random.split(jax.random.key(num_samples), count)), np.float64)

    expected = estimates(MANY, 5).mean(axis=0)
    few, many = (np.sqrt(np.mean((estimates(num_samples, 60) - expected) ** 2)) for num_samples in (16, 1024))
    # A root mean square of 60 x 10 correlated errors is known to about a tenth.
    assert few / many == pytest.approx(8, rel=0.3)


@pytest.mark.parametrize("kind", ["HET-XL", "HET-H, diagonal"])
def test_the_gradient_of_the_mean_probability_has_no_bias_at_one_sample(kind):
    """∇ of one sample's probability, over many keys, has the mean ∇ E[p]: here the slope of a large NumPy mean.

    The loss is another matter: -log of a mean of few samples is biased upward, by Jensen's inequality.
    """
    graph, state = rebuilt(kind, 1)
    count = 4000

    @jax.jit
    def gradients(state, keys):
        def probability(state, key):
            samples = nnx.merge(graph, state)(X, key)
            return jnp.sum(mean_probabilities(samples, jax.nn.log_softmax)[:, 0])

        return jax.lax.map(lambda key: jax.grad(probability)(state, key), keys, batch_size=500)

    found = parameters.flatten(nnx.to_pure_dict(gradients(state, jax.random.split(jax.random.key(1), count))))
    params, x = references.in_float64(make(kind)), np.asarray(X, np.float64)
    config, random = HEADS[kind], np.random.default_rng(5)
    rank, diagonal = config.covariance.num_factors, config.covariance.is_diagonal
    normals = random.normal(size=(2000, rank + (3 if diagonal else 1)))

    def probabilities(params):
        """Of class 0, summed over examples, for each of the draws."""
        of_noise = {path.removeprefix("covariance/"): leaf for path, leaf in params.items()}
        factors, scale = references.terms(of_noise, config.covariance, x)
        tau, total = references.temperature(params, config.temperature), np.zeros(len(normals))
        for n in range(B):
            noise = normals[:, :rank] @ factors[n] + normals[:, rank:] * scale[n]
            if isinstance(config, HetHConfig):
                u = x[n] @ params["logits/kernel"] + params["logits/bias"] + noise[:, make(kind).bucket_of_class]
            else:
                u = (x[n] + noise) @ params["logits/kernel"] + params["logits/bias"]
            total = total + np.exp(u[:, 0] / tau - np.logaddexp.reduce(u / tau, axis=1))
        return total

    for path, leaf in found.items():
        direction = random.normal(size=leaf.shape[1:])
        slopes = np.tensordot(np.asarray(leaf, np.float64), direction, direction.ndim)
        moved = [probabilities({**params, path: params[path] + 1e-5 * sign * direction}) for sign in (1, -1)]
        reference = (moved[0] - moved[1]) / 2e-5
        error = np.hypot(slopes.std() / np.sqrt(count), reference.std() / np.sqrt(len(normals)))
        assert error > 0, path
        assert abs(slopes.mean() - reference.mean()) < 5 * error, path
