"""Rotary positions turn queries and keys as the equation says, at any size and for any subset of patches."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.image_config import RotaryConfig, ViTConfig
from lit_het.towers.rotary import Rotation, grid_angles, line_angles
from tests.towers.models import apply, like_initial, run, shapes, with_encoder

ENCODER = EncoderConfig(width=16, depth=2, mlp_width=40, num_heads=2)
VIT = ViTConfig(12, 4, ENCODER, "class_token", "none", num_registers=2, rotary=RotaryConfig())
RANDOM = np.random.default_rng(0)
IMAGES = jnp.asarray(RANDOM.integers(0, 256, (2, 12, 12, 3), np.uint8))


def test_every_plane_is_turned_by_its_angle():
    positions, x = np.arange(3), RANDOM.normal(size=(2, 3, 2, 4)).astype(np.float32)
    turned = Rotation.by(jnp.asarray(line_angles(positions, 100.0, 2))[None])(jnp.asarray(x))
    for b, n, h in np.ndindex(2, 3, 2):
        for plane, frequency in enumerate((1.0, 0.1)):
            angle = n * frequency
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            np.testing.assert_allclose(turned[b, n, h, plane::2], turn @ x[b, n, h, plane::2], atol=1e-6)


def test_attention_depends_on_differences_of_positions_only():
    layer = ENCODER.build_attention(nnx.Rngs(0))
    tokens = jnp.asarray(RANDOM.normal(size=(10, 16)), jnp.float32)
    angles = (jnp.asarray(line_angles(np.arange(5) + start, 10_000.0, 4)) for start in (0, 7))
    here, there = (Rotation.by(rows[None]) for rows in angles)
    moved = layer(tokens, tokens, 2, rotation=there)
    np.testing.assert_allclose(layer(tokens, tokens, 2, rotation=here), moved, atol=1e-5)
    assert np.abs(layer(tokens, tokens, 2) - moved).max() > 1e-2


def test_patches_have_the_angles_of_their_rows_and_columns():
    """Centres of patches in [-1, 1] times 2 π (DINOv3), or first edges in 16 places (EVA-02)."""
    of_dino = grid_angles(RotaryConfig(), 2, 3, 8).reshape(2, 3, 4)
    places = np.pi * np.array([-1.0, 1.0]), 2 * np.pi * np.array([-2 / 3, 0, 2 / 3])
    for row, column in np.ndindex(2, 3):
        y, x = places[0][row], places[1][column]
        np.testing.assert_allclose(of_dino[row, column], [y, y / 10, x, x / 10], atol=1e-6)
    of_eva = grid_angles(RotaryConfig(10_000.0, 0.0, 16.0, place=0.0), 1, 4, 4)
    np.testing.assert_allclose(of_eva[:, 1], [0, 4, 8, 12])


@pytest.mark.parametrize("config", [VIT, with_encoder(VIT, head_size=12)], ids=["8 per head", "12 per head"])
def test_a_subset_of_patches_keeps_its_places(config):
    params = like_initial(shapes(config))
    every = np.tile(np.arange(9), (2, 1))
    whole, same = run(config, params, IMAGES), apply(config, params, IMAGES, kept=jnp.asarray(every))
    np.testing.assert_allclose(same.tokens, whole.tokens, atol=1e-5)
    swapped = apply(config, params, IMAGES, kept=jnp.asarray(every[:, ::-1]))
    np.testing.assert_allclose(swapped.tokens[:, :2:-1], whole.tokens[:, 3:], atol=1e-5)


def test_blocks_that_are_run_otherwise_compute_the_same():
    params = like_initial(shapes(VIT))
    whole = run(VIT, params, IMAGES).embedding
    unrolled = run(with_encoder(VIT, unrolled=True, remat="full"), params, IMAGES).embedding
    np.testing.assert_allclose(unrolled, whole, atol=1e-5)


def test_heads_and_experts_without_rotary_positions_are_refused():
    with pytest.raises(UserError, match="a multiple of 4, not 2"):
        with_encoder(VIT, num_heads=8)
    with pytest.raises(UserError, match="a multiple of 4, not 6"):
        with_encoder(VIT, head_size=6)
    with pytest.raises(UserError, match="experts = None"):
        with_encoder(VIT, experts=ExpertsConfig(num_experts=2, num_blocks=1))
    with pytest.raises(UserError, match="base = 0"):
        dataclasses.replace(VIT, rotary=RotaryConfig(base=0.0))
