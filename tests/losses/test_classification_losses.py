"""Classification losses on noise samples: -log of the mean probability (HET-XL Eq. 2, Sec. 2.1), in blocks."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sklearn.metrics import log_loss

from lit_het.errors import UserError
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.losses.base import masked_mean, weights
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy, softened_divergence
from lit_het.mixtures import LabelMixture
from lit_het.sharding import MeshConfig, batch_sharding
from lit_het.tasks.classification import ClassificationConfig
from lit_het.types import Batch, LogitSamples
from tests.heads.references import mean_probabilities
from tests.losses import contrastive_cases

S, B, K = 3, 4, 5
RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(B, S, K)) * 2
LABEL = np.array([0, 4, 2, 2])
# Other classes, the same class twice, a class that does not count.
MIXED = LabelMixture(
    jnp.asarray([[0, 1], [4, 3], [2, 2], [2, 0]]), jnp.asarray([[0.7, 0.3], [0.55, 0.45], [0.9, 0.1], [1.0, 0.0]])
)
TARGET = np.array([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0.5, 0.25, 0, 0, 0]])


def single(x):
    return jnp.asarray(x, jnp.float32)


def held(logits, examples_per_block=100, samples_per_block=100) -> LogitSamples:
    """Returns given logits ``[b s k]`` as samples: each example's features are all of its logits."""
    b, s, k = logits.shape

    def of_numbers(common, _, numbers):
        return common.reshape(-1, s, k)[:, jnp.minimum(numbers, s - 1)]

    return LogitSamples(logits.reshape(b, -1), None, lambda x: x, of_numbers, s, examples_per_block, samples_per_block)


class Result(NamedTuple):
    loss: jax.Array
    top1: jax.Array
    gradient: jax.Array


def _compiled(cross_entropy):
    @functools.partial(jax.jit, static_argnames=("examples_per_block", "samples_per_block"))
    def run(logits, label, valid, weight, **blocks):
        def loss(logits):
            result = cross_entropy(held(logits, **blocks), label, valid, weight)
            return result.loss, result.top1

        (value, top1), gradient = jax.value_and_grad(loss, has_aux=True)(logits)
        return Result(value, top1, gradient)

    def with_targets(logits, label, valid=None, weight=None, **blocks):
        label = single(label) if isinstance(cross_entropy, SigmoidCrossEntropy) else label
        return run(single(logits), label, np.ones(len(logits), bool) if valid is None else valid, weight, **blocks)

    return with_targets


softmax = _compiled(SoftmaxCrossEntropy())
smoothed = _compiled(SoftmaxCrossEntropy(label_smoothing=0.2))
sigmoid = _compiled(SigmoidCrossEntropy())


def reference_softmax(logits, label):
    """-log (1/S Σ_s exp(u_sy) / Σ_k exp(u_sk)) for each example."""
    losses = []
    for u, y in zip(logits, label, strict=True):
        losses.append(-np.log(np.mean([np.exp(u_s[y]) / np.exp(u_s).sum() for u_s in u])))
    return np.array(losses)


def reference_mixed_softmax(logits, labels):
    """Σ_c w_c -log (1/S Σ_s softmax(u_s)[y_c]) for each example."""
    shares, classes = np.asarray(labels.weight).T, np.asarray(labels.label).T
    return sum(share * reference_softmax(logits, label) for share, label in zip(shares, classes, strict=True))


def reference_smoothed(logits, labels):
    """The loss of the labels, and of the uniform distribution over classes, with the shares 0.8 and 0.2."""
    uniform = sum(reference_softmax(logits, [k] * B) for k in range(K)) / K
    return 0.8 * reference_mixed_softmax(logits, labels) + 0.2 * uniform


def reference_sigmoid(logits, target):
    """Σ_k -(t log p̄_k + (1 - t) log(1 - p̄_k)), p̄_k = 1/S Σ_s σ(u_sk), for each example."""
    losses = []
    for u, t in zip(logits, target, strict=True):
        loss = 0.0
        for k in range(len(t)):
            p = np.mean([1 / (1 + np.exp(-u_s[k])) for u_s in u])
            loss -= t[k] * np.log(p) + (1 - t[k]) * np.log(1 - p)
        losses.append(loss)
    return np.array(losses)


def reference_softened(logits, teacher, probabilities):
    """T² Σ_c p_c log (p_c / q_c), with p of the teacher's logits over T and q the mean over samples of T = 3."""
    losses = []
    for u, t in zip(logits, teacher, strict=True):
        p, q = probabilities(t / 3), np.mean([probabilities(u_s / 3) for u_s in u], axis=0)
        losses.append(9 * np.sum(p * np.log(p / q)))
    return np.array(losses)


