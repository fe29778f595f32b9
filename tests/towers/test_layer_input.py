"""Towers that tell the input of their last linear layer, BayesVLM's φ: the layer maps it to the embedding."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.eval.features import Features
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.features import FeatureExtractor
from lit_het.towers.bert import BertConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import ImageFeatures
from tests.towers.test_towers import compiled, initial

ENCODER = EncoderConfig(width=8, depth=1, mlp_width=12, num_heads=2)
IMAGES = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3)), jnp.uint8)
TEXTS = jnp.asarray(np.random.default_rng(0).integers(0, 30, (3, 4)), jnp.int32)
VIT = ViTConfig(image_size=8, patch_size=4, encoder=ENCODER, pooling="class_token")
BERT = BertConfig(
    30, 4, 5, EncoderConfig(width=8, depth=1, mlp_width=12, num_heads=2, norm_placement="after"), pooler=True
)
PROJECTED = {
    "clip": (dataclasses.replace(VIT, projection_size=5), IMAGES, 8),
    "representation": (dataclasses.replace(VIT, representation_size=6, projection_size=5), IMAGES, 6),
    "attention": (dataclasses.replace(VIT, pooling="attention", projection_size=5), IMAGES, 8),
    "text": (TextConfig(30, 4, 5, ENCODER), TEXTS, 8),
    "bert": (BERT, TEXTS, 8),
}


def with_bias(config):
    """Returns parameters whose last layer has a bias."""
    flat = parameters.flatten(initial(config))
    flat[f"{config.last_layer}/bias"] = jnp.linspace(-1, 1, config.embedding_size)
    return parameters.unflatten(flat), flat


@pytest.mark.parametrize("name", PROJECTED)
def test_a_projection_maps_the_input_to_the_embedding(name):
    config, inputs, size = PROJECTED[name]
    params, flat = with_bias(config)
    telling = dataclasses.replace(config, layer_input=True)
    assert (telling.embedding_size, telling.input_size, config.input_size) == (5, size, 0)
    found = np.asarray(compiled(telling, params)(inputs).embedding)
    assert found.shape == (3, 5 + size)
    np.testing.assert_allclose(found[:, :5], compiled(config, params)(inputs).embedding, atol=1e-6)
    kernel, bias = (np.asarray(flat[f"{config.last_layer}/{part}"]) for part in ("kernel", "bias"))
    np.testing.assert_allclose(found[:, 5:] @ kernel + bias, found[:, :5], atol=1e-5)


def test_attention_pooling_adds_a_residual_that_its_last_layer_does_not_change():
    config = ViTConfig(image_size=8, patch_size=4, encoder=ENCODER)
    telling = dataclasses.replace(config, layer_input=True)
    params, flat = with_bias(config)
    found = np.asarray(compiled(telling, params)(IMAGES).embedding)
    assert found.shape == (3, 8 + 12)
    np.testing.assert_allclose(found[:, :8], compiled(config, params)(IMAGES).embedding, atol=1e-6)
    kernel, bias = (np.asarray(flat[f"{config.last_layer}/{part}"]) for part in ("kernel", "bias"))
    residual = found[:, :8] - found[:, 8:] @ kernel - bias
    without = {**flat, f"{config.last_layer}/kernel": jnp.zeros((12, 8)), f"{config.last_layer}/bias": jnp.zeros(8)}
    only = compiled(config, parameters.unflatten(without))(IMAGES).embedding
    np.testing.assert_allclose(residual, only, atol=1e-5)


def test_features_hold_both():
    config = dataclasses.replace(PROJECTED["clip"][0], layer_input=True)
    features = FeatureExtractor(config)
    assert features.size == 13
    found = features({"image_tower": initial(config)}, IMAGES)
    np.testing.assert_array_equal(features.embedding(found), found)


def test_the_mean_embedding_is_what_comes_first():
    clip = dataclasses.replace(PROJECTED["clip"][0], layer_input=True)
    gaussian = dataclasses.replace(PROJECTED["clip"][0], uncertainty_token=True)
    sizes = {FeatureExtractor(config).mean_size for config in (PROJECTED["clip"][0], clip, gaussian)}
    assert sizes == {PROJECTED["clip"][0].projection_size}
    tower = ImageFeatures(lambda view: view, num_members=2, num_shards=1, tower="", mean_size=2)
    members = Features(np.arange(6, dtype=np.float32)[None], np.zeros(1, int), np.zeros(1, int))
    np.testing.assert_array_equal(members.embeddings(tower), [[[0, 1], [3, 4]]])
    np.testing.assert_array_equal(members.joint_embeddings(tower), [[0, 1, 3, 4]])


def test_towers_that_end_otherwise_have_no_last_layer():
    experts = dataclasses.replace(ENCODER, depth=2, experts=ExpertsConfig(num_experts=4, num_members=2, num_blocks=1))
    ensemble = dataclasses.replace(VIT, projection_size=5, encoder=experts)
    ends = [VIT, dataclasses.replace(VIT, pooling="attention", representation_size=6), ensemble]
    for config in (*ends, dataclasses.replace(BERT, projection_size=None)):
        assert config.last_layer is None
        with pytest.raises(UserError, match="layer_input = True needs"):
            dataclasses.replace(config, layer_input=True)
    assert ResNetConfig().last_layer is None


def test_a_classifier_has_no_use_for_it():
    with pytest.raises(UserError, match="layer_input is for the head bayes_vlm"):
        ClassificationConfig(image_tower=dataclasses.replace(VIT, projection_size=5, layer_input=True))
