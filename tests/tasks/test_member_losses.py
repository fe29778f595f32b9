"""Classifiers with several predictions of an image: heads, members of a tower, and MIMO (e3 App. B.3, C.1, G.3)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from lit_het.errors import UserError
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.tasks import mimo, quantities
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.mimo import MimoConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.rank_one import RankOneConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch
from tests.heads.references import all_at_once
from tests.tasks.meshes import KEYS, assert_eight_devices_have_the_loss_of_one, forward, start

K, B = 3, 6
RANDOM = np.random.default_rng(0)
ENCODER = EncoderConfig(width=8, depth=1, mlp_width=12, num_heads=2)


def with_experts(count, **fields):
    return dataclasses.replace(ENCODER, experts=ExpertsConfig(count, 1, blocks=(0,), auxiliary_weight=0.0, **fields))


E3 = with_experts(4, num_members=2, noise_scale=0.0, dispatch="ragged")
PLAIN = ViTConfig(8, 4, ENCODER, pooling="mean", members="apart")
HEAD, SOFTMAX = DeterministicConfig(), SoftmaxCrossEntropy()
NOISY = HetXLConfig(CovarianceConfig(num_factors=2), sampling=SamplingConfig(4, 4, block_size=8))
IMAGE = jnp.asarray(RANDOM.integers(0, 256, (B, 8, 8, 3), np.uint8))
LABEL = np.array([0, 2, 1, 1, 0, 2], np.int32)
VALID = np.array([True, True, False, True, True, True])
BATCH = Batch(image=IMAGE, label=jnp.asarray(LABEL), valid=jnp.asarray(VALID))
ENSEMBLES = {
    "heads": {"num_heads": 3},
    "members": {"image_tower": dataclasses.replace(PLAIN, encoder=E3)},
    "members with heads": {"image_tower": dataclasses.replace(PLAIN, encoder=E3), "num_heads": 2},
}


def classifier(**changes):
    return ClassificationConfig(**{"image_tower": PLAIN, "head": HEAD, "num_classes": K, **changes})


@functools.cache
def evaluated(name):
    """Returns the mean loss, the joint one, its gradient, that of sigmoids, and log p and logits ``[b m k]``."""
    of_mean, of_joint, of_sigmoids = (
        classifier(**ENSEMBLES[name], member_loss=form, loss=loss).build()
        for form, loss in (("mean", SOFTMAX), ("joint", SOFTMAX), ("joint", SigmoidCrossEntropy()))
    )

    @jax.jit
    def run(params):
        mean, _ = of_mean.loss(params, BATCH, KEYS)
        (joint, _), gradient = jax.value_and_grad(of_joint.loss, has_aux=True)(params, BATCH, KEYS)
        model, features = of_mean.image_classifier(params), of_mean.features(params, IMAGE)
        log_p = quantities.member_log_probabilities(model, features, jax.random.key(0), 0)
        logits = all_at_once(model.logits(model.inputs(features), None, 0))
        sigmoid_loss, _ = of_sigmoids.loss(params, BATCH, KEYS)
        return mean, joint, gradient, sigmoid_loss, log_p, logits

    *found, logits = jax.device_get(run(start(classifier(**ENSEMBLES[name]), 1)[1]))
    return *found, logits.reshape(B, -1, K).astype(np.float64)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("heads", 3),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("members", 2), ("members with heads", 4))),
    ],
)
def test_the_loss_of_members_is_their_mean_or_that_of_their_mean_prediction_and_all_of_them_learn(name, count):
    mean, joint, gradient, _, log_p, _ = evaluated(name)
    assert log_p.shape == (B, count, K)
    of_label = log_p[np.arange(B), :, LABEL][VALID]
    assert mean == pytest.approx(-of_label.mean(), abs=1e-5)
    assert joint == pytest.approx(-np.log(np.exp(of_label).mean(axis=1)).mean(), abs=1e-5)
    # Jensen: the mean prediction is never worse than its members.
    assert joint < mean
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    bias = gradient["head"]["logits"]["bias"].reshape(-1, K)
    assert (np.abs(bias) > 0).all()
    # No two heads learn the same.
    assert len(np.unique(bias.round(6), axis=0)) == len(bias)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENSEMBLES)
def test_the_joint_sigmoid_loss_is_that_of_the_mean_probability_of_each_class(name):
    _, _, _, loss, _, logits = evaluated(name)
    p, target = (1 / (1 + np.exp(-logits))).mean(axis=1), np.eye(K)[LABEL]
    expected = -(target * np.log(p) + (1 - target) * np.log(1 - p)).sum(axis=1)[VALID].mean()
    assert loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_noise_samples_and_members_are_averaged_together_in_the_joint_loss():
    # 4 samples of 3 heads in blocks of at most 8 vectors: several blocks of examples.
    task, params = start(classifier(num_heads=3, head=NOISY, member_loss="joint"), 1)

    @jax.jit
    def logits(params):
        features = jnp.where(VALID[:, None], task.features(params, IMAGE), 1.0)
        return all_at_once(task.model(params).head(features, KEYS("noise"))).reshape(B, 4, 3, K)

    p = special.softmax(np.asarray(logits(params), np.float64), axis=3)[np.arange(B), :, :, LABEL]
    loss, _ = forward(task.loss)(params, BATCH, KEYS)
    assert loss == pytest.approx(-np.log(p.reshape(B, -1)[VALID].mean(axis=1)).mean(), abs=1e-5)


# ---- MIMO ----


def test_each_input_sees_every_example_as_often_as_the_batch_is_repeated():
    config = MimoConfig(0.5, batch_repetitions=2)
    inputs = np.asarray(jax.jit(lambda key: mimo.draw_inputs(key, config, 8, 3))(jax.random.key(0)))
    assert inputs.shape == (16, 3)
    for column in inputs.T:
        np.testing.assert_array_equal(np.sort(column), np.repeat(np.arange(8), 2))
    # The last half of the rows has equal inputs, the first hardly any.
    assert (inputs[8:] == inputs[8:, :1]).all()
    assert (inputs[:8] == inputs[:8, :1]).all(axis=1).mean() < 0.5


@pytest.mark.parametrize(("repetition", "equal"), [(0.0, 0), (0.75, 12), (1.0, 16)])
def test_the_share_of_repeated_inputs_is_the_one_asked_for(repetition, equal):
    draw = jax.jit(lambda key: mimo.draw_inputs(key, MimoConfig(repetition), 16, 2))
    first, second = np.asarray(draw(jax.random.key(1))).T
    assert (first[16 - equal :] == second[16 - equal :]).all()
    assert (first == second).sum() < equal + 4


MIMO = {
    "image_tower": dataclasses.replace(PLAIN, num_inputs=2, members="mean"),
    "num_heads": 2,
    "mimo": MimoConfig(0.5, 2),
}


def test_each_head_of_mimo_predicts_the_class_of_its_own_input():
    task, params = start(classifier(**MIMO), 1)
    inputs = np.asarray(jax.jit(lambda: mimo.draw_inputs(KEYS("mimo"), MIMO["mimo"], B, 2))())
    pairs = inputs[VALID[inputs].all(axis=1)]

    @jax.jit
    def logits(params, images):
        model: Any = task.model(params)
        return model.head.logits(model.image_tower(images).embedding).reshape(-1, 2, K)

    images = np.concatenate([np.asarray(IMAGE)[pairs[:, side]] for side in range(2)], axis=3)
    log_p = special.log_softmax(np.asarray(logits(params, images), np.float64), axis=2)
    expected = -np.take_along_axis(log_p, LABEL[pairs][..., None], axis=2).mean()
    assert forward(task.loss)(params, BATCH, KEYS)[0] == pytest.approx(expected, abs=1e-5)


def test_mimo_sees_the_same_image_in_all_inputs_in_evaluation():
    task, params = start(classifier(**MIMO), 1)

    @jax.jit
    def computed(params, image, twice):
        features, model = [task.features(params, x) for x in (image, twice)], task.image_classifier(params)
        return *features, quantities.member_log_probabilities(model, features[0], jax.random.key(0), 0)

    features, of_twice, found = computed(params, IMAGE, np.tile(IMAGE, (1, 1, 1, 2)))
    np.testing.assert_array_equal(features, of_twice)
    assert found.shape == (B, 2, K)
    assert task.num_predictions == 2


APART = dataclasses.replace(MIMO["image_tower"], inputs_as="patches")
CLASS_TOKENS = dataclasses.replace(MIMO["image_tower"], pooling="class_token", num_class_tokens=2)


def test_inputs_with_patches_of_their_own_are_images_side_by_side_with_their_own_positions():
    task, params = start(classifier(**{**MIMO, "image_tower": APART}), 1)
    two = np.concatenate([IMAGE, IMAGE[::-1]], axis=3)

    @jax.jit
    def computed(params, image):
        tower = task.model(params).image_tower
        halves = jnp.split(image.astype(jnp.float32) / 127.5 - 1, 2, axis=3)
        # 4 patches of each image, row by row.
        pixels = [x.reshape(B, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(B * 4, -1) for x in halves]
        tokens = jnp.concatenate([tower.patches(x).reshape(B, 4, -1) for x in pixels], axis=1)
        expected = tower.encoder(tokens + tower.positions[...][None]).tokens
        return tower(image).tokens, expected

    assert params["image_tower"]["positions"].shape == (2 * 4, 8)
    found, expected = computed(params, two)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # Another size resizes the positions of each image; a single image is seen twice.
    larger = np.tile(IMAGE.repeat(2, axis=1).repeat(2, axis=2), (1, 1, 1, 2))
    of_size = jax.jit(lambda params, image: task.features(params, image))
    assert of_size(params, larger).shape == (B, 8)
    np.testing.assert_array_equal(of_size(params, IMAGE), of_size(params, np.tile(IMAGE, (1, 1, 1, 2))))


def test_the_embedding_of_several_class_tokens_is_one_output_after_the_other():
    task, params = start(classifier(**{**MIMO, "image_tower": CLASS_TOKENS}), 1)
    output = jax.jit(lambda params: task.model(params).image_tower(IMAGE))(params)
    assert output.embedding.shape == (B, 16)
    assert output.tokens.shape == (B, 2 + 4, 8)
    np.testing.assert_array_equal(output.embedding, np.asarray(output.tokens)[:, :2].reshape(B, 16))
    assert (np.asarray(output.tokens)[:, 0] != np.asarray(output.tokens)[:, 1]).any()  # they begin differently


CONCATENATED_SAMPLES = dataclasses.replace(
    PLAIN, encoder=with_experts(4, dropout_rate=0.1, dropout_samples=2), members="concatenated"
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mimo": MimoConfig()}, "image_tower.num_inputs = 1 needs no task.mimo"),
        ({**MIMO, "mimo": None}, "num_inputs = 2 needs as many heads and task.mimo; num_heads = 2"),
        ({**MIMO, "num_heads": 1}, "num_inputs = 2 needs as many heads and task.mimo; num_heads = 1"),
        ({**MIMO, "member_loss": "joint"}, "'joint' has no meaning where members see different images"),
        ({"num_heads": 0}, "num_heads = 0 must be at least 1"),
        ({"num_heads": 2, "head": DeterministicConfig(zero_kernel=True)}, "heads .* zero_kernel = True stay equal"),
        ({"image_tower": CONCATENATED_SAMPLES}, "'concatenated' does not go with experts.dropout_samples above 1"),
    ],
)
def test_inputs_heads_and_losses_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        classifier(**changes).build()
    with pytest.raises(UserError, match=r"input_repetition = 1.5 must be between 0 and 1"):
        MimoConfig(1.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs_as": "patches"}, "inputs_as = 'patches' needs num_inputs of at least 2"),
        ({"inputs_as": "patches", "num_inputs": 2, "positions": "sine_cosine"}, "and positions = 'learned' to differ"),
        ({"num_class_tokens": 2}, "num_class_tokens = 2 needs pooling 'class_token'"),
        ({"num_class_tokens": 0}, "num_class_tokens = 0 must be at least 1"),
    ],
)
def test_towers_of_mimo_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(PLAIN, **changes)


OVERLAP = with_experts(6, num_members=2, overlap=2, noise_scale=0.0, dispatch="ragged")
BATCH_ENSEMBLE = with_experts(2, num_members=2, rank_one=RankOneConfig("normal"))


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        MIMO,
        {"image_tower": dataclasses.replace(PLAIN, encoder=OVERLAP)},
        {"image_tower": dataclasses.replace(PLAIN, encoder=BATCH_ENSEMBLE), "num_heads": 2, "member_loss": "joint"},
    ],
    ids=["mimo", "overlap", "batch ensemble"],
)
def test_eight_devices_have_the_loss_of_one(changes):
    task, params = start(classifier(**{"head": DeterministicConfig(zero_kernel=False), **changes}), 1)
    rows = np.arange(8) % B
    batch = Batch(image=np.asarray(IMAGE)[rows], label=LABEL[rows], valid=np.arange(8) != 2)
    assert_eight_devices_have_the_loss_of_one(task.loss, params, batch)
