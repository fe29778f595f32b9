"""Losses of classifiers without samples: against NumPy, against Monte Carlo, for all heads with noise."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, log_softmax

from lit_het.errors import UserError
from lit_het.heads import CovarianceConfig, DeterministicConfig, HetConfig, HetHConfig, HetXLConfig, SamplingConfig
from lit_het.losses import SigmoidCrossEntropy, SoftmaxCrossEntropy, gaussian, sample_free
from lit_het.losses.classification import mean_log_probabilities
from lit_het.mixtures import LabelMixture
from lit_het.tasks.classification import ClassificationConfig
from lit_het.types import LogitSamples
from tests.heads import references
from tests.losses.contrastive_cases import on_devices

B, D, K, R = 8, 6, 7, 2
X = jnp.asarray(np.random.default_rng(1).normal(size=(B, D)), jnp.float32)
KEY = jax.random.key(2)
VALID = jnp.asarray([True, True, False, True, True, True, True, True])
LABEL = jnp.asarray([0, 3, 6, 2, 2, 5, 1, 4])
MIXED = LabelMixture(jnp.stack([LABEL, LABEL[::-1]], 1), jnp.tile(jnp.asarray([[0.7, 0.3]]), (B, 1)))
TARGET = jnp.asarray(np.random.default_rng(3).random((B, K)), jnp.float32)

FORMS: list[Any] = ["delta", "mean_field", "pairwise_probit", "unscented", "tilted"]
LOSSES = [
    *(SoftmaxCrossEntropy(likelihood=form) for form in FORMS),
    *(SoftmaxCrossEntropy(0.2, form) for form in FORMS if form != "pairwise_probit"),
    *(SigmoidCrossEntropy(form) for form in ("probit", "unscented")),
]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=str)
NOISE = CovarianceConfig(R, "efficient")
NONE = SamplingConfig(num_samples=0)
HEADS = {
    "HET": HetConfig(NOISE, sampling=NONE),
    "HET full": HetConfig(CovarianceConfig(R, "full"), sampling=NONE),
    "HET-H": HetHConfig(4, covariance=NOISE, sampling=NONE),
    "HET-H factored": HetHConfig(4, covariance=NOISE, sampling=dataclasses.replace(NONE, order="factored")),
    "HET-XL": HetXLConfig(NOISE, sampling=NONE),
    "HET-XL factored": HetXLConfig(NOISE, sampling=dataclasses.replace(NONE, order="factored")),
    "HET-XL full": HetXLConfig(CovarianceConfig(R, "full"), sampling=NONE),
    "unshared": HetXLConfig(NOISE, unshared_size=3, sampling=NONE),
}
every_head = pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)


def held(rows, examples_per_block=100) -> LogitSamples:
    """Given means and factors ``[b 1+r k]``."""
    b, count, k = rows.shape
    return LogitSamples(
        rows.reshape(b, -1),
        None,
        lambda x: x,
        lambda common, *_: common.reshape(-1, count, k),
        1,
        examples_per_block,
        1,
        num_factors=count - 1,
    )


def rows_of(scale=0.6, k=K):
    random = np.random.default_rng(4)
    return np.concatenate([2 * random.normal(size=(B, 1, k)), scale * random.normal(size=(B, R + 1, k))], axis=1)


@functools.cache
def compiled(loss):
    def value(rows, label, **block):
        found = loss(held(rows, **block), label, VALID)
        return found.loss, found.top1

    run = jax.jit(jax.value_and_grad(value, has_aux=True), static_argnames="examples_per_block")

    def on_rows(rows, label, **block):
        (found, top1), gradient = run(jnp.asarray(rows, jnp.float32), label, **block)
        return found, top1, gradient

    return on_rows


def targets_of(loss):
    return TARGET if isinstance(loss, SigmoidCrossEntropy) else MIXED


def sigma_points(u, g):
    return [u + sign * math.sqrt(len(g)) * row for row in g for sign in (1, -1)]


def log_expected(form, u, g, y):
    """log E[softmax(u + gᵀξ)_y] of one example by the equations of the module, in float64."""
    p, variance = np.exp(log_softmax(u)), (g**2).sum(axis=0)
    match form:
        case "mean_field":
            return log_softmax(u / np.sqrt(1 + math.pi / 8 * variance))[y]
        case "unscented":
            return math.log(np.mean([np.exp(log_softmax(point))[y] for point in sigma_points(u, g)]))
        case "tilted":
            return u[y] - math.log(sum(np.exp(u[m] + ((g[:, m] - g @ p) ** 2).sum() / 2) for m in range(len(u))))
        case "delta":
            x = sum((np.eye(len(u))[y] - p) @ row * ((np.eye(len(u))[y] - p) @ row) for row in g)
            x -= sum(row @ (np.diag(p) - np.outer(p, p)) @ row for row in g)
            return math.log(p[y]) + (min(math.log1p(x / 2), -math.log(p[y])) if x > 0 else x / 2)
        case _:
            spread = ((g[:, y : y + 1] - g) ** 2).sum(axis=0)
            return -math.log(np.exp(-(u[y] - u) / np.sqrt(1 + math.pi / 8 * spread)).sum())


def reference(loss, rows):
    """The mean over valid examples, one after the other."""
    total, targets = 0.0, np.asarray(TARGET, np.float64)
    for n in np.flatnonzero(VALID):
        u, g = rows[n, 0], rows[n, 1:]
        if isinstance(loss, SigmoidCrossEntropy):
            scaled = u / np.sqrt(1 + math.pi / 8 * (g**2).sum(axis=0))
            points = [scaled] if loss.likelihood == "probit" else sigma_points(u, g)
            p, absent = (np.mean([expit(sign * point) for point in points], axis=0) for sign in (1, -1))
            total -= (targets[n] * np.log(p) + (1 - targets[n]) * np.log(absent)).sum()
        else:
            labels = zip(np.asarray(MIXED.label)[n], np.asarray(MIXED.weight, np.float64)[n], strict=True)
            found = -sum(weight * log_expected(loss.likelihood, u, g, y) for y, weight in labels)
            share = loss.label_smoothing
            of_all = -np.mean([log_expected(loss.likelihood, u, g, y) for y in range(K)])
            total += (1 - share) * found + share * of_all
    return total / np.count_nonzero(VALID)


@every_loss
@pytest.mark.parametrize("scale", [0.05, 0.6, 3.0])
def test_losses_equal_the_numpy_reference_also_in_blocks(loss, scale):
    rows = rows_of(scale)
    for block in ({}, {"examples_per_block": 2}):
        found, _, _ = compiled(loss)(rows, targets_of(loss), **block)
        np.testing.assert_allclose(found, reference(loss, rows), rtol=2e-5)


@every_loss
def test_gradients_agree_with_finite_differences_of_the_reference(loss):
    rows, step = rows_of(), 1e-5
    _, _, gradient = compiled(loss)(rows, targets_of(loss))
    np.testing.assert_allclose(compiled(loss)(rows, targets_of(loss), examples_per_block=2)[2], gradient, atol=1e-6)
    for index in np.ndindex(rows.shape):
        change = np.zeros_like(rows)
        change[index] = step
        slope = (reference(loss, rows + change) - reference(loss, rows - change)) / (2 * step)
        np.testing.assert_allclose(gradient[index], slope, rtol=2e-3, atol=2e-5)


# For more than two classes the pairwise form is a heuristic.
CASES = [
    (SoftmaxCrossEntropy(likelihood="delta"), K, 0.1, 2e-3),
    (SoftmaxCrossEntropy(likelihood="mean_field"), K, 0.3, 5e-2),
    (SoftmaxCrossEntropy(likelihood="pairwise_probit"), 2, 0.5, 5e-2),
    (SoftmaxCrossEntropy(likelihood="unscented"), K, 0.3, 2e-3),
    (SigmoidCrossEntropy("probit"), K, 0.3, 2e-2),
    (SigmoidCrossEntropy("unscented"), K, 0.3, 5e-3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "k", "scale", "tolerance"), CASES, ids=str)
def test_small_noise_has_the_loss_of_20000_samples(loss, k, scale, tolerance):
    """The bound, in nats, is below what the noise changes."""
    rows = jnp.asarray(rows_of(scale, k), jnp.float32)
    label = TARGET[:, :k] if isinstance(loss, SigmoidCrossEntropy) else LABEL % k
    normals = np.random.default_rng(2).normal(size=(B, 10_000, R + 1)).astype(np.float32)
    normals = np.concatenate([normals, -normals], axis=1)

    def of_samples(points):
        samples = dataclasses.replace(held(points), num_samples=points.shape[1], num_factors=0, samples_per_block=10**6)
        return float(type(loss)()(samples, label).loss)

    drawn = of_samples(rows[:, :1] + jnp.einsum("bsr,brk->bsk", normals, rows[:, 1:]))
    found = float(loss(held(rows), label).loss)
    assert abs(found - drawn) < tolerance
    assert abs(found - drawn) < abs(of_samples(rows[:, :1]) - drawn) / 2


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_tilted_form_is_a_bound_of_the_loss_of_20000_samples(scale):
    rows = rows_of(scale)
    normals = np.random.default_rng(2).normal(size=(B, 20_000, R + 1))
    drawn = log_softmax(rows[:, :1] + np.einsum("bsr,brk->bsk", normals, rows[:, 1:]), axis=-1)
    of_label = np.take_along_axis(drawn, np.asarray(LABEL)[:, None, None], axis=2)[..., 0]
    bound, expected = (
        -np.array([log_expected("tilted", one[0], one[1:], y) for one, y in zip(rows, LABEL, strict=True)]),
        -np.log(np.mean(np.exp(of_label), axis=1)),
    )
    mean_of_logs = -of_label.mean(axis=1)
    assert np.all(bound > mean_of_logs - 0.02)  # the error of 20,000 samples
    assert np.all(mean_of_logs >= expected)


@pytest.mark.parametrize("scale", [3.0, 10.0, 100.0])
def test_no_noise_is_large_enough_for_a_loss_below_zero(scale):
    for loss in LOSSES:
        found, _, gradient = compiled(loss)(rows_of(scale), targets_of(loss))
        assert found >= 0
        assert np.isfinite(gradient).all()


def test_noise_that_all_logits_share_changes_only_the_mean_field():
    rows = rows_of()
    rows[:, 1:] = rows[:, 1:, :1]
    rows = jnp.asarray(rows, jnp.float32)
    expected = float(SoftmaxCrossEntropy()(dataclasses.replace(held(rows[:, :1]), num_factors=0), LABEL, VALID).loss)
    for form in FORMS:
        found = float(SoftmaxCrossEntropy(likelihood=form)(held(rows), LABEL, VALID).loss)
        assert (abs(found - expected) < 1e-5) == (form != "mean_field")


def make(config):
    return references.with_random_parameters(lambda: config.build(D, K, nnx.Rngs(0)))


@functools.cache
def rows_of_head(config):
    head = make(config)
    return head, np.asarray(jax.jit(lambda x: references.all_at_once(head(x, KEY)))(X))


@every_head
def test_heads_return_the_mean_and_the_factors_of_their_logits(config):
    """Σ of the logits is what the equations of the head say, from unit normals one by one."""
    head, rows = rows_of_head(config)
    place, x = references.in_float64(head), np.asarray(X, np.float64)
    mean = references.logits(place, config, x)[:, 0]
    normals = np.broadcast_to(np.eye(R + 1), (B, R + 1, R + 1))
    factors = references.logits(place, config, x, normals) - mean[:, None]
    np.testing.assert_allclose(rows[:, 0], mean, rtol=1e-4, atol=2e-5)
    found, expected = (np.einsum("brk,brl->bkl", some, some) for some in (rows[:, 1:], factors))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("loss", [LOSSES[0], LOSSES[3], LOSSES[-2]], ids=str)
def test_gradients_reach_all_parameters_of_a_head_and_are_those_of_finite_differences(loss):
    head, _ = rows_of_head(HEADS["HET-XL"])
    graph, state = nnx.split(head)
    params = nnx.to_pure_dict(state)
    target = targets_of(loss)
    value = jax.jit(lambda params: loss(nnx.merge(graph, params)(X, KEY), target, VALID).loss)
    gradient = jax.jit(jax.grad(value))(params)
    random = np.random.default_rng(5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.linalg.norm(leaf) > 0, path
    moves = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), jnp.float32), params)
    step = 2e-3
    up, down = (value(jax.tree.map(lambda p, m, s=s: p + s * step * m, params, moves)) for s in (1, -1))
    expected = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, moves)))
    np.testing.assert_allclose((up - down) / (2 * step), expected, rtol=2e-2)


@pytest.mark.parametrize("form", sample_free.PREDICTED)
def test_predictions_without_samples_are_probabilities_by_which_the_loss_is_trained(form):
    loss = SigmoidCrossEntropy(form) if form == "probit" else SoftmaxCrossEntropy(likelihood=form)
    head, rows = rows_of_head(HEADS["HET-XL"])
    activation = jax.nn.log_sigmoid if form == "probit" else jax.nn.log_softmax
    log_p = mean_log_probabilities(sample_free.predictions(form, head(X, KEY)), activation)
    target = TARGET if form == "probit" else LABEL
    if form == "probit":
        expected = -np.mean(np.sum(TARGET * log_p + (1 - TARGET) * np.log1p(-np.exp(log_p)), axis=1))
    else:
        np.testing.assert_allclose(np.exp(log_p).sum(axis=1), 1, rtol=1e-5)
        expected = -np.mean(log_p[np.arange(B), LABEL])
    np.testing.assert_allclose(loss(held(jnp.asarray(rows)), target).loss, expected, rtol=1e-4)


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_eight_devices_have_the_loss_and_the_gradient_of_one(loss):
    head, _ = rows_of_head(HEADS["HET-XL"])
    graph, state = nnx.split(head)

    @jax.jit
    def run(x, target, valid):
        def value(params):
            return loss(nnx.merge(graph, params)(x, KEY), target, valid).loss

        return jax.value_and_grad(value)(nnx.to_pure_dict(state))

    arguments = X, targets_of(loss), VALID
    one, eight = (on_devices(devices, run, arguments) for devices in (1, 8))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), one, eight)


def test_a_million_classes_need_no_matrix_of_classes_by_classes():
    """The largest array of a compiled step holds the factors' logits of a block."""
    k, b = 2**20, 8
    config = HetXLConfig(CovarianceConfig(3, "efficient"), sampling=SamplingConfig(num_samples=0, block_size=10))
    graph, params = nnx.split(nnx.eval_shape(lambda: config.build(4, k, nnx.Rngs(0))))

    def value(params, x):
        return SoftmaxCrossEntropy(likelihood="delta")(nnx.merge(graph, params)(x, KEY), jnp.zeros(b, int)).loss

    traced = jax.make_jaxpr(jax.grad(value))(params, jax.ShapeDtypeStruct((b, 4), jnp.float32))
    assert max(_sizes(traced.jaxpr)) <= 2 * 4 * k  # two examples of a block, r + 1 factors


