"""Logits of the classifiers: Eq. 1 (DET) and Eq. 5 (HET-XL)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.heads.het_xl import HetXLClassifier, HetXLConfig
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature
from lit_het.losses.classification import sigmoid_cross_entropy, softmax_cross_entropy

GOLDEN = Path(__file__).parents[1] / "golden"
B, D, K, S = 3, 6, 5, 4


def make(form: Any = "full", second: Any = "rank_one", *, num_samples=S, initial_bias=0.3):
    config = HetXLConfig(CovarianceConfig(2, form, second), num_samples=num_samples, initial_bias=initial_bias)
    return config.build(D, K, nnx.Rngs(0))


def features():
    return jnp.asarray(np.random.default_rng(1).normal(size=(B, D)), jnp.float32)


@pytest.mark.parametrize("form", ["full", "efficient"])
@pytest.mark.parametrize("second", ["rank_one", "diagonal"])
def test_logits_equal_the_numpy_reference_with_the_same_noise(form, second):
    """u_s = (Wᵀ (φ + ε_s) + b) / τ with τ = 2.525."""
    head, x, key = make(form, second), features(), jax.random.key(2)
    noise = np.asarray(head.covariance.apply(x, *head.covariance.draw(B, D, key, S)))
    kernel, bias = np.asarray(head.logits.kernel[...]), 0.3
    expected = np.zeros((S, B, K))
    for s in range(S):
        for n in range(B):
            for k in range(K):
                expected[s, n, k] = (kernel[:, k] @ (np.asarray(x[n]) + noise[s, n]) + bias) / 2.525
    np.testing.assert_allclose(head(x, key), expected, rtol=1e-5, atol=1e-5)


def test_logits_of_a_lookup_that_replaces_the_matrix_product_are_the_same():
    head, x, key = make(), features(), jax.random.key(2)
    kernel, bias = head.logits.kernel[...], head.logits.bias
    assert bias is not None

    def in_two_shards(phi):
        return jnp.concatenate([phi @ kernel[:, :2], phi @ kernel[:, 2:]], axis=1) + bias[...][None]

    np.testing.assert_allclose(head(x, key, in_two_shards), head(x, key), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(head(x, None, in_two_shards), head(x, None), rtol=1e-5, atol=1e-6)
    assert not np.allclose(head(x, key, lambda phi: 2 * in_two_shards(phi)), head(x, key))


def test_without_a_key_there_is_one_sample_without_noise():
    head, x = make(), features()
    assert head(x, None).shape == (1, B, K)
    np.testing.assert_allclose(head(x, None)[0], head.logits(x) / 2.525, rtol=1e-6)
    assert not np.allclose(head(x, jax.random.key(0))[0], head(x, None)[0])


def test_a_deterministic_classifier_divides_by_the_temperature_and_ignores_the_key():
    config = DeterministicConfig(FixedTemperature(0.5), initial_bias=-6.9)
    head, x = config.build(D, K, nnx.Rngs(0)), features()
    expected = (np.asarray(x) @ np.asarray(head.logits.kernel[...]) - 6.9) / 0.5
    np.testing.assert_allclose(head(x, jax.random.key(0))[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(head(x, None), head(x, jax.random.key(0)))
    np.testing.assert_array_equal(head.noise_norm(x), np.zeros(B))


def test_more_samples_approach_the_expected_probability_like_one_over_the_square_root():
    """1/S Σ_s softmax(u_s) has the standard error sd/√S around E softmax(u): errors shrink 8-fold from 64 to 4096."""
    x = features()

    def estimates(num_samples, seeds):
        head = make(num_samples=num_samples)
        mean_probability = jax.jit(lambda key: jax.nn.softmax(head(x, key)).mean(axis=0))
        return np.stack([mean_probability(jax.random.key(seed)) for seed in seeds])

    expected = estimates(200_000, [100])

    def error(num_samples):
        return np.sqrt(np.mean((estimates(num_samples, range(40)) - expected) ** 2))

    few, many = error(64), error(4096)
    assert few / many == pytest.approx(8, rel=0.3)


def test_noise_norm_is_that_of_the_covariance():
    head, x = make(), features()
    np.testing.assert_array_equal(head.noise_norm(x), head.covariance.noise_norm(x))


def count(config, d, k):
    return parameters.count(nnx.eval_shape(lambda: nnx.to_pure_dict(nnx.state(config.build(d, k, nnx.Rngs(0))))))


@pytest.mark.parametrize("num_classes", [18_291, 21_843, 29_593])
def test_het_xl_adds_the_parameters_of_table_3_whatever_the_number_of_classes(num_classes):
    # ViT-L/32, r = 50: 331.1 M - 328.9 M = 327.5 M - 325.3 M = 2.2 M.
    extra = count(HetXLConfig(), 1024, num_classes) - count(DeterministicConfig(), 1024, num_classes)
    assert extra == 2 * 1024**2 + 50 * 1024 + 2 * 1024 + 1  # 2d² + rd, two biases, the temperature
    assert round(extra / 1e6, 1) == 2.2


def test_het_xl_on_a_resnet_adds_the_parameters_of_table_3():
    # ResNet152x1, d = 2048: 111.4 M - 102.9 M = 8.5 M.
    assert round((count(HetXLConfig(), 2048, 100) - count(DeterministicConfig(), 2048, 100)) / 1e6, 1) == 8.5


def from_edward2(golden) -> HetXLClassifier:
    """Puts edward2's parameters into our head; its J has a bias (a mean of the noise), which ours has not."""
    efficient = "params/scale_layer_homoscedastic/kernel" in golden
    tuned = "params/pre_sigmoid_temperature" in golden
    temperature = BoundedTemperature(0.05, 5.0) if tuned else FixedTemperature(float(golden["temperature"][0]))
    form = "efficient" if efficient else "full"
    head = HetXLConfig(CovarianceConfig(3, form), temperature, num_samples=8).build(6, 5, nnx.Rngs(0))
    graph, state = nnx.split(head)
    params = parameters.flatten(nnx.to_pure_dict(state))
    renamed = {
        "logits": "loc_layer",
        "covariance/diagonal": "diag_layer",
        "covariance/factors": "scale_layer",
        "covariance/scale_of_factors": "scale_layer_heteroscedastic",
    }
    for path in params:
        layer, _, leaf = path.rpartition("/")
        if layer in renamed:
            params[path] = jnp.asarray(golden[f"params/{renamed[layer]}/{leaf}"])
    if efficient:
        params["covariance/shared_factors"] = jnp.asarray(golden["params/scale_layer_homoscedastic/kernel"].T)
    if tuned:
        params["temperature/position"] = jnp.asarray(golden["params/pre_sigmoid_temperature"][0])
    return nnx.merge(graph, parameters.unflatten(params))


