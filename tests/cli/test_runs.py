"""Runs opened again: what a classifier answers, and what is refused."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lit_het.apps.quickstart.running import write_data
from lit_het.configs import experiment
from lit_het.configs.quickstart_upstream import glyphs
from lit_het.errors import UserError
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.models.opening import open_run
from lit_het.tasks import quantities
from lit_het.training.train import train
from lit_het.types import EvaluatedModel
from tests import tiny
from tests.cli.conftest import refusal


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


def test_a_head_that_draws_pairs_refuses_an_odd_number_of_samples(capsys, lit_config, data, tmp_path):
    head = dataclasses.replace(lit_config.task.head, antithetic=True)
    paired = dataclasses.replace(lit_config, task=dataclasses.replace(lit_config.task, head=head))
    seen = ImageSet("seen", str(data / "train"), split=".")
    with pytest.raises(UserError, match="3 noise samples are odd"):  # before the first step
        train(dataclasses.replace(paired, evaluations=(ZeroShotConfig(seen, samples=3),)))
    paired = dataclasses.replace(paired, run_dir=tmp_path / "paired")
    tiny.finish_untrained(paired)
    Image.new("RGB", (40, 30)).save(tmp_path / "black.png")
    run = ("--checkpoint", paired.run_dir, "--samples", 3)
    for command in (
        ("zero-shot", "--data", data / "train", *run),
        ("classify", tmp_path / "black.png", "--labels", "a cat,a dog", *run),
        ("calibrate", paired.run_dir, "--data", data / "train", "--samples", 3),
    ):
        assert "give an even number with --samples" in refusal(capsys, *command)


def test_characters_drawn_with_another_seed_are_refused(tmp_path):
    (tmp_path / "glyphs.json").write_text(json.dumps({"config": {"seed": 0, "noisy_script": "cyrillic"}}))
    write_data(tmp_path, glyphs(seed=0))
    with pytest.raises(UserError, match="was drawn with seed = 0, not 1; give another --run-dir"):
        write_data(tmp_path, glyphs(seed=1))


def test_a_configuration_of_an_earlier_version_keeps_its_captions_and_its_loss(lit_config, tmp_path):
    experiment.save(lit_config, tmp_path / "config.json")
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["data"]["caption_unit"], saved["task"]["loss"]["duplicates"], saved["task"]["loss"]["label_smoothing"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    config = experiment.load(tmp_path / "config.json")
    assert config.data.caption_unit == "text"
    assert config.task.loss == SoftmaxLoss(duplicates="negatives")
