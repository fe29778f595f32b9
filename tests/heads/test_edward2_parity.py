"""HET and HET-XL equal the authors' published supervised code (edward2, `heteroscedastic_lib.py`)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.heads import sampling
from lit_het.heads.covariance import CovarianceConfig, standard_normals
from lit_het.heads.het import HetConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy
from tests.heads.references import mean_probabilities

GOLDEN = Path(__file__).parents[1] / "golden"
B, D, K, R = 4, 6, 5, 3
LAYERS = {
    "logits": "loc_layer",
    "covariance/diagonal": "diag_layer",
    "covariance/factors": "scale_layer",
    "covariance/scale_of_factors": "scale_layer_heteroscedastic",
}
RECORDED = [
    "softmax_het_full_fixed",
    "softmax_het_pe_tune",
    "softmax_hetxl_full_tune",
    "softmax_hetxl_pe_fixed",
    "sigmoid_het_full_fixed",
    "sigmoid_hetxl_pe_tune",
]


def ours(tree, prefix, rank):
    """Returns edward2's parameters, or their gradients, in our layout.

    Theirs reshapes C φ to [q, r], ours to [r, q]. Its J has a bias, a mean of the noise, which the paper and our heads
    have not: a factor more, whose normal is always 1. It is left out where ``rank`` is theirs.
    """
    renamed = {}
    for layer, name in LAYERS.items():
        for leaf in ("kernel", "bias"):
            if (path := f"{prefix}/{name}/{leaf}") in tree:
                array = tree[path]
                if layer == "covariance/factors":
                    array = array.reshape(*array.shape[:-1], -1, R).swapaxes(-1, -2).reshape(array.shape)
                renamed[f"{layer}/{leaf}"] = jnp.asarray(array)
    if f"{prefix}/scale_layer_homoscedastic/kernel" in tree:
        rows = [
            tree[f"{prefix}/scale_layer_homoscedastic/kernel"],
            tree[f"{prefix}/scale_layer_homoscedastic/bias"][None],
        ]
        renamed["covariance/shared_factors"] = jnp.asarray(np.concatenate(rows)[:rank])
    if f"{prefix}/pre_sigmoid_temperature" in tree:
        renamed["temperature/position"] = jnp.asarray(tree[f"{prefix}/pre_sigmoid_temperature"][0])
    return renamed


def head_of(golden, name, *, order: Any = "direct", num_samples=8, with_mean=True):
    """Returns our head with edward2's parameters; the noise of an efficient one has a mean if asked for."""
    form = "efficient" if "_pe_" in name else "full"
    rank = R + 1 if with_mean and form == "efficient" else R
    config: Any = HetXLConfig if "hetxl" in name else HetConfig
    tau = BoundedTemperature(0.05, 5.0) if "tune" in name else FixedTemperature(float(golden["temperature"][0]))
    how = SamplingConfig(num_samples=num_samples, order=order)
    head = nnx.eval_shape(
        lambda: config(CovarianceConfig(rank, form), temperature=tau, sampling=how).build(D, K, nnx.Rngs(0))
    )
    params = ours(golden, "params", rank)
    assert set(params) == set(parameters.flatten(nnx.to_pure_dict(nnx.state(head))))
    nnx.update(head, parameters.unflatten(params))
    return head


def recorded_normals(golden, head):
    xi, eta = golden["eps_factors"], golden["eps_diag"]
    one = np.ones((*eta.shape[:2], head.config.covariance.num_factors - R), np.float32)
    return jnp.asarray(np.concatenate([xi, one, eta], axis=-1))


