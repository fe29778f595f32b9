"""Uncertainty tokens: log σ² beside the mean, which no pooling, mask or size of texts confuses with it."""

import dataclasses

import jax
import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from tests.towers.models import drawn, initial, run, shapes
from tests.towers.test_forms import dense, norm

ENCODER = EncoderConfig(width=16, depth=2, mlp_width=32, num_heads=2)
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
TEXT = np.array([[3, 4, 9, 1], [5, 9, 1, 1], [9, 1, 1, 1]], np.int32)
VIT = ViTConfig(8, 4, ENCODER, pooling="class_token", projection_size=6, uncertainty_token=True)
WORDS = TextConfig(20, 4, 12, ENCODER, uncertainty_token=True)


def embed(config, params, inputs):
    return np.split(np.asarray(run(config, params, inputs).embedding), 2, axis=1)


@pytest.mark.parametrize("pooling", ["class_token", "mean", "first", "attention", "none"])
def test_an_image_has_a_mean_and_a_log_variance_with_every_pooling(pooling):
    config = dataclasses.replace(VIT, pooling=pooling, num_registers=2)
    assert config.embedding_size == 12
    params = drawn(shapes(config))
    mean, log_variance = embed(config, params, IMAGES)
    assert mean.shape == log_variance.shape == (3, 6)
    assert np.ptp(log_variance, axis=0).min() > 0
    other = {"kernel": np.zeros((16, 6), np.float32), "bias": np.full(6, -3, np.float32)}
    again, log_variance = embed(config, {**params, "uncertainty": other}, IMAGES)
    np.testing.assert_array_equal(again, mean)
    np.testing.assert_array_equal(log_variance, np.full((3, 6), -3.0))


@pytest.mark.parametrize("pooling", ["last", "first", "mean", "max", "attention", "end_token", "class_token"])
def test_a_text_has_a_mean_and_a_log_variance_with_every_pooling(pooling):
    config = dataclasses.replace(WORDS, pooling=pooling)
    mean, log_variance = embed(config, drawn(shapes(config)), TEXT)
    assert mean.shape == log_variance.shape == (3, 6)
    assert np.ptp(mean, axis=0).min() > 0
    assert np.ptp(log_variance, axis=0).min() > 0


def test_behind_a_causal_mask_the_token_changes_no_mean():
    causal = dataclasses.replace(WORDS, encoder=dataclasses.replace(ENCODER, causal=True), pooling="end_token")
    plain = dataclasses.replace(causal, uncertainty_token=False, embedding_size=6)
    params = drawn(shapes(causal), scale=0.1)
    shared = {name: params[name] for name in params.keys() - {"uncertainty", "uncertainty_token"}}
    assert jax.tree.map(np.shape, shared) == jax.tree.map(lambda leaf: leaf.shape, shapes(plain))
    mean, _ = embed(causal, params, TEXT)
    np.testing.assert_allclose(run(plain, shared, TEXT).embedding, mean, atol=1e-6)


def test_log_variances_start_around_those_of_prolip():
    config = dataclasses.replace(VIT, projection_size=500)
    _, log_variance = embed(config, initial(config), IMAGES)
    assert log_variance.mean() == pytest.approx(-10, abs=0.2)
    assert log_variance.std() == pytest.approx(1, abs=0.2)


def test_a_log_variance_may_be_a_layer_of_the_mean():
    config = dataclasses.replace(WORDS, uncertainty_from="mean")
    params = drawn(shapes(config))
    mean, log_variance = embed(config, params, TEXT)
    np.testing.assert_allclose(log_variance, dense(params["uncertainty"], mean), atol=1e-5)


def test_the_last_norm_may_be_applied_to_the_class_token_twice():
    config = dataclasses.replace(VIT, projection_size=None, uncertainty_token=False, norm_twice=True)
    params = drawn(shapes(config), scale=1.0)
    output = run(config, params, IMAGES)
    expected = norm(params["encoder"]["norm"], np.asarray(output.tokens)[:, 0], ENCODER.norm_epsilon)
    np.testing.assert_allclose(output.embedding, expected, atol=1e-5)


@pytest.mark.parametrize("config", [VIT, WORDS], ids=["image", "text"])
def test_the_token_counts_as_an_input_of_the_tower(config):
    layers = config.layers_above(shapes(config))
    assert layers["uncertainty_token"] == ENCODER.depth + 1
    assert set(jax.tree.leaves(layers["uncertainty"])) == {0}


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UserError, match="embedding_size = 11 must be even"):
        dataclasses.replace(WORDS, embedding_size=11)
    experts = dataclasses.replace(ENCODER, experts=ExpertsConfig(4, blocks=(1,), num_members=2))
    with pytest.raises(UserError, match="uncertainty_token = True needs"):
        dataclasses.replace(VIT, encoder=experts)
    with pytest.raises(UserError, match="norm_twice = True needs pooling = 'class_token'"):
        dataclasses.replace(VIT, pooling="mean", norm_twice=True)
