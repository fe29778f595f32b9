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
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import HetHConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.heads.temperature import FixedTemperature
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.tasks import quantities
from lit_het.tasks.base import Task
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.classifier import Classifier
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.two_towers import TwoTowers
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch
from tests.heads.references import all_at_once
from tests.tasks.meshes import KEYS, forward, start, task_of

B, K = 4, 3
ENCODER = EncoderConfig(width=16, depth=1, mlp_width=32, num_heads=2)
VIT = ViTConfig(8, 4, ENCODER, pooling="mean")
TEXT = TextConfig(vocabulary_size=20, length=4, embedding_size=16, encoder=ENCODER)
CONTRASTIVE = ContrastiveConfig(VIT, TEXT, HetXLContrastiveConfig(CovarianceConfig(3, initial_noise_norm=0.5)))
SAMPLING = SamplingConfig(num_samples=4, num_eval_samples=4)
CLASSIFIER = ClassificationConfig(VIT, HetXLConfig(CovarianceConfig(3), sampling=SAMPLING), num_classes=K)
RANDOM = np.random.default_rng(0)
IMAGE = jnp.asarray(RANDOM.integers(0, 256, (B, 8, 8, 3), np.uint8))
WORDS = jnp.asarray(RANDOM.integers(0, 20, (B, 4), np.int32))
VALID = jnp.asarray(np.asarray([True, True, False, True]))
LABEL = jnp.asarray(np.asarray([0, 2, 1, 1], np.int32))


def evaluate(task, params, batch):
    return forward(task.loss)(params, batch, KEYS)


def build(module, config):
    return nnx.eval_shape(lambda: module(config, nnx.Rngs(0)))


@functools.cache
def computed():
    """Returns what the parts of the image-text model compute: embeddings and norms of the noise, and samples."""
    task, params = start(CONTRASTIVE)

    @jax.jit
    def run(params):
        model, classifier, features = task.model(params), task.image_classifier(params), task.features(params, IMAGE)
        stored, text = model.image_tower(IMAGE).embedding, model.text_tower(WORDS).embedding
        norms = quantities.noise_norm(classifier, features), model.head.text_noise_norm(text)
        return stored, quantities.embeddings(classifier, features), *norms, model.head(stored, text, KEYS("noise"))

    return run(params)


def test_tasks_and_heads_keep_their_protocols():
    assert isinstance(task_of(CONTRASTIVE), Task)
    assert isinstance(task_of(CLASSIFIER), Task)
    for head in (DeterministicContrastiveConfig(), HetXLContrastiveConfig()):
        config = dataclasses.replace(CONTRASTIVE, head=head)
        assert isinstance(build(TwoTowers, config).head, ContrastiveHead)
    for head in (DeterministicConfig(), HetXLConfig(), HetConfig(), HetHConfig(num_buckets=2)):
        assert isinstance(build(Classifier, dataclasses.replace(CLASSIFIER, head=head)).head, ClassificationHead)


def test_lit_locks_the_image_tower_and_trains_the_head_of_both_sides():
    task, params = start(CONTRASTIVE)
    locked, trainable = parameters.partition(params, task.locked)
    assert set(locked) == {"image_tower"}
    assert set(trainable) == {"text_tower", "head"}
    assert set(trainable["head"]) == {"image_covariance", "text_covariance", "temperature"}


def test_the_contrastive_metrics_equal_a_numpy_computation_and_the_loss_is_that_of_the_head_on_the_embeddings():
    loss, metrics = evaluate(*start(CONTRASTIVE), Batch(VALID, image=IMAGE, text=WORDS))
    _, image, image_norm, text_norm, samples = computed()
    valid = np.flatnonzero(VALID)
    shapes = {f"{side}_noise_{shape}" for side in ("image", "text") for shape in ("alignment", "rank")}
    assert set(metrics) == {"temperature", "image_noise_norm", "text_noise_norm", *shapes}
    assert float(metrics["image_noise_norm"]) == pytest.approx(np.asarray(image_norm)[valid].mean(), rel=1e-5)
    assert float(metrics["text_noise_norm"]) == pytest.approx(np.asarray(text_norm)[valid].mean(), rel=1e-5)
    assert float(metrics["temperature"]) == pytest.approx(1 / 20)
    assert float(samples.temperature) == pytest.approx(1 / 20)
    np.testing.assert_allclose(np.linalg.norm(image, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(loss, jax.jit(CONTRASTIVE.loss)(samples, VALID), rtol=1e-5)


def test_stored_embeddings_have_the_loss_of_images_and_the_content_of_invalid_rows_does_not_matter():
    """Also zeros as stored embedding, which have no direction."""
    task, params = start(CONTRASTIVE)
    stored, words = np.array(computed()[0]), np.array(WORDS)
    expected, _ = evaluate(task, params, Batch(VALID, image=IMAGE, text=WORDS))
    locked, trainable = parameters.partition(params, task.locked)

    @jax.jit
    @jax.value_and_grad
    def loss(trainable, batch):
        return task.loss(parameters.merge(trainable, locked), batch, KEYS)[0]

    # What is no number must not reach a gradient either, not even as nothing times itself.
    row, word = stored[2].copy(), words[2].copy()
    for stored[2], words[2] in ((row, word), (0, 0), (np.nan, word)):
        batch = Batch(VALID, image_embedding=jnp.asarray(stored), text=jnp.asarray(words))
        value, gradient = loss(trainable, batch)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))

    changed = np.array(IMAGE)
    changed[2] = 0
    batches = (Batch(VALID, image=jnp.asarray(image), label=LABEL) for image in (IMAGE, changed))
    one, other = (evaluate(*start(CLASSIFIER), batch) for batch in batches)
    for actual, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_stored_embeddings_of_another_tower_and_towers_of_different_embedding_sizes_are_refused():
    task, params = start(CONTRASTIVE)
    with pytest.raises(UserError, match="stored image embeddings have size 8, those of the image tower 16"):
        jax.eval_shape(task.loss, params, Batch(VALID, image_embedding=np.zeros((B, 8), np.float32), text=WORDS), KEYS)

    with pytest.raises(UserError, match=r"text_tower.embedding_size = 8 must equal the image tower's .* 16"):
        dataclasses.replace(CONTRASTIVE, text_tower=dataclasses.replace(TEXT, embedding_size=8))


