"""Fingerprints of towers do not change between versions, so that stored embeddings stay valid."""

import dataclasses

import jax
import numpy as np
import pytest

from lit_het.configs import quickstart_lit_deterministic
from lit_het.models.tower_fingerprints import tower_fingerprint
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.text_config import TextConfig


@dataclasses.dataclass
class _Tokenizer:
    model_bytes: bytes = b"a tokenizer"
    length: int = 1
    padding_id: int = 0
    vocabulary_size: int = 1

    def __call__(self, captions: list[str]) -> np.ndarray:
        return np.zeros((len(captions), 1), np.int32)


@pytest.fixture
def config():
    """With the towers of the quickstart of that version."""
    config = quickstart_lit_deterministic.get_config()
    image_tower, text_tower = config.task.image_tower, config.task.text_tower
    assert isinstance(image_tower, ViTConfig)
    assert isinstance(text_tower, TextConfig)
    encoder = dataclasses.replace(image_tower.encoder, width=256, mlp_width=1024)
    image_tower = dataclasses.replace(image_tower, encoder=encoder)
    text_tower = dataclasses.replace(text_tower, embedding_size=256)
    return dataclasses.replace(
        config, task=dataclasses.replace(config.task, image_tower=image_tower, text_tower=text_tower)
    )


def ones(config):
    return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), config.task.build().shapes)


def test_fingerprints_are_those_of_the_version_before_uncertainty_tokens(config):
    params = ones(config)
    assert tower_fingerprint(config, params) == "082c75cd8a6d53a1"
    assert tower_fingerprint(config, params, _Tokenizer()) == "17072f80a7fc42bd"


def test_another_field_gives_another_fingerprint(config):
    params = ones(config)
    for changes in ({"uncertainty_token": True}, {"pooling": "mean"}):
        tower = dataclasses.replace(config.task.image_tower, **changes)
        # Only the fields are compared: the sizes of a configuration with another tower may not fit.
        task = dataclasses.replace(config.task)
        object.__setattr__(task, "image_tower", tower)
        assert tower_fingerprint(dataclasses.replace(config, task=task), params) != tower_fingerprint(config, params)
