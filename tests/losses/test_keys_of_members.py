"""The softmax loss of images with a key of each member of an ensemble, against NumPy and over forms and devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.types import Queries
from tests.losses.contrastive_cases import (
    VALID,
    B,
    D,
    S,
    assert_equal,
    compiled,
    make,
    numpy_fields,
    on_devices,
)

M = 3
# Whether image queries have noise, and those of texts.
NOISE = {"deterministic": (False, False), "both sides noisy": (True, True), "noisy texts": (False, True)}
# Rows 1 and 2, and 8 and 20 have the same image.
IDS = np.stack([np.arange(B), np.arange(B)], axis=1).astype(np.uint32)
IDS[2], IDS[20] = IDS[1], IDS[8]

every_kind = pytest.mark.parametrize("kind", NOISE)


@functools.cache
def batch(kind):
    """Returns a batch whose images have M keys, and with noise S queries of each."""
    random, (image, text) = np.random.default_rng(3), NOISE[kind]

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    plain = make("deterministic", b=B)
    queries = Queries(draw(B, M * S, D)) if image else None
    text_queries = Queries(draw(B, 1, D), draw(B, 2, D), draw(B, S, 2)) if text else None
    return dataclasses.replace(plain, image=draw(B, M, D), image_queries=queries, text_queries=text_queries, bias=None)


def reference(kind, ids, smoothing):
    """Returns the loss of texts and the keys of all members, of which those of an image are right (loops over rows)."""
    samples = batch(kind)
    image, text = (np.asarray(x, np.float64) for x in (samples.image, samples.text))
    queries, text_queries = samples.image_queries, samples.text_queries
    image_queries = image if queries is None else np.asarray(queries.samples, np.float64)
    of_texts = text[:, None] if text_queries is None else np.asarray(text_queries.materialize(), np.float64)
    tau, rows, losses = float(samples.temperature), np.flatnonzero(VALID), []
    for n in rows:
        right = [m == n or any((one[m] == one[n]).all() for one in ids) for m in rows]
        # [s i one] of texts, [s i m] of images.
        of_image, quiet_image = (np.exp(one @ text[rows].T / tau)[:, :, None] for one in (image_queries[n], image[n]))
        of_text, quiet_text = (
            np.exp(np.einsum("sd,imd->sim", one, image[rows]) / tau) for one in (of_texts[n], text[n : n + 1])
        )
        for x, quiet in ((of_image, quiet_image), (of_text, quiet_text)):
            p, without = (y / y.sum(axis=(1, 2), keepdims=True) for y in (x, quiet))
            losses.append(-(1 - smoothing) * np.log(p.mean(axis=0)[right].sum()) - smoothing * np.log(without).mean())
    return np.mean(losses)


@every_kind
@pytest.mark.parametrize(("ids", "smoothing"), [((), 0.0), ((IDS,), 0.0), ((IDS,), 0.2)], ids=["", "ids", "smoothed"])
def test_the_loss_is_that_of_the_mean_over_the_members_of_an_image(kind, ids, smoothing):
    loss = compiled(SoftmaxLoss("dense", label_smoothing=smoothing))
    found, _ = loss(batch(kind), jnp.asarray(VALID), tuple(map(jnp.asarray, ids)))
    np.testing.assert_allclose(found, reference(kind, ids, smoothing), rtol=1e-5)


def test_equal_members_are_one_key():
    member = make("deterministic", b=B)
    repeated = dataclasses.replace(member, image=jnp.asarray(np.repeat(np.asarray(member.image)[:, None], M, axis=1)))
    expected, gradient = compiled(SoftmaxLoss("dense"))(member, jnp.asarray(VALID))
    found, of_members = compiled(SoftmaxLoss("dense"))(repeated, jnp.asarray(VALID))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(of_members.image).sum(axis=1), gradient.image, atol=1e-6)


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "kind", "ids", "smoothing"),
    [
        ("gather", "deterministic", (), 0.2),
        ("gather", "both sides noisy", (IDS,), 0.0),
        ("gather", "noisy texts", (), 0.0),
        ("ring", "deterministic", (IDS,), 0.2),
        ("ring", "both sides noisy", (), 0.0),
        ("ring", "noisy texts", (IDS,), 0.2),
    ],
    ids=lambda x: "duplicates" * len(x) if isinstance(x, tuple) else str(x),
)
def test_every_form_has_the_value_and_the_gradient_of_the_dense_one(form, kind, ids, smoothing):
    arguments = batch(kind), jnp.asarray(VALID), tuple(map(jnp.asarray, ids))
    expected = compiled(SoftmaxLoss("dense", label_smoothing=smoothing))(*arguments)
    # Each of eight devices has four examples, in blocks of two.
    found = on_devices(8, compiled(SoftmaxLoss(form, 2 * M * S, label_smoothing=smoothing)), arguments)
    assert_equal(found, expected, rtol=2e-5)


@pytest.mark.parametrize("loss", [SigmoidLoss(), SoftmaxLoss(likelihood="delta")], ids=["sigmoid", "delta"])
def test_other_losses_refuse_several_keys(loss):
    with pytest.raises(UserError, match="images with several keys need the softmax loss"):
        loss(batch("deterministic"), jnp.asarray(VALID))


def test_queries_in_factored_form_are_drawn_as_products_are():
    queries = make("one side noisy", b=4).image_queries
    drawn, products = jax.jit(lambda queries, keys: (queries.materialize(), queries.products(keys)))(queries, np.eye(D))
    np.testing.assert_allclose(drawn, products, rtol=1e-5, atol=1e-6)
    assert numpy_fields(queries).keys() == {"samples", "factors", "normals", "scale"}
