"""ε = V(x) ξ + d(x) η and its covariance (HET-XL Sec. 2.2, Eq. 17 and 18, App. L)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.covariance import MINIMUM_SCALE, Covariance, CovarianceConfig

B, D, Q, R = 3, 6, 5, 4
FORMS = [(form, second) for form in ("full", "efficient") for second in ("rank_one", "diagonal")]
every_form = pytest.mark.parametrize(("form", "second"), FORMS)


def make(form, second, *, q=Q, norm=None, r=R):
    config = CovarianceConfig(r, form, second, initial_noise_norm=norm)
    module = config.build(D, q, feature_norm=1.0, rngs=nnx.Rngs(0))
    # Biases start at zero (or alike): random ones take part in the test.
    random = np.random.default_rng(0)
    for layer in (value for value in vars(module).values() if isinstance(value, nnx.Linear)):
        assert layer.bias is not None
        layer.bias[...] = jnp.asarray(random.normal(size=layer.out_features), jnp.float32)
    return module


def features(b=B):
    return jnp.asarray(np.random.default_rng(1).normal(size=(b, D)), jnp.float32)


def reference_terms(module: Covariance, x):
    """V(x) = reshape(C φ + c, [q, r]) or V = J ∘ (K2ᵀφ + k2) per coordinate; d(x) = softplus(K1ᵀφ + k1) + 10⁻³."""
    p = {k: np.asarray(v, np.float64) for k, v in parameters.flatten(nnx.to_pure_dict(nnx.state(module))).items()}
    b, q, r = len(x), module.diagonal.out_features, module.config.num_factors
    factors, scale = np.zeros((b, q, r)), np.zeros((b, q))
    for n in range(b):
        phi = np.asarray(x[n], np.float64)
        for i in range(q):
            scale[n, i] = np.log1p(np.exp(phi @ p["diagonal/kernel"][:, i] + p["diagonal/bias"][i])) + 1e-3
            for j in range(r):
                if module.config.form == "full":
                    factors[n, i, j] = phi @ p["factors/kernel"][:, i * r + j] + p["factors/bias"][i * r + j]
                else:
                    v = phi @ p["scale_of_factors/kernel"][:, i] + p["scale_of_factors/bias"][i]
                    factors[n, i, j] = p["shared_factors"][i, j] * v
    return factors, scale


def reference_noise(module, x, xi, eta):
    """ε_s = V ξ_s + d ∘ η_s, one sample and one example at a time."""
    factors, scale = reference_terms(module, x)
    noise = np.zeros((len(xi), len(x), scale.shape[1]))
    for s in range(len(xi)):
        for n in range(len(x)):
            noise[s, n] = factors[n] @ xi[s, n] + scale[n] * eta[s, n]
    return noise


@every_form
def test_noise_equals_the_numpy_reference_for_given_normals(form, second):
    module, x = make(form, second), features()
    xi, eta = module.draw(B, Q, jax.random.key(0), 7)
    assert eta.shape == (7, B, 1 if second == "rank_one" else Q)
    expected = reference_noise(module, x, np.asarray(xi, np.float64), np.asarray(eta, np.float64))
    np.testing.assert_allclose(module.apply(x, xi, eta), expected, rtol=1e-5, atol=1e-5)


@every_form
def test_sample_is_apply_of_draw(form, second):
    module, x, key = make(form, second), features(), jax.random.key(3)
    np.testing.assert_array_equal(module.sample(x, key, 4), module.apply(x, *module.draw(B, Q, key, 4)))


@every_form
def test_covariance_equals_the_numpy_reference(form, second):
    module, x = make(form, second), features()
    factors, scale = reference_terms(module, x)
    for n, matrix in enumerate(np.asarray(module.covariance(x))):
        term = np.outer(scale[n], scale[n]) if second == "rank_one" else np.diag(scale[n] ** 2)
        np.testing.assert_allclose(matrix, factors[n] @ factors[n].T + term, rtol=1e-5, atol=1e-5)


@every_form
def test_covariance_is_the_empirical_covariance_of_samples(form, second):
    module, x, samples = make(form, second), features(2), 50_000
    noise = np.asarray(module.sample(x, jax.random.key(0), samples), np.float64)
    expected = np.asarray(module.covariance(x), np.float64)
    empirical = np.einsum("sbi,sbj->bij", noise, noise) / samples
    # For Gaussians var(ε_i ε_j) = Σ_ii Σ_jj + Σ_ij²; five standard errors over 2·25 entries fail once in 30,000.
    variances = np.einsum("bii->bi", expected)
    error = np.sqrt((variances[:, :, None] * variances[:, None, :] + expected**2) / samples)
    assert np.all(np.abs(empirical - expected) < 5 * error)
    assert np.all(np.abs(noise.mean(axis=0)) < 5 * np.sqrt(variances / samples))


@every_form
def test_noise_norm_squared_is_the_trace(form, second):
    module, x = make(form, second), features()
    np.testing.assert_allclose(module.noise_norm(x) ** 2, jnp.trace(module.covariance(x), axis1=1, axis2=2), rtol=1e-5)


@every_form
def test_gradients_equal_those_of_a_plain_reference(form, second):
    module, x = make(form, second), features()
    xi, eta = module.draw(B, Q, jax.random.key(0), 3)
    weights = jnp.asarray(np.random.default_rng(5).normal(size=(3, B, Q)), jnp.float32)
    graph, state = nnx.split(module)

    def fast(params, x):
        return jnp.sum(weights * nnx.merge(graph, params).apply(x, xi, eta))

    def slow(params, x):
        p = nnx.to_pure_dict(params)
        total = jnp.float32(0)
        for n in range(B):
            scale = jnp.log1p(jnp.exp(x[n] @ p["diagonal"]["kernel"] + p["diagonal"]["bias"])) + MINIMUM_SCALE
            if form == "full":
                factors = (x[n] @ p["factors"]["kernel"] + p["factors"]["bias"]).reshape(Q, R)
            else:
                v = x[n] @ p["scale_of_factors"]["kernel"] + p["scale_of_factors"]["bias"]
                factors = p["shared_factors"] * jnp.repeat(v[:, None], R, axis=1)
            for s in range(3):
                total += weights[s, n] @ (factors @ xi[s, n] + scale * eta[s, n])
        return total

    actual, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(state, x) for f in (fast, slow))
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), actual, expected)


def test_the_gradient_of_the_covariance_agrees_with_finite_differences():
    module, x = make("full", "rank_one"), features(1)
    direction = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), jnp.float32)

    def norm(x):
        return module.noise_norm(x)[0]

    step = 1e-2
    slope = (norm(x + step * direction) - norm(x - step * direction)) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(jax.grad(norm)(x), direction), slope, rtol=1e-3)


def test_noise_depends_on_the_key_and_differs_between_samples_and_examples():
    module = make("full", "rank_one")
    x = jnp.repeat(features(1), 2, axis=0)
    noise = np.asarray(module.sample(x, jax.random.key(0), 2))
    other = np.asarray(module.sample(x, jax.random.key(1), 2))
    np.testing.assert_array_equal(noise, module.sample(x, jax.random.key(0), 2))
    rows = [*noise.reshape(4, -1), *other.reshape(4, -1)]
    assert all(not np.allclose(rows[i], rows[j]) for i in range(8) for j in range(i))


def test_samples_and_examples_are_uncorrelated():
    module, n = make("full", "diagonal"), 40_000
    x = jnp.repeat(features(1), 2, axis=0)
    noise = np.asarray(module.sample(x, jax.random.key(0), n), np.float64)
    standard = noise / noise.std(axis=0)
    # The mean of n products of independent standard variables has standard error 1/√n.
    assert np.all(np.abs((standard[:, 0] * standard[:, 1]).mean(axis=0)) < 5 / math.sqrt(n))
    assert np.all(np.abs((standard[1:] * standard[:-1]).mean(axis=0)) < 5 / math.sqrt(n - 1))


def test_the_two_normals_of_a_sample_are_independent():
    xi, eta = make("full", "diagonal", r=R, q=R).draw(1, R, jax.random.key(0), 10_000)
    assert np.all(np.abs(np.mean(np.asarray(xi * eta), axis=0)) < 5 / 100)


@settings(max_examples=5, deadline=None)  # every size is compiled anew
@given(
    form=st.sampled_from(["full", "efficient"]),
    second=st.sampled_from(["rank_one", "diagonal"]),
    d=st.integers(16, 96),
    q=st.integers(16, 96),
    r=st.integers(1, 20),
    norm=st.floats(0.05, 3.0),
    unit_features=st.booleans(),
)
def test_the_initial_noise_norm_is_reached_at_any_size(form, second, d, q, r, norm, unit_features):
    feature_norm = 1.0 if unit_features else math.sqrt(d)
    config = CovarianceConfig(r, form, second, initial_noise_norm=norm)
    x = np.random.default_rng(0).normal(size=(64, d))
    x *= feature_norm / np.linalg.norm(x, axis=1, keepdims=True)

    @jax.jit
    def squared_norms(x):
        factors, scale = config.build(d, q, feature_norm, nnx.Rngs(0)).terms(x)
        return jnp.sum(factors**2, axis=(1, 2)), jnp.sum(scale**2, axis=1)

    of_factors, of_scale = squared_norms(jnp.asarray(x, jnp.float32))
    # Half of the squared norm from either term. |d|² is exact; the mean of |V|² over 64 examples is a mean of many
    # squared Gaussians with a relative spread below √(2/min(q, d)) (J and φ are shared): 4 spreads at 16 are 1.4.
    np.testing.assert_allclose(of_scale, norm**2 / 2, rtol=1e-4)
    ratio = float(of_factors.mean()) / (norm**2 / 2)
    assert abs(ratio - 1) < 4 * math.sqrt(2 / min(q, d))


@pytest.mark.parametrize("form", ["full", "efficient"])
@pytest.mark.parametrize("feature_norm", [1.0, 16.0])
def test_the_initial_noise_norm_is_met_within_five_percent_at_a_real_size(form, feature_norm):
    @jax.jit
    def noise_norm(x):
        module = CovarianceConfig(15, form, initial_noise_norm=0.1).build(256, 256, feature_norm, nnx.Rngs(0))
        return module.noise_norm(x)

    x = np.random.default_rng(0).normal(size=(64, 256))
    x *= feature_norm / np.linalg.norm(x, axis=1, keepdims=True)
    assert float(noise_norm(jnp.asarray(x, jnp.float32)).mean()) == pytest.approx(0.1, rel=0.05)


def test_an_initial_noise_norm_below_the_floor_of_d_is_refused():
    config = CovarianceConfig(initial_noise_norm=0.01)
    with pytest.raises(UserError, match=r"initial_noise_norm = 0.01 is below 0.0447.*1000 dimensions") as error:
        config.build(8, 1000, 1.0, nnx.Rngs(0))
    assert "\n" not in str(error.value)
    dataclasses.replace(config, initial_noise_norm=0.045).build(8, 1000, 1.0, nnx.Rngs(0))


@settings(max_examples=15, deadline=None)
@given(d=st.integers(1, 40), q=st.integers(1, 40), r=st.integers(1, 8))
def test_parameter_counts_follow_the_formulas(d, q, r):
    def count(form):
        return parameters.count(
            nnx.eval_shape(lambda: nnx.to_pure_dict(nnx.state(CovarianceConfig(r, form).build(d, q, 1.0, nnx.Rngs(0)))))
        )

    # Full: C [d, q r] and K1 [d, q]. Efficient: K2 and K1 [d, q], J [q, r]. The rest are biases of dense layers.
    assert count("full") == (d * q * r + q * r) + (d * q + q)
    assert count("efficient") == (2 * d * q + q * r) + 2 * q