@pytest.mark.parametrize("name", ["softmax_hetxl_full_tune", "softmax_hetxl_pe_fixed", "sigmoid_hetxl_pe_tune"])
def test_noise_and_probabilities_equal_those_of_the_authors_code(name, monkeypatch):
    with np.load(GOLDEN / f"{name}.npz") as golden:
        head = from_edward2(golden)
        x = jnp.asarray(golden["x"])
        xi, eta = (jnp.asarray(golden[k]).swapaxes(0, 1) for k in ("eps_factors", "eps_diag"))
        noise = np.asarray(head.covariance.apply(x, xi, eta)).swapaxes(0, 1)
        mean = 0.0
        if "_pe_" in name:
            v = np.asarray(head.covariance.scale_of_factors(x))
            mean = golden["params/scale_layer_homoscedastic/bias"] * v[:, None]
        np.testing.assert_allclose(noise + mean, golden["noise"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(head.temperature(), golden["temperature"][0], rtol=1e-6)

        recorded = jnp.asarray(golden["noise"]).swapaxes(0, 1)
        monkeypatch.setattr(type(head.covariance), "sample", lambda *_: recorded)
        logits = head(x, jax.random.key(0))
        if name.startswith("softmax"):
            probabilities, labels = jax.nn.softmax(logits).mean(axis=0), jnp.asarray(golden["labels"])
            loss = softmax_cross_entropy(logits, labels).mean()
        else:
            probabilities = jax.nn.sigmoid(logits).mean(axis=0)
            loss = sigmoid_cross_entropy(logits, jnp.asarray(golden["targets"], jnp.float32)).mean()
        np.testing.assert_allclose(probabilities, golden["probs"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(loss, golden["loss"], rtol=1e-5)


def test_gradients_equal_those_of_the_authors_code(monkeypatch):
    with np.load(GOLDEN / "softmax_hetxl_full_tune.npz") as golden:
        head = from_edward2(golden)
        xi, eta = (jnp.asarray(golden[k]).swapaxes(0, 1) for k in ("eps_factors", "eps_diag"))
        labels = jnp.asarray(golden["labels"])
        monkeypatch.setattr(type(head.covariance), "draw", lambda *_: (xi, eta))
        graph, state = nnx.split(head)

        def loss(params, x):
            return softmax_cross_entropy(nnx.merge(graph, params)(x, jax.random.key(0)), labels).mean()

        params, x = jax.jit(jax.grad(loss, argnums=(0, 1)))(state, jnp.asarray(golden["x"]))
        gradient = parameters.flatten(nnx.to_pure_dict(params))
        theirs = {
            "logits": "loc_layer",
            "covariance/diagonal": "diag_layer",
            "covariance/factors": "scale_layer",
        }
        for layer, name in theirs.items():
            for leaf in ("kernel", "bias"):
                expected = golden[f"grads/{name}/{leaf}"]
                np.testing.assert_allclose(gradient[f"{layer}/{leaf}"], expected, rtol=1e-4, atol=1e-5)
        expected = golden["grads/pre_sigmoid_temperature"][0]
        np.testing.assert_allclose(gradient["temperature/position"], expected, rtol=1e-4)
        np.testing.assert_allclose(x, golden["grad_x"], rtol=1e-4, atol=1e-5)
