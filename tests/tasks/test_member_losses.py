"""Classifiers with several predictions of an image: heads, members of a tower, and MIMO (e3 App. B.3, C.1, G.3)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import distributed, parameters, sharding
from lit_het.errors import UserError
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.deterministic import DeterministicClassifier, DeterministicConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.losses.classification import SigmoidCrossEntropy
from lit_het.random import keys_at
from lit_het.sharding import MeshConfig
from lit_het.tasks import mimo, quantities
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.mimo import MimoConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.rank_one import RankOneConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch

K, B = 3, 6
RANDOM = np.random.default_rng(0)
ENCODER = EncoderConfig(width=8, depth=2, mlp_width=12, num_heads=2)
E3 = dataclasses.replace(
    ENCODER, experts=ExpertsConfig(4, 1, 1, 2, noise_scale=0.0, auxiliary_weight=0.0, dispatch="ragged")
)
PLAIN = ViTConfig(8, 4, ENCODER, pooling="mean", members="apart")
HEAD = DeterministicConfig()
NOISY = HetXLConfig(CovarianceConfig(num_factors=2), sampling=SamplingConfig(4, 4, block_size=8))
IMAGE = jnp.asarray(RANDOM.integers(0, 256, (B, 8, 8, 3)), jnp.uint8)
LABEL = jnp.asarray([0, 2, 1, 1, 0, 2])
VALID = jnp.asarray([True, True, False, True, True, True])
BATCH = Batch(image=IMAGE, label=LABEL, valid=VALID)
ENSEMBLES = {
    "heads": {"num_heads": 3},
    "members": {"image_tower": dataclasses.replace(PLAIN, encoder=E3)},
    "members with heads": {"image_tower": dataclasses.replace(PLAIN, encoder=E3), "num_heads": 2},
}


def classifier(**changes):
    return ClassificationConfig(**{"image_tower": PLAIN, "head": HEAD, "num_classes": K, **changes}).build()


@functools.lru_cache
def losses(name, joint, sigmoid=False):
    """Returns the loss of a task and the probabilities of its members ``[b m k]``."""
    loss = {"loss": SigmoidCrossEntropy()} if sigmoid else {}
    task = classifier(**ENSEMBLES[name], member_loss="joint" if joint else "mean", **loss)

    def both(params):
        loss, _ = task.loss(params, BATCH, keys_at(0, 0))
        model = task.image_classifier(params)
        features = task.features(params, IMAGE)
        return loss, quantities.member_log_probabilities(model, features, jax.random.key(0), 0)

    return jax.device_get(jax.jit(both)(jax.jit(task.initialize)(jax.random.key(1))))


@pytest.mark.parametrize(("name", "count"), [("heads", 3), ("members", 2), ("members with heads", 4)])
def test_the_loss_of_members_is_their_mean_or_that_of_their_mean_prediction(name, count):
    mean, log_p = losses(name, False)
    joint, again = losses(name, True)
    assert log_p.shape == (B, count, K)
    np.testing.assert_allclose(log_p, again, atol=1e-6)
    of_label = log_p[np.arange(B), :, np.asarray(LABEL)][np.asarray(VALID)]
    assert mean == pytest.approx(-of_label.mean(), abs=1e-5)
    assert joint == pytest.approx(-np.log(np.exp(of_label).mean(axis=1)).mean(), abs=1e-5)
    # Jensen: the mean prediction is never worse than its members.
    assert joint < mean


def test_the_joint_sigmoid_loss_is_that_of_the_mean_probability_of_each_class():
    for name in ENSEMBLES:
        task = classifier(**ENSEMBLES[name], member_loss="joint", loss=SigmoidCrossEntropy())
        params = jax.jit(task.initialize)(jax.random.key(1))
        loss, _ = jax.jit(lambda params, task=task: task.loss(params, BATCH, keys_at(0, 0)))(params)
        model, features = task.image_classifier(params), task.features(params, IMAGE)
        samples = model.logits(model.inputs(features), None, 0)
        logits = samples.logits(samples.prepare(samples.features), None, jnp.arange(1)).reshape(B, -1, K)
        p = (1 / (1 + np.exp(-np.asarray(logits, np.float64)))).mean(axis=1)
        target = np.eye(K)[np.asarray(LABEL)]
        expected = -(target * np.log(p) + (1 - target) * np.log(1 - p)).sum(axis=1)[np.asarray(VALID)].mean()
        assert loss == pytest.approx(expected, abs=1e-5)


def test_noise_samples_and_members_are_averaged_together_in_the_joint_loss():
    # 4 samples of 3 heads in blocks of at most 8 vectors: several blocks of examples.
    task = classifier(num_heads=3, head=NOISY, member_loss="joint")
    params = jax.jit(task.initialize)(jax.random.key(1))
    keys = keys_at(0, 0)
    loss, _ = jax.jit(lambda params: task.loss(params, BATCH, keys))(params)
    head = task._model(params).head
    features = jnp.where(VALID[:, None], task.features(params, IMAGE), 1.0)
    samples = head(features, keys("noise"))
    logits = samples.logits(samples.prepare(features), samples.keys, jnp.arange(4))
    log_p = jax.nn.log_softmax(logits.reshape(B, 4, 3, K))
    of_label = log_p[np.arange(B), :, :, np.asarray(LABEL)].reshape(B, -1)[np.asarray(VALID)]
    assert loss == pytest.approx(-np.log(np.exp(np.asarray(of_label)).mean(axis=1)).mean(), abs=1e-5)


@pytest.mark.parametrize("member_loss", ["mean", "joint"])
@pytest.mark.parametrize("name", ENSEMBLES)
def test_every_head_and_member_learns(name, member_loss):
    task = classifier(**ENSEMBLES[name], member_loss=member_loss)
    params = jax.jit(task.initialize)(jax.random.key(1))
    gradient = jax.jit(jax.grad(lambda params: task.loss(params, BATCH, keys_at(0, 0))[0]))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    bias = gradient["head"]["logits"]["bias"].reshape(-1, K)
    assert (np.abs(bias) > 0).all()
    # No two heads learn the same.
    assert len(np.unique(bias.round(6), axis=0)) == len(bias)


# ---- MIMO ----


def test_each_input_sees_every_example_as_often_as_the_batch_is_repeated():
    inputs = np.asarray(mimo.draw_inputs(jax.random.key(0), MimoConfig(0.5, batch_repetitions=2), 8, 3))
    assert inputs.shape == (16, 3)
    for column in inputs.T:
        np.testing.assert_array_equal(np.sort(column), np.repeat(np.arange(8), 2))
    # The last half of the rows has equal inputs, the first hardly any.
    assert (inputs[8:] == inputs[8:, :1]).all()
    assert (inputs[:8] == inputs[:8, :1]).all(axis=1).mean() < 0.5


@pytest.mark.parametrize(("repetition", "equal"), [(0.0, 0), (0.75, 12), (1.0, 16)])
def test_the_share_of_repeated_inputs_is_the_one_asked_for(repetition, equal):
    inputs = np.asarray(mimo.draw_inputs(jax.random.key(1), MimoConfig(repetition), 16, 2))
    assert (inputs[16 - equal :, 0] == inputs[16 - equal :, 1]).all()
    assert (inputs[:, 0] == inputs[:, 1]).sum() < equal + 4


MIMO = {
    "image_tower": dataclasses.replace(PLAIN, num_inputs=2, members="mean"),
    "num_heads": 2,
    "mimo": MimoConfig(0.5, 2),
}


def test_each_head_of_mimo_predicts_the_class_of_its_own_input():
    task = classifier(**MIMO)
    params = jax.jit(task.initialize)(jax.random.key(1))
    keys = keys_at(0, 0)
    loss, _ = jax.jit(lambda params: task.loss(params, BATCH, keys))(params)
    inputs = np.asarray(mimo.draw_inputs(keys("mimo"), MIMO["mimo"], B, 2))
    model, found = task._model(params), []
    assert isinstance(model.head, DeterministicClassifier)
    for first, second in inputs:
        if not (VALID[first] and VALID[second]):
            continue
        pair = jnp.concatenate([IMAGE[first], IMAGE[second]], axis=2)[None]
        logits = np.asarray(model.head.logits(model.image_tower(pair).embedding), np.float64).reshape(2, K)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        found.append(-(log_p[0, LABEL[first]] + log_p[1, LABEL[second]]) / 2)
    assert loss == pytest.approx(np.mean(found), abs=1e-5)


def test_mimo_sees_the_same_image_in_all_inputs_in_evaluation():
    task = classifier(**MIMO)
    params = jax.jit(task.initialize)(jax.random.key(1))
    twice = jnp.concatenate([IMAGE, IMAGE], axis=3)
    np.testing.assert_array_equal(task.features(params, IMAGE), task.features(params, twice))
    found = quantities.member_log_probabilities(
        task.image_classifier(params), task.features(params, IMAGE), jax.random.key(0), 0
    )
    assert found.shape == (B, 2, K)
    assert task.num_predictions == 2


_DROPOUT = dataclasses.replace(ENCODER, experts=ExpertsConfig(4, 1, 1, dropout_rate=0.1, dropout_samples=2))
CONCATENATED_SAMPLES = dataclasses.replace(PLAIN, encoder=_DROPOUT, members="concatenated")


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
        classifier(**changes)


def test_a_repetition_of_inputs_is_a_probability():
    with pytest.raises(UserError, match=r"input_repetition = 1.5 must be between 0 and 1"):
        MimoConfig(1.5)


OVERLAP = dataclasses.replace(
    ENCODER, experts=ExpertsConfig(6, 1, 1, 2, overlap=2, noise_scale=0.0, auxiliary_weight=0.0, dispatch="ragged")
)
BATCH_ENSEMBLE = dataclasses.replace(
    ENCODER, experts=ExpertsConfig(2, 1, 1, 2, rank_one=RankOneConfig("normal"), auxiliary_weight=0.0)
)


@pytest.mark.parametrize(
    "changes",
    [
        MIMO,
        {"image_tower": dataclasses.replace(PLAIN, encoder=OVERLAP)},
        {"image_tower": dataclasses.replace(PLAIN, encoder=BATCH_ENSEMBLE), "num_heads": 2, "member_loss": "joint"},
    ],
    ids=["mimo", "overlap", "batch ensemble"],
)
def test_eight_devices_have_the_loss_and_the_gradient_of_one(changes):
    task = classifier(**{"head": DeterministicConfig(zero_kernel=False), **changes})
    batch = Batch(
        image=np.resize(np.asarray(IMAGE), (8, 8, 8, 3)),
        label=np.array([0, 2, 1, 1, 0, 2, 0, 1], np.int32),
        valid=np.array([True, True, False, True, True, True, True, True]),
    )
    initial, found = jax.jit(task.initialize)(jax.random.key(1)), []
    for mesh in (MeshConfig(data=1).build(jax.devices()[:1]), MeshConfig(data=2, fsdp=4).build()):
        params = jax.device_put(initial, sharding.tree_shardings(initial, mesh))
        with jax.set_mesh(mesh):
            function = jax.jit(jax.value_and_grad(task.loss, has_aux=True))
            (loss, _), gradient = function(params, distributed.to_global(batch, mesh), keys_at(0, 0))
            found.append((loss, parameters.flatten(gradient)))
    (expected_loss, expected), (loss, gradient) = found
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for path, leaf in expected.items():
        atol = 1e-5 * float(np.abs(leaf).max()) + 1e-6
        np.testing.assert_allclose(gradient[path], leaf, atol=atol, err_msg=path)
