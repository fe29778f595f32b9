"""Entropy, BALD and EPIG against hand arithmetic, loops and the authors' code."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from lit_het.eval.selection import bald, entropy, epig

GOLDEN = Path(__file__).parents[1] / "golden" / "bayes_vlm.npz"


def draw(*shape, seed=0):
    """Returns log-probabilities of samples ``[images samples classes]``."""
    logits = 2 * np.random.default_rng(seed).normal(size=shape)
    return log_softmax(logits, axis=-1).astype(np.float32)


def test_two_sure_samples_that_disagree_say_one_bit():
    sure = np.log(np.array([[[1, 1e-30], [1e-30, 1]], [[0.5, 0.5], [0.5, 0.5]]], np.float32))
    np.testing.assert_allclose(entropy(sure), np.log([2, 2]), rtol=1e-5)
    np.testing.assert_allclose(bald(sure), [np.log(2), 0], atol=1e-6)
    # The first image's label tells which sample is right, and with it that of a target with the same samples.
    np.testing.assert_allclose(epig(sure, sure[:1]), [np.log(2), 0], atol=1e-6)
    np.testing.assert_allclose(epig(sure, sure), [np.log(2) / 2, 0], atol=1e-6)


def test_bald_is_the_mean_divergence_of_the_samples_from_their_mean():
    log_p = draw(5, 7, 4)
    p = np.exp(log_p, dtype=np.float64)
    expected = [np.mean([np.sum(s * np.log(s / image.mean(axis=0))) for s in image]) for image in p]
    np.testing.assert_allclose(bald(log_p), expected, rtol=1e-4)


def test_a_sample_of_weight_two_counts_as_two_samples():
    log_p = draw(5, 3, 4)
    repeated = np.concatenate([log_p, log_p[:, :1]], axis=1)
    np.testing.assert_allclose(bald(log_p, np.array([2.0, 1.0, 1.0])), bald(repeated), rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 40, 10**6])
def test_epig_is_the_mutual_information_of_both_labels(block_size):
    pool, target = draw(3, 7, 4), draw(5, 7, 2, seed=1)
    expected = np.zeros(3)
    for n, t in itertools.product(range(3), range(5)):
        p, q = np.exp(pool[n]), np.exp(target[t])
        for k, other in itertools.product(range(4), range(2)):
            joint = np.mean(p[:, k] * q[:, other])
            expected[n] += joint * np.log(joint / (p[:, k].mean() * q[:, other].mean())) / 5
    np.testing.assert_allclose(epig(pool, target, block_size), expected, rtol=1e-4, atol=1e-6)


def test_epig_is_that_of_the_authors_code():
    with np.load(GOLDEN) as golden:
        found = epig(np.log(golden["pool"]), np.log(golden["target"]))
        np.testing.assert_allclose(found, golden["epig"], atol=1e-5)
