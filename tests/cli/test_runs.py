"""Runs opened again: what a classifier answers, and what is refused."""

import json

import numpy as np
import pytest

from lit_het.cli import runs
from lit_het.cli.quickstart import write_data
from lit_het.errors import UserError


def test_a_classifier_answers_with_probabilities_and_draws_the_same_noise_each_time_it_is_opened(upstream):
    pictures = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    first, second = (runs.open_classifier(upstream).probabilities() for _ in range(2))
    once, again = first(pictures), first(pictures)
    assert once.shape == (4, 6)
    assert ((once > 0) & (once < 1)).all()
    assert not np.array_equal(once, again), "every call draws new noise"
    np.testing.assert_array_equal(once, second(pictures))


def test_an_image_text_model_is_no_classifier(trained_lit):
    with pytest.raises(UserError, match="holds an image-text model, not a classifier"):
        runs.open_classifier(trained_lit.run_dir)


def test_characters_drawn_with_another_seed_are_refused(tmp_path):
    (tmp_path / "glyphs.json").write_text(json.dumps({"config": {"seed": 0}}))
    write_data(tmp_path, seed=0)
    with pytest.raises(UserError, match="was drawn with seed 0; give --seed 0 or another --run-dir"):
        write_data(tmp_path, seed=1)
