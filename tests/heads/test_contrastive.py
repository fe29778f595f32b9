"""Contrastive heads: noisy queries, noiseless keys (HET-XL Eq. 8, App. A.2, Table 7), in two orders of products."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.heads.base import unit
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.sampling import SamplingConfig
from tests.heads.references import draw_normals, held_singly, noise_norms

B, D, S = 4, 6, 3
FULL = CovarianceConfig(num_factors=2, initial_noise_norm=0.5)
EFFICIENT = dataclasses.replace(FULL, form="efficient")
DIAGONAL = dataclasses.replace(FULL, second_term="diagonal")
KEY = jax.random.key(7)


@functools.cache
def make(covariance=FULL, num_samples=S, **changes) -> Any:
    return HetXLContrastiveConfig(covariance, num_samples=num_samples, **changes).build(D, nnx.Rngs(0))


def embeddings(b=B):
    image, text = 3 * np.random.default_rng(0).normal(size=(2, b, D))
    return jnp.asarray(image, jnp.float32), jnp.asarray(text, jnp.float32)


@jax.jit
def drawn_singly(queries):
    return held_singly(queries)


def singly(queries):
    return np.asarray(drawn_singly(queries))


def image_queries(head, image, count=S):
    return singly(jax.jit(lambda image: head.image_queries(image, KEY, count))(image))


def numpy_unit(x):
    return np.asarray(x) / np.linalg.norm(x, axis=-1, keepdims=True)


def reference_queries(head, side, embedding, key, before, after):
    """Loops of ε = Vᵀ ξ + d η on top of embeddings, with the head's own normals; the factors come from its Σ."""
    mean = numpy_unit(embedding) if before else np.asarray(embedding)
    noise = getattr(head, f"{side}_covariance")(jnp.asarray(mean))
    normals = np.asarray(draw_normals(jax.random.split(key, B), np.arange(S), noise.num_normals))
    factors, scale, is_diagonal = np.asarray(noise.low_rank()), np.asarray(noise.scale), noise.is_diagonal
    queries = np.zeros((B, S, D))
    for n, s in itertools.product(range(B), range(S)):
        query = mean[n].copy()
        for r in range(factors.shape[1]):
            query += factors[n, r] * normals[n, s, r]
        for q in range(D):
            query[q] += scale[n, q] * normals[n, s, factors.shape[1] + (q if is_diagonal else 0)]
        queries[n, s] = numpy_unit(query) if after else query
    return queries


# The covariance, and whether embeddings are normalised before and after the noise.
NORMALISATIONS = [*itertools.product([FULL], [False, True], [False, True]), (EFFICIENT, True, True)]
every_order = pytest.mark.parametrize("order", ["direct", "factored"])


