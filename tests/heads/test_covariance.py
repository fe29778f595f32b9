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
    with jax.ensure_compile_time_eval():  # the first call may be within a compiled function
        return references.with_random_parameters(lambda: config.build(D, Q, feature_norm=1.0, rngs=nnx.Rngs(0)))


def features(b=B):
    return jnp.asarray(np.random.default_rng(1).normal(size=(b, D)), jnp.float32)


def draw(config, x, samples, seed=0):
    """Returns noise ``[b s q]`` and the standard normals that it is made of."""
    keys = jax.random.split(jax.random.key(seed), len(x))
    normals = references.draw_normals(keys, np.arange(samples), config.num_factors + (Q if config.is_diagonal else 1))
    return apply(config, x, normals), normals


@functools.partial(jax.jit, static_argnums=0)
def apply(config, x, normals):
    noise = make(config)(x)
    assert noise.num_normals == normals.shape[-1]
    return noise.apply(normals)


@functools.partial(jax.jit, static_argnums=0)
def covariance(config, x):
    """Returns the covariance of the noise and its norm."""
    return make(config).covariance(x), make(config).noise_norm(x)


@every_config
def test_noise_for_the_same_normals_its_covariance_and_its_norm_equal_the_numpy_reference(config):
    params, x = references.in_float64(make(config)), features()
    noise, normals = draw(config, x, 7)
    expected = references.noise(params, config, np.asarray(x), np.asarray(normals, np.float64))
    np.testing.assert_allclose(noise, expected, rtol=1e-5, atol=1e-5)
    found, norm = covariance(config, x)
    expected = references.covariance(params, config, np.asarray(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(norm**2, np.trace(expected, axis1=1, axis2=2), rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS[4:], ids=["rank_one", "diagonal"])
def test_rank_zero_has_a_diagonal_covariance_for_every_second_term(config):
    module, x = make(config), features()
    assert config.is_diagonal
    assert set(nnx.to_pure_dict(nnx.state(module))) == {"diagonal"}
    scale = np.log1p(np.exp(np.asarray(jax.jit(module.diagonal)(x), np.float64))) + 1e-3
    np.testing.assert_allclose(covariance(config, x)[0], [np.diag(d**2) for d in scale], rtol=1e-5)


@every_config
def test_covariance_is_the_empirical_covariance_of_samples(config):
    x, samples = features(), 20_000
    noise = np.asarray(draw(config, x, samples)[0], np.float64)
    expected = np.asarray(covariance(config, x)[0], np.float64)
    empirical = np.einsum("bsi,bsj->bij", noise, noise) / samples
    # For Gaussians var(ε_i ε_j) = Σ_ii Σ_jj + Σ_ij²; five standard errors over 2·25 entries fail once in 30,000.
    variances = np.einsum("bii->bi", expected)
    error = np.sqrt((variances[:, :, None] * variances[:, None, :] + expected**2) / samples)
    assert np.all(np.abs(empirical - expected) < 5 * error)
    assert np.all(np.abs(noise.mean(axis=1)) < 5 * np.sqrt(variances / samples))


@every_config
def test_gradients_agree_with_finite_differences_of_the_reference(config):
    module, x = make(config), features()
    normals, random = draw(config, x, 7)[1], np.random.default_rng(5)
    weights = random.normal(size=(B, 7, Q))
    graph, state = nnx.split(module)

    def fast(params, x):
        return jnp.sum(jnp.asarray(weights, jnp.float32) * nnx.merge(graph, params)(x).apply(normals))

    def slow(params, x):
        return np.sum(weights * references.noise(params, config, x, np.asarray(normals, np.float64)))

    gradient, of_x = jax.jit(jax.grad(fast, argnums=(0, 1)))(state, x)
    gradient = jax.tree.map(np.asarray, {**parameters.flatten(nnx.to_pure_dict(gradient)), "x": of_x})
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

    @jax.jit
    def projected(x, normals):
        noise = module(x)
        by_rows = jnp.einsum("ntr,nrq->ntq", normals, noise.rows())
        return noise.project(kernel).apply(normals), noise.take(index).apply(normals), by_rows

    noise, normals = map(np.asarray, draw(config, x, 7))
    of_kernel, of_index, by_rows = projected(x, normals)
    np.testing.assert_allclose(of_kernel, noise @ kernel, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_index, noise[..., index], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_rows, noise, rtol=1e-5, atol=1e-5)


def test_a_diagonal_term_adds_no_rows_and_cannot_be_projected():
    noise = jax.jit(make(CONFIGS[1]))(features())
    np.testing.assert_array_equal(*jax.jit(lambda noise: (noise.rows(), noise.low_rank()))(noise))
    for change in (lambda: noise.project(jnp.eye(Q)), lambda: noise.take(np.arange(Q))):
        with pytest.raises(ValueError, match="a diagonal term"):
            change()


def test_noise_depends_on_the_key_and_differs_between_samples_and_examples():
    x = np.repeat(np.asarray(features(1)), B, axis=0)
    noise, other = (np.asarray(draw(FULL, x, 7, seed)[0]) for seed in (0, 1))
    np.testing.assert_array_equal(noise, draw(FULL, x, 7, 0)[0])
    rows = [*noise.reshape(7 * B, -1), *other.reshape(7 * B, -1)]
    assert all(not np.allclose(rows[i], rows[j]) for i in range(len(rows)) for j in range(i))


def test_a_sample_depends_only_on_its_index_and_antithetic_ones_come_in_pairs_that_cancel():
    """Samples 2i and 2i + 1 are ξ and -ξ, whichever others are drawn with them; ξ is the i-th of the usual draws."""
    keys, all_six, two = jax.random.split(jax.random.key(0), B), np.arange(6), np.array([5, 2])
    drawn = jax.jit(standard_normals, static_argnums=2, static_argnames="antithetic")
    normals, pairs = (np.asarray(drawn(keys, all_six, 4, antithetic=some)) for some in (False, True))
    # Sample 5 is the same one whether it is drawn among six or with sample 2, and for its example among others.
    for some, expected in ((False, normals), (True, pairs)):
        np.testing.assert_array_equal(drawn(keys, two, 4, antithetic=some), expected[:, two])
    np.testing.assert_array_equal(drawn(keys[1:2], all_six, 4, antithetic=False), normals[1:2])
    np.testing.assert_array_equal(pairs[:, 0::2], -pairs[:, 1::2])
    np.testing.assert_array_equal(pairs[:, 0::2], normals[:, :3])


def test_normals_are_standard_and_independent_over_examples_samples_and_coordinates():
    n = 20_000
    drawn = jax.jit(lambda key: standard_normals(jax.random.split(key, 2), jnp.arange(n), 3))
    normals = np.asarray(drawn(jax.random.key(0)), np.float64)
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
        ratio = np.mean(of_factors) / (norm**2 / 2)
        assert abs(ratio - 1) < 4 * math.sqrt(2 / min(q, d))


@pytest.mark.parametrize(("form", "feature_norm"), [("full", 1.0), ("efficient", 16.0)])
def test_the_initial_noise_norm_is_met_within_five_percent_at_a_real_size(form, feature_norm):
    @jax.jit
    def noise_norm(x):
        module = CovarianceConfig(15, form, initial_noise_norm=0.1).build(256, 256, feature_norm, nnx.Rngs(0))
        return module.noise_norm(x)

    x = np.random.default_rng(0).normal(size=(64, 256))
    x *= feature_norm / np.linalg.norm(x, axis=1, keepdims=True)
    assert np.mean(noise_norm(x.astype(np.float32))) == pytest.approx(0.1, rel=0.05)


def test_an_initial_noise_norm_below_the_floor_of_d_is_refused():
    config = CovarianceConfig(initial_noise_norm=0.01)
    with pytest.raises(UserError, match=r"initial_noise_norm = 0.01 is below 0.0447.*1000 dimensions") as error:
        config.build(8, 1000, 1.0, nnx.Rngs(0))
    assert "\n" not in str(error.value)
    enough = dataclasses.replace(config, initial_noise_norm=0.045)
    nnx.eval_shape(lambda: enough.build(8, 1000, 1.0, nnx.Rngs(0)))


def test_the_scale_stays_above_its_floor_however_small_its_layer_makes_it():
    def scale(x):
        module = CovarianceConfig(1).build(D, Q, 1.0, nnx.Rngs(0))
        assert module.diagonal.bias is not None
        module.diagonal.bias[...] = jnp.full(Q, -1e4)
        return module(x).scale

    np.testing.assert_allclose(jax.jit(scale)(features()), MINIMUM_SCALE, rtol=1e-6)


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


@functools.partial(jax.jit, static_argnums=0)
def measured(config, x, keys, valid):
    """Returns the alignment of the noise with keys, and its effective rank."""
    noise = make(config)(x)
    return noise.alignment(keys, valid), noise.effective_rank()


@pytest.mark.parametrize("config", CONFIGS[:4], ids=lambda c: f"{c.form}-{c.second_term}")
def test_alignment_and_effective_rank_are_those_of_the_whole_matrix(config):
    x, keys = features(), np.random.default_rng(1).normal(size=(7, Q))
    matrices = np.asarray(covariance(config, x)[0], np.float64)
    alignment, rank = measured(config, x, keys.astype(np.float32), np.ones(7, bool))
    centred = keys - keys.mean(axis=0)
    of_keys = centred.T @ centred
    expected = [Q * np.trace(sigma @ of_keys) / (np.trace(sigma) * np.trace(of_keys)) for sigma in matrices]
    np.testing.assert_allclose(alignment, expected, rtol=1e-4)
    ranks = [np.trace(sigma) ** 2 / np.trace(sigma @ sigma) for sigma in matrices]
    np.testing.assert_allclose(rank, ranks, rtol=1e-4)


def test_isotropic_noise_has_alignment_1_and_the_rank_of_its_space():
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(9, Q)), jnp.float32)
    isotropic = Noise(jnp.asarray(np.full((2, Q), 0.3, np.float32)), None, None, None, is_diagonal=True)
    of_noise = jax.jit(lambda noise: (noise.alignment(keys, jnp.ones(9, bool)), noise.effective_rank()))
    alignment, rank = of_noise(isotropic)
    np.testing.assert_allclose(alignment, 1, rtol=1e-5)
    np.testing.assert_allclose(rank, Q, rtol=1e-5)


def test_invalid_keys_do_not_count_and_equal_keys_have_no_direction():
    x, valid = features(), np.array([True, True, False, True, True, False, True])
    keys = np.random.default_rng(2).normal(size=(7, Q)).astype(np.float32)
    found, _ = measured(FULL, x, np.where(valid[:, None], keys, np.float32(100)), valid)
    expected, _ = measured(FULL, x, keys[valid], np.ones(5, bool))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    equal, _ = measured(FULL, x, np.ones((7, Q), np.float32), np.ones(7, bool))
    np.testing.assert_array_equal(equal, 1)
