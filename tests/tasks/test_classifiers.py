"""Every classification head on a tower: it builds, and it learns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import HetHConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.logits_config import HierarchicalSoftmax, SampledSoftmax
from lit_het.heads.sampling import SamplingConfig, noiseless_samples
from lit_het.heads.temperature import FixedTemperature
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.random import keys_at
from lit_het.tasks import quantities
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.quantities import ImageClassifier
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch, LogitSamples
from tests.tasks.meshes import start

B, K, SIZE = 4, 5, 8
COVARIANCE = CovarianceConfig(2, "efficient", initial_noise_norm=0.5)
SAMPLING = SamplingConfig(num_samples=3, block_size=8)
TEMPERATURE = FixedTemperature(2.0)
HEADS = {
    "DET": DeterministicConfig(TEMPERATURE),
    "HET": HetConfig(COVARIANCE, TEMPERATURE, SAMPLING),
    "HET-H": HetHConfig(3, 0, COVARIANCE, TEMPERATURE, SAMPLING),
    "HET-XL": HetXLConfig(COVARIANCE, None, TEMPERATURE, SAMPLING),
    "HET-XL unshared": HetXLConfig(COVARIANCE, 3, TEMPERATURE, SAMPLING),
    "HET-XL sampled": HetXLConfig(COVARIANCE, None, TEMPERATURE, SAMPLING, get_logits=SampledSoftmax(3)),
    "DET in two levels": DeterministicConfig(TEMPERATURE, get_logits=HierarchicalSoftmax()),
}
WITHOUT_SAMPLES = HetXLConfig(COVARIANCE, None, TEMPERATURE, SamplingConfig(num_samples=0))
ENCODER = EncoderConfig(width=16, depth=1, mlp_width=32, num_heads=2, compute_type="float32")
RANDOM = np.random.default_rng(1)
FEATURES = RANDOM.normal(size=(B, ENCODER.width)).astype(np.float32)
TOWER = ViTConfig(SIZE, 4, ENCODER, pooling="mean")


def config_of(head, **fields):
    return ClassificationConfig(TOWER, HEADS[head], num_classes=K, **fields)


@pytest.mark.slow
def test_a_head_on_a_resnet_has_a_loss_and_gradients_of_the_shapes_of_its_parameters():
    """Traced, not compiled: that takes half a minute. Heads see embeddings alone, whatever the tower."""
    task = ClassificationConfig(ResNetConfig(image_size=SIZE), HEADS["HET-XL"], num_classes=K).build()
    params = jax.eval_shape(task.initialize, jax.random.key(0))
    image, label = jnp.zeros((B, SIZE, SIZE, 3), jnp.uint8), jnp.zeros(B, jnp.int32)

    def gradient(params):
        batch = Batch(valid=jnp.ones(B, bool), image=image, label=label)
        return jax.value_and_grad(lambda params: task.loss(params, batch, keys_at(0, 0))[0])(params)

    loss, gradients = jax.eval_shape(gradient, params)
    assert loss.shape == ()
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize(
    "head",
    [pytest.param(head, marks=pytest.mark.slow) if head in ("HET-H", "HET-XL unshared") else head for head in HEADS],
)
def test_every_head_learns_in_two_steps(head):
    task, params = start(config_of(head))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, task.shapes)
    random = np.random.default_rng(0)
    batch = Batch(
        valid=jnp.asarray(np.asarray([True, True, True, False])),
        image=jnp.asarray(random.integers(0, 256, (B, SIZE, SIZE, 3), np.uint8)),
        label=jnp.asarray(np.asarray([0, 4, 2, 1], np.int32)),
    )
    keys, rate = keys_at(0, 0), 1e-3

    @jax.jit
    def step(params):
        (loss, metrics), gradient = jax.value_and_grad(task.loss, has_aux=True)(params, batch, keys)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradient), loss, metrics

    losses = []
    for _ in range(3):
        params, loss, metrics = step(params)
        losses.append(float(loss))
        assert (float(metrics["image_noise_norm"]) > 0) == (head[:3] == "HET")
    assert losses[2] < losses[1] < losses[0], losses


@functools.cache
def heads_of(loss, head):
    """A task with a head whose logits are not all alike, as at the start, and its parameters."""
    task, params = config_of(head, loss=LOSSES[loss]).build(), start(config_of(head))[1]
    kernel = RANDOM.normal(size=(ENCODER.width, K)).astype(np.float32)
    return task, {**params, "head": {**params["head"], "logits": {**params["head"]["logits"], "kernel": kernel}}}


LOSSES = {"softmax": SoftmaxCrossEntropy(), "sigmoid": SigmoidCrossEntropy()}


@pytest.mark.parametrize("loss", LOSSES)
def test_scores_of_a_class_do_not_depend_on_other_classes(loss):
    """Of a softmax it is the logit, of a sigmoid the log of the class's own probability."""
    task, params = heads_of(loss, "DET")
    key = jax.random.key(2)

    @jax.jit
    def found(params, features):
        model = task.image_classifier(params)
        without_noise = (quantities.scores, quantities.log_normalizer, quantities.noise_norm)
        log_p = quantities.log_probabilities(model, features, key, 0)
        return log_p, *(quantity(model, features) for quantity in without_noise)

    log_p, scores, log_normalizer, norm = found(params, FEATURES)
    logits = FEATURES @ np.asarray(params["head"]["logits"]["kernel"]) / 2.0
    expected = logits if loss == "softmax" else -np.log1p(np.exp(-logits))
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    share = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(log_p), share, rtol=1e-4)
    np.testing.assert_allclose(log_normalizer, np.log(np.exp(logits).sum(axis=1)), rtol=1e-5)
    np.testing.assert_array_equal(norm, 0)