@pytest.mark.parametrize(
    ("covariance", "before", "after", "order"),
    [
        *((*case, order) for case in NORMALISATIONS for order in ("direct", "factored")),
        (DIAGONAL, True, False, "direct"),
        (DIAGONAL, True, False, "cheaper"),
    ],
)
def test_the_four_normalisations_of_table_7_equal_the_numpy_reference(covariance, before, after, order):
    """A diagonal second term is never factored."""
    head = make(covariance, normalize_before_noise=before, normalize_after_noise=after, order=order)
    samples = head(*embeddings(), KEY)
    last = numpy_unit if after else np.asarray
    for side, embedding, key in zip(("image", "text"), embeddings(), jax.random.split(KEY), strict=True):
        queries = getattr(samples, f"{side}_queries")
        assert (queries.factors is None) == (order != "factored")
        expected = reference_queries(head, side, embedding, key, before, after)
        np.testing.assert_allclose(singly(queries), expected, rtol=1e-4, atol=1e-5)
        quiet = last(numpy_unit(embedding) if before else np.asarray(embedding))
        np.testing.assert_allclose(getattr(samples, side), quiet, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("covariance", "before", "after"), [(FULL, True, False), (FULL, False, True), (EFFICIENT, True, True)]
)
def test_both_orders_have_the_same_products_and_gradients(covariance, before, after):
    """Products of all samples with 7 keys, weighed at random; gradients of parameters, embeddings and keys."""
    random = np.random.default_rng(1)
    weights, keys = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((B, S, 7), (7, D)))

    @functools.partial(jax.jit, static_argnums=0)
    def found(order):
        head = make(covariance, normalize_before_noise=before, normalize_after_noise=after, order=order)
        graph, state = nnx.split(head)

        def weighed(state, image, keys):
            queries = nnx.merge(graph, state).image_queries(image, KEY, S)
            products = queries.products(keys)
            return jnp.sum(products * weights), products

        return jax.grad(weighed, argnums=(0, 1, 2), has_aux=True)(state, embeddings()[0], keys)

    (direct, products), (factored, other_products) = found("direct"), found("factored")
    np.testing.assert_allclose(other_products, products, rtol=1e-4, atol=1e-5)
    moved = 0
    for actual, expected in zip(jax.tree.leaves(factored), jax.tree.leaves(direct), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=max(1e-5 * np.abs(expected).max(), 1e-6))
        moved += bool(np.any(np.asarray(expected) != 0))
    assert moved >= 4  # embeddings, keys, and the kernels behind V and d


@every_order
def test_factored_products_equal_those_of_each_query(order):
    queries = make(order=order, normalize_after_noise=True)(*embeddings(), KEY).text_queries
    assert queries.num_samples == S
    keys = embeddings()[0]
    expected = np.einsum("bsd,md->bsm", singly(queries), np.asarray(keys))
    found = jax.jit(lambda queries, keys: queries.products(keys))(queries, keys)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("covariance", "num_samples", "factored"),
    [(FULL, 1, False), (FULL, 100, True), (EFFICIENT, 1, False), (EFFICIENT, 100, True), (DIAGONAL, 100, False)],
)
def test_the_cheaper_order_maps_few_samples_directly_and_many_by_their_factors(covariance, num_samples, factored):
    config = HetXLContrastiveConfig(covariance, num_samples=num_samples, order="cheaper")
    samples = jax.eval_shape(lambda image, text: config.build(D, nnx.Rngs(0))(image, text, KEY), *embeddings(16))
    for queries in (samples.image_queries, samples.text_queries):
        assert (queries.factors is not None) == factored
        assert queries.num_samples == num_samples


def test_queries_are_noisy_with_a_covariance_of_each_side_and_keys_are_those_of_the_deterministic_head():
    head, (image, text) = make(), embeddings()
    samples, quiet, same_image = head(image, text, KEY), head(image, text, None), head(image, image, KEY)
    assert quiet.image_queries is quiet.text_queries is None
    plain = DeterministicContrastiveConfig().build(D, nnx.Rngs(0))(image, text, KEY)
    jax.tree.map(np.testing.assert_array_equal, quiet, plain)
    for queries, keys, expected in (
        (samples.image_queries, samples.image, quiet.image),
        (samples.text_queries, samples.text, quiet.text),
    ):
        np.testing.assert_array_equal(keys, expected)
        assert singly(queries).shape == (B, S, D)
        assert not np.any(np.isclose(singly(queries), np.asarray(keys)[:, None], atol=1e-6))
    assert not np.allclose(singly(same_image.image_queries), singly(same_image.text_queries))
    assert not np.allclose(*noise_norms(head, image, image), rtol=1e-6)


def test_the_default_normalises_before_the_noise_and_not_after():
    """Table 7's setting of Table 6: β / |β| + ε(β / |β|)."""
    config = HetXLContrastiveConfig()
    assert (config.normalize_before_noise, config.normalize_after_noise) == (True, False)
    assert (config.covariance.num_factors, config.covariance.form, config.num_samples) == (15, "full", 16)
    assert config.temperature == DeterministicContrastiveConfig().temperature, "heads are compared from one start"
    samples = make()(*embeddings(), KEY)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(samples.image), axis=-1), 1, rtol=1e-5)
    assert np.all(np.abs(np.linalg.norm(singly(samples.image_queries), axis=-1) - 1) > 1e-3)


