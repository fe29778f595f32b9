"""Image-text models whose images have a key of each member of an e3 tower (`image_tower.members` is "apart")."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import special

from lit_het.errors import UserError
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.tasks import quantities
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch
from tests.heads.references import held_singly
from tests.tasks.meshes import KEYS, assert_eight_devices_have_the_loss_of_one, start

B, M, S, D = 8, 2, 3, 8
ENCODER = EncoderConfig(width=D, depth=1, mlp_width=12, num_heads=2)
# Without noise and without limits of the experts, so that members do not depend on the batch.
EXPERTS = ExpertsConfig(4, 1, blocks=(0,), num_members=M, noise_scale=0.0, auxiliary_weight=0.0, dispatch="ragged")
TOWER = ViTConfig(8, 4, dataclasses.replace(ENCODER, experts=EXPERTS), pooling="mean", members="apart")
TEXT = TextConfig(vocabulary_size=20, length=4, embedding_size=D, encoder=ENCODER)
HET_XL = HetXLContrastiveConfig(CovarianceConfig(2, initial_noise_norm=0.5), num_samples=S)
CONFIG = ContrastiveConfig(TOWER, TEXT, HET_XL, SoftmaxLoss("gather", 4))
RANDOM = np.random.default_rng(0)
VALID = np.array([True, True, False, True, True, True, True, True])
BATCH = Batch(
    valid=VALID,
    image=RANDOM.integers(0, 256, (B, 8, 8, 3), dtype=np.uint8),
    text=RANDOM.integers(0, 20, (B, 4)).astype(np.int32),
)
IMAGES = jnp.asarray(BATCH.image)


@pytest.mark.slow
def test_the_members_of_an_image_and_their_noise_are_samples_of_its_query_and_every_member_is_a_key():
    task, params = start(CONFIG)

    @jax.jit
    def embedded(params, batch):
        model: Any = nnx.merge(task.graph, params)
        image, text = model.image_tower(IMAGES).embedding, model.text_tower(batch.text).embedding
        samples, features = model.head(image, text, KEYS("noise")), task.features(params, IMAGES)
        # Stored embeddings of the members train as images do.
        stored = dataclasses.replace(batch, image=None, image_embedding=features)
        singly = held_singly(samples.image_queries), held_singly(samples.text_queries)
        return samples, *singly, features, task.loss(params, batch, KEYS), task.loss(params, stored, KEYS)[0]

    found = jax.tree.map(np.asarray, embedded(params, BATCH))
    samples, queries, text_queries, features, (loss, metrics), of_stored = found
    rows, tau, losses = np.flatnonzero(VALID), float(samples.temperature), []
    queries, image_keys, text_keys = queries.reshape(B, M * S, D), samples.image.reshape(B, M, D), samples.text
    for place, n in enumerate(rows):
        of_texts = special.softmax(queries[n] @ text_keys[rows].T / tau, axis=1)
        by_key = text_queries[n] @ image_keys[rows].reshape(-1, D).T / tau
        of_images = special.softmax(by_key, axis=1).reshape(S, -1, M).sum(axis=2)
        losses.append(-np.log([p[:, place].mean() for p in (of_texts, of_images)]).mean())
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["image_noise_norm"] > 0
    assert features.shape == (B, M * D)
    np.testing.assert_allclose(of_stored, loss, rtol=1e-6)


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_have_the_loss_of_one():
    task, params = start(CONFIG)
    assert_eight_devices_have_the_loss_of_one(task.loss, params, BATCH)


@pytest.mark.slow
def test_probabilities_are_means_over_members_and_scores_logs_of_their_mean_exponentials():
    task, params = start(CONFIG)
    assert task.num_predictions == M
    names = RANDOM.normal(size=(5, D))
    names = jnp.asarray(names / np.linalg.norm(names, axis=1, keepdims=True), jnp.float32)

    @jax.jit
    def found(params):
        model, features, key = task.image_classifier(params, names), task.features(params, IMAGES), jax.random.key(0)
        return (
            features,
            task.temperature(params),
            quantities.log_probabilities(model, features, key, 0),
            quantities.member_log_probabilities(model, features, key, 2),
            quantities.scores(model, features),
            quantities.embeddings(model, features),
        )

    features, tau, log_p, of_samples, scores, embedding = found(params)
    keys = np.asarray(features).reshape(B, M, D)
    keys = keys / np.linalg.norm(keys, axis=2, keepdims=True)
    logits = keys @ np.asarray(names).T / tau
    np.testing.assert_allclose(np.exp(log_p), special.softmax(logits, axis=2).mean(axis=1), rtol=1e-4)
    assert of_samples.shape == (B, 2 * M, 5)
    np.testing.assert_allclose(scores, np.log(np.exp(logits).mean(axis=1)), rtol=1e-5)
    mean = keys.mean(axis=1)
    np.testing.assert_allclose(embedding, mean / np.linalg.norm(mean, axis=1, keepdims=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": SigmoidLoss()},
        {"head": dataclasses.replace(HET_XL, num_samples=0), "loss": SoftmaxLoss(likelihood="delta")},
        {"head": GaussianContrastiveConfig()},
    ],
    ids=["sigmoid", "no samples", "gaussian"],
)
def test_other_losses_and_heads_take_one_key_of_an_image(changes):
    with pytest.raises(UserError, match=r"members = 'apart' gives an image several keys, .*; take 'mean' or"):
        dataclasses.replace(CONFIG, **changes)
    averaged = dataclasses.replace(TOWER, members="mean")
    assert dataclasses.replace(CONFIG, image_tower=averaged, head=DeterministicContrastiveConfig()).num_keys == 1