def of_classes_alone(*inputs):
    return quantities.class_log_probabilities(*inputs), quantities.member_class_log_probabilities(*inputs)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_classifier_takes_the_requested_number_of_noise_samples(loss):
    """The mean is that of the single samples."""
    task, params = heads_of(loss, "HET-XL")
    key = jax.random.key(2)

    @jax.jit
    def found(params, features):
        model = task.image_classifier(params)
        noisy = (quantities.log_probabilities, quantities.member_log_probabilities, of_classes_alone)
        of_noise = (quantities.noise_spectrum, quantities.noise_norm)
        return *(quantity(model, features, key, 2000) for quantity in noisy), *(q(model, features) for q in of_noise)

    mean, of_samples, of_classes, spectrum, norm = found(params, FEATURES)
    p = np.exp(np.asarray(of_samples, np.float64))
    assert p.shape == (B, 2000, K)
    np.testing.assert_allclose(p.sum(axis=2), 1, rtol=1e-5)
    np.testing.assert_allclose(np.exp(mean), p.mean(axis=1), rtol=1e-4)
    classes, each = (np.exp(np.asarray(one, np.float64)) for one in of_classes)
    np.testing.assert_allclose(classes, each.mean(axis=1), rtol=1e-4)
    # Principal axes carry all of the noise.
    np.testing.assert_allclose(np.sqrt((np.asarray(spectrum) ** 2).sum(axis=1)), norm, rtol=1e-4)


@pytest.mark.parametrize(
    "loss",
    [SoftmaxCrossEntropy(likelihood=form) for form in ("delta", "mean_field", "unscented")]
    + [SigmoidCrossEntropy("probit")],
    ids=lambda loss: loss.likelihood,
)
def test_a_likelihood_of_logits_predicts_without_samples_as_it_is_trained_and_others_predict_by_samples(loss):
    task = ClassificationConfig(TOWER, WITHOUT_SAMPLES, num_classes=K, loss=loss).build()
    params = heads_of("softmax", "HET-XL")[1]

    @functools.partial(jax.jit, static_argnums=1)
    def found(params, count, seed):
        model, key = task.image_classifier(params), jax.random.key(seed)
        noisy = (quantities.log_probabilities, quantities.member_log_probabilities)
        return tuple(quantity(model, jnp.asarray(FEATURES), key, count) for quantity in noisy)

    (few, _), (many, each) = found(params, 2, 0), found(params, 20, 1)
    np.testing.assert_allclose(np.exp(many).sum(axis=1), 1, rtol=1e-5)
    assert each.shape[1] == {"delta": 20, "unscented": 2 * 3}.get(loss.likelihood, 1)
    assert np.allclose(few, many, atol=1e-6) == (loss.likelihood != "delta")
    quiet = found(params, 0, 0)[0]
    assert not np.allclose(quiet, many, atol=1e-4)


