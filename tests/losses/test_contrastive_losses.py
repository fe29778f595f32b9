"""Contrastive losses against NumPy loops (HET-XL Eq. 6 and 8; SigLIP Eq. 1) and big_vision's outputs."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.errors import UserError
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.types import EmbeddingSamples, Queries
from tests.heads.references import held_singly
from tests.losses.contrastive_cases import (
    KINDS,
    LOSSES,
    S,
    every_kind,
    every_loss,
    make,
    numpy_fields,
    reference,
    take,
)

GOLDEN = Path(__file__).parents[1] / "golden"
B = 5
ALL = np.ones(B, bool)
SOME = np.array([True, False, True, True, False])


@functools.cache
def compiled(loss):
    return jax.jit(jax.value_and_grad(loss()))


@every_loss
@pytest.mark.parametrize(("kind", "num_samples"), [*((kind, S) for kind in KINDS), ("both sides noisy", 1)])
def test_the_loss_equals_the_numpy_reference(loss, kind, num_samples):
    samples = make(kind, b=B, num_samples=num_samples)
    for valid in (ALL, SOME):
        expected = reference(loss, numpy_fields(samples), valid)
        np.testing.assert_allclose(compiled(loss)(samples, jnp.asarray(valid))[0], expected, rtol=1e-5)


@every_loss
def test_each_direction_has_its_own_noisy_logits(loss):
    """Image queries meet text keys and the other way round: exchanging queries changes the loss."""
    samples, values = make("both sides noisy", b=B), []
    image, text = jax.jit(lambda *sides: [Queries(held_singly(queries)) for queries in sides])(
        samples.image_queries, samples.text_queries
    )
    for image_queries, text_queries in ((image, text), (text, image)):
        changed = dataclasses.replace(samples, image_queries=image_queries, text_queries=text_queries)
        values.append(compiled(loss)(changed, jnp.asarray(ALL))[0])
        np.testing.assert_allclose(values[-1], reference(loss, numpy_fields(changed), ALL), rtol=1e-5)
    assert not np.isclose(*values, rtol=1e-3)


@every_loss
@every_kind
def test_invalid_rows_are_neither_queries_nor_keys_and_have_no_gradient(loss, kind):
    samples, valid_rows = make(kind, b=B), np.flatnonzero(SOME)
    value, gradient = compiled(loss)(samples, jnp.asarray(SOME))
    rows = take(samples, valid_rows)
    expected_value, expected = compiled(loss)(rows, jnp.asarray(np.ones(len(valid_rows), bool)))
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for name, array in numpy_fields(take(gradient, valid_rows)).items():
        np.testing.assert_allclose(array, numpy_fields(expected)[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name, array in numpy_fields(gradient).items():
        if array.ndim:
            np.testing.assert_array_equal(array[~SOME], 0, err_msg=name)


@every_loss
def test_one_noisy_side_equals_noise_of_norm_zero_on_the_other(loss):
    samples = make("one side noisy", b=B)
    text = jnp.asarray(np.repeat(np.asarray(samples.text)[:, None], 2, axis=1))
    quiet = dataclasses.replace(samples, text_queries=Queries(text))
    values = [compiled(loss)(batch, jnp.asarray(SOME))[0] for batch in (samples, quiet)]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    order=st.permutations(range(B)),
    valid=st.lists(st.booleans(), min_size=B, max_size=B),
    loss=st.sampled_from(LOSSES),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 1000),
)
def test_permuting_the_batch_does_not_change_the_loss(order, valid, loss, kind, seed):
    samples, valid, order = make(kind, b=B, seed=seed), jnp.asarray(valid), np.array(order)
    expected, _ = compiled(loss)(samples, valid)
    actual, _ = compiled(loss)(take(samples, order), np.asarray(valid)[order])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@every_loss
def test_blocks_without_queries_are_refused(loss):
    with pytest.raises(UserError, match="block_size = 0 must be at least 1"):
        loss(block_size=0)


# big_vision's temperature t is a factor, and the recorded embeddings have norm 1 already.


@pytest.mark.parametrize(("loss", "all_devices"), [("softmax", (1, 2, 4)), ("sigmoid", (2, 4))])
def test_losses_and_their_gradients_equal_big_visions(loss, all_devices):
    def value(image, text, t, bias=None):
        found = SoftmaxLoss() if loss == "softmax" else SigmoidLoss()
        return found(EmbeddingSamples(image, text, None, None, 1 / t, bias), jnp.asarray(np.ones(12, bool)))

    names = ("zimg", "ztxt", "t") if loss == "softmax" else ("zimg", "ztxt", "t", "b")
    with np.load(GOLDEN / "contrastive_losses.npz") as golden:
        program = jax.jit(jax.value_and_grad(value, argnums=tuple(range(len(names)))))
        found, gradient = program(*(jnp.asarray(golden[name]) for name in names))
        for devices in all_devices:
            np.testing.assert_allclose(found, golden[f"{loss}_loss_{devices}dev"].mean(), rtol=1e-5)
            for name, actual in zip(names, gradient, strict=True):
                expected = golden[f"{loss}_grad_{devices}dev/{name}"]
                np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5, err_msg=name)