@pytest.mark.parametrize("name", RECORDED)
def test_noise_equals_that_of_the_authors_code(name):
    with np.load(GOLDEN / f"{name}.npz") as golden:
        head = head_of(golden, name)

        @jax.jit
        def found(x, normals):
            noise = head.covariance(x)
            return noise.scale, noise.apply(normals), head.temperature()

        scale, noise, tau = found(golden["x"], recorded_normals(golden, head))
        np.testing.assert_allclose(scale, golden["diag_scale"], rtol=1e-5)
        np.testing.assert_allclose(noise, golden["noise"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(tau, golden["temperature"][0], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "order"),
    [(name, order) for name in RECORDED for order in ("direct", "factored") if order == "direct" or "hetxl" in name],
)
def test_probabilities_losses_and_gradients_equal_those_of_the_authors_code(name, order, monkeypatch):
    with np.load(GOLDEN / f"{name}.npz") as golden:
        head = head_of(golden, name, order=order)
        normals = recorded_normals(golden, head)
        monkeypatch.setattr(sampling, "standard_normals", lambda *_, **__: normals)
        cross_entropy, activation, target = SigmoidCrossEntropy(), jax.nn.log_sigmoid, golden["targets"]
        if name.startswith("softmax"):
            cross_entropy, activation, target = SoftmaxCrossEntropy(), jax.nn.log_softmax, golden["labels"]
        graph, state = nnx.split(head)

        def loss(params, x):
            samples = nnx.merge(graph, params)(x, jax.random.key(0))
            value = cross_entropy(samples, jnp.asarray(target), jnp.ones(B, bool)).loss
            return value, mean_probabilities(samples, activation)

        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (value, probabilities), (of_params, of_x) = compiled(state, jnp.asarray(golden["x"]))
        np.testing.assert_allclose(probabilities, golden["probs"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(value, golden["loss"], rtol=1e-5)
        np.testing.assert_allclose(of_x, golden["grad_x"], rtol=1e-4, atol=1e-5)
        gradient = parameters.flatten(nnx.to_pure_dict(of_params))
        expected = ours(golden, "grads", R + 1)
        assert set(gradient) == set(expected)
        for path, leaf in expected.items():
            np.testing.assert_allclose(gradient[path], leaf, rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("name", ["stats_softmax_het_full_tune", "stats_softmax_hetxl_pe_tune"])
def test_covariances_are_those_of_20000_samples_of_the_authors_code(name):
    with np.load(GOLDEN / f"{name}.npz") as golden:
        head, x = head_of(golden, name, with_mean=False), jnp.asarray(golden["x"])
        covariance = np.asarray(jax.jit(head.covariance.covariance)(x))
        kernel = np.asarray(head.logits.kernel[...])
        of_logits = np.einsum("qk,nqp,pl->nkl", kernel, covariance, kernel) if "hetxl" in name else covariance
        for actual, expected in ((covariance, golden["noise_cov"]), (of_logits, golden["latent_cov"])):
            deviation = np.sqrt(np.einsum("nii->ni", actual))
            assert np.all(np.abs(actual - expected) < 0.06 * deviation[:, :, None] * deviation[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stats_softmax_het_full_tune", "stats_softmax_hetxl_pe_tune"])
def test_mean_probabilities_over_20000_samples_are_those_of_the_authors_code(name, monkeypatch):
    with np.load(GOLDEN / f"{name}.npz") as golden:
        samples_taken = int(golden["num_samples"])
        head, x = head_of(golden, name, num_samples=samples_taken, order="direct"), jnp.asarray(golden["x"])

        def with_a_constant(keys, samples, count, *, antithetic):
            normals = standard_normals(keys, samples, count, antithetic=antithetic)
            return normals if head.config.covariance.num_factors == R else normals.at[..., R].set(1.0)

        monkeypatch.setattr(sampling, "standard_normals", with_a_constant)

        @jax.jit
        def probabilities(x):
            return mean_probabilities(head(x, jax.random.key(0)), jax.nn.log_softmax)

        assert samples_taken == 20_000
        # Two means of independent samples differ by √2 standard errors; theirs come from ten means of 2,000 and are
        # themselves uncertain by a quarter.
        difference = np.abs(np.asarray(probabilities(x)) - golden["probs_mean"])
        assert np.max(difference) < 0.012
        assert np.sqrt(np.mean(difference**2)) < 2 * np.sqrt(2 * np.mean(golden["probs_se"] ** 2))
