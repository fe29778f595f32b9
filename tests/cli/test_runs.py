"""Runs opened again: what a classifier answers, and what is refused."""

import json

import numpy as np
import pytest

from lit_het.apps.quickstart import write_data
from lit_het.errors import UserError
from lit_het.runs.opening import open_run
from lit_het.types import Classifier


def test_a_classifier_answers_with_log_probabilities_and_its_noise_follows_from_the_seed(upstream):
    images = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    first, second = (open_run(upstream).model() for _ in range(2))
    assert isinstance(first, Classifier)
    assert isinstance(second, Classifier)
    features = np.asarray(first.features.extract(images))
    blocks, seeds = features[None], np.array([1])
    once, quiet = first.members(blocks, seeds, 3), first.members(blocks, seeds, 0)
    assert once.shape == (8, 3, 6)
    assert quiet.shape == (8, 1, 6)
    assert (once < 0).all()
    assert not np.array_equal(once, first.members(blocks, np.array([2]), 3)), "another seed draws other noise"
    assert not np.array_equal(once[:, :1], quiet)
    np.testing.assert_array_equal(once, second.members(blocks, seeds, 3))
    np.testing.assert_array_equal(quiet, second.members(blocks, seeds, 0))
    output = first.choose(blocks, seeds, 0)
    np.testing.assert_allclose(output.log_probabilities, quiet[:, 0], rtol=1e-5)
    assert (output.noise_norm > 0).all()
    assert np.isfinite(output.log_normalizer).all()


def test_characters_drawn_with_another_seed_are_refused(tmp_path):
    (tmp_path / "glyphs.json").write_text(json.dumps({"config": {"seed": 0}}))
    write_data(tmp_path, seed=0)
    with pytest.raises(UserError, match="was drawn with seed 0; give --seed 0 or another --run-dir"):
        write_data(tmp_path, seed=1)