@pytest.mark.parametrize("side", ["image", "text"])
def test_one_noisy_side_leaves_the_other_without_queries_and_without_parameters(side):
    head, (image, text) = make(noisy=side), embeddings()
    samples = head(image, text, KEY)
    other = "text" if side == "image" else "image"
    assert getattr(samples, f"{other}_queries") is None
    assert singly(getattr(samples, f"{side}_queries")).shape == (B, S, D)
    assert set(nnx.to_pure_dict(nnx.state(head))) == {f"{side}_covariance", "temperature"}
    norms = dict(zip(("image", "text"), noise_norms(head, image, image), strict=True))
    assert np.all(norms[side] > 0)
    np.testing.assert_array_equal(norms[other], np.zeros(B))
    assert (jax.eval_shape(lambda x: head.image_queries(x, KEY, S), image) is None) == (side == "text")


@every_order
@pytest.mark.parametrize("after", [False, True])
def test_with_a_covariance_of_zero_the_queries_are_the_keys(order, after):
    head = make.__wrapped__(order=order, normalize_after_noise=after)
    for covariance in (head.image_covariance, head.text_covariance):
        # softplus(-100) is 0, and the constant below it stays: d(x) = 0.001.
        covariance.diagonal.bias[...] = jnp.full(D, -100.0)
        covariance.factors.kernel[...] = jnp.zeros_like(covariance.factors.kernel[...])
    samples = head(*embeddings(), KEY)
    for queries, keys in ((samples.image_queries, samples.image), (samples.text_queries, samples.text)):
        np.testing.assert_allclose(singly(queries), np.repeat(np.asarray(keys)[:, None], S, axis=1), atol=1e-2)


def test_a_deterministic_head_returns_unit_embeddings_without_separate_queries():
    image, text = embeddings()
    head: Any = DeterministicContrastiveConfig(initial_bias=-10.0).build(D, nnx.Rngs(0))
    samples = head(image, text, KEY)
    np.testing.assert_allclose(samples.image, numpy_unit(image), rtol=1e-5)
    np.testing.assert_allclose(samples.text, numpy_unit(text), rtol=1e-5)
    assert samples.image_queries is None
    assert samples.text_queries is None
    assert head.logits(image, jnp.eye(D), KEY, S).num_samples == 1
    assert float(samples.bias) == -10.0
    assert float(samples.temperature) == pytest.approx(1 / 20)
    np.testing.assert_array_equal(noise_norms(head, image, text), np.zeros((2, B)))


@every_order
def test_the_noise_of_an_example_depends_on_no_other_example(order):
    head, (image, _) = make(order=order), embeddings()
    changed = jnp.asarray(np.where(np.arange(B)[:, None] == 2, np.float32(5), image))
    drawn = jax.jit(lambda x: held_singly(head.image_queries(x, KEY, S)))
    one, other = (np.asarray(drawn(x)) for x in (image, changed))
    np.testing.assert_allclose(one[[0, 1, 3]], other[[0, 1, 3]], rtol=1e-5, atol=1e-6)
    assert not np.allclose(one[2], other[2])


def test_more_samples_begin_with_the_samples_of_fewer():
    """Evaluation may take any number of samples; each depends on its own number."""
    head, (image, _) = make(), embeddings()
    few, many = (image_queries(head, image, count) for count in (2, 50))
    assert many.shape == (B, 50, D)
    np.testing.assert_allclose(many[:, :2], few, rtol=1e-4, atol=1e-5)
    assert len(np.unique(many[0, :, 0])) == 50