# Quantities of an image against hand computations, for a classifier whose parts are given.

MEMBERS = np.log(np.array([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], [[0.6, 0.2, 0.2], [0.3, 0.4, 0.3]]]))
INPUTS = MEMBERS.reshape(2, 6).astype(np.float32)


def ensemble() -> ImageClassifier:
    """Two members, whose inputs are their logits."""
    return ImageClassifier(
        inputs=lambda features: features.reshape(-1, 3),
        logits=lambda inputs, key, count: noiseless_samples(inputs, lambda rows: rows),
        log_probabilities=jax.nn.log_softmax,
        scores=lambda logits: logits,
        mean_scores=lambda scores: scores.mean(axis=1),
        embeddings=lambda inputs: inputs,
        noise_norm=lambda inputs: jnp.zeros(len(inputs)),
        noise_spectrum=lambda inputs: jnp.zeros((len(inputs), 0)),
    )


def test_classes_have_probabilities_of_their_own():
    biased = dataclasses.replace(ensemble(), pair_bias=jnp.asarray(0.5))
    for model, bias in ((ensemble(), 0.0), (biased, 0.5)):

        @jax.jit
        def computed(features, model=model):
            classes = quantities.member_class_log_probabilities(model, features, jax.random.key(0), 0)
            joint = quantities.class_log_probabilities(model, features, jax.random.key(0), 0)
            return classes, joint, quantities.pair_probabilities(model, features)

        found, joint, means = computed(INPUTS)
        np.testing.assert_allclose(np.exp(joint), np.exp(found).mean(axis=1), rtol=1e-5)
        np.testing.assert_allclose(found[:, :, 0], special.log_expit(MEMBERS + bias), rtol=1e-5)
        np.testing.assert_allclose(found[:, :, 1], special.log_expit(-MEMBERS - bias), rtol=1e-5)
        np.testing.assert_allclose(np.exp(found[:, :, 0]).mean(axis=1), means, rtol=1e-5)


def test_an_ensemble_predicts_the_mean_of_its_members_probabilities():
    @jax.jit
    def computed(features):
        noisy = quantities.log_probabilities, quantities.member_log_probabilities
        of_members = [quantity(ensemble(), features, jax.random.key(0), 0) for quantity in noisy]
        return *of_members, quantities.log_normalizer(ensemble(), features)

    found, by_member, log_normalizer = computed(INPUTS)
    np.testing.assert_allclose(np.exp(found), np.exp(MEMBERS).mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(np.exp(found)[0], [0.3, 0.2, 0.5], rtol=1e-5)
    np.testing.assert_allclose(by_member, MEMBERS, rtol=1e-5)
    np.testing.assert_allclose(log_normalizer, 0, atol=1e-6)


def test_of_noise_samples_the_first_of_every_member_come_first():
    def logits(inputs, key, count):
        assert key is not None
        return LogitSamples(
            features=inputs,
            keys=jax.random.split(key, len(inputs)),
            prepare=lambda rows: rows,
            logits=lambda rows, _, index: rows[:, None] * (1 + index)[None, :, None],
            num_samples=count,
            examples_per_block=len(inputs),
            samples_per_block=count,
        )

    model = dataclasses.replace(ensemble(), logits=logits)
    found = jax.jit(lambda x: quantities.member_log_probabilities(model, x, jax.random.key(0), 3))(INPUTS)
    expected = [[special.log_softmax(member * (1 + s)) for s in range(3) for member in image] for image in MEMBERS]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
