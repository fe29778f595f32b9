"""A text tower with more positions reads the first ones only, and has the same unit embeddings."""

import dataclasses

import jax
import numpy as np
import pytest

from lit_het import parameters
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.weights.huggingface.lengthening import POOLINGS, lengthened
from tests.towers.models import drawn, run, shapes
from tests.weights.importing import unit

LENGTH, LONGER = 8, 20
ENCODER = EncoderConfig(width=16, depth=3, mlp_width=24, num_heads=2)
TOWER = TextConfig(vocabulary_size=40, length=LENGTH, embedding_size=12, encoder=ENCODER)


def unit_embeddings(tower, params, ids):
    return unit(np.asarray(run(tower, params, ids).embedding, np.float64))


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_tokens_behind_the_length_change_nothing(pooling, positions, scale):
    tower = dataclasses.replace(TOWER, pooling=pooling, positions=positions)
    # Large kernels make peaked attention and large residuals.
    params = drawn(shapes(tower), seed=1)
    params["encoder"] = jax.tree.map(lambda leaf: np.float32(scale) * leaf, params["encoder"])
    longer, wide = lengthened(tower, parameters.flatten(params), LONGER)
    random = np.random.default_rng(0)
    ids = random.integers(0, 40, (5, LENGTH), np.int32)
    ours = unit_embeddings(tower, params, ids)
    assert np.abs(ours - ours[0]).max() > 0.01  # texts differ
    for behind in (random.integers(0, 40, (5, LONGER - LENGTH), np.int32), np.zeros((5, LONGER - LENGTH), np.int32)):
        theirs = unit_embeddings(longer, parameters.unflatten(wide), np.concatenate([ids, behind], axis=1))
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6 if scale == 1 else 1e-5)


def test_the_longer_tower_is_an_ordinary_one():
    longer, wide = lengthened(TOWER, parameters.flatten(drawn(shapes(TOWER))), LONGER)
    expected = {path: leaf.shape for path, leaf in parameters.flatten(shapes(longer)).items()}
    assert {path: array.shape for path, array in wide.items()} == expected
    assert (longer.length, longer.pooling, longer.encoder.depth) == (LONGER, "last", 4)
