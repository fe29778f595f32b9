"""Likelihoods without samples: against loops in NumPy, against Monte Carlo, in blocks and on devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, log_softmax

from lit_het.errors import UserError
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.types import EmbeddingSamples, Queries
from tests.losses.contrastive_cases import compiled, on_devices, take

B, D, R, TAU, BIAS = 8, 5, 3, 0.4, 0.3
VALID = np.array([True, True, False, True, True, True, True, True])
WEIGHT = np.array([1, 0.3, 1, 0.3, 1, 0, 1, 1], np.float32)
LOSSES = [
    *(SoftmaxLoss(likelihood=likelihood) for likelihood in ("delta", "mean_field", "pairwise_probit")),
    SigmoidLoss(likelihood="probit"),
    *(SoftmaxLoss(likelihood=likelihood) for likelihood in ("unscented", "tilted")),
    SigmoidLoss(likelihood="unscented"),
]
SMOOTHED = [dataclasses.replace(loss, label_smoothing=0.3) for loss in LOSSES]
IN_A_RING = [LOSSES[3], SMOOTHED[3], LOSSES[4], LOSSES[6]]
plain_and_smoothed = pytest.mark.parametrize("loss", LOSSES + SMOOTHED, ids=str)


def single(x):
    return jnp.asarray(x, jnp.float32)


def make(scale=0.3, sides=("image", "text")):
    """Unit embeddings, and the distribution of the queries of some sides."""
    random = np.random.default_rng(0)

    def side(name):
        embedding = random.normal(size=(B, D))
        embedding = jnp.asarray(embedding / np.linalg.norm(embedding, axis=1, keepdims=True), jnp.float32)
        factors = jnp.asarray(scale * random.normal(size=(B, R, D)), jnp.float32)
        return embedding, Queries(embedding[:, None], factors) if name in sides else None

    (image, image_queries), (text, text_queries) = side("image"), side("text")
    return EmbeddingSamples(image, text, image_queries, text_queries, jnp.float32(TAU), jnp.float32(BIAS))


def sigma_points(u, g):
    """u ± sqrt(R) g_i, of equal weights: the points of Wan & van der Merwe 2000 with κ = 0; without noise u."""
    return [u + sign * math.sqrt(len(g)) * row for row in g for sign in (1, -1)] if g.any() else [u]


def one_query(likelihood, n, u, g) -> float:
    """-log E[p] of one query by the equations of the module, in float64; u are the valid logits, g [R m]."""
    if likelihood == "unscented":
        return -math.log(np.mean([np.exp(log_softmax(point))[n] for point in sigma_points(u, g)]))
    if likelihood == "tilted":
        p = np.exp(log_softmax(u))
        centred = [row - p @ row for row in g]
        return math.log(np.exp(u + sum(row**2 for row in centred) / 2).sum()) - u[n]
    if likelihood == "delta":
        p = np.exp(log_softmax(u))
        covariance = np.diag(p) - np.outer(p, p)
        residual = np.eye(len(u))[n] - p
        x = sum(residual @ row * (residual @ row) - row @ covariance @ row for row in g)
        loss = -log_softmax(u)[n]
        return loss - (min(math.log1p(x / 2), loss) if x > 0 else x / 2)
    variance = (g**2).sum(axis=0)
    if likelihood == "mean_field":
        return -log_softmax((u - BIAS) / np.sqrt(1 + math.pi / 8 * variance))[n]
    terms = []
    for m in range(len(u)):
        spread = sum((row[n] - row[m]) ** 2 for row in g)
        terms.append(-(u[n] - u[m]) / math.sqrt(1 + math.pi / 8 * spread))
    return float(np.log(np.sum(np.exp(terms))))


def reference(loss, samples, weight=None):
    """The mean over valid queries of both directions, query by query."""
    weight = np.ones(B) if weight is None else weight
    valid, total, smoothing = np.flatnonzero(VALID), 0.0, loss.label_smoothing
    for mean, queries, keys in (
        (samples.image, samples.image_queries, samples.text),
        (samples.text, samples.text_queries, samples.image),
    ):
        keys, own = np.asarray(keys, np.float64)[valid], np.asarray(mean, np.float64)
        # A query is an array of its own, beside the key of the same embedding.
        means = np.asarray(mean if queries is None else queries.samples[:, 0], np.float64)
        factors = np.zeros((B, 1, D)) if queries is None else np.asarray(queries.factors, np.float64)
        for place, n in enumerate(valid):
            u, g = keys @ means[n] / TAU + BIAS, factors[n] @ keys.T / TAU
            if isinstance(loss, SigmoidLoss):
                y = (1 - smoothing) * (np.arange(len(valid)) == place) + smoothing / 2
                scaled = u / np.sqrt(1 + math.pi / 8 * (g**2).sum(axis=0))
                points = [scaled] if loss.likelihood == "probit" else sigma_points(u, g)
                p, absent = (np.mean([expit(sign * point) for point in points], axis=0) for sign in (1, -1))
                total -= weight[n] * (y * np.log(p) + (1 - y) * np.log(absent)).sum()
            else:
                found = one_query(loss.likelihood, place, u, g)
                total += weight[n] * ((1 - smoothing) * found - smoothing * np.mean(log_softmax(keys @ own[n] / TAU)))
    return total / weight[valid].sum() / 2


@plain_and_smoothed
@pytest.mark.parametrize(
    ("sides", "weight"), [(("image", "text"), None), (("image",), WEIGHT)], ids=["both noisy", "image noisy"]
)
def test_the_loss_equals_the_numpy_reference(loss, sides, weight):
    for scale in (0.05, 1.0):
        samples = make(scale, sides)
        found, _ = compiled(loss)(samples, jnp.asarray(VALID), (), weight)
        np.testing.assert_allclose(found, reference(loss, samples, weight), rtol=2e-5)


@plain_and_smoothed
def test_gradients_agree_with_finite_differences_of_the_numpy_reference(loss):
    samples = make()
    _, gradient = compiled(loss)(samples, jnp.asarray(VALID), (), None)
    leaves, tree = jax.tree.flatten(samples)
    for index, (slopes, leaf) in enumerate(zip(jax.tree.leaves(gradient), leaves, strict=True)):
        if leaf.ndim == 0:
            continue  # τ and the bias are constants of the reference
        direction = np.random.default_rng(1).normal(size=leaf.shape)
        values = []
        for amount in (1e-4, -1e-4):
            moved = [np.asarray(x, np.float64) for x in leaves]
            moved[index] = moved[index] + amount * direction
            values.append(reference(loss, jax.tree.unflatten(tree, moved)))
        slope = (values[0] - values[1]) / 2e-4
        np.testing.assert_allclose(np.vdot(slopes, direction), slope, rtol=1e-3, atol=1e-4)


# Of how many examples: the pairwise form is an approximation of two classes, and for more a heuristic.
CASES = [(LOSSES[0], B, 0.03, 4e-3), (LOSSES[1], B, 0.1, 4e-2), (LOSSES[2], 2, 0.3, 2e-2), (LOSSES[3], B, 0.1, 2e-2)]
CASES += [(LOSSES[4], B, 0.1, 4e-3), (LOSSES[6], B, 0.1, 1e-2)]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "b", "scale", "tolerance"), CASES, ids=str)
def test_small_noise_has_the_loss_of_20000_samples(loss, b, scale, tolerance):
    """The error of the approximation is small beside what the noise changes."""
    samples, valid = take(make(scale, ("image",)), slice(b)), jnp.asarray(VALID[:b])
    normals = jnp.asarray(np.random.default_rng(2).normal(size=(b, 20_000, R)), jnp.float32)
    of_samples = jax.jit(type(loss)())
    drawn, none = (
        dataclasses.replace(samples, image_queries=queries)
        for queries in (dataclasses.replace(samples.image_queries, normals=normals), None)
    )
    expected, without, found = of_samples(drawn, valid), of_samples(none, valid), jax.jit(loss)(samples, valid)
    np.testing.assert_allclose(found, expected, atol=tolerance * scale)
    assert abs(found - expected) < abs(without - expected) / 2


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_tilted_form_is_a_bound_of_the_loss_of_20000_samples(scale):
    samples, valid = make(scale), jnp.asarray(VALID)
    draws = {name: np.random.default_rng(2).normal(size=(B, 20_000, R)) for name in ("image_queries", "text_queries")}
    queries = {name: dataclasses.replace(getattr(samples, name), normals=single(draw)) for name, draw in draws.items()}
    drawn = jax.jit(SoftmaxLoss())(dataclasses.replace(samples, **queries), valid)
    assert jax.jit(SoftmaxLoss(likelihood="tilted"))(samples, valid) > drawn


@pytest.mark.parametrize("scale", [3.0, 10.0, 100.0])
def test_no_noise_is_large_enough_for_a_loss_below_zero(scale):
    value, gradient = compiled(SoftmaxLoss(likelihood="delta"))(make(scale), jnp.asarray(VALID), (), None)
    assert value >= 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_noise_that_all_logits_share_changes_only_the_mean_field():
    """Factors at a right angle to all differences of keys: every softmax, and so the expectation, stays as it is."""
    samples = make()
    # As many keys as dimensions: exactly equal.
    image, text = np.asarray(samples.image)[:D], np.asarray(samples.text)[:D]
    shift = np.linalg.solve(text.astype(np.float64), np.ones(D)).astype(np.float32)
    factors = jnp.asarray(np.broadcast_to(np.float32(0.2) * shift, (D, 1, D)))
    shared, none = (
        EmbeddingSamples(jnp.asarray(image), jnp.asarray(text), noise, None, samples.temperature)
        for noise in (Queries(jnp.asarray(image[:, None]), factors), None)
    )
    valid = np.ones(D, bool)
    expected = jax.jit(SoftmaxLoss())(none, valid)
    for likelihood in ("delta", "pairwise_probit", "unscented", "tilted"):
        np.testing.assert_allclose(jax.jit(SoftmaxLoss(likelihood=likelihood))(shared, valid), expected, rtol=1e-4)
    assert abs(jax.jit(SoftmaxLoss(likelihood="mean_field"))(shared, valid) - expected) > 1e-2


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "form"),
    [*((loss, "gather") for loss in [*LOSSES, *SMOOTHED]), *((loss, "ring") for loss in IN_A_RING)],
    ids=str,
)
def test_blocks_and_eight_devices_equal_the_dense_form(loss, form):
    arguments = make(), jnp.asarray(VALID), (), jnp.asarray(WEIGHT)
    dense, in_blocks = (compiled(dataclasses.replace(loss, form=form, block_size=R + 2)) for form in ("dense", form))
    for devices in (1, 8):
        found = on_devices(devices, in_blocks, arguments)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, dense(*arguments))


@pytest.mark.parametrize("loss", [SoftmaxLoss, SigmoidLoss])
@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan, math.inf])
def test_a_share_of_smoothing_that_is_none_is_refused(loss, share):
    with pytest.raises(UserError, match=rf"label_smoothing = {share} is not in \[0, 1\)"):
        loss(label_smoothing=share)


@pytest.mark.parametrize("likelihood", ["delta", "mean_field", "pairwise_probit", "tilted"])
def test_a_ring_needs_samples_for_the_softmax_loss(likelihood):
    with pytest.raises(UserError, match="needs the keys of a whole batch at once; set form to 'gather'"):
        SoftmaxLoss("ring", likelihood=likelihood)
