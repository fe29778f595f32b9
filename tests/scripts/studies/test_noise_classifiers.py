"""Classifiers' heads in the study of noise: the classes are the names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.random import keys_at
from lit_het.types import Batch
from scripts.studies.noise.classifiers import FeatureClassifierConfig
from scripts.studies.noise.pairs import PairSet
from scripts.studies.noise.training import Trained

FEATURES = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
LABELS = np.array([0, 2, 1, 2, 0, 1])


def test_the_loss_of_a_deterministic_head_is_the_cross_entropy():
    task = FeatureClassifierConfig(DeterministicConfig(), 4, 3).build()
    params = jax.jit(task.initialize)(jax.random.key(0))
    batch = Batch(jnp.asarray(np.ones(6, bool)), image_embedding=jnp.asarray(FEATURES), label=jnp.asarray(LABELS))
    loss, metrics = jax.jit(lambda params, batch: task.loss(params, batch, keys_at(0, 0)))(params, batch)
    layer = params["head"]["logits"]
    logits = FEATURES @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"])
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert loss == pytest.approx(-log_p[np.arange(6), LABELS].mean(), rel=1e-5)
    assert metrics["top1"] == pytest.approx((logits.argmax(axis=1) == LABELS).mean())


def test_predictions_are_over_all_names():
    head = HetXLConfig(sampling=SamplingConfig(num_samples=4))
    task = FeatureClassifierConfig(head, 4, 3).build()
    trained = Trained(task, jax.jit(task.initialize)(jax.random.key(0)), np.zeros((3, 2), np.int32), {})
    pairs = PairSet(FEATURES, LABELS, ("a", "b", "c"), {})
    found = trained.predict(pairs, np.arange(3), num_samples=8)
    assert trained.names is None
    assert found.log_probabilities.shape == (6, 3)
    np.testing.assert_allclose(np.exp(found.log_probabilities).sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(found.labels, LABELS)
    assert (found.noise_norm > 0).all()