@pytest.mark.slow
def test_a_head_without_parameters_and_a_head_with_a_bias_both_work():
    fixed = dataclasses.replace(CONTRASTIVE, head=DeterministicContrastiveConfig(FixedTemperature(0.1))).build()
    assert set(fixed.shapes) == {"image_tower", "text_tower"}
    towers, batch = {name: start(CONTRASTIVE)[1][name] for name in fixed.shapes}, Batch(VALID, image=IMAGE, text=WORDS)
    biased = dataclasses.replace(CONTRASTIVE.head, temperature=FixedTemperature(1.0), initial_bias=-10.0)
    task, params = start(dataclasses.replace(CONTRASTIVE, head=biased, loss=SigmoidLoss()))
    assert float(params["head"]["bias"]) == -10.0
    losses = jax.jit(lambda towers, params: [fixed.loss(towers, batch, KEYS)[0], task.loss(params, batch, KEYS)[0]])
    of_fixed, loss = losses(towers, params)
    assert np.isfinite(of_fixed)
    # Logits are cosines minus 10: partners cost about 10 each, the others nothing.
    assert float(loss) == pytest.approx(10, abs=1.5)


def test_probabilities_are_means_over_samples_and_the_training_metric_counts_right_samples():
    task, params = start(CLASSIFIER)

    @jax.jit
    def found(params):
        classifier, features = task.image_classifier(params), task.features(params, IMAGE)
        head = task.model(params).head
        noisy, quiet = (quantities.log_probabilities(classifier, features, KEYS("noise"), count) for count in (4, 0))
        of_samples = all_at_once(head(features, KEYS("noise")))
        return jnp.exp(noisy), jnp.exp(quiet), of_samples, jax.nn.softmax(head.logits(features) / 2.525)

    probabilities, quiet, of_samples, expected = map(np.asarray, found(params))
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    loss, metrics = evaluate(task, params, Batch(VALID, image=IMAGE, label=LABEL))
    valid = np.flatnonzero(VALID)
    p = np.asarray(probabilities, np.float64)[valid]
    assert float(loss) == pytest.approx(-np.log(p[np.arange(len(valid)), np.asarray(LABEL)[valid]]).mean(), rel=1e-5)
    assert float(metrics["temperature"]) == pytest.approx(2.525)
    assert float(metrics["image_noise_norm"]) > 0
    assert not np.allclose(quiet, probabilities, atol=1e-4)
    right = of_samples.argmax(axis=-1) == np.asarray(LABEL)[:, None]
    assert float(metrics["top1"]) == pytest.approx(right[valid].mean())
    np.testing.assert_allclose(quiet, expected, rtol=1e-5)


def test_the_sigmoid_loss_counts_the_most_probable_class_as_right_if_it_is_one_of_the_true_ones():
    task, params = start(dataclasses.replace(CLASSIFIER, loss=SigmoidCrossEntropy(), head=DeterministicConfig()))
    scores = jax.jit(lambda params: quantities.scores(task.image_classifier(params), task.features(params, IMAGE)))
    best = np.asarray(scores(params)).argmax(axis=1)
    target = np.ones((B, K), np.float32)
    target[0, best[0]] = 0
    _, metrics = evaluate(task, params, Batch(VALID, image=IMAGE, label=jnp.asarray(target)))
    assert float(metrics["top1"]) == pytest.approx(2 / 3)


@pytest.mark.slow
def test_the_sigmoid_loss_takes_a_class_index_for_the_vector_that_marks_it():
    task = dataclasses.replace(CLASSIFIER, loss=SigmoidCrossEntropy(), mixup=0.5).build()
    labels, params = (LABEL, jnp.asarray(np.eye(K, dtype=np.float32)[np.asarray(LABEL)])), start(CLASSIFIER)[1]
    batches = [Batch(VALID, image=IMAGE, label=label) for label in labels]
    with_index, with_vector = jax.jit(lambda params: [task.loss(params, one, KEYS) for one in batches])(params)
    jax.tree.map(np.testing.assert_array_equal, with_index, with_vector)


@pytest.mark.parametrize(
    ("loss", "label"),
    [(SoftmaxCrossEntropy(), np.zeros((B, K))), (SigmoidCrossEntropy(), np.zeros((B, K + 1)))],
)
def test_labels_of_the_wrong_shape_are_refused_with_the_flags(loss, label):
    task = dataclasses.replace(CLASSIFIER, loss=loss).build()
    _, params = start(CLASSIFIER)
    with pytest.raises(UserError, match=r"over 3 classes cannot take labels of shape .*--task.num-classes") as error:
        jax.eval_shape(task.loss, params, Batch(VALID, image=IMAGE, label=label.astype(np.float32)), KEYS)
    assert "\n" not in str(error.value)
