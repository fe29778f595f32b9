"""Text towers of several seeds on one locked image tower: each is what it would be alone, and their mean predicts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from lit_het import parameters
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.objectives.mixing import Mixing
from lit_het.random import Keys
from lit_het.tasks import quantities
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.temperature_gradient_config import TemperatureGradient
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch
from tests.refusals import assert_refused
from tests.tasks.meshes import EIGHT_DEVICES, KEYS, assert_same, assert_same_loss, loss_and_gradient, start, task_of

B, M, S, D = 16, 3, 4, 16
ENCODER = EncoderConfig(width=D, depth=1, mlp_width=32, num_heads=2, compute_type="float32")
CONFIG = ContrastiveConfig(
    image_tower=ViTConfig(8, 4, ENCODER, pooling="mean"),
    text_tower=TextConfig(vocabulary_size=20, length=4, embedding_size=D, encoder=ENCODER),
    head=HetXLContrastiveConfig(CovarianceConfig(3, initial_noise_norm=0.5), num_samples=S, initial_bias=-1.0),
    text_members=M,
)
SIGMOID = dataclasses.replace(CONFIG, loss=SigmoidLoss())
RANDOM = np.random.default_rng(0)
BATCH = Batch(
    valid=np.arange(B) % 5 != 4,
    image=RANDOM.integers(0, 256, (B, 8, 8, 3), dtype=np.uint8),
    text=RANDOM.integers(0, 20, (B, 4)).astype(np.int32),
)


def one_of(config):
    return task_of(dataclasses.replace(config, text_members=1))


def keys_of(number):
    """The keys of a member; the first has those of a run with one."""
    return Keys(jax.random.fold_in(KEYS.base, number)) if number else KEYS


def started(config):
    """Returns the task and parameters in which biases of members differ, too."""
    task, params = start(config)
    bias = jnp.array([-1.0, -3.0, 0.5])
    return task, params | {"head": params["head"] | {"bias": bias}}


def classifier(config):
    task, params = started(config)
    classes = task.encode_text(params, jnp.asarray(BATCH.text))
    return task, params, classes, task.features(params, jnp.asarray(BATCH.image))


def test_the_first_member_starts_as_a_single_one_and_no_two_members_alike():
    params = task_of(CONFIG).initialize(jax.random.key(7))
    expected = parameters.flatten(one_of(CONFIG).initialize(jax.random.key(7)))
    found = parameters.flatten(task_of(CONFIG).member(params, 0))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    drawn = params["text_tower"]["tokens"]["embedding"]
    assert min(np.abs(drawn[i] - drawn[j]).mean() for i, j in [(0, 1), (0, 2), (1, 2)]) > 0.01


@pytest.mark.parametrize("config", [CONFIG, SIGMOID], ids=["softmax", "sigmoid"])
def test_each_member_has_the_gradient_that_it_has_alone_and_the_mean_loss_is_logged(config):
    task, params = started(config)
    (total, metrics), gradient = loss_and_gradient(task.loss, params, BATCH)
    losses, temperatures = [], []
    for number in range(M):
        alone = loss_and_gradient(one_of(config).loss, task.member(params, number), BATCH, keys=keys_of(number))
        own = task.member(gradient, number)
        assert_same(
            ((alone[0][0],), own | {"image_tower": {}}), ((alone[0][0],), alone[1] | {"image_tower": {}}), atol=1e-5
        )
        losses.append(float(alone[0][0]))
        temperatures.append(float(alone[0][1]["temperature"]))
    assert np.ptp(losses) > 0.01
    assert float(total) == pytest.approx(sum(losses), rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(metrics["temperature"]) == pytest.approx(np.mean(temperatures), rel=1e-5)


def test_stored_embeddings_and_microbatches_train_as_images_do():
    task, params = start(CONFIG)
    expected = jax.jit(task.loss)(params, BATCH, KEYS)[0]
    features = np.asarray(task.features(params, jnp.asarray(BATCH.image)))
    stored = dataclasses.replace(BATCH, image=None, image_embedding=features)
    parts = task_of(dataclasses.replace(CONFIG, microbatches=4))
    for found in (jax.jit(task.loss)(params, stored, KEYS), jax.jit(parts.loss)(params, BATCH, KEYS)):
        assert float(found[0]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_that_share_parameters_have_the_loss_and_gradients_of_one():
    task, params = start(CONFIG)
    expected = loss_and_gradient(task.loss, params, BATCH)
    found = loss_and_gradient(task.loss, params, BATCH, EIGHT_DEVICES.build())
    assert_same_loss(found[0], expected[0])
    assert_same(found, expected, atol=1e-5)


def test_the_prediction_is_the_mean_probability_over_members_and_their_samples():
    task, params, classes, features = classifier(CONFIG)
    model = task.image_classifier(params, classes)
    key = jax.random.key(3)
    found = quantities.log_probabilities(model, features, key, S)
    sampled = np.asarray(quantities.member_log_probabilities(model, features, key, S), np.float64)
    by_member = sampled.reshape(B, S, M, B)
    total = np.zeros((B, B))
    for number in range(M):
        own = task.member(params, number)
        alone = one_of(CONFIG).image_classifier(own, one_of(CONFIG).encode_text(own, jnp.asarray(BATCH.text)))
        own_key = jax.random.fold_in(key, number) if number else key
        expected = quantities.member_log_probabilities(alone, features, own_key, S)
        np.testing.assert_allclose(by_member[:, :, number], expected, atol=1e-4)
        total += np.exp(np.asarray(expected, np.float64)).mean(axis=1)
    np.testing.assert_allclose(np.exp(found), total / M, atol=1e-6)
    assert np.abs(by_member[:, :, 0] - by_member[:, :, 1]).max() > 0.1


def test_pairs_have_the_mean_of_the_members_sigmoids_each_with_its_bias():
    task, params, classes, features = classifier(SIGMOID)
    found = quantities.pair_probabilities(task.image_classifier(params, classes), features)
    image = np.asarray(features, np.float64)
    image /= np.linalg.norm(image, axis=1, keepdims=True)
    expected = []
    for number in range(M):
        own = task.member(params, number)
        text = np.asarray(one_of(SIGMOID).encode_text(own, jnp.asarray(BATCH.text)), np.float64)
        logits = image @ text.T / float(one_of(SIGMOID).temperature(own)) + float(own["head"]["bias"])
        expected.append(special.expit(logits))
    np.testing.assert_allclose(found, np.mean(expected, axis=0), atol=1e-5)


def test_embeddings_are_unit_vectors_whose_inner_product_is_the_mean_cosine():
    task, params, classes, features = classifier(CONFIG)
    images = np.asarray(quantities.embeddings(task.image_classifier(params), features))
    np.testing.assert_allclose(np.linalg.norm(images, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(classes, axis=1), 1, atol=1e-5)
    own = [one_of(CONFIG).encode_text(of_member, jnp.asarray(BATCH.text)) for of_member in task.members(params)]
    unit = np.asarray(features / np.linalg.norm(features, axis=1, keepdims=True))
    expected = np.mean([unit @ np.asarray(text).T for text in own], axis=0)
    np.testing.assert_allclose(images @ np.asarray(classes).T, expected, atol=1e-5)


def test_prompts_of_a_class_are_joined_by_each_member_for_itself():
    task, params, classes, _ = classifier(CONFIG)
    joined = task.mean_text_key(params, classes.reshape(8, 2, -1))
    for part, own in zip(task.parts(joined), task.parts(classes.reshape(8, 2, -1)), strict=True):
        mean = np.asarray(own).mean(axis=1)
        np.testing.assert_allclose(part, mean / np.linalg.norm(mean, axis=1, keepdims=True), atol=1e-5)


def test_what_members_cannot_share_is_refused_by_its_field():
    def refused(field, **changes):
        assert_refused(rf"text_members = 3.*change task\.{field}", dataclasses.replace, CONFIG, **changes)
        dataclasses.replace(CONFIG, text_members=1, **changes)

    refused("head", head=GaussianContrastiveConfig())
    refused("temperature_gradient", temperature_gradient=TemperatureGradient())
    refused("mixing", mixing=Mixing(), loss=SigmoidLoss())
    weights = dataclasses.replace(CONFIG.text_tower, weights="hf://owner/name")
    refused("text_tower.weights", text_tower=weights)
    assert_refused("text_members", dataclasses.replace, CONFIG, text_members=0)


@pytest.mark.parametrize("locked", [(), ("image_tower/.*", "text_tower/tokens/.*"), ("image_tower/patches/.*",)])
def test_members_that_share_no_locked_image_tower_are_not_trained(locked):
    assert_refused("task.locked at", task_of(dataclasses.replace(CONFIG, locked=locked)).check_trained)
    task_of(CONFIG).check_trained()


def test_a_head_without_parameters_has_members_of_the_tower_alone():
    head = DeterministicContrastiveConfig()
    task, params = start(dataclasses.replace(CONFIG, head=head))
    loss, metrics = jax.jit(task.loss)(params, BATCH, KEYS)
    assert float(loss) == pytest.approx(3 * float(metrics["loss"]), rel=1e-6)
