"""Logits of the classifiers (HET-XL Eq. 1, 2, 5, 9 and 14), in both orders of their products."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.heads import covariance, het_h
from lit_het.heads.base import ClassificationHead
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import HetHConfig, hash_classes
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig, is_factored
from lit_het.heads.temperature import FixedTemperature
from lit_het.types import LogitSamples
from tests.heads import references
from tests.heads.references import all_at_once

B, D, K, S, R = 3, 6, 11, 5, 2
M, H = 4, 8
KEY = jax.random.key(2)
X = jnp.asarray(np.random.default_rng(1).normal(size=(B, D)), jnp.float32)
WEIGHTS = np.random.default_rng(2).normal(size=(B, S, K))

KINDS: dict[str, Any] = {
    "HET": HetConfig(),
    "HET-H": HetHConfig(H),
    "HET-XL": HetXLConfig(),
    "unshared": HetXLConfig(unshared_size=M),
}
NOISE_SIZES = {"HET": K, "HET-H": H, "HET-XL": D, "unshared": M}
# Each pair of a kind, a form, a second term and an order, and r = 0.
CASES = [(kind, "efficient", "rank_one", "direct", R) for kind in KINDS]
CASES += [
    ("HET", "full", "diagonal", "direct", R),
    ("HET", "efficient", "rank_one", "direct", 0),
    ("HET-H", "full", "diagonal", "direct", R),
    ("HET-H", "efficient", "rank_one", "factored", R),
    ("HET-XL", "full", "rank_one", "direct", R),
    ("HET-XL", "full", "rank_one", "factored", R),
    ("HET-XL", "efficient", "diagonal", "direct", R),
    ("unshared", "full", "diagonal", "direct", R),
    ("unshared", "efficient", "rank_one", "factored", R),
    ("unshared", "efficient", "rank_one", "direct", 0),
]


def config_of(kind, form: Any = "efficient", second: Any = "rank_one", order: Any = "direct", rank=R):
    sampling = SamplingConfig(num_samples=S, num_eval_samples=S + 2, order=order)
    return dataclasses.replace(KINDS[kind], covariance=CovarianceConfig(rank, form, second), sampling=sampling)


def make(config) -> Any:
    return references.with_random_parameters(lambda: config.build(D, K, nnx.Rngs(0)))


@functools.cache
def results(config):
    """Returns the head, its logits for `X`, and the gradient of their sum weighted by `WEIGHTS`."""
    head = make(config)
    graph, state = nnx.split(head)

    def weighted_sum(params, x):
        logits = all_at_once(nnx.merge(graph, params)(x, KEY))
        return jnp.sum(jnp.asarray(WEIGHTS[:, : logits.shape[1]], jnp.float32) * logits), logits

    (of_params, of_x), logits = jax.jit(jax.grad(weighted_sum, argnums=(0, 1), has_aux=True))(state, X)
    gradient = {**parameters.flatten(nnx.to_pure_dict(of_params)), "x": of_x}
    return head, np.asarray(logits), {path: np.asarray(leaf) for path, leaf in gradient.items()}


@functools.cache
def drawn(config):
    """Returns a compiled function of features and a key: all samples of the logits of the head of `results`."""
    return compiled(results(config)[0])


def compiled(head):
    function = jax.jit(lambda x, key: all_at_once(head(x, key)))
    return lambda x, key: np.asarray(function(x, key))


def assert_equal_to_the_reference(config, noise_size=None):
    head, logits, gradient = results(config)
    place = {**references.in_float64(head), "x": np.asarray(X, np.float64)}
    normals = None
    if noise_size is not None:
        normals = np.asarray(references.normals_of(head(X, KEY), config.covariance, noise_size), np.float64)
    expected = references.logits(place, config, place["x"], normals)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=2e-5)
    random = np.random.default_rng(3)
    for path, leaf in gradient.items():
        direction = 1e-6 * random.normal(size=leaf.shape)
        moved = ({**place, path: place[path] + sign * direction} for sign in (1, -1))
        sums = [np.sum(WEIGHTS[:, : logits.shape[1]] * references.logits(p, config, p["x"], normals)) for p in moved]
        scale = np.linalg.norm(leaf) * np.linalg.norm(direction)
        assert scale > 0
        slope = (sums[0] - sums[1]) / 2
        np.testing.assert_allclose(np.sum(leaf * direction) / scale, slope / scale, atol=5e-5, err_msg=path)


@pytest.mark.parametrize(("kind", "form", "second", "order", "rank"), CASES)
def test_logits_and_gradients_equal_the_numpy_reference_with_the_same_noise(kind, form, second, order, rank):
    """With r = 0 references draw one normal per coordinate, although the second term is said to be rank one."""
    config = config_of(kind, form, second, order, rank)
    assert_equal_to_the_reference(config, NOISE_SIZES[kind])
    assert results(config)[1].shape == (B, S, K)


def test_deterministic_logits_equal_the_numpy_reference_and_ignore_the_key():
    config = DeterministicConfig(FixedTemperature(0.5), initial_bias=-6.9)
    assert_equal_to_the_reference(config)
    head: Any = config.build(D, K, nnx.Rngs(0))
    np.testing.assert_array_equal(head.logits.bias[...], np.full(K, np.float32(-6.9)))
    np.testing.assert_array_equal(compiled(head)(X, None), compiled(head)(X, KEY))
    np.testing.assert_array_equal(head.noise_norm(X), np.zeros(B))


@pytest.mark.parametrize(("kind", "form"), [("HET-H", "efficient"), ("HET-XL", "full"), ("unshared", "efficient")])
def test_both_orders_of_the_products_give_the_same_logits_and_gradients(kind, form):
    (_, direct, of_direct), (_, factored, of_factored) = (
        results(config_of(kind, form, order=order)) for order in ("direct", "factored")
    )
    np.testing.assert_allclose(factored, direct, rtol=1e-5, atol=1e-5)
    assert "temperature/position" in of_direct
    assert "x" in of_direct
    for path, expected in of_direct.items():
        np.testing.assert_allclose(of_factored[path], expected, rtol=1e-4, atol=1e-4, err_msg=path)


@pytest.mark.parametrize(
    ("order", "second", "rank", "num_samples", "expected"),
    [
        # Multiply-adds an example, in units of k = 21843: direct S (2048 + 51·2048/k), factored 51·2048 + 51 S.
        ("cheaper", "rank_one", 50, 1000, True),  # 2.05 M against 0.16 M
        ("cheaper", "rank_one", 50, 64, True),  # 131 k against 108 k
        ("cheaper", "rank_one", 50, 53, True),  # 108.8 k against 107.2 k
        ("cheaper", "rank_one", 50, 52, False),  # 106.7 k against 107.1 k
        ("cheaper", "rank_one", 50, 16, False),  # 33 k against 105 k
        ("cheaper", "diagonal", 50, 1000, False),
        ("cheaper", "rank_one", 0, 1000, False),
        ("direct", "rank_one", 50, 1000, False),
        ("factored", "rank_one", 50, 16, True),
    ],
)
def test_the_order_with_fewer_operations_is_taken_and_never_the_factored_one_for_a_diagonal(
    order, second, rank, num_samples, expected
):
    sizes = {"noise_size": 2048, "num_classes": 21_843, "num_samples": num_samples}
    assert is_factored(order, CovarianceConfig(rank, "efficient", second), **sizes) is expected


@pytest.mark.parametrize("kind", ["HET-H", "HET-XL", "unshared"])
def test_few_samples_are_taken_in_the_direct_order_and_many_in_the_factored_one(kind):
    """The direct order prepares the noise in its own space [n q], the factored one in that of the logits [n k]."""
    config, spaces = config_of(kind), []
    for num_samples in (1, 200):
        sampling = SamplingConfig(num_samples=num_samples)
        samples = make(dataclasses.replace(config, sampling=sampling))(X, KEY)
        spaces.append(jax.eval_shape(lambda x, samples=samples: samples.prepare(x)[1].scale, X).shape[1])
    assert spaces == [NOISE_SIZES[kind], K]


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_as_many_samples_as_asked_for_and_one_without_noise_where_no_key_is_given(kind):
    config = config_of(kind)
    head = results(config)[0]
    counts = [head(X, KEY).num_samples, head(X, KEY, S + 2).num_samples, head(X, None).num_samples]
    assert counts == [S, S + 2, 1]
    expected, *norms = jax.jit(
        lambda x: (head.logits(x) / head.temperature(), head.noise_norm(x), head.covariance.noise_norm(x))
    )(X)
    np.testing.assert_allclose(drawn(config)(X, None), np.asarray(expected)[:, None], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(*norms)
    assert isinstance(head, ClassificationHead)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_examples_with_equal_features_have_noise_of_their_own_which_no_other_example_influences(kind):
    config, changed = config_of(kind), np.array(X)
    changed[1] = 5.0
    found, logits = drawn(config)(changed, KEY), results(config)[1]
    np.testing.assert_allclose(found[::2], logits[::2], rtol=1e-5, atol=1e-5)
    assert not np.allclose(found[1], logits[1])
    # Each of the logits without their noiseless part is a draw of its own.
    equal = np.repeat(X[:1], B, axis=0)
    draws = np.concatenate([drawn(config)(equal, key) for key in (KEY, jax.random.key(3))]).reshape(-1, K)
    assert all(not np.allclose(draws[i], draws[j], rtol=1e-3) for i in range(len(draws)) for j in range(i))


def test_het_h_with_a_bucket_for_every_class_is_het(monkeypatch):
    monkeypatch.setattr(het_h, "hash_classes", lambda num_classes, *_: np.arange(num_classes))
    het, expected, expected_gradient = results(config_of("HET"))
    for order in ("direct", "factored"):
        head = dataclasses.replace(config_of("HET-H", order=order), num_buckets=K).build(D, K, nnx.Rngs(7))
        nnx.update(head, nnx.state(het))
        graph, state = nnx.split(head)

        def weighted_sum(params, x, graph=graph):
            logits = all_at_once(nnx.merge(graph, params)(x, KEY))
            return jnp.sum(jnp.asarray(WEIGHTS, jnp.float32) * logits), logits

        gradient, logits = jax.jit(jax.grad(weighted_sum, has_aux=True))(state, X)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
        for path, leaf in parameters.flatten(nnx.to_pure_dict(gradient)).items():
            np.testing.assert_allclose(leaf, expected_gradient[path], rtol=1e-4, atol=1e-4, err_msg=path)


def test_classes_of_one_bucket_have_the_same_noise_and_others_have_not():
    head, logits, _ = results(config_of("HET-H"))
    noise = logits - drawn(config_of("HET-H"))(X, None)
    buckets = head.bucket_of_class
    assert len(np.unique(buckets)) < K  # eleven classes, eight buckets
    for i, j in np.ndindex(K, K):
        assert np.allclose(noise[..., i], noise[..., j], rtol=1e-3, atol=1e-5) == (buckets[i] == buckets[j])


@pytest.mark.parametrize("kind", ["HET-XL", "unshared"])
def test_het_xl_with_no_covariance_is_deterministic(kind, monkeypatch):
    monkeypatch.setattr(covariance, "MINIMUM_SCALE", 0.0)
    head = make(config_of(kind))
    params = parameters.flatten(nnx.to_pure_dict(nnx.state(head)))
    params = {
        path: jnp.asarray(0 * np.asarray(leaf)) if path.startswith("covariance") else leaf
        for path, leaf in params.items()
    }
    # softplus(-200) = 0 in float32.
    params["covariance/diagonal/bias"] = jnp.asarray(np.full(NOISE_SIZES[kind], -200, np.float32))
    nnx.update(head, parameters.unflatten(params))
    np.testing.assert_array_equal(jax.jit(head.noise_norm)(X), np.zeros(B))
    plain = nnx.eval_shape(lambda: DeterministicConfig(head.config.temperature).build(D, K, nnx.Rngs(0)))
    nnx.update(
        plain, parameters.unflatten({path: params[path] for path in params if not path.startswith(("cov", "uns"))})
    )
    expected = np.repeat(compiled(plain)(X, None), S, axis=1)
    np.testing.assert_allclose(compiled(head)(X, KEY), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_classes", "num_buckets"), [(21_843, 2048), (21_843, 768), (18_291, 1024)])
def test_the_hash_is_even_over_all_buckets_and_its_seed_changes_which_classes_collide(num_classes, num_buckets):
    first, again, other = (hash_classes.__wrapped__(num_classes, num_buckets, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (num_classes,)
    assert set(first) == set(range(num_buckets))
    # Σ (n_j - k/H)² / (k/H) has the mean H - 1 and the variance 2 (H - 1) for a random function.
    expected = num_classes / num_buckets
    for buckets in (first, other):
        chi_square = np.sum((np.bincount(buckets) - expected) ** 2) / expected
        assert abs(chi_square - (num_buckets - 1)) < 5 * np.sqrt(2 * (num_buckets - 1))
    # Classes that collide under one seed collide under the other by chance alone, with probability 1/H.
    collide, still = (h[:, None] == h[None] for h in (first[-2000:], other[-2000:]))
    pairs = np.triu(collide, 1)
    equal, chance = np.sum(still & pairs), np.sum(pairs) / num_buckets
    assert equal < chance + 5 * np.sqrt(chance) + 5


def test_the_hash_is_the_same_on_every_machine():
    """A run that is resumed, or a checkpoint that is shared, must find the classes where it left them."""
    np.testing.assert_array_equal(hash_classes(6, 1000, 0), [75, 599, 637, 283, 655, 669])


def test_blocks_of_samples_have_the_configured_size():
    """1024 vectors, 200 samples in four blocks of 50: direct 1024 // 50 examples, with V(x) 1024 // (50 + r + 2)."""

    def examples_per_block(kind, form, second, order):
        sampling = SamplingConfig(num_samples=200, block_size=1024, order=order)
        config = dataclasses.replace(config_of(kind, form, second), sampling=sampling)
        samples: LogitSamples = make(config)(X, KEY)
        assert samples.samples_per_block == 50
        return samples.examples_per_block

    assert examples_per_block("HET-XL", "full", "rank_one", "direct") == 1024 // 50
    assert examples_per_block("HET-XL", "full", "rank_one", "factored") == 1024 // (50 + R + 2)
    for second in ("rank_one", "diagonal"):
        assert examples_per_block("HET", "full", second, "direct") == 1024 // (50 + R + 2)
        assert examples_per_block("HET", "efficient", second, "direct") == 1024 // (50 + 3)


@pytest.mark.parametrize("config", [DeterministicConfig(), *KINDS.values()], ids=["DET", *KINDS])
def test_a_head_for_fine_tuning_starts_with_equal_logits_and_otherwise_as_without(config):
    fresh = config.build(D, K, nnx.Rngs(0))
    start = dataclasses.replace(config, zero_kernel=True, initial_bias=-6.9).build(D, K, nnx.Rngs(0))
    assert not np.asarray(start.logits.kernel[...]).any()
    np.testing.assert_array_equal(start.logits.bias[...], np.full(K, -6.9, np.float32))
    one, other = (
        {path: x for path, x in parameters.flatten(nnx.to_pure_dict(nnx.state(head))).items() if "logits/" not in path}
        for head in (fresh, start)
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)
