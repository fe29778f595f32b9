"""Examples of a batch with the same image or an equal text: positives of each other, for both losses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.types import Queries
from tests.losses.contrastive_cases import (
    VALID,
    B,
    S,
    assert_equal,
    compiled,
    every_form,
    every_kind,
    every_loss,
    make,
    mesh_of,
    numpy_fields,
    reference,
    split_rows,
    take,
)


def words(numbers):
    """Hashes of 64 bits; those of the numbers 1 and 2 differ in their second words alone."""
    numbers = np.asarray(numbers)
    return jnp.asarray(np.stack([np.where(numbers == 2, 1, numbers), numbers], axis=1), jnp.uint32)


# Ten images and seven texts, on all of eight devices; some pairs share only one, and invalid rows share both.
IDS = (words(np.random.default_rng(0).integers(0, 10, B)), words(np.random.default_rng(1).integers(0, 7, B)))
NONE = (words(np.arange(B)), words(np.arange(100, 100 + B)))


@every_loss
@every_kind
def test_the_dense_form_equals_the_numpy_reference(loss, kind):
    samples = make(kind, b=B)
    value, _ = compiled(loss("dense"))(samples, jnp.asarray(VALID), IDS)
    arrays = numpy_fields(samples)
    np.testing.assert_allclose(value, reference(loss, arrays, VALID, IDS), rtol=1e-5)
    assert abs(value - reference(loss, arrays, VALID)) > 0.1


@every_loss
@every_kind
@every_form
def test_gradients_agree_with_finite_differences_of_the_numpy_reference(loss, kind, form):
    samples = make(kind, b=B)
    gradient = numpy_fields(compiled(loss(form, 6))(samples, jnp.asarray(VALID), IDS)[1])
    arrays, step = numpy_fields(samples), 1e-5
    random = np.random.default_rng(1)
    direction = {name: random.normal(size=value.shape) for name, value in arrays.items()}

    def along(amount):
        moved = {name: value + amount * direction[name] for name, value in arrays.items()}
        return reference(loss, moved, VALID, IDS)

    slope = (along(step) - along(-step)) / (2 * step)
    found = sum(np.vdot(gradient[name], direction[name]) for name in arrays)
    np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-5)


@every_loss
@every_kind
@pytest.mark.parametrize("form", ["gather", "ring"])
def test_eight_devices_equal_one(form, loss, kind):
    samples, valid = make(kind, b=B), jnp.asarray(VALID)
    expected = compiled(loss("dense"))(samples, valid, IDS)
    mesh = mesh_of(8)
    with jax.set_mesh(mesh):
        found = compiled(loss(form, 2 * S))(*split_rows((samples, valid, IDS), mesh))
    assert_equal(found, expected, 1e-5)


@every_loss
@every_kind
@every_form
def test_without_duplicates_the_loss_is_bit_for_bit_that_of_negatives(form, loss, kind):
    samples, valid = make(kind, b=B), jnp.asarray(VALID)
    expected = compiled(loss(form, 6, duplicates="negatives"))(samples, valid, IDS)
    assert_equal(compiled(loss(form, 6))(samples, valid, NONE), expected, 0)
    assert_equal(compiled(loss(form, 6))(samples, valid), expected, 0)


@every_form
@pytest.mark.parametrize("noise", [False, True], ids=["deterministic", "noisy"])
def test_a_batch_of_three_copies_has_the_softmax_loss_of_one_copy(form, noise):
    """Copies have the same noise here, so that they are copies."""
    samples = make("both sides noisy" if noise else "deterministic", b=8)
    thrice = take(samples, np.tile(np.arange(8), 3))
    ids = words(np.tile(np.arange(8), 3))
    loss, of_negatives = jax.jit(SoftmaxLoss(form)), jax.jit(SoftmaxLoss(form, duplicates="negatives"))
    once = loss(samples, jnp.ones(8, bool))
    np.testing.assert_allclose(loss(thrice, jnp.ones(24, bool), [ids]), once, rtol=1e-5)
    assert of_negatives(thrice, jnp.ones(24, bool), [ids]) > once + 0.9


def test_two_examples_need_not_share_what_both_share_with_a_third():
    """Rows 0 and 1 have one image, rows 1 and 2 one text: 0 and 2 stay negatives of each other."""
    samples = make("deterministic", b=3)
    ids = (words([5, 5, 6]), words([7, 8, 8]))
    expected = reference(SigmoidLoss, numpy_fields(samples), np.ones(3, bool), ids)
    np.testing.assert_allclose(SigmoidLoss()(samples, jnp.ones(3, bool), ids), expected, rtol=1e-5)
    closed = [words([1, 1, 1])]
    assert not np.isclose(SigmoidLoss()(samples, jnp.ones(3, bool), closed), expected, rtol=1e-3)


@pytest.mark.parametrize("likelihood", ["delta", "mean_field", "pairwise_probit", "probit"])
def test_likelihoods_without_samples_approach_the_loss_with_samples_as_noise_vanishes(likelihood):
    samples = make("both sides noisy", b=8)
    quiet = {side: Queries(getattr(samples, side)[:, None], jnp.full((8, 2, 4), 1e-3)) for side in ("image", "text")}
    quiet = dataclasses.replace(samples, image_queries=quiet["image"], text_queries=quiet["text"])
    none = dataclasses.replace(samples, image_queries=None, text_queries=None)
    loss: Any = SigmoidLoss if likelihood == "probit" else SoftmaxLoss
    ids, valid = [words([0, 1, 2, 3, 4, 5, 5, 0])], jnp.ones(8, bool)
    if likelihood == "pairwise_probit":  # leaves positives other than the partner out of its sum
        expected = np.mean([partner_among_negatives(none, n, ids[0]) for n in range(8)])
    else:
        expected = loss()(none, valid, ids)
    np.testing.assert_allclose(loss(likelihood=likelihood)(quiet, valid, ids), expected, rtol=1e-4)


def partner_among_negatives(samples, n, ids):
    image, text = np.asarray(samples.image), np.asarray(samples.text)
    remaining = [m for m in range(len(image)) if m == n or (ids[m] != ids[n]).any()]
    losses = []
    for query, keys in ((image[n], text), (text[n], image)):
        scores = keys @ query / float(samples.temperature)
        losses.append(np.log(np.exp(scores[remaining]).sum()) - scores[n])
    return sum(losses) / 2


def test_the_second_order_of_noise_counts_all_positives():
    """Against 200,000 samples: without the spread among positives the error would be that of no correction."""
    samples, ids, valid = make("both sides noisy", b=6), [words([0, 0, 0, 3, 4, 5])], jnp.ones(6, bool)
    factors = jnp.asarray(np.random.default_rng(3).normal(size=(6, 2, 4)), jnp.float32) * 0.05
    distribution = Queries(samples.image[:, None], factors)
    delta = dataclasses.replace(samples, image_queries=distribution, text_queries=None)
    normals = jax.random.normal(jax.random.key(0), (6, 200_000, 2))
    drawn = dataclasses.replace(delta, image_queries=dataclasses.replace(distribution, normals=normals))
    expected = jax.jit(SoftmaxLoss("dense"))(drawn, valid, ids)
    without = SoftmaxLoss()(dataclasses.replace(delta, image_queries=None), valid, ids)
    found = SoftmaxLoss(likelihood="delta")(delta, valid, ids)
    assert abs(found - expected) < abs(without - expected) / 5
