"""ε = V(x)ᵀ ξ + d(x) η and its covariance (HET-XL Sec. 2.2, Eq. 17 and 18, App. L)."""

import dataclasses
import functools
import itertools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.covariance import MINIMUM_SCALE, Covariance, CovarianceConfig, Noise, standard_normals
from tests.heads import references

B, D, Q, R = 3, 6, 5, 4
CONFIGS = [CovarianceConfig(R, f, second) for f in ("full", "efficient") for second in ("rank_one", "diagonal")]
CONFIGS += [CovarianceConfig(0, "full", "rank_one"), CovarianceConfig(0, "efficient", "diagonal")]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.form}-{c.second_term}-{c.num_factors}")
FULL, EFFICIENT = CONFIGS[0], CONFIGS[2]


@functools.cache
def make(config) -> Covariance:
    return references.with_random_biases(config.build(D, Q, feature_norm=1.0, rngs=nnx.Rngs(0)))


def features(b=B):
    return jnp.asarray(np.random.default_rng(1).normal(size=(b, D)), jnp.float32)


def draw(module, x, samples, seed=0):
    """Returns noise ``[b s q]`` and the standard normals that it is made of."""
    noise = module(x)
    normals = standard_normals(jax.random.split(jax.random.key(seed), len(x)), jnp.arange(samples), noise.num_normals)
    return noise.apply(normals), normals


