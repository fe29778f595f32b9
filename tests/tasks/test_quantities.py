"""Quantities of an image against hand computations, for a classifier whose parts are given."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from lit_het.heads.sampling import noiseless_samples
from lit_het.tasks import quantities
from lit_het.tasks.quantities import ImageClassifier
from lit_het.types import LogitSamples

MEMBERS = np.log(np.array([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], [[0.6, 0.2, 0.2], [0.3, 0.4, 0.3]]]))


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
    features, key = jnp.asarray(MEMBERS.reshape(2, 6), jnp.float32), jax.random.key(0)
    biased = dataclasses.replace(ensemble(), pair_bias=jnp.asarray(0.5))
    for model, bias in ((ensemble(), 0.0), (biased, 0.5)):
        found = quantities.member_class_log_probabilities(model, features, key, 0)
        np.testing.assert_allclose(found[:, :, 0], special.log_expit(MEMBERS + bias), rtol=1e-5)
        np.testing.assert_allclose(found[:, :, 1], special.log_expit(-MEMBERS - bias), rtol=1e-5)
        means = quantities.pair_probabilities(model, features)
        np.testing.assert_allclose(np.exp(found[:, :, 0]).mean(axis=1), means, rtol=1e-5)


def test_an_ensemble_predicts_the_mean_of_its_members_probabilities():
    features, key = jnp.asarray(MEMBERS.reshape(2, 6), jnp.float32), jax.random.key(0)
    found = quantities.log_probabilities(ensemble(), features, key, 0)
    np.testing.assert_allclose(np.exp(found), np.exp(MEMBERS).mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(np.exp(found)[0], [0.3, 0.2, 0.5], rtol=1e-5)
    by_member = quantities.member_log_probabilities(ensemble(), features, key, 0)
    np.testing.assert_allclose(by_member, MEMBERS, rtol=1e-5)
    np.testing.assert_allclose(quantities.log_normalizer(ensemble(), features), 0, atol=1e-6)


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
    features = jnp.asarray(MEMBERS.reshape(2, 6), jnp.float32)
    found = quantities.member_log_probabilities(model, features, jax.random.key(0), 3)
    expected = [[special.log_softmax(member * (1 + s)) for s in range(3) for member in image] for image in MEMBERS]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
