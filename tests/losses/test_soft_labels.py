"""Pseudo-positives and mixed images in the sigmoid loss: against NumPy loops, in every form, on eight devices."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.types import EmbeddingSamples, MixedImages, Queries
from tests.losses.contrastive_cases import (
    VALID,
    B,
    S,
    assert_equal,
    compiled,
    every_form,
    every_kind,
    make,
    mesh_of,
    numpy_fields,
    queries_one_by_one,
    split_rows,
)

ALPHA = 0.3
WEIGHT = np.where(np.arange(B) % 3 == 1, 0.3, 1.0).astype(np.float32)
# Ten images; some pairs are positives of each other.
IDS = np.random.default_rng(0).integers(0, 10, (B, 1)).repeat(2, axis=1).astype(np.uint32)
OTHER = (np.arange(B) - 1) % B
SHARE = np.where(VALID & VALID[OTHER] & (np.arange(B) % 4 != 1), np.linspace(0.5, 1, B), 1).astype(np.float32)
MIXED = MixedImages(jnp.asarray(SHARE), jnp.asarray(OTHER), (jnp.asarray(IDS[OTHER]),))
# (α, mixed images)
CASES = {"pseudo-positives": (ALPHA, None), "mixed images": (0.0, MIXED), "both": (ALPHA, MIXED)}
every_case = pytest.mark.parametrize("case", CASES)


def arguments(kind, case) -> tuple[Any, ...]:
    return make(kind, b=B), jnp.asarray(VALID), (jnp.asarray(IDS),), jnp.asarray(WEIGHT), CASES[case][1]


def labels(share: Any = SHARE):
    """Returns y of each image and text: the share of an image in its positives, and that of the other image in its."""
    positive = (IDS[:, None, 0] == IDS[None, :, 0]) | np.eye(B, dtype=bool)
    return share[:, None] * positive + (1 - share[:, None]) * positive[OTHER]


def reference(arrays, case):
    """Returns the mean over valid rows of both directions, pair by pair (PCME++ Sec. 2.3 and 2.4)."""
    alpha, mixed = CASES[case]
    y = labels(np.ones(B) if mixed is None else SHARE)
    of_rows = np.zeros(B)
    for side, keys, label in (("image", arrays["text"], y), ("text", arrays["image"], y.T)):
        queries = queries_one_by_one(arrays, side)
        for n in np.flatnonzero(VALID):
            p = probabilities(queries[n], keys, arrays)
            for m in np.flatnonzero(VALID):
                of_rows[n] += cross_entropy(label[n, m], p[m]) / 2
                fits = p[m] >= p[n] or m == n
                raised = max(label[n, m], label[n, n]) if fits else label[n, m]
                of_rows[n] += alpha * cross_entropy(raised, p[m]) / 2
    return np.average(of_rows[VALID], weights=WEIGHT[VALID].astype(np.float64))


def probabilities(queries, keys, arrays):
    """Returns 1/S Σ_s σ(q_s · k / τ + bias) of each key."""
    logits = np.array(queries) @ keys.T / arrays["temperature"] + arrays["bias"]
    return np.mean(1 / (1 + np.exp(-logits)), axis=0)


def cross_entropy(y, p):
    return -(y * np.log(p) + (1 - y) * np.log(1 - p))


@every_case
@every_kind
@every_form
def test_loss_and_gradient_are_those_of_the_numpy_reference(form, kind, case):
    samples, *rows = arguments(kind, case)
    value, gradient = compiled(SigmoidLoss(form, 6, pseudo_positives=CASES[case][0]))(samples, *rows)
    arrays, gradient, step = numpy_fields(samples), numpy_fields(gradient), 1e-5
    np.testing.assert_allclose(value, reference(arrays, case), rtol=1e-5)
    random = np.random.default_rng(1)
    direction = {name: random.normal(size=array.shape) for name, array in arrays.items()}

    def along(amount):
        return reference({name: array + amount * direction[name] for name, array in arrays.items()}, case)

    found = sum(np.vdot(gradient[name], direction[name]) for name in arrays)
    np.testing.assert_allclose(found, (along(step) - along(-step)) / (2 * step), rtol=1e-3, atol=1e-4)


@every_case
@every_kind
@pytest.mark.parametrize("form", ["gather", "ring"])
def test_eight_devices_equal_one(form, kind, case):
    make_loss = functools.partial(SigmoidLoss, pseudo_positives=CASES[case][0])
    expected = compiled(make_loss("dense"))(*arguments(kind, case))
    mesh = mesh_of(8)
    with jax.set_mesh(mesh):
        found = compiled(make_loss(form, 2 * S))(*split_rows(arguments(kind, case), mesh))
    assert_equal(found, expected, 1e-5)


@every_case
def test_equal_weights_are_no_weights(case):
    loss = compiled(SigmoidLoss(pseudo_positives=CASES[case][0]))
    samples, valid, ids, _, mixed = arguments("deterministic", case)
    assert_equal(loss(samples, valid, ids, jnp.ones(B), mixed), loss(samples, valid, ids, None, mixed), 1e-6)


@every_kind
def test_images_of_which_all_is_their_own_have_the_plain_loss(kind):
    samples, valid, ids, weight, _ = arguments(kind, "mixed images")
    own = dataclasses.replace(MIXED, share=jnp.ones(B))
    loss = compiled(SigmoidLoss())
    assert_equal(loss(samples, valid, ids, weight, own), loss(samples, valid, ids, weight), 1e-5)


@every_form
def test_duplicates_of_mixed_images_may_be_negatives(form):
    samples, valid, ids, weight, mixed = arguments("deterministic", "both")
    found = SigmoidLoss(form, 6, duplicates="negatives", pseudo_positives=ALPHA)(samples, valid, ids, weight, mixed)
    without = dataclasses.replace(MIXED, ids=())
    expected = SigmoidLoss(form, 6, pseudo_positives=ALPHA)(samples, valid, (), weight, without)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_text_that_fits_better_than_the_partner_is_a_positive_of_the_second_loss():
    """Text 1 is nearer to image 0 than text 0 is; all other pairs fit worse than partners."""
    image, text = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.5, 0.0], [0.8, 2.0]])
    samples = EmbeddingSamples(jnp.asarray(image, "f4"), jnp.asarray(text, "f4"), None, None, jnp.float32(1))

    def of_label(logit, positive):
        return np.log1p(np.exp(-logit if positive else logit))

    logits = image @ text.T
    plain, image_to_text = (
        sum(of_label(logits[n, m], n == m or (n, m) in more) for n in range(2) for m in range(2)) / 2
        for more in ([], [(0, 1)])
    )
    expected = plain + ALPHA * (image_to_text + plain) / 2
    np.testing.assert_allclose(SigmoidLoss(pseudo_positives=ALPHA)(samples), expected, rtol=1e-6)
    np.testing.assert_allclose(SigmoidLoss()(samples), plain, rtol=1e-6)


@every_case
def test_the_likelihood_without_samples_approaches_that_with_samples_as_noise_vanishes(case):
    samples, *rows = arguments("both sides noisy", case)
    factors = jnp.asarray(1e-3 * np.random.default_rng(0).normal(size=(B, 2, samples.image.shape[1])), jnp.float32)
    queries = {f"{side}_queries": Queries(getattr(samples, side)[:, None], factors) for side in ("image", "text")}
    quiet, none = dataclasses.replace(samples, **queries), dataclasses.replace(samples, **dict.fromkeys(queries))
    found = SigmoidLoss(likelihood="probit", pseudo_positives=CASES[case][0])(quiet, *rows)
    np.testing.assert_allclose(found, SigmoidLoss(pseudo_positives=CASES[case][0])(none, *rows), rtol=1e-4)


def test_a_negative_weight_of_pseudo_positives_is_refused():
    with pytest.raises(UserError, match=r"SigmoidLoss: pseudo_positives = -0.1 must be at least 0"):
        SigmoidLoss(pseudo_positives=-0.1)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_of_the_uniform_distribution_is_below_one(share):
    with pytest.raises(UserError, match=rf"SoftmaxCrossEntropy: label_smoothing = {share} is not in \[0, 1\)"):
        SoftmaxCrossEntropy(label_smoothing=share)
