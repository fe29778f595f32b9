"""Rows with weights: against NumPy loops, in every form and on eight devices; weights of 1 and of 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.losses import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.losses.base import weights
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
)
from tests.losses.test_classification_losses import BOTH, LOGITS, held, single

WEIGHT = np.where(np.arange(B) % 3 == 1, 0.3, 1.0).astype(np.float32)
WEIGHT[[9, 13, 20]] = [0.0, 0.7, 0.0]
# Ten images; some pairs are positives of each other.
IDS = (jnp.asarray(np.random.default_rng(0).integers(0, 10, (B, 1)).repeat(2, axis=1), jnp.uint32),)


@every_loss
@every_kind
@every_form
def test_loss_and_gradient_are_those_of_the_numpy_reference(form, loss, kind):
    samples, step = make(kind, b=B), 1e-5
    value, gradient = compiled(loss(form, 6))(samples, jnp.asarray(VALID), IDS, WEIGHT)
    arrays, gradient = numpy_fields(samples), numpy_fields(gradient)
    expected = reference(loss, arrays, VALID, IDS, WEIGHT)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert abs(expected - reference(loss, arrays, VALID, IDS)) > 0.01
    random = np.random.default_rng(1)
    direction = {name: random.normal(size=array.shape) for name, array in arrays.items()}

    def along(amount):
        moved = {name: array + amount * direction[name] for name, array in arrays.items()}
        return reference(loss, moved, VALID, IDS, WEIGHT)

    found = sum(np.vdot(gradient[name], direction[name]) for name in arrays)
    np.testing.assert_allclose(found, (along(step) - along(-step)) / (2 * step), rtol=1e-4, atol=1e-5)


@every_loss
@every_kind
@pytest.mark.parametrize("form", ["gather", "ring"])
def test_eight_devices_equal_one(form, loss, kind):
    arguments = (make(kind, b=B), jnp.asarray(VALID), IDS, jnp.asarray(WEIGHT))
    expected = compiled(loss("dense"))(*arguments)
    mesh = mesh_of(8)
    with jax.set_mesh(mesh):
        found = compiled(loss(form, 2 * S))(*split_rows(arguments, mesh))
    assert_equal(found, expected, 1e-5)


@every_loss
@every_kind
@every_form
def test_weights_of_one_change_no_bit(form, loss, kind):
    arguments = (make(kind, b=B), jnp.asarray(VALID), IDS)
    expected = compiled(loss(form, 6))(*arguments)
    assert_equal(compiled(loss(form, 6))(*arguments, jnp.ones(B)), expected, 0)


@every_loss
@every_form
def test_only_the_ratios_of_weights_matter_and_small_ones_approach_zero(form, loss):
    arguments = (make("both sides noisy", b=B), jnp.asarray(VALID), IDS)
    zero, small = (np.where(WEIGHT < 1, amount, 1.0).astype(np.float32) for amount in (0.0, 1e-6))
    expected = compiled(loss(form, 6))(*arguments, zero)
    assert_equal(compiled(loss(form, 6))(*arguments, small), expected, 1e-5)
    assert_equal(compiled(loss(form, 6))(*arguments, 8 * zero), expected, 1e-5)


@every_loss
@every_kind
@every_form
def test_a_row_of_weight_zero_is_no_query_but_stays_a_key_of_the_others(form, loss, kind):
    samples, weight = make(kind, b=B), jnp.ones(B).at[9].set(0.0)
    value, gradient = compiled(loss(form, 6))(samples, jnp.asarray(VALID), (), weight)
    np.testing.assert_allclose(value, reference(loss, numpy_fields(samples), VALID, (), weight), rtol=1e-5)
    left_out, _ = compiled(loss(form, 6))(samples, jnp.asarray(VALID).at[9].set(False))
    assert abs(value - left_out) > 1e-3
    found = numpy_fields(gradient)
    assert np.abs(found["text"][9]).max() > 1e-4
    for name, array in found.items():
        if "queries" in name:
            np.testing.assert_allclose(array[9], 0, atol=1e-12, err_msg=name)


@every_loss
@every_kind
@every_form
def test_a_batch_without_rows_that_count_has_the_loss_and_the_gradient_zero(form, loss, kind):
    samples = make(kind, b=B)
    for valid, weight in ((np.zeros(B, bool), WEIGHT), (VALID, np.zeros(B, np.float32))):
        value, gradient = compiled(loss(form, 6))(samples, jnp.asarray(valid), (), weight)
        np.testing.assert_allclose(value, 0, atol=1e-12)
        for name, array in numpy_fields(gradient).items():
            np.testing.assert_allclose(array, 0, atol=1e-12, err_msg=name)


def test_shares_are_those_of_numpys_average_and_never_zero_for_valid_rows():
    valid, weight = np.array([True, False, True, True]), np.array([0.5, np.nan, 0.0, 1.5], np.float32)
    found = np.asarray(weights(jnp.asarray(valid), jnp.asarray(weight)))
    np.testing.assert_allclose(found, [0.25, 0, 0, 0.75], atol=1e-20)
    assert found[2] > 0 == found[1]


@BOTH
@pytest.mark.parametrize("blocks", [{}, {"examples_per_block": 1, "samples_per_block": 2}], ids=["whole", "blocks"])
def test_a_classifier_has_a_weighted_loss_and_an_unweighted_top1(fast, slow, labels, blocks):
    kinds = {"reference_sigmoid": SigmoidCrossEntropy(), "reference_smoothed": SoftmaxCrossEntropy(label_smoothing=0.2)}
    loss = kinds.get(slow.__name__, SoftmaxCrossEntropy())
    valid, weight = np.array([True, False, True, True]), np.array([1, 5, 0.25, 0.5], np.float32)
    labels = jax.tree.map(jnp.asarray, labels)

    def function(logits, weight):
        result = loss(held(logits, **blocks), labels, jnp.asarray(valid), weight)
        return result.loss, result.top1

    program = jax.jit(jax.value_and_grad(function, has_aux=True))
    (value, top1), gradient = program(single(LOGITS), weight)
    (plain, expected_top1), plain_gradient = program(single(LOGITS), None)
    np.testing.assert_allclose(value, np.average(slow(LOGITS, labels)[valid], weights=weight[valid]), rtol=1e-5)
    assert float(top1) == float(expected_top1)
    # Rows are independent: a gradient changes by the ratio of the shares.
    ratio = weight / weight[valid].sum() * valid.sum()
    np.testing.assert_allclose(gradient, plain_gradient * ratio[:, None, None], rtol=1e-4, atol=1e-8)
    (ones, _), gradient = program(single(LOGITS), np.ones(4, np.float32))
    assert float(ones) == float(plain)
    np.testing.assert_array_equal(gradient, plain_gradient)


def test_a_classifiers_weighted_loss_on_eight_devices_is_that_of_one():
    random = np.random.default_rng(0)
    logits, labels = single(random.normal(size=(B, 3, 5))), jnp.asarray(random.integers(0, 5, B))

    def function(logits, labels, valid, weight):
        return SoftmaxCrossEntropy()(held(logits, 2, 2), labels, valid, weight).loss

    program, arguments = (
        jax.jit(jax.value_and_grad(function)),
        (logits, labels, jnp.asarray(VALID), jnp.asarray(WEIGHT)),
    )
    expected, expected_gradient = program(*arguments)
    mesh = mesh_of(8)
    with jax.set_mesh(mesh):
        value, gradient = program(*split_rows(arguments, mesh))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-9)
