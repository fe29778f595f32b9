"""Contrastive losses against NumPy loops (HET-XL Eq. 6 and 8; SigLIP Eq. 1) and big_vision's recorded outputs."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.types import EmbeddingSamples

GOLDEN = Path(__file__).parents[1] / "golden"
B, D, S = 5, 4, 3
ALL = np.ones(B, bool)
SOME = np.array([True, False, True, True, False])
LOSSES = [SoftmaxLoss(), SigmoidLoss()]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=["softmax", "sigmoid"])


def make(loss, *, num_samples=S, seed=0, b=B):
    random = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    return EmbeddingSamples(
        image=draw(b, D),
        text=draw(b, D),
        image_queries=draw(num_samples, b, D),
        text_queries=draw(num_samples, b, D),
        temperature=jnp.float32(0.7),
        bias=jnp.float32(-1.5) if isinstance(loss, SigmoidLoss) else None,
    )


def deterministic(samples):
    return dataclasses.replace(samples, image_queries=samples.image[None], text_queries=samples.text[None])


def rows(samples, kept):
    """The same batch without the other rows."""
    return dataclasses.replace(
        samples,
        image=samples.image[kept],
        text=samples.text[kept],
        image_queries=samples.image_queries[:, kept],
        text_queries=samples.text_queries[:, kept],
    )


def reference_softmax(samples, valid):
    """½ Σ over directions of mean_n -log (1/S Σ_s exp(q_sn·k_n/τ) / Σ_i exp(q_sn·k_i/τ)), sums over valid rows."""

    def direction(queries, keys):
        losses = []
        for n in np.flatnonzero(valid):
            probability = 0.0
            for s in range(len(queries)):
                scores = {i: np.exp(queries[s, n] @ keys[i] / tau) for i in np.flatnonzero(valid)}
                probability += scores[n] / sum(scores.values()) / len(queries)
            losses.append(-np.log(probability))
        return np.mean(losses)

    tau = float(samples.temperature)
    image, text, image_queries, text_queries = (
        np.asarray(x, np.float64) for x in (samples.image, samples.text, samples.image_queries, samples.text_queries)
    )
    return (direction(image_queries, text) + direction(text_queries, image)) / 2


def reference_sigmoid(samples, valid):
    """½ Σ over directions of mean_n Σ_i -log (1/S Σ_s σ(z_ni (q_sn·k_i/τ + bias))), z = 1 where n = i and else -1."""

    def direction(queries, keys):
        losses = []
        for n in np.flatnonzero(valid):
            total = 0.0
            for i in np.flatnonzero(valid):
                z = 1.0 if i == n else -1.0
                logits = [q[n] @ keys[i] / tau + bias for q in queries]
                total -= np.log(np.mean([1 / (1 + np.exp(-z * logit)) for logit in logits]))
            losses.append(total)
        return np.mean(losses)

    tau, bias = float(samples.temperature), float(samples.bias)
    image, text, image_queries, text_queries = (
        np.asarray(x, np.float64) for x in (samples.image, samples.text, samples.image_queries, samples.text_queries)
    )
    return (direction(image_queries, text) + direction(text_queries, image)) / 2


def reference(loss):
    return reference_softmax if isinstance(loss, SoftmaxLoss) else reference_sigmoid


@every_loss
@pytest.mark.parametrize("num_samples", [1, S])
@pytest.mark.parametrize("valid", [ALL, SOME], ids=["all", "some"])
def test_the_loss_equals_the_numpy_reference(loss, num_samples, valid):
    samples = make(loss, num_samples=num_samples)
    np.testing.assert_allclose(loss(samples, jnp.asarray(valid)), reference(loss)(samples, valid), rtol=1e-5)


@every_loss
def test_each_direction_has_its_own_noisy_logits(loss):
    """The image queries meet the text keys and the other way round: exchanging keys and queries changes the loss."""
    samples = make(loss)
    swapped = dataclasses.replace(samples, image_queries=samples.text_queries, text_queries=samples.image_queries)
    assert not np.isclose(loss(samples, jnp.asarray(ALL)), loss(swapped, jnp.asarray(ALL)), rtol=1e-3)
    np.testing.assert_allclose(loss(swapped, jnp.asarray(ALL)), reference(loss)(swapped, ALL), rtol=1e-5)


@every_loss
def test_invalid_rows_are_neither_queries_nor_keys(loss):
    samples = make(loss)
    kept = np.flatnonzero(SOME)
    expected = loss(rows(samples, kept), jnp.ones(len(kept), bool))
    np.testing.assert_allclose(loss(samples, jnp.asarray(SOME)), expected, rtol=1e-6)


@every_loss
def test_gradients_of_invalid_rows_are_zero_and_the_others_are_those_of_the_smaller_batch(loss):
    samples, kept = make(loss), np.flatnonzero(SOME)
    gradient = jax.jit(jax.grad(loss))(samples, jnp.asarray(SOME))
    expected = jax.jit(jax.grad(loss))(rows(samples, kept), jnp.ones(len(kept), bool))
    for actual, wanted in zip(jax.tree.leaves(rows(gradient, kept)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-7)
    for embedding in (gradient.image, gradient.text, gradient.image_queries[0], gradient.text_queries[0]):
        np.testing.assert_array_equal(embedding[~SOME], 0)


@every_loss
def test_a_batch_without_valid_rows_has_loss_and_gradients_zero(loss):
    value, gradient = jax.jit(jax.value_and_grad(loss))(make(loss), jnp.zeros(B, bool))
    assert float(value) == 0.0
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradient))


@every_loss
def test_huge_logits_give_finite_losses_and_gradients(loss):
    samples = dataclasses.replace(make(loss), temperature=jnp.float32(1e-4))
    value, gradient = jax.jit(jax.value_and_grad(loss))(samples, jnp.asarray(SOME))
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@every_loss
@pytest.mark.parametrize("valid", [ALL, SOME], ids=["all", "some"])
def test_gradients_agree_with_finite_differences_of_the_reference(loss, valid):
    samples = make(loss, num_samples=2)
    gradient = jax.jit(jax.grad(loss))(samples, jnp.asarray(valid))
    step = 1e-5
    for field in ("image", "text", "image_queries", "text_queries", "temperature", "bias"):
        value = getattr(samples, field)
        if value is None:
            continue
        value = np.asarray(value, np.float64)
        direction = np.random.default_rng(1).normal(size=value.shape)

        def along(amount, field=field, value=value, direction=direction):
            return reference(loss)(SimpleNamespace(**{**vars(samples), field: value + amount * direction}), valid)

        slope = (along(step) - along(-step)) / (2 * step)
        actual = np.vdot(np.asarray(getattr(gradient, field)), direction)
        np.testing.assert_allclose(actual, slope, rtol=1e-3, atol=1e-5, err_msg=field)


def test_a_deterministic_softmax_loss_is_the_plain_clip_loss():
    samples = deterministic(make(SoftmaxLoss()))
    logits = np.asarray(samples.image, np.float64) @ np.asarray(samples.text, np.float64).T / 0.7

    def cross_entropy(logits):
        return np.mean(np.log(np.exp(logits).sum(axis=1)) - np.diag(logits))

    expected = (cross_entropy(logits) + cross_entropy(logits.T)) / 2
    np.testing.assert_allclose(SoftmaxLoss()(samples, jnp.asarray(ALL)), expected, rtol=1e-5)


def test_one_sided_noise_may_have_another_number_of_samples():
    samples = make(SoftmaxLoss())
    samples = dataclasses.replace(samples, text_queries=samples.text[None])
    expected = reference_softmax(samples, ALL)
    np.testing.assert_allclose(SoftmaxLoss()(samples, jnp.asarray(ALL)), expected, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    order=st.permutations(range(B)),
    valid=st.lists(st.booleans(), min_size=B, max_size=B),
    loss=st.sampled_from(LOSSES),
    seed=st.integers(0, 1000),
)
def test_permuting_the_batch_does_not_change_the_loss(order, valid, loss, seed):
    samples, valid, order = make(loss, seed=seed), jnp.asarray(valid), np.array(order)
    expected = loss(samples, valid)
    np.testing.assert_allclose(loss(rows(samples, order), valid[order]), expected, rtol=1e-5, atol=1e-6)


# big_vision's temperature t is a factor, and the recorded embeddings have norm 1 already.


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_softmax_loss_and_its_gradients_equal_big_visions(devices):
    with np.load(GOLDEN / "contrastive_losses.npz") as golden:

        def loss(image, text, t):
            return SoftmaxLoss()(EmbeddingSamples(image, text, image[None], text[None], 1 / t), jnp.ones(12, bool))

        arguments = tuple(jnp.asarray(golden[k]) for k in ("zimg", "ztxt", "t"))
        value, gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arguments)
        np.testing.assert_allclose(value, golden[f"softmax_loss_{devices}dev"].mean(), rtol=1e-5)
        for name, actual in zip(("zimg", "ztxt", "t"), gradient, strict=True):
            expected = golden[f"softmax_grad_{devices}dev/{name}"]
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("devices", [2, 4])
def test_the_sigmoid_loss_and_its_gradients_equal_big_visions(devices):
    with np.load(GOLDEN / "contrastive_losses.npz") as golden:

        def loss(image, text, t, b):
            samples = EmbeddingSamples(image, text, image[None], text[None], 1 / t, b)
            return SigmoidLoss()(samples, jnp.ones(12, bool))

        arguments = tuple(jnp.asarray(golden[k]) for k in ("zimg", "ztxt", "t", "b"))
        value, gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arguments)
        np.testing.assert_allclose(value, golden[f"sigmoid_loss_{devices}dev"].mean(), rtol=1e-5)
        for name, actual in zip(("zimg", "ztxt", "t", "b"), gradient, strict=True):
            expected = golden[f"sigmoid_grad_{devices}dev/{name}"]
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5, err_msg=name)