def of_one_class(u):
    return np.exp(u) / np.exp(u).sum()


def of_each_class(u):
    """Probabilities of the classes, and of their absence."""
    p = 1 / (1 + np.exp(-u))
    return np.concatenate([p, 1 - p])


def softened(loss):
    return _compiled(lambda samples, teacher, *counted: softened_divergence(loss, samples, teacher, counted, 3.0))


TEACHER = RANDOM.normal(size=(B, K)) * 4
CASES = {
    "softmax": (softmax, reference_softmax, LABEL),
    "mixed softmax": (softmax, reference_mixed_softmax, MIXED),
    "smoothed softmax": (smoothed, reference_smoothed, MIXED),
    "sigmoid": (sigmoid, reference_sigmoid, TARGET),
    "softened softmax": (
        softened(SoftmaxCrossEntropy()),
        functools.partial(reference_softened, probabilities=of_one_class),
        TEACHER,
    ),
    "softened sigmoid": (
        softened(SigmoidCrossEntropy()),
        functools.partial(reference_softened, probabilities=of_each_class),
        TEACHER,
    ),
}
BOTH = pytest.mark.parametrize(("fast", "slow", "labels"), CASES.values(), ids=CASES)
IN_BLOCKS = {"examples_per_block": 3, "samples_per_block": 2}  # neither divides four examples or three samples


@functools.partial(jax.jit, static_argnames=("activation", "examples_per_block", "samples_per_block"))
def probabilities(logits, activation, **blocks):
    return mean_probabilities(held(logits, **blocks), activation)


@BOTH
@pytest.mark.parametrize("samples", [1, S])
def test_losses_equal_the_numpy_reference(fast, slow, labels, samples):
    logits = LOGITS[:, :samples]
    np.testing.assert_allclose(fast(logits, labels).loss, slow(logits, labels).mean(), rtol=1e-5)


def test_losses_are_scikit_learns_log_losses_of_the_mean_probability_which_a_sigmoid_sums_over_classes():
    p, of_class = (
        np.asarray(probabilities(single(LOGITS), activation), np.float64)
        for activation in (jax.nn.log_softmax, jax.nn.log_sigmoid)
    )
    expected = log_loss(LABEL, p / p.sum(axis=1, keepdims=True), labels=range(K))
    np.testing.assert_allclose(softmax(LOGITS, LABEL).loss, expected, rtol=1e-5)
    target = (TARGET > 0.3).astype(int)
    expected = sum(log_loss(target[:, k], of_class[:, k], labels=[0, 1]) for k in range(K))
    np.testing.assert_allclose(sigmoid(LOGITS, target).loss, expected, rtol=1e-5)


@pytest.mark.parametrize("blocks", [{}, IN_BLOCKS], ids=["whole", "blocks"])
def test_mean_probabilities_average_probabilities_not_logarithms(blocks):
    exponentials = np.exp(LOGITS)
    expected = (exponentials / exponentials.sum(axis=-1, keepdims=True)).mean(axis=1)
    actual = probabilities(single(LOGITS), jax.nn.log_softmax, **blocks)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    actual = probabilities(single(LOGITS), jax.nn.log_sigmoid, **blocks)
    np.testing.assert_allclose(actual, (1 / (1 + np.exp(-LOGITS))).mean(axis=1), rtol=1e-5)


