"""All forms of a contrastive loss are one function on any number of devices, whatever is told of rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.types import EmbeddingSamples, Queries
from tests.losses.contrastive_cases import (
    IDS,
    KINDS,
    MIXED,
    PSEUDO,
    ROWS,
    SMOOTHED,
    VALID,
    WEIGHT,
    B,
    S,
    arguments,
    assert_equal,
    assert_zero,
    compiled,
    every_form,
    make,
    numpy_fields,
    on_devices,
    reference,
    take,
    words,
)

# What is told less than of these rows changes the loss by more than this.
WITHOUT = {"duplicates": ((), 0.1), "weights": (IDS[:1], 0.01)}
# The softmax loss takes no soft labels. Three cases apart have the same kinds of queries: plain rows and duplicates.
CASES = [
    (SoftmaxLoss, "plain"),
    (SoftmaxLoss, "weights"),
    (SigmoidLoss, "both"),
    (SoftmaxLoss, "duplicates"),
    (SigmoidLoss, "plain"),
    (SigmoidLoss, "weights"),
    (SigmoidLoss, "pseudo-positives"),
    (SigmoidLoss, "duplicates"),
    (SigmoidLoss, "mixed images"),
    (SoftmaxLoss, "smoothed"),
    (SigmoidLoss, "both smoothed"),
]
# Weights have duplicates too, and "both" has either of the soft labels.
OFTEN = [(SoftmaxLoss, "weights"), (SigmoidLoss, "both")]
TWO_KINDS = ["deterministic", "both sides noisy"]
# Each pair of a loss, a form and a kind of queries.
PAIRS = [
    (SoftmaxLoss, "dense", "deterministic"),
    (SoftmaxLoss, "gather", "both sides noisy"),
    (SoftmaxLoss, "ring", "deterministic"),
    (SigmoidLoss, "dense", "both sides noisy"),
    (SigmoidLoss, "gather", "deterministic"),
    (SigmoidLoss, "ring", "both sides noisy"),
]
every_pair = pytest.mark.parametrize(("loss", "form", "kind"), PAIRS)


def taking_turns(*forms, first):
    """Every case with these forms, and the kinds of queries in turn: each pair of the three occurs."""
    return [
        (form, list(KINDS)[(first + number + place) % len(KINDS)], *case)
        for number, case in enumerate(CASES)
        for place, form in enumerate(forms)
    ]


# On eight devices: of soft labels mixed images, without pseudo-positives and with them; of what both losses take, each
# of them with one of the forms.
DISTRIBUTED = [
    case
    for case in taking_turns("gather", "ring", first=1)
    if case[3] in ("both", "mixed images")
    or case[2:] in OFTEN
    or (case[3] in ("plain", "weights") and (case[0] == "ring") == (case[2] is SigmoidLoss))
    or (case[3] == "duplicates" and (case[0] == "ring") == (case[2] is SoftmaxLoss))
]


def marked(often, seldom):
    """Parameters of which only the first ones are part of the short form."""
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in seldom if case not in often]
    return pytest.mark.parametrize(("form", "kind", "loss", "rows"), [*often, *slow])


def of_two_examples(loss, form, kind, rows="plain"):
    """The loss with blocks of two examples, half of what each of eight devices holds."""
    return with_rows(loss, form, 2 if kind == "deterministic" else 2 * S, rows)


def with_rows(loss, form, block_size, rows):
    return loss(form, block_size, **ROWS[rows][3])


@marked(
    [(form, kind, *case) for case in OFTEN for kind in TWO_KINDS for form in ("dense", "gather", "ring")]
    # Of columns, and of the shares of samples in keys.
    + [(form, kind, SoftmaxLoss, "smoothed") for form, kind in (("gather", TWO_KINDS[0]), ("ring", TWO_KINDS[1]))],
    # The dense form, with which eight devices are compared below; the others of what is not compared there.
    [case for case in taking_turns("dense", "gather", "ring", first=1) if "dense" in case or "pseudo-positives" in case]
    + [(form, kind, SoftmaxLoss, "smoothed") for kind in KINDS for form in ("dense", "gather", "ring")],
)
def test_the_loss_and_its_gradient_are_those_of_the_numpy_reference(form, kind, loss, rows):
    """In blocks of six queries, of which 32 rows are no multiple; the gradient along a direction of all arrays."""
    samples, _, *told = arguments(kind, rows)
    value, gradient = compiled(with_rows(loss, form, 6, rows))(*arguments(kind, rows))
    arrays, gradient, step, fields = numpy_fields(samples), numpy_fields(gradient), 1e-5, ROWS[rows][3]
    np.testing.assert_allclose(value, reference(loss, arrays, VALID, *told, **fields), rtol=1e-5)
    if rows in WITHOUT:
        ids, change = WITHOUT[rows]
        assert abs(value - reference(loss, arrays, VALID, ids)) > change
    assert gradient.keys() == arrays.keys()
    random = np.random.default_rng(1)
    direction = {name: random.normal(size=array.shape) for name, array in arrays.items()}
    ends = (
        reference(loss, {name: x + amount * direction[name] for name, x in arrays.items()}, VALID, *told, **fields)
        for amount in (step, -step)
    )
    found = sum(np.vdot(gradient[name], direction[name]) for name in arrays)
    np.testing.assert_allclose(found, (next(ends) - next(ends)) / (2 * step), rtol=1e-4, atol=1e-5)


@pytest.mark.devices
@marked(
    [case for case in DISTRIBUTED if case[2:] in OFTEN],
    DISTRIBUTED,
)
def test_eight_devices_with_blocks_of_two_examples_equal_the_dense_form(form, kind, loss, rows):
    found = on_devices(8, compiled(of_two_examples(loss, form, kind, rows)), arguments(kind, rows))
    assert_equal(found, compiled(with_rows(loss, "dense", 6, rows))(*arguments(kind, rows)), 1e-5)


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "loss", "kind", "rows"),
    [
        (1, SoftmaxLoss("gather", 1), "both sides noisy", "plain"),
        (2, SoftmaxLoss("ring", 1), "deterministic", "weights"),
        (2, SoftmaxLoss("gather", 1000), "one side noisy", "plain"),
        (2, SigmoidLoss("gather", 10), "both sides noisy", "weights"),
        (8, SigmoidLoss("ring", 1000), "deterministic", "plain"),
    ],
    ids=str,
)
def test_the_loss_does_not_depend_on_devices_or_the_size_of_blocks(num_devices, loss, kind, rows):
    """Blocks of one query, of some, and larger than the batch."""
    found = on_devices(num_devices, compiled(loss), arguments(kind, rows))
    assert_equal(found, compiled(type(loss)("dense", 6))(*arguments(kind, rows)), 1e-5)


@every_form
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
    value = jax.jit(SoftmaxLoss(form, 4))(samples, np.ones(B, bool))
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6)


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "kind"),
    [(SoftmaxLoss("ring", 2), "deterministic"), (SigmoidLoss("gather", 6), "both sides noisy")],
    ids=str,
)
def test_the_gradient_of_a_compiled_loss_is_that_of_the_compiled_gradient(loss, kind):
    found = on_devices(8, jax.value_and_grad(jax.jit(loss)), arguments(kind, "weights"))
    assert_equal(found, compiled(type(loss)("dense", 6))(*arguments(kind, "weights")), 1e-5)


# What is told of the rows differs, so that the tests share programs with those above.
every_distributed_case = pytest.mark.parametrize(
    ("form", "kind", "loss", "rows"),
    [case for case in DISTRIBUTED if case[3] in ("plain", "duplicates", "weights")],
)


@pytest.mark.devices
@pytest.mark.slow
@every_distributed_case
def test_a_batch_without_valid_rows_has_loss_and_gradient_zero_on_eight_devices(form, kind, loss, rows):
    samples, _, *told = arguments(kind, rows)
    found = on_devices(8, compiled(of_two_examples(loss, form, kind)), [samples, jnp.asarray(np.zeros(B, bool)), *told])
    assert_zero(found)


@pytest.mark.devices
@pytest.mark.slow
@every_distributed_case
def test_huge_logits_give_the_loss_of_the_dense_form_and_finite_gradients(form, kind, loss, rows):
    """Also where logits of invalid rows are far above those of valid ones."""
    batch = [make(kind, b=B, temperature=1e-4), *arguments(kind, rows)[1:]]
    expected, dense_gradient = compiled(loss("dense", 6))(*batch)
    value, gradient = on_devices(8, compiled(of_two_examples(loss, form, kind)), batch)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for found in (gradient, dense_gradient):
        for name, array in numpy_fields(found).items():
            assert np.all(np.isfinite(array)), name


# Duplicates: examples with the same image or an equal text are positives of each other.

NONE = (words(np.arange(B)), words(np.arange(100, 100 + B)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "kind", "loss", "rows"),
    [case for case in taking_turns("dense", "gather", "ring", first=1) if case[3] == "duplicates"],
)
def test_without_duplicates_the_loss_is_bit_for_bit_that_of_negatives(form, kind, loss, rows):
    samples, valid, ids, *rest = arguments(kind, rows)
    expected = compiled(loss(form, 6, duplicates="negatives"))(samples, valid, ids, *rest)
    for none in (NONE, ()):
        assert_equal(compiled(loss(form, 6))(samples, valid, none, *rest), expected, 0)


@pytest.mark.parametrize(
    ("form", "kind"), [("dense", "both sides noisy"), ("gather", "deterministic"), ("ring", "both sides noisy")]
)
def test_a_batch_of_three_copies_has_the_softmax_loss_of_one_copy(form, kind):
    """Copies have the same noise here, so that they are copies."""
    samples, copies = make(kind, b=8), np.tile(np.arange(8), 3)
    thrice = take(samples, copies), np.ones(24, bool), [words(copies)]
    once = reference(SoftmaxLoss, numpy_fields(samples), np.ones(8, bool))
    np.testing.assert_allclose(jax.jit(SoftmaxLoss(form))(*thrice), once, rtol=1e-5)
    assert jax.jit(SoftmaxLoss(form, duplicates="negatives"))(*thrice) > once + 0.9
    # The uniform part is of single keys, each of which has a third of the probability.
    smoothed = reference(SoftmaxLoss, numpy_fields(samples), np.ones(8, bool), **SMOOTHED)
    found = jax.jit(SoftmaxLoss(form, **SMOOTHED))(*thrice)
    np.testing.assert_allclose(found, smoothed + SMOOTHED["label_smoothing"] * np.log(3), rtol=1e-5)


@pytest.mark.devices
@pytest.mark.parametrize(("form", "num_samples"), [("dense", 16), ("gather", 1), ("ring", 5)])
def test_smoothing_takes_no_notice_of_the_noise(form, num_samples):
    """With the share 1 - α less, the same smoothing is left of any noise; one device has no valid row."""
    left = []
    for seed in (0, 1):
        samples = make("both sides noisy", b=B, num_samples=num_samples)
        other = make("both sides noisy", b=B, num_samples=num_samples, seed=seed)
        noisy = dataclasses.replace(samples, image_queries=other.image_queries, text_queries=other.text_queries)
        told = noisy, jnp.asarray(VALID)
        (smoothed, _), (plain, _) = (
            on_devices(8, compiled(SoftmaxLoss(form, 6, **kind)), told) for kind in (SMOOTHED, {})
        )
        left.append(float(smoothed) - (1 - SMOOTHED["label_smoothing"]) * float(plain))
    assert left[0] == pytest.approx(left[1], abs=1e-4)
    assert left[0] > 0.1


def test_two_examples_need_not_share_what_both_share_with_a_third():
    """Rows 0 and 1 have one image, rows 1 and 2 one text: 0 and 2 stay negatives of each other."""
    samples, loss = make("deterministic", b=3), jax.jit(SigmoidLoss())
    ids = (words([5, 5, 6]), words([7, 8, 8]))
    expected = reference(SigmoidLoss, numpy_fields(samples), np.ones(3, bool), ids)
    np.testing.assert_allclose(loss(samples, np.ones(3, bool), ids), expected, rtol=1e-5)
    other = loss(samples, np.ones(3, bool), (words([1, 1, 1]), words([7, 8, 9])))
    assert not np.isclose(other, expected, rtol=1e-3)


@pytest.mark.parametrize("likelihood", ["delta", "mean_field", "pairwise_probit", "probit"])
def test_likelihoods_without_samples_approach_the_loss_with_samples_as_noise_vanishes(likelihood):
    samples, factors = make("both sides noisy", b=8), jnp.asarray(np.full((8, 2, 4), 1e-3, np.float32))
    queries = {f"{side}_queries": Queries(getattr(samples, side)[:, None], factors) for side in ("image", "text")}
    quiet, none = dataclasses.replace(samples, **queries), dataclasses.replace(samples, **dict.fromkeys(queries))
    loss: Any = SigmoidLoss if likelihood == "probit" else SoftmaxLoss
    ids, valid = [words([0, 1, 2, 3, 4, 5, 5, 0])], np.ones(8, bool)
    if likelihood == "pairwise_probit":  # leaves positives other than the partner out of its sum
        expected = np.mean([partner_among_negatives(none, n, np.asarray(ids[0])) for n in range(8)])
    else:
        expected = reference(loss, numpy_fields(none), valid, ids)
    np.testing.assert_allclose(jax.jit(loss(likelihood=likelihood))(quiet, valid, ids), expected, rtol=1e-4)


def partner_among_negatives(samples, n, ids):
    image, text = np.asarray(samples.image), np.asarray(samples.text)
    remaining = [m for m in range(len(image)) if m == n or (ids[m] != ids[n]).any()]
    losses = []
    for query, keys in ((image[n], text), (text[n], image)):
        scores = keys @ query / float(samples.temperature)
        losses.append(np.log(np.exp(scores[remaining]).sum()) - scores[n])
    return sum(losses) / 2


@pytest.mark.slow
def test_the_second_order_of_noise_counts_all_positives():
    """Against 200,000 samples: without the spread among positives the error would be that of no correction."""
    samples, ids, valid = make("both sides noisy", b=6), [words([0, 0, 0, 3, 4, 5])], jnp.ones(6, bool)
    factors = jnp.asarray(0.05 * np.random.default_rng(3).normal(size=(6, 2, 4)), jnp.float32)
    distribution = Queries(samples.image[:, None], factors)
    delta = dataclasses.replace(samples, image_queries=distribution, text_queries=None)
    normals = jax.random.normal(jax.random.key(0), (6, 200_000, 2))
    drawn = dataclasses.replace(delta, image_queries=dataclasses.replace(distribution, normals=normals))
    expected = jax.jit(SoftmaxLoss("dense"))(drawn, valid, ids)
    without = jax.jit(SoftmaxLoss())(dataclasses.replace(delta, image_queries=None), valid, ids)
    found = jax.jit(SoftmaxLoss(likelihood="delta"))(delta, valid, ids)
    assert abs(found - expected) < abs(without - expected) / 5


# Weights of rows.


@pytest.mark.slow
@every_pair
def test_weights_of_one_change_no_bit_and_rows_of_weight_zero_are_no_queries_but_keys_of_the_others(form, loss, kind):
    samples, valid, ids, _ = arguments(kind, "weights")
    plain = compiled(loss(form, 6))

    def weighted(weight, valid=valid):
        return plain(samples, valid, ids, weight)

    ones = np.ones(B, np.float32)
    assert_equal(weighted(ones), plain(samples, valid, ids, None), 0)
    weight = np.where(np.arange(B) == 9, 0, ones)
    value, gradient = weighted(weight)
    np.testing.assert_allclose(value, reference(loss, numpy_fields(samples), VALID, ids, weight), rtol=1e-5)
    left_out, _ = weighted(ones, jnp.asarray(VALID & (np.arange(B) != 9)))
    assert abs(value - left_out) > 1e-3
    found = numpy_fields(gradient)
    assert np.abs(found["text"][9]).max() > 1e-4
    for name, array in found.items():
        if "queries" in name:
            np.testing.assert_allclose(array[9], 0, atol=1e-12, err_msg=name)
    assert_zero(weighted(WEIGHT, jnp.zeros(B, bool)))
    assert_zero(weighted(np.zeros(B, np.float32)))


@every_pair
def test_only_the_ratios_of_weights_matter_and_small_ones_approach_zero(form, loss, kind):
    samples, valid, ids, _ = arguments(kind, "weights")
    zero, small = (np.where(WEIGHT < 1, amount, 1.0).astype(np.float32) for amount in (0.0, 1e-6))
    expected, *others = (compiled(loss(form, 6))(samples, valid, ids, x) for x in (zero, small, 8 * zero))
    for found in others:
        assert_equal(found, expected, 1e-5)


# Pseudo-positives and mixed images.


@pytest.mark.parametrize("case", ["mixed images", "both"])
def test_equal_weights_are_no_weights(case):
    loss = compiled(SigmoidLoss("gather", 6, **ROWS[case][3]))
    samples, valid, ids, _, *mixed = arguments("deterministic", case)
    equal, none = (loss(samples, valid, ids, weight, *mixed) for weight in (np.ones(B, np.float32), None))
    assert_equal(equal, none, 1e-6)


@pytest.mark.parametrize("kind", ["deterministic", pytest.param("one side noisy", marks=pytest.mark.slow)])
def test_images_of_which_all_is_their_own_have_the_plain_loss(kind):
    *some, mixed = arguments(kind, "mixed images")
    own = dataclasses.replace(mixed, share=jnp.asarray(np.ones(B, np.float32)))
    loss = compiled(SigmoidLoss("gather", 6))
    assert_equal(loss(*some, own), loss(*some), 1e-5)


def test_duplicates_of_mixed_images_may_be_negatives():
    samples, valid, ids, weight, mixed = arguments("deterministic", "both")
    of_negatives = SigmoidLoss("gather", 6, duplicates="negatives", **PSEUDO)
    found = jax.jit(of_negatives)(samples, valid, ids, weight, mixed)
    without = dataclasses.replace(MIXED, ids=())
    expected = reference(SigmoidLoss, numpy_fields(samples), VALID, (), weight, without, **PSEUDO)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


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
    expected = plain + 0.3 * (image_to_text + plain) / 2
    np.testing.assert_allclose(jax.jit(SigmoidLoss(pseudo_positives=0.3))(samples), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(SigmoidLoss())(samples), plain, rtol=1e-6)


@pytest.mark.parametrize("case", ["pseudo-positives", "mixed images", "both smoothed"])
def test_the_likelihood_without_samples_approaches_that_with_samples_as_noise_vanishes(case):
    (samples, *rows), fields = arguments("both sides noisy", case), ROWS[case][3]
    factors = jnp.asarray(1e-3 * np.random.default_rng(0).normal(size=(B, 2, samples.image.shape[1])), jnp.float32)
    queries = {f"{side}_queries": Queries(getattr(samples, side)[:, None], factors) for side in ("image", "text")}
    quiet, none = dataclasses.replace(samples, **queries), dataclasses.replace(samples, **dict.fromkeys(queries))
    found = jax.jit(SigmoidLoss(likelihood="probit", **fields))(quiet, *rows)
    expected = reference(SigmoidLoss, numpy_fields(none), *rows, **fields)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_negative_weight_of_pseudo_positives_is_refused():
    with pytest.raises(UserError, match=r"SigmoidLoss: pseudo_positives = -0.1 must be at least 0"):
        SigmoidLoss(pseudo_positives=-0.1)
