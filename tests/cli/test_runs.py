"""Runs opened again: what a classifier answers, and what is refused."""

import json
from typing import Any

import numpy as np
import pytest

from lit_het.apps.quickstart import write_data
from lit_het.configs.quickstart_upstream import glyphs
from lit_het.errors import UserError
from lit_het.runs.opening import open_run
from lit_het.tasks import quantities
from lit_het.types import EvaluatedModel


def test_a_classifier_answers_with_log_probabilities_and_its_noise_follows_from_the_seed(upstream):
    images = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    first, second = (open_run(upstream).model() for _ in range(2))
    features = np.asarray(first.features.extract(images))

    def members(model: EvaluatedModel, seed: int, num_samples: int) -> np.ndarray:
        noise: Any = {"seeds": np.array([seed]), "num_samples": num_samples}
        return model(quantities.member_log_probabilities, features[None], **noise)

    once, quiet = members(first, 1, 3), members(first, 1, 0)
    assert once.shape == (8, 3, 6)
    assert quiet.shape == (8, 1, 6)
    assert (once < 0).all()
    assert not np.array_equal(once, members(first, 2, 3)), "another seed draws other noise"
    assert not np.array_equal(once[:, :1], quiet)
    np.testing.assert_array_equal(once, members(second, 1, 3))
    np.testing.assert_array_equal(quiet, members(second, 1, 0))
    log_p = first(quantities.log_probabilities, features[None], seeds=np.array([1]))
    np.testing.assert_allclose(log_p, quiet[:, 0], rtol=1e-5)
    assert (first(quantities.noise_norm, features[None]) > 0).all()
    assert np.isfinite(first(quantities.log_normalizer, features[None])).all()


def test_characters_drawn_with_another_seed_are_refused(tmp_path):
    (tmp_path / "glyphs.json").write_text(json.dumps({"config": {"seed": 0}}))
    write_data(tmp_path, glyphs(seed=0))
    with pytest.raises(UserError, match="was drawn with seed 0; give --seed 0 or another --run-dir"):
        write_data(tmp_path, glyphs(seed=1))