@BOTH
def test_gradients_agree_with_finite_differences_of_the_reference(fast, slow, labels):
    gradient, step = np.asarray(fast(LOGITS, labels).gradient), 1e-5
    for index in np.ndindex(B, S, K):
        change = np.zeros_like(LOGITS)
        change[index] = step
        slope = (slow(LOGITS + change, labels).mean() - slow(LOGITS - change, labels).mean()) / (2 * step)
        np.testing.assert_allclose(gradient[index], slope, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        *((case, (3, 2)) for case in CASES),
        ("softmax", (1, 1)),
        ("sigmoid", (1, 1)),
        ("sigmoid", (4, 2)),
        ("smoothed softmax", (2, 3)),
    ],
)
def test_losses_hits_and_gradients_in_blocks_are_those_of_the_whole(case, blocks):
    (fast, slow, labels), blocks = CASES[case], dict(zip(IN_BLOCKS, blocks, strict=True))
    valid = np.array([True, True, False, True])
    found, expected = (fast(LOGITS, labels, valid, **blocks) for blocks in (blocks, {}))
    np.testing.assert_allclose(found.loss, slow(LOGITS, labels)[valid].mean(), rtol=1e-5)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
    np.testing.assert_allclose(found.top1, expected.top1, rtol=1e-6)
    np.testing.assert_allclose(found.gradient, expected.gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("blocks", [{}, IN_BLOCKS], ids=["whole", "blocks"])
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_huge_logits_give_finite_losses_and_gradients(scale, blocks):
    logits = scale * np.eye(B, K)[:, None].repeat(S, axis=1)
    for result in (softmax(logits, LABEL, **blocks), sigmoid(logits, TARGET, **blocks)):
        assert np.isfinite(result.loss)
        assert np.all(np.isfinite(result.gradient))


def test_top1_is_the_share_of_samples_whose_most_probable_class_is_right():
    # Example 0: two of two samples right, example 1: one, example 2: none, but it does not count.
    logits = np.array([[[3, 0, 1], [2, 1, 0]], [[0, 1, 4], [5, 0, 1]], [[0, 9, 0], [0, 9, 0]]])
    valid = np.array([True, True, False])
    assert float(softmax(logits, np.array([0, 0, 2]), valid).top1) == pytest.approx(3 / 4)
    # Targets above 1/2: {0, 1} (both right), {2} (one right); none at all is never right.
    target = np.array([[1, 0.6, 0.5], [0, 0, 1], [0, 0, 1]])
    assert float(sigmoid(logits, target, valid).top1) == pytest.approx(3 / 4)
    assert float(sigmoid(logits, 0.5 * target, valid).top1) == 0
    # A mixture counts the class of the largest share.
    logits = np.array([[[3, 0, 1], [0, 2, 1]], [[0, 1, 4], [5, 0, 1]]])
    mixed = LabelMixture(jnp.asarray([[0, 1], [1, 2]]), jnp.asarray([[0.6, 0.4], [0.8, 0.2]]))
    assert float(softmax(logits, mixed).top1) == pytest.approx(1 / 4)


@BOTH
@pytest.mark.parametrize("blocks", [{}, IN_BLOCKS], ids=["whole", "blocks"])
def test_invalid_rows_count_neither_in_the_loss_nor_in_the_gradient(fast, slow, labels, blocks):
    valid = np.array([True, False, True, False])
    changed = LOGITS.copy()
    changed[1], changed[3] = 1e30, -1e30
    strange = jax.tree.map(np.array, labels)
    for array in jax.tree.leaves(strange):
        array[1], array[3] = -1, 99
    found = fast(changed, strange, valid, **blocks)
    np.testing.assert_allclose(found.loss, slow(LOGITS, labels)[valid].mean(), rtol=1e-5)
    gradient = np.asarray(found.gradient)
    assert np.any(gradient[valid])
    np.testing.assert_array_equal(gradient[~valid], 0)
    expected = fast(LOGITS[valid], jax.tree.map(lambda x: np.asarray(x)[valid], labels)).gradient
    np.testing.assert_allclose(gradient[valid], expected, rtol=1e-5, atol=1e-7)
    changed[1] = np.nan
    np.testing.assert_allclose(fast(changed, strange, valid, **blocks).loss, found.loss, rtol=1e-6)


@pytest.mark.devices
@pytest.mark.slow
def test_devices_meet_once_a_step_and_not_in_every_block():
    """The program on eight devices has collectives, none of them in the body of a loop."""
    config = HetXLConfig(CovarianceConfig(2), sampling=SamplingConfig(130, block_size=130, order="factored"))
    head = config.build(D := 4, K, nnx.Rngs(0))
    graph, state = nnx.split(head)
    features, label, valid = jnp.ones((32, D)), jnp.zeros(32, jnp.int32), jnp.ones(32, bool)

    def loss(state, features, label, valid):
        return SoftmaxCrossEntropy()(nnx.merge(graph, state)(features, jax.random.key(0)), label, valid).loss

    mesh = MeshConfig(data=4, fsdp=2).build()
    with jax.set_mesh(mesh):
        rows = jax.device_put((features, label, valid), batch_sharding(mesh))
        program = str(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(state, *rows).compile().as_text())
    collective = re.compile(r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)[\w-]*\(")
    computations = re.split(r"\n(?=%|ENTRY)", program)
    assert any(" while(" in computation for computation in computations)
    assert [computation.startswith("ENTRY") for computation in computations if collective.search(computation)] == [True]


def test_masked_mean_counts_valid_rows_only_and_ignores_what_the_others_hold():
    values, valid, none = np.array([1, np.nan, 4, np.inf], np.float32), np.arange(4) % 2 == 0, np.zeros(4, bool)
    program = jax.jit(lambda valid: (*jax.value_and_grad(masked_mean)(values, valid), weights(valid)))
    value, gradient, shares = program(valid)
    assert float(value) == 2.5
    np.testing.assert_array_equal(gradient, [0.5, 0, 0.5, 0])
    np.testing.assert_array_equal(shares, [0.5, 0, 0.5, 0])
    value, _, shares = program(none)
    assert float(value) == 0.0
    np.testing.assert_array_equal(shares, np.zeros(4))


def test_shares_are_those_of_numpys_average_and_never_zero_for_valid_rows():
    valid, weight = np.array([True, False, True, True]), np.array([0.5, np.nan, 0.0, 1.5], np.float32)
    found = np.asarray(jax.jit(weights)(valid, weight))
    np.testing.assert_allclose(found, [0.25, 0, 0, 0.75], atol=1e-20)
    assert found[2] > 0 == found[1]


@BOTH
def test_a_classifier_has_a_weighted_loss_and_an_unweighted_top1(fast, slow, labels):
    valid, weight = np.array([True, False, True, True]), np.array([1, 5, 0.25, 0.5], np.float32)
    value, top1, gradient = fast(LOGITS, labels, valid, weight, **IN_BLOCKS)
    plain, expected_top1, plain_gradient = fast(LOGITS, labels, valid, **IN_BLOCKS)
    np.testing.assert_allclose(value, np.average(slow(LOGITS, labels)[valid], weights=weight[valid]), rtol=1e-5)
    assert float(top1) == float(expected_top1)
    # Rows are independent: a gradient changes by the ratio of the shares.
    ratio = weight / weight[valid].sum() * valid.sum()
    np.testing.assert_allclose(gradient, plain_gradient * ratio[:, None, None], rtol=1e-4, atol=1e-8)
    ones, _, gradient = fast(LOGITS, labels, valid, np.ones(4, np.float32), **IN_BLOCKS)
    assert float(ones) == float(plain)
    np.testing.assert_array_equal(gradient, plain_gradient)


@pytest.mark.devices
@pytest.mark.slow
def test_a_classifiers_weighted_loss_on_eight_devices_is_that_of_one():
    random = np.random.default_rng(0)
    logits, labels = single(random.normal(size=(32, 3, 5))), jnp.asarray(random.integers(0, 5, 32))

    def function(logits, labels, valid, weight):
        return SoftmaxCrossEntropy()(held(logits, 2, 2), labels, valid, weight).loss

    program = jax.jit(jax.value_and_grad(function))
    rows = logits, labels, jnp.asarray(contrastive_cases.VALID), jnp.asarray(contrastive_cases.WEIGHT)
    (expected, expected_gradient), (value, gradient) = (
        contrastive_cases.on_devices(count, program, rows) for count in (1, 8)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-9)


INDEX, SHAPE = (
    "label = {} is not a class: --task.num-classes 5 allows 0 to 4",
    "{} over 5 classes cannot take labels of ",
)
RANGE = "label = {} is not a target of SigmoidCrossEntropy"


def batch_of(label):
    return Batch(np.ones(len(label), bool), label=label)


@pytest.mark.parametrize(
    ("loss", "label", "message"),
    [
        (SoftmaxCrossEntropy(), np.array([0, 5]), INDEX.format(5)),
        (SoftmaxCrossEntropy(), np.array([-1, 2]), INDEX.format(-1)),
        (SoftmaxCrossEntropy(), np.zeros((2, 5)), SHAPE.format("SoftmaxCrossEntropy") + "shape (2, 5)"),
        (SigmoidCrossEntropy(), np.array([0, 5]), INDEX.format(5)),
        (SigmoidCrossEntropy(), np.full((2, 5), 1.5), RANGE.format(1.5)),
        (SigmoidCrossEntropy(), np.full((2, 5), -0.5), RANGE.format(-0.5)),
        (SigmoidCrossEntropy(), np.full((2, 5), np.nan), RANGE.format("nan")),
        (SigmoidCrossEntropy(), np.zeros((2, 4)), SHAPE.format("SigmoidCrossEntropy") + "shape (2, 4)"),
    ],
)
def test_labels_that_a_loss_cannot_take_are_refused_in_one_line(loss, label, message):
    task = ClassificationConfig(num_classes=5, loss=loss).build()
    with pytest.raises(UserError) as error:
        task.check_batch(batch_of(label.astype(np.float32) if label.dtype == np.float64 else label))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_labels_that_a_loss_can_take_are_accepted():
    ClassificationConfig(num_classes=5).build().check_batch(batch_of(np.array([0, 4])))
    sigmoid = ClassificationConfig(num_classes=5, loss=SigmoidCrossEntropy())
    sigmoid.build().check_batch(batch_of(TARGET.astype(np.float32)))


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_of_the_uniform_distribution_is_below_one(share):
    with pytest.raises(UserError, match=rf"SoftmaxCrossEntropy: label_smoothing = {share} is not in \[0, 1\)"):
        SoftmaxCrossEntropy(label_smoothing=share)