@pytest.mark.parametrize(
    "covariance",
    [
        CovarianceConfig(3, "full", "rank_one"),
        CovarianceConfig(3, "full", "diagonal"),
        CovarianceConfig(3, "efficient", "rank_one"),
        CovarianceConfig(0, "full"),
        CovarianceConfig(0, "efficient"),
    ],
    ids=lambda config: f"{config.form} {config.num_factors} {config.second_term}",
)
def test_the_measured_initial_noise_has_the_configured_norm(covariance):
    covariance = dataclasses.replace(covariance, initial_noise_norm=0.4)
    image = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)

    @jax.jit
    def noise_and_norm(image):
        head = HetXLContrastiveConfig(covariance).build(64, nnx.Rngs(3))
        queries = head.image_queries(image, KEY, 200)
        assert queries is not None
        return held_singly(queries) - head.image_key(image)[:, None], head.image_noise_norm(image)

    noise, norm = map(np.asarray, noise_and_norm(image))
    assert np.sqrt(np.mean(np.sum(noise**2, axis=-1))) == pytest.approx(0.4, rel=0.08)
    assert np.sqrt(np.mean(norm**2)) == pytest.approx(0.4, rel=0.08)


def test_noise_norms_belong_to_the_normalised_embedding():
    head, (image, text) = make(), embeddings()
    of_units = jax.jit(lambda *x: (head.image_covariance.noise_norm(x[0]), head.text_covariance.noise_norm(x[1])))
    found, expected = noise_norms(head, image, text), of_units(numpy_unit(image), numpy_unit(text))
    np.testing.assert_allclose(found, np.asarray(expected), rtol=1e-6)
    np.testing.assert_allclose(found, noise_norms(head, 5 * np.asarray(image), 5 * np.asarray(text)), rtol=1e-5)


def test_unit_gives_norm_one_and_does_not_change_zeros():
    rows = jnp.asarray([[3.0, 4.0], [0.0, 0.0]])
    np.testing.assert_allclose(jax.jit(unit)(rows), [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)


def test_antithetic_queries_lie_opposite_to_one_another():
    """The mean of every pair is the embedding without noise, whatever the order of products."""
    image, text = embeddings()
    for order in ("direct", "factored"):
        samples = make(num_samples=4, order=order)(image, text, KEY)
        for queries, keys in ((samples.image_queries, samples.image), (samples.text_queries, samples.text)):
            pairs = singly(queries).reshape(B, 2, 2, D)
            np.testing.assert_allclose(pairs.mean(axis=2), np.repeat(np.asarray(keys)[:, None], 2, axis=1), atol=1e-6)
            assert not np.allclose(pairs[:, 0], pairs[:, 1])


def test_an_odd_number_of_samples_has_no_pairs():
    image, _ = embeddings()
    odd, without = (
        image_queries(head, image, 3) for head in (make(num_samples=3), make(num_samples=3, antithetic=False))
    )
    np.testing.assert_array_equal(odd, without)
    with pytest.raises(UserError, match="num_samples = 3 is odd, but antithetic samples come in pairs"):
        HetXLContrastiveConfig(num_samples=3, antithetic=True)
    with pytest.raises(UserError, match="num_eval_samples = 5 is odd"):
        SamplingConfig(num_samples=4, num_eval_samples=5, antithetic=True)


def test_without_samples_queries_are_their_distribution():
    head, (image, text) = make(num_samples=0), embeddings()
    queries = head(image, text, KEY).image_queries
    assert queries.normals is None
    np.testing.assert_allclose(np.asarray(queries.samples)[:, 0], numpy_unit(image), rtol=1e-5)
    covariance = jax.jit(head.image_covariance.covariance)(numpy_unit(image))
    np.testing.assert_allclose(np.einsum("brp,brq->bpq", queries.factors, queries.factors), covariance, rtol=1e-4)
    for changes in ({"normalize_after_noise": True}, {"covariance": DIAGONAL}):
        with pytest.raises(UserError, match="num_samples = 0 needs normally distributed queries of low rank"):
            make(**{"covariance": FULL, **changes}, num_samples=0)
