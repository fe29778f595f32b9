"""Towers that tell the input of their last linear layer, BayesVLM's φ: the layer maps it to the embedding."""

import dataclasses

import jax
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
from tests.towers.models import drawn, run, shapes
from tests.towers.test_forms import dense

ENCODER = EncoderConfig(width=8, depth=1, mlp_width=12, num_heads=2)
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
TEXTS = np.random.default_rng(0).integers(0, 30, (3, 4), np.int32)
VIT = ViTConfig(image_size=8, patch_size=4, encoder=ENCODER, pooling="class_token")
CLIP = dataclasses.replace(VIT, projection_size=5)
BERT = BertConfig(30, 4, 5, dataclasses.replace(ENCODER, norm_placement="after"), pooler=True)
PROJECTED = {
    "clip": (CLIP, IMAGES, 8),
    "representation": (dataclasses.replace(CLIP, representation_size=6), IMAGES, 6),
    "attention": (dataclasses.replace(CLIP, pooling="attention"), IMAGES, 8),
    "text": (TextConfig(30, 4, 5, ENCODER), TEXTS, 8),
    "bert": (BERT, TEXTS, 8),
}


def embeddings(config, params, inputs):
    """Returns what the tower that tells has behind the embedding, which is that of the tower that does not."""
    found = np.asarray(run(dataclasses.replace(config, layer_input=True), params, inputs).embedding)
    embedding = np.asarray(run(config, params, inputs).embedding)
    np.testing.assert_allclose(found[:, : config.embedding_size], embedding, atol=1e-6)
    return embedding, found[:, config.embedding_size :]


def last_layer(config, params):
    """Returns the last layer, whose bias is drawn as its kernel is."""
    flat = parameters.flatten(params)
    return {part: flat[f"{config.last_layer}/{part}"] for part in ("kernel", "bias")}


@pytest.mark.parametrize("name", PROJECTED)
def test_a_projection_maps_the_input_to_the_embedding(name):
    config, inputs, size = PROJECTED[name]
    params, telling = drawn(shapes(config)), dataclasses.replace(config, layer_input=True)
    assert (telling.embedding_size, telling.input_size, config.input_size) == (5, size, 0)
    embedding, layer_input = embeddings(config, params, inputs)
    assert (embedding.shape, layer_input.shape) == ((3, 5), (3, size))
    np.testing.assert_allclose(dense(last_layer(config, params), layer_input), embedding, atol=1e-5)


def test_attention_pooling_adds_a_residual_that_its_last_layer_does_not_change():
    config = ViTConfig(image_size=8, patch_size=4, encoder=ENCODER)
    params = drawn(shapes(config))
    embedding, layer_input = embeddings(config, params, IMAGES)
    assert (embedding.shape, layer_input.shape) == ((3, 8), (3, 12))
    layer = last_layer(config, params)
    zeros = {f"{config.last_layer}/{part}": np.zeros_like(array) for part, array in layer.items()}
    only = run(config, parameters.unflatten({**parameters.flatten(params), **zeros}), IMAGES).embedding
    np.testing.assert_allclose(embedding - dense(layer, layer_input), only, atol=1e-5)


def test_features_hold_both():
    config = dataclasses.replace(CLIP, layer_input=True)
    features, params = FeatureExtractor(config), drawn(shapes(config))
    assert features.size == 13
    found = jax.jit(features)({"image_tower": params}, IMAGES)
    np.testing.assert_array_equal(features.embedding(found), found)


def test_the_mean_embedding_is_what_comes_first():
    others = ({}, {"layer_input": True}, {"uncertainty_token": True})
    sizes = {FeatureExtractor(dataclasses.replace(CLIP, **changes)).mean_size for changes in others}
    assert sizes == {CLIP.projection_size}
    tower = ImageFeatures(lambda view: view, num_members=2, num_shards=1, tower="", mean_size=2)
    members = Features(np.arange(6, dtype=np.float32)[None], np.zeros(1, int), np.zeros(1, int))
    np.testing.assert_array_equal(members.embeddings(tower), [[[0, 1], [3, 4]]])
    np.testing.assert_array_equal(members.joint_embeddings(tower), [[0, 1, 3, 4]])


def test_towers_that_end_otherwise_have_no_last_layer():
    experts = dataclasses.replace(ENCODER, depth=2, experts=ExpertsConfig(num_experts=4, num_members=2, num_blocks=1))
    ends = [VIT, dataclasses.replace(VIT, pooling="attention", representation_size=6)]
    for config in (*ends, dataclasses.replace(CLIP, encoder=experts), dataclasses.replace(BERT, projection_size=None)):
        assert config.last_layer is None
        with pytest.raises(UserError, match="layer_input = True needs"):
            dataclasses.replace(config, layer_input=True)
    assert ResNetConfig().last_layer is None


def test_a_classifier_has_no_use_for_it():
    with pytest.raises(UserError, match="layer_input is for heads of image-text models"):
        ClassificationConfig(image_tower=dataclasses.replace(CLIP, layer_input=True))
