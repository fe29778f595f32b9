"""Tasks: towers, head and loss joined; what they measure and what they refuse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.base import ClassificationHead, ContrastiveHead
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import HetHConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.heads.temperature import FixedTemperature
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.random import keys_at
from lit_het.tasks import quantities
from lit_het.tasks.base import Task
from lit_het.tasks.classification import ClassificationConfig, Classifier
from lit_het.tasks.contrastive import ContrastiveConfig, TwoTowers
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch

B, K = 4, 3
ENCODER = EncoderConfig(width=16, depth=1, mlp_width=32, num_heads=2)
VIT = ViTConfig(8, 4, ENCODER, pooling="mean")
TEXT = TextConfig(vocabulary_size=20, length=4, embedding_size=16, encoder=ENCODER)
CONTRASTIVE = ContrastiveConfig(VIT, TEXT, HetXLContrastiveConfig(CovarianceConfig(3, initial_noise_norm=0.5)))
SAMPLING = SamplingConfig(num_samples=4, num_eval_samples=4)
CLASSIFIER = ClassificationConfig(VIT, HetXLConfig(CovarianceConfig(3), sampling=SAMPLING), num_classes=K)
RANDOM = np.random.default_rng(0)
IMAGE = jnp.asarray(RANDOM.integers(0, 256, (B, 8, 8, 3)), jnp.uint8)
WORDS = jnp.asarray(RANDOM.integers(0, 20, (B, 4)), jnp.int32)
VALID = jnp.asarray([True, True, False, True])
LABEL = jnp.asarray([0, 2, 1, 1], jnp.int32)
KEYS = keys_at(0, 0)


def start(config):
    task = config.build()
    return task, jax.jit(task.initialize)(jax.random.key(0))


@functools.cache
def compiled(task):
    return jax.jit(task.loss)


def evaluate(task, params, batch):
    return compiled(task)(params, batch, KEYS)


def build(module, config):
    return nnx.eval_shape(lambda: module(config, nnx.Rngs(0)))


@pytest.fixture(scope="module")
def contrastive():
    return start(CONTRASTIVE)


@pytest.fixture(scope="module")
def classifier():
    return start(CLASSIFIER)


def test_tasks_and_heads_keep_their_protocols(contrastive, classifier):
    assert isinstance(contrastive[0], Task)
    assert isinstance(classifier[0], Task)
    for head in (DeterministicContrastiveConfig(), HetXLContrastiveConfig()):
        config = dataclasses.replace(CONTRASTIVE, head=head)
        assert isinstance(build(TwoTowers, config).head, ContrastiveHead)
    for head in (DeterministicConfig(), HetXLConfig(), HetConfig(), HetHConfig(num_buckets=2)):
        assert isinstance(build(Classifier, dataclasses.replace(CLASSIFIER, head=head)).head, ClassificationHead)


def test_lit_locks_the_image_tower_and_trains_the_head_of_both_sides(contrastive):
    task, params = contrastive
    locked, trainable = parameters.partition(params, task.locked)
    assert set(locked) == {"image_tower"}
    assert set(trainable) == {"text_tower", "head"}
    assert set(trainable["head"]) == {"image_covariance", "text_covariance", "temperature"}


def test_the_contrastive_metrics_equal_a_numpy_computation(contrastive):
    task, params = contrastive
    loss, metrics = evaluate(task, params, Batch(VALID, image=IMAGE, text=WORDS))
    features = task.features(params, IMAGE)
    computed = (quantities.embeddings, quantities.noise_norm)
    image, image_norm = (quantity(task.image_classifier(params), features) for quantity in computed)
    model = task._model(params)
    text_norm = model.head.text_noise_norm(model.text_tower(WORDS).embedding)
    valid = np.flatnonzero(VALID)
    shapes = {f"{side}_noise_{shape}" for side in ("image", "text") for shape in ("alignment", "rank")}
    assert set(metrics) == {"temperature", "image_noise_norm", "text_noise_norm", *shapes}
    assert float(metrics["image_noise_norm"]) == pytest.approx(np.asarray(image_norm)[valid].mean(), rel=1e-5)
    assert float(metrics["text_noise_norm"]) == pytest.approx(np.asarray(text_norm)[valid].mean(), rel=1e-5)
    assert float(metrics["temperature"]) == pytest.approx(1 / 20)
    assert float(model.head.temperature()) == pytest.approx(1 / 20)
    np.testing.assert_allclose(jnp.linalg.norm(image, axis=1), 1, rtol=1e-5)
    assert np.isfinite(loss)


def test_the_contrastive_loss_is_the_loss_of_the_head_on_the_towers_embeddings(contrastive):
    task, params = contrastive
    loss, _ = evaluate(task, params, Batch(VALID, image=IMAGE, text=WORDS))
    model = task._model(params)
    samples = model.head(model.image_tower(IMAGE).embedding, model.text_tower(WORDS).embedding, KEYS("noise"))
    np.testing.assert_allclose(loss, CONTRASTIVE.loss(samples, VALID), rtol=1e-5)


def test_stored_embeddings_of_the_image_tower_give_the_same_loss(contrastive):
    task, params = contrastive
    stored = task._model(params).image_tower(IMAGE).embedding
    expected, _ = evaluate(task, params, Batch(VALID, image=IMAGE, text=WORDS))
    actual, _ = evaluate(task, params, Batch(VALID, image_embedding=stored, text=WORDS))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_the_content_of_invalid_rows_does_not_matter(contrastive, classifier):
    """Also zeros as stored embedding, which have no direction."""
    task, params = contrastive
    stored = task._model(params).image_tower(IMAGE).embedding
    batch = Batch(VALID, image_embedding=stored.at[2].set(0), text=WORDS.at[2].set(0))
    _, trainable = parameters.partition(params, task.locked)

    def loss(trainable, batch):
        return task.loss(parameters.merge(trainable, {"image_tower": params["image_tower"]}), batch, KEYS)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(trainable, batch)
    expected = loss(trainable, Batch(VALID, image_embedding=stored, text=WORDS))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))

    # What is no number must not reach a gradient either, not even as nothing times itself.
    broken = Batch(VALID, image_embedding=stored.at[2].set(jnp.nan), text=WORDS)
    value, gradient = jax.jit(jax.value_and_grad(loss))(trainable, broken)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))

    task, params = classifier
    batches = (Batch(VALID, image=image, label=LABEL) for image in (IMAGE, IMAGE.at[2].set(0)))
    one, other = (evaluate(task, params, batch) for batch in batches)
    for actual, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_stored_embeddings_of_another_tower_are_refused(contrastive):
    task, params = contrastive
    with pytest.raises(UserError, match="stored image embeddings have size 8, those of the image tower 16"):
        task.loss(params, Batch(VALID, image_embedding=jnp.zeros((B, 8)), text=WORDS), KEYS)


def test_towers_of_different_embedding_sizes_are_refused():
    with pytest.raises(UserError, match=r"text_tower.embedding_size = 8 must equal the image tower's .* 16"):
        dataclasses.replace(CONTRASTIVE, text_tower=dataclasses.replace(TEXT, embedding_size=8))


def test_a_head_without_parameters_and_a_head_with_a_bias_both_work():
    fixed = DeterministicContrastiveConfig(FixedTemperature(0.1))
    task, params = start(dataclasses.replace(CONTRASTIVE, head=fixed))
    assert set(params) == {"image_tower", "text_tower"}
    assert np.isfinite(evaluate(task, params, Batch(VALID, image=IMAGE, text=WORDS))[0])
    biased = dataclasses.replace(CONTRASTIVE.head, initial_bias=-10.0)
    task, params = start(dataclasses.replace(CONTRASTIVE, head=biased, loss=SigmoidLoss()))
    assert float(params["head"]["bias"]) == -10.0
    loss, _ = evaluate(task, params, Batch(VALID, image=IMAGE, text=WORDS))
    # Every pair starts at about σ(10): partners cost about 10 each, the others nothing.
    assert float(loss) == pytest.approx(10, abs=3)


def test_probabilities_are_means_over_samples_and_the_training_metric_counts_right_samples(classifier):
    task, params = classifier
    features = task.features(params, IMAGE)

    @jax.jit
    def log_probabilities(params):
        return quantities.log_probabilities(task.image_classifier(params), features, KEYS("noise"), 4)

    probabilities = jnp.exp(log_probabilities(params))
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    loss, metrics = evaluate(task, params, Batch(VALID, image=IMAGE, label=LABEL))
    valid = np.flatnonzero(VALID)
    p = np.asarray(probabilities, np.float64)[valid]
    assert float(loss) == pytest.approx(-np.log(p[np.arange(len(valid)), np.asarray(LABEL)[valid]]).mean(), rel=1e-5)
    assert float(metrics["temperature"]) == pytest.approx(2.525)
    assert float(metrics["image_noise_norm"]) > 0
    quiet = jnp.exp(quantities.log_probabilities(task.image_classifier(params), features, KEYS("noise"), 0))
    assert not np.allclose(quiet, probabilities, atol=1e-4)
    model = task._model(params)
    samples = model.head(model.image_tower(IMAGE).embedding, KEYS("noise"))
    every_sample = samples.logits(samples.prepare(samples.features), samples.keys, jnp.arange(4))
    right = np.asarray(every_sample).argmax(axis=-1) == np.asarray(LABEL)[:, None]
    assert float(metrics["top1"]) == pytest.approx(right[valid].mean())
    expected = jax.nn.softmax(model.head.logits(model.image_tower(IMAGE).embedding) / 2.525)
    np.testing.assert_allclose(quiet, expected, rtol=1e-5)


def test_the_sigmoid_loss_counts_the_most_probable_class_as_right_if_it_is_one_of_the_true_ones():
    task, params = start(dataclasses.replace(CLASSIFIER, loss=SigmoidCrossEntropy(), head=DeterministicConfig()))
    model, features = task.image_classifier(params), task.features(params, IMAGE)
    best = np.asarray(quantities.scores(model, features)).argmax(axis=1)
    target = np.ones((B, K), np.float32)
    target[0, best[0]] = 0
    _, metrics = evaluate(task, params, Batch(VALID, image=IMAGE, label=jnp.asarray(target)))
    assert float(metrics["top1"]) == pytest.approx(2 / 3)


def test_the_sigmoid_loss_takes_a_class_index_for_the_vector_that_marks_it():
    task, params = start(dataclasses.replace(CLASSIFIER, loss=SigmoidCrossEntropy(), mixup=0.5))
    with_index, with_vector = (
        evaluate(task, params, Batch(VALID, image=IMAGE, label=label)) for label in (LABEL, jax.nn.one_hot(LABEL, K))
    )
    jax.tree.map(np.testing.assert_array_equal, with_index, with_vector)


@pytest.mark.parametrize(
    ("loss", "label"),
    [(SoftmaxCrossEntropy(), jnp.zeros((B, K))), (SigmoidCrossEntropy(), jnp.zeros((B, K + 1)))],
)
def test_labels_of_the_wrong_shape_are_refused_with_the_flags(loss, label):
    task, params = start(dataclasses.replace(CLASSIFIER, loss=loss, head=DeterministicConfig()))
    with pytest.raises(UserError, match=r"over 3 classes cannot take labels of shape .*--task.num-classes") as error:
        task.loss(params, Batch(VALID, image=IMAGE, label=label), KEYS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("loss", "label", "refusal"),
    [
        (
            SoftmaxCrossEntropy(),
            np.array([0, 3], np.int32),
            r"label = 3 is not a class: --task.num-classes 3",
        ),
        (SoftmaxCrossEntropy(), np.array([2, -1], np.int32), "label = -1 is not a class"),
        (SoftmaxCrossEntropy(), np.zeros((2, K), np.float32), r"cannot take labels of shape \(2, 3\)"),
        (SigmoidCrossEntropy(), np.array([0, 3], np.int32), "label = 3 is not a class"),
        (
            SigmoidCrossEntropy(),
            np.array([[0, 1, 1.5]], np.float32),
            "label = 1.5 is not a target of SigmoidCrossEntropy",
        ),
        (
            SigmoidCrossEntropy(),
            np.array([[0, -0.5, 1]], np.float32),
            "label = -0.5 is not a target of SigmoidCrossEntropy",
        ),
    ],
)
def test_labels_that_are_not_classes_are_refused_on_the_host(loss, label, refusal):
    task = dataclasses.replace(CLASSIFIER, loss=loss).build()
    with pytest.raises(UserError, match=refusal) as error:
        task.check_labels(label)
    assert "\n" not in str(error.value)


def test_labels_of_every_class_and_targets_from_0_to_1_are_taken():
    CLASSIFIER.build().check_labels(np.arange(K, dtype=np.int32))
    dataclasses.replace(CLASSIFIER, loss=SigmoidCrossEntropy()).build().check_labels(
        np.array([[0, 0.5, 1]], np.float32)
    )
