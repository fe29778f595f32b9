"""All forms of a contrastive loss are one function on any number of devices: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.types import EmbeddingSamples
from tests.losses.contrastive_cases import (
    VALID,
    B,
    S,
    compiled,
    every_kind,
    every_loss,
    make,
    mesh_of,
    numpy_fields,
    reference,
    split_rows,
)

distributed = pytest.mark.parametrize("form", ["gather", "ring"])


@functools.cache
def dense(loss, kind):
    return compiled(loss("dense"))(make(kind, b=B), jnp.asarray(VALID))


def on_devices(num_devices, function, samples, valid=VALID):
    """Runs a function with rows split over devices, without a mesh if there is but one."""
    if num_devices == 1:
        return function(samples, jnp.asarray(valid))
    mesh = mesh_of(num_devices)
    with jax.set_mesh(mesh):
        return function(*split_rows((samples, jnp.asarray(valid)), mesh))


def of_two_examples(loss, form, kind):
    """The loss with blocks of two examples, half of what each of eight devices holds."""
    return loss(form, 2 if kind == "deterministic" else 2 * S)


def assert_equals_dense(result, loss, kind):
    value, gradient = result
    expected_value, expected = dense(loss, kind)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    gradient, expected = numpy_fields(gradient), numpy_fields(expected)
    assert gradient.keys() == expected.keys()
    for name, array in expected.items():
        # The gradient of a softmax's bias is 0 but for rounding.
        atol = max(1e-5 * np.abs(array).max(), 1e-7)
        np.testing.assert_allclose(gradient[name], array, rtol=0, atol=atol, err_msg=name)


@every_loss
@every_kind
def test_the_dense_form_equals_the_numpy_reference(loss, kind):
    expected = reference(loss, numpy_fields(make(kind, b=B)), VALID)
    np.testing.assert_allclose(dense(loss, kind)[0], expected, rtol=1e-5)


@every_loss
@every_kind
@distributed
def test_eight_devices_with_blocks_of_two_examples_equal_the_dense_form(form, loss, kind):
    samples = make(kind, b=B)
    assert_equals_dense(on_devices(8, compiled(of_two_examples(loss, form, kind)), samples), loss, kind)


@pytest.mark.parametrize(
    ("num_devices", "loss", "kind"),
    [
        (1, SoftmaxLoss("gather", 1), "both sides noisy"),
        (1, SoftmaxLoss("gather", 10), "deterministic"),
        (1, SoftmaxLoss("ring", 10), "both sides noisy"),
        (1, SigmoidLoss("ring", 1), "one side noisy"),
        (2, SoftmaxLoss("ring", 1), "deterministic"),
        (2, SoftmaxLoss("gather", 1000), "one side noisy"),
        (2, SigmoidLoss("gather", 10), "both sides noisy"),
        (8, SoftmaxLoss("gather", 1), "deterministic"),
        (8, SoftmaxLoss("ring", 1000), "both sides noisy"),
        (8, SigmoidLoss("ring", 1000), "deterministic"),
    ],
    ids=str,
)
def test_the_loss_does_not_depend_on_devices_or_the_size_of_blocks(num_devices, loss, kind):
    """Blocks of one query, of some, and larger than the batch."""
    assert_equals_dense(on_devices(num_devices, compiled(loss), make(kind, b=B)), type(loss), kind)


@pytest.mark.parametrize("form", ["dense", "gather", "ring"])
def test_a_small_loss_is_accurate_beside_large_logits(form):
    """A loss of 1e-4 beside logits of 12: a sum of the gradient's terms, as large as logits, must not swallow it."""
    random = np.random.default_rng(0)
    image = np.linalg.qr(random.normal(size=(B, B)))[0].astype(np.float32)
    text = image + 1e-3 * random.normal(size=(B, B)).astype(np.float32)
    samples = EmbeddingSamples(jnp.asarray(image), jnp.asarray(text), None, None, jnp.float32(0.08))
    logits = image.astype(np.float64) @ text.astype(np.float64).T / np.float64(np.float32(0.08))
    normalisers = np.log(np.exp(logits).sum(axis=1)) + np.log(np.exp(logits).sum(axis=0))
    expected = (normalisers - 2 * np.diag(logits)).mean() / 2
    assert 5e-5 < expected < 5e-4
    value = jax.jit(SoftmaxLoss(form, 4))(samples, jnp.ones(B, bool))
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [(SoftmaxLoss("ring", 2), "deterministic"), (SigmoidLoss("gather", 6), "both sides noisy")],
    ids=str,
)
def test_the_gradient_of_a_compiled_loss_is_that_of_the_compiled_gradient(loss, kind):
    gradient_of_compiled = jax.value_and_grad(jax.jit(loss))
    assert_equals_dense(on_devices(8, gradient_of_compiled, make(kind, b=B)), type(loss), kind)


@every_loss
@every_kind
@distributed
def test_a_batch_without_valid_rows_has_loss_and_gradient_zero_on_eight_devices(form, loss, kind):
    function = compiled(of_two_examples(loss, form, kind))
    value, gradient = on_devices(8, function, make(kind, b=B), np.zeros(B, bool))
    assert float(value) == 0
    for name, array in numpy_fields(gradient).items():
        np.testing.assert_array_equal(array, 0, err_msg=name)


@every_loss
@every_kind
@distributed
def test_huge_logits_give_the_loss_of_the_dense_form_and_finite_gradients(form, loss, kind):
    """Also where logits of invalid rows are far above those of valid ones."""
    samples = make(kind, b=B, temperature=1e-4)
    expected, dense_gradient = compiled(loss("dense"))(samples, jnp.asarray(VALID))
    value, gradient = on_devices(8, compiled(of_two_examples(loss, form, kind)), samples)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for found in (gradient, dense_gradient):
        for name, array in numpy_fields(found).items():
            assert np.all(np.isfinite(array)), name
