"""What a sampled softmax draws, how it starts, and that its best logits are those of the full softmax."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.heads import DenseLogits, DeterministicConfig, SampledSoftmax, candidates
from lit_het.heads.temperature_config import FixedTemperature
from lit_het.losses import SoftmaxCrossEntropy

TAU, KEY = 0.7, jax.random.key(2)


def deterministic(layer):
    return DeterministicConfig(FixedTemperature(TAU), get_logits=layer)


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["uniform", "log_uniform"])
def test_classes_are_drawn_as_often_as_the_correction_says(distribution):
    config, k, steps = SampledSoftmax(20, distribution), 50, 10_000
    draws = jax.vmap(lambda key: candidates.draw(config, k, key))(jax.random.split(KEY, steps))
    found = np.mean((np.asarray(draws)[:, :, None] == np.arange(k)).any(axis=1), axis=0)
    expected = np.exp(candidates.log_inclusion(config, k, jnp.arange(k)))
    # Each share is within five standard deviations.
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / steps))


@pytest.mark.slow
def test_rare_classes_of_a_million_are_drawn_as_often_as_the_correction_says():
    # More classes than float32 has values from there on, if it had those of a uniform number.
    config, k, rare = SampledSoftmax(2**22, "log_uniform"), 1_000_000, 900_000
    found = np.bincount(np.asarray(candidates.draw(config, k, KEY)), minlength=k)
    assert len(found) == k
    of_class = np.exp(candidates.log_inclusion(config, k, jnp.arange(rare, k)))
    expected, error = of_class.mean(), math.sqrt(np.sum(of_class * (1 - of_class))) / (k - rare)
    assert abs(np.mean(found[rare:] > 0) - expected) < 5 * error


def test_a_sampled_softmax_starts_with_the_parameters_of_a_dense_layer_at_the_same_paths():
    dense, sampled = (
        parameters.flatten(nnx.to_pure_dict(nnx.state(deterministic(layer).build(6, 11, nnx.Rngs(0)))))
        for layer in (DenseLogits(), SampledSoftmax())
    )
    assert dense.keys() == sampled.keys()
    for path, leaf in dense.items():
        np.testing.assert_array_equal(sampled[path], leaf)


@pytest.mark.parametrize("distribution", ["uniform", "log_uniform", "log_uniform without correction"])
def test_the_expected_gradient_vanishes_where_the_logits_are_those_of_the_true_probabilities(distribution, monkeypatch):
    distribution, _, without = distribution.partition(" ")
    if without:
        monkeypatch.setattr(candidates, "log_inclusion", lambda config, k, classes: jnp.zeros(classes.shape))
    k, steps, b = 20, 20_000, 8
    p = np.random.default_rng(0).dirichlet(np.ones(k))
    labels = jnp.asarray(np.random.default_rng(1).choice(k, size=(steps, b), p=p))
    head = deterministic(SampledSoftmax(8, distribution)).build(2, k, nnx.Rngs(0))
    head.logits.kernel[...] = jnp.zeros((2, k))
    head.logits.bias[...] = jnp.asarray(TAU * np.log(p), jnp.float32)
    graph, params = nnx.split(head)

    def of_bias(rows):
        label, key = rows

        def value(params):
            return SoftmaxCrossEntropy()(nnx.merge(graph, params)(jnp.zeros((b, 2)), key), label).loss

        return jax.grad(value)(nnx.to_pure_dict(params))["logits"]["bias"]

    rows = labels, jax.random.split(KEY, steps)
    gradients = np.asarray(jax.jit(lambda rows: jax.lax.map(of_bias, rows, batch_size=500))(rows), np.float64)
    mean, error = gradients.mean(axis=0), gradients.std(axis=0) / math.sqrt(steps)
    assert np.all(np.abs(mean) < 5 * error + 1e-3) == (not without)