def _sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (math.prod(found.aval.shape) for found in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _sizes(inner)


REFUSED = {
    "samples with a loss without": lambda: ClassificationConfig(loss=SoftmaxCrossEntropy(likelihood="delta")),
    "no samples with a loss of samples": lambda: ClassificationConfig(head=HetXLConfig(sampling=NONE)),
}


@pytest.mark.parametrize("build", REFUSED.values(), ids=REFUSED)
def test_a_likelihood_that_does_not_fit_the_head_is_refused(build):
    with pytest.raises(UserError, match=r"task.loss.likelihood = .* does not fit task.head.sampling.num_samples"):
        build()


def test_a_likelihood_of_noise_is_refused_for_a_head_without():
    with pytest.raises(UserError, match="'delta' needs a head with noise, and DeterministicConfig has none"):
        ClassificationConfig(head=DeterministicConfig(), loss=SoftmaxCrossEntropy(likelihood="delta"))


@pytest.mark.parametrize("kind", [HetConfig, HetHConfig, HetXLConfig])
def test_noise_of_every_coordinate_has_no_likelihood_without_samples(kind):
    for noise in (CovarianceConfig(0), CovarianceConfig(2, second_term="diagonal")):
        with pytest.raises(UserError, match="num_samples = 0 needs noise of low rank"):
            kind(covariance=noise, sampling=NONE)
    head = HetXLConfig(CovarianceConfig(2, second_term="diagonal")).build(D, K, nnx.Rngs(0))
    with pytest.raises(UserError, match="num_samples = 0 needs noise of low rank"):
        head(X, KEY, 0)


def test_a_loss_says_what_it_needs_of_a_head_alone():
    head, _ = rows_of_head(HEADS["HET-XL"])
    with pytest.raises(UserError, match="likelihood = 'samples' does not fit what the head returns"):
        SoftmaxCrossEntropy()(head(X, KEY), LABEL)
    with pytest.raises(UserError, match="likelihood = 'delta' does not fit what the head returns"):
        SoftmaxCrossEntropy(likelihood="delta")(head(X, KEY, 2), LABEL)


def test_smoothing_by_the_pairwise_form_is_refused():
    with pytest.raises(UserError, match="'pairwise_probit' is of single classes, and label_smoothing needs all"):
        SoftmaxCrossEntropy(0.1, "pairwise_probit")


def test_sigma_points_have_the_mean_and_the_covariance_of_the_logits():
    rows = rows_of()
    points = np.asarray(gaussian.sigma_points(jnp.asarray(rows[:, 0]), jnp.asarray(rows[:, 1:])), np.float64)
    np.testing.assert_allclose(points.mean(axis=1), rows[:, 0], atol=1e-6)
    centred = points - rows[:, :1]
    found = np.einsum("bsk,bsl->bkl", centred, centred) / points.shape[1]
    np.testing.assert_allclose(found, np.einsum("brk,brl->bkl", rows[:, 1:], rows[:, 1:]), atol=1e-5)