@every_config
def test_noise_for_the_same_normals_its_covariance_and_its_norm_equal_the_numpy_reference(config):
    module, x = make(config), features()
    noise, normals = draw(module, x, 7)
    assert normals.shape == (B, 7, config.num_factors + (Q if config.is_diagonal else 1))
    expected = references.noise(references.in_float64(module), config, np.asarray(x), np.asarray(normals, np.float64))
    np.testing.assert_allclose(noise, expected, rtol=1e-5, atol=1e-5)
    expected = references.covariance(references.in_float64(module), config, np.asarray(x))
    np.testing.assert_allclose(module.covariance(x), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(module.noise_norm(x) ** 2, np.trace(expected, axis1=1, axis2=2), rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS[4:], ids=["rank_one", "diagonal"])
def test_rank_zero_has_a_diagonal_covariance_for_every_second_term(config):
    module, x = make(config), features()
    assert config.is_diagonal
    assert set(nnx.to_pure_dict(nnx.state(module))) == {"diagonal"}
    scale = np.log1p(np.exp(np.asarray(module.diagonal(x), np.float64))) + 1e-3
    np.testing.assert_allclose(module.covariance(x), [np.diag(d**2) for d in scale], rtol=1e-5)


@every_config
def test_covariance_is_the_empirical_covariance_of_samples(config):
    module, x, samples = make(config), features(2), 20_000
    noise = np.asarray(draw(module, x, samples)[0], np.float64)
    expected = np.asarray(module.covariance(x), np.float64)
    empirical = np.einsum("bsi,bsj->bij", noise, noise) / samples
    # For Gaussians var(ε_i ε_j) = Σ_ii Σ_jj + Σ_ij²; five standard errors over 2·25 entries fail once in 30,000.
    variances = np.einsum("bii->bi", expected)
    error = np.sqrt((variances[:, :, None] * variances[:, None, :] + expected**2) / samples)
    assert np.all(np.abs(empirical - expected) < 5 * error)
    assert np.all(np.abs(noise.mean(axis=1)) < 5 * np.sqrt(variances / samples))


@every_config
def test_gradients_agree_with_finite_differences_of_the_reference(config):
    module, x = make(config), features()
    normals, random = draw(module, x, 3)[1], np.random.default_rng(5)
    weights = random.normal(size=(B, 3, Q))
    graph, state = nnx.split(module)

    def fast(params, x):
        return jnp.sum(jnp.asarray(weights, jnp.float32) * nnx.merge(graph, params)(x).apply(normals))

    def slow(params, x):
        return np.sum(weights * references.noise(params, config, x, np.asarray(normals, np.float64)))

    gradient, of_x = jax.jit(jax.grad(fast, argnums=(0, 1)))(state, x)
    gradient = {**parameters.flatten(nnx.to_pure_dict(gradient)), "x": of_x}
    place = {**references.in_float64(module), "x": np.asarray(x, np.float64)}
    for path, leaf in gradient.items():
        direction = 1e-6 * random.normal(size=leaf.shape)
        moved = ({**place, path: place[path] + sign * direction} for sign in (1, -1))
        sums = [slow(params, params["x"]) for params in moved]
        slope = (sums[0] - sums[1]) / 2
        scale = np.linalg.norm(leaf) * np.linalg.norm(direction)
        assert scale > 0
        np.testing.assert_allclose(np.sum(leaf * direction) / scale, slope / scale, atol=1e-5, err_msg=path)


def test_the_gradient_of_the_covariance_agrees_with_finite_differences():
    module, x = make(FULL), np.asarray(features(1))
    direction, step = np.random.default_rng(2).normal(size=x.shape).astype(np.float32), np.float32(1e-2)
    norm = jax.jit(jax.value_and_grad(lambda x: module.noise_norm(x)[0]))
    slope = (norm(x + step * direction)[0] - norm(x - step * direction)[0]) / (2 * step)
    np.testing.assert_allclose(np.vdot(norm(x)[1], direction), slope, rtol=1e-3)


@pytest.mark.parametrize("config", [FULL, EFFICIENT], ids=["full", "efficient"])
def test_projected_noise_is_the_projection_of_the_noise(config):
    module, x = make(config), features()
    kernel = jnp.asarray(np.random.default_rng(3).normal(size=(Q, 7)), jnp.float32)
    index = np.array([4, 0, 0, 2])
    noise, normals = draw(module, x, 6)
    np.testing.assert_allclose(module(x).project(kernel).apply(normals), noise @ kernel, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(module(x).take(index).apply(normals), noise[..., index], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jnp.einsum("ntr,nrq->ntq", normals, module(x).rows()), noise, rtol=1e-5, atol=1e-5)


def test_a_diagonal_term_adds_no_rows_and_cannot_be_projected():
    noise = make(CONFIGS[1])(features())
    np.testing.assert_array_equal(noise.rows(), noise.low_rank())
    for change in (lambda: noise.project(jnp.eye(Q)), lambda: noise.take(np.arange(Q))):
        with pytest.raises(ValueError, match="a diagonal term"):
            change()


def test_noise_depends_on_the_key_and_differs_between_samples_and_examples():
    module, x = make(FULL), jnp.repeat(features(1), 2, axis=0)
    noise, other = (np.asarray(draw(module, x, 2, seed)[0]) for seed in (0, 1))
    np.testing.assert_array_equal(noise, draw(module, x, 2, 0)[0])
    rows = [*noise.reshape(4, -1), *other.reshape(4, -1)]
    assert all(not np.allclose(rows[i], rows[j]) for i in range(8) for j in range(i))


def test_a_sample_depends_only_on_its_index_and_antithetic_ones_come_in_pairs_that_cancel():
    """Samples 2i and 2i + 1 are ξ and -ξ, whichever others are drawn with them; ξ is the i-th of the usual draws."""
    keys = jax.random.split(jax.random.key(0), B)
    normals, pairs = (np.asarray(standard_normals(keys, jnp.arange(6), 4, antithetic=some)) for some in (False, True))
    # Sample 5 is the same one whether it is drawn among six or with sample 2, and for its example among others.
    for some, expected in ((False, normals), (True, pairs)):
        found = standard_normals(keys, jnp.array([5, 2]), 4, antithetic=some)
        np.testing.assert_array_equal(found, expected[:, [5, 2]])
    np.testing.assert_array_equal(standard_normals(keys[1:2], jnp.arange(6), 4), normals[1:2])
    np.testing.assert_array_equal(pairs[:, 0::2], -pairs[:, 1::2])
    np.testing.assert_array_equal(pairs[:, 0::2], normals[:, :3])


def test_normals_are_standard_and_independent_over_examples_samples_and_coordinates():
    n = 20_000
    normals = np.asarray(standard_normals(jax.random.split(jax.random.key(0), 2), jnp.arange(n), 3), np.float64)
    columns = np.concatenate([*normals, normals[0, np.roll(np.arange(n), 1)]], axis=1)
    # Moments of n standard normals: means have standard error 1/√n, squares √2/√n, products 1/√n.
    np.testing.assert_allclose(columns.mean(axis=0), 0, atol=5 / math.sqrt(n))
    np.testing.assert_allclose(columns.T @ columns / n, np.eye(9), atol=5 * math.sqrt(2 / n))


@settings(max_examples=5, deadline=None)  # every size is compiled anew
@given(
    form=st.sampled_from(["full", "efficient"]),
    second=st.sampled_from(["rank_one", "diagonal"]),
    d=st.integers(16, 96),
    q=st.integers(16, 96),
    r=st.integers(0, 20),
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
        noise = config.build(d, q, feature_norm, nnx.Rngs(0))(x)
        return jnp.sum(noise.low_rank() ** 2, axis=(1, 2)), jnp.sum(noise.scale**2, axis=1)

    of_factors, of_scale = squared_norms(jnp.asarray(x, jnp.float32))
    # Half of the squared norm from either term, or all of it from d. |d|² is exact; the mean of |V|² over 64 examples
    # is a mean of many squared Gaussians with a relative spread below √(2/min(q, d)) (J and φ are shared): 4 spreads
    # at 16 are 1.4.
    np.testing.assert_allclose(of_scale, norm**2 / (2 if r else 1), rtol=1e-4)
    if r:
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


def test_the_scale_stays_above_its_floor_however_small_its_layer_makes_it():
    module = CovarianceConfig(1).build(D, Q, 1.0, nnx.Rngs(0))
    assert module.diagonal.bias is not None
    module.diagonal.bias[...] = jnp.full(Q, -1e4)
    np.testing.assert_allclose(module(features()).scale, MINIMUM_SCALE, rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(d=st.integers(1, 40), q=st.integers(1, 40), r=st.integers(0, 8))
def test_parameter_counts_follow_the_formulas(d, q, r):
    def count(form):
        return parameters.count(
            nnx.eval_shape(lambda: nnx.to_pure_dict(nnx.state(CovarianceConfig(r, form).build(d, q, 1.0, nnx.Rngs(0)))))
        )

    # Full: C [d, r q] and K1 [d, q]. Efficient: K2 and K1 [d, q], J [r, q]. The rest are biases of dense layers.
    assert count("full") == (d * q * r + q * r) + (d * q + q)
    assert count("efficient") == ((2 * d * q + q * r) + 2 * q if r else d * q + q)


def test_the_noise_grows_alike_for_every_rank_and_size():
    """Steps of one size in every entry of the kernels, as Adam makes them, move |V|² by the same amount."""
    moved = []
    sizes: list[tuple[Literal["full", "efficient"], int, int]]
    sizes = [("full", 2, 64), ("full", 15, 64), ("full", 4, 256), ("efficient", 4, 128), ("efficient", 9, 512)]
    for (form, r, q), feature_norm in itertools.product(sizes, (1.0, 8.0)):
        config = CovarianceConfig(r, form, initial_noise_norm=1.0)
        factor = config.scaled_learning_rate(q, feature_norm)
        columns = q * r if form == "full" else q
        steps = np.random.default_rng(0).choice([-1.0, 1.0], (32, columns))
        features = np.full((1, 32), feature_norm / math.sqrt(32))
        moved.append(np.linalg.norm(factor * features @ steps))
    np.testing.assert_allclose(moved, 10, rtol=0.15)
    assert CovarianceConfig(2, learning_rate_factor=0.5).scaled_learning_rate(64, 1.0) == 0.5
    assert CovarianceConfig(2).scaled_learning_rate(8, 1.0) == 1.0, "small heads have the learning rate of the others"


@pytest.mark.parametrize("form", ["full", "efficient"])
@pytest.mark.parametrize("second_term", ["rank_one", "diagonal"])
def test_alignment_and_effective_rank_are_those_of_the_whole_matrix(form, second_term):
    module = make(CovarianceConfig(3, form, second_term, initial_noise_norm=1.0))
    x, keys = features(4), np.random.default_rng(1).normal(size=(7, Q))
    matrices, noise = np.asarray(module.covariance(x), np.float64), module(x)
    centred = keys - keys.mean(axis=0)
    of_keys = centred.T @ centred
    expected = [Q * np.trace(sigma @ of_keys) / (np.trace(sigma) * np.trace(of_keys)) for sigma in matrices]
    np.testing.assert_allclose(noise.alignment(jnp.asarray(keys, jnp.float32), jnp.ones(7, bool)), expected, rtol=1e-4)
    ranks = [np.trace(sigma) ** 2 / np.trace(sigma @ sigma) for sigma in matrices]
    np.testing.assert_allclose(noise.effective_rank(), ranks, rtol=1e-4)


def test_isotropic_noise_has_alignment_1_and_the_rank_of_its_space():
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(9, Q)), jnp.float32)
    isotropic = Noise(jnp.full((2, Q), 0.3), None, None, None, is_diagonal=True)
    np.testing.assert_allclose(isotropic.alignment(keys, jnp.ones(9, bool)), 1, rtol=1e-5)
    np.testing.assert_allclose(isotropic.effective_rank(), Q, rtol=1e-5)


def test_invalid_keys_do_not_count_and_equal_keys_have_no_direction():
    module, random = make(FULL), np.random.default_rng(2)
    keys = jnp.asarray(random.normal(size=(6, Q)), jnp.float32)
    noise, valid = module(features(4)), jnp.array([True, True, False, True, True, False])
    changed = jnp.where(valid[:, None], keys, 100.0)
    np.testing.assert_allclose(
        noise.alignment(changed, valid), noise.alignment(keys[valid], jnp.ones(4, bool)), rtol=1e-4
    )
    np.testing.assert_array_equal(noise.alignment(jnp.ones((3, Q)), jnp.ones(3, bool)), 1)
