"""Towers with imported weights equal big_vision's recorded outputs, and fixed positions are its positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.towers.positions import sine_cosine_positions
from lit_het.towers.vit import ViT
from lit_het.weights.big_vision.importing import read_big_vision
from tests.towers.models import with_encoder
from tests.weights.importing import (
    apply,
    assert_recorded,
    golden,
    image_tower,
    loaded,
    params_of,
    pixels,
    run,
    save,
    text_tower,
)


@pytest.mark.parametrize("unrolled", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize(
    ("name", "pooling", "positions"),
    [
        ("vit_tok_learn", "class_token", "learned"),
        ("vit_map_learn", "attention", "learned"),
        ("vit_gap_sincos2d", "mean", "sine_cosine"),
    ],
)
def test_the_image_tower_equals_big_visions(name, pooling, positions, unrolled, monkeypatch, tmp_path):
    recording = golden(name)
    arrays = params_of(recording)
    # The recorded images are 16 x 24, their grid 4 x 6: the file gets a square one, the tower the recorded one.
    if positions == "learned":
        rectangle = arrays["pos_embedding"][0]
        arrays["pos_embedding"] = np.zeros((1, 16, 16), np.float32)
    else:
        rectangle = sine_cosine_positions(4, 6, 16)
    monkeypatch.setattr(ViT, "_positions", lambda *_: jnp.asarray(rectangle))

    imported = read_big_vision(save(tmp_path / "vit.npz", arrays), image_size=16)
    config = image_tower(imported)
    assert (config.pooling, config.positions) == (pooling, positions)
    tower = jax.jit(functools.partial(apply, with_encoder(config, unrolled=unrolled)))
    output = tower(loaded(imported)["image_tower"], pixels(recording["image"]))
    assert_recorded(output.tokens, recording["out/encoded"])
    assert_recorded(output.embedding, recording["out/pre_logits"])


@pytest.mark.parametrize("unrolled", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_text_tower_equals_big_visions(unrolled, tmp_path):
    recording = golden("text_last")
    imported = read_big_vision(save(tmp_path / "text.npz", params_of(recording)))
    config, params = with_encoder(text_tower(imported), unrolled=unrolled), loaded(imported)["text_tower"]
    output = run(config, params, recording["text"])
    assert_recorded(output.tokens, recording["out/transformed"])
    assert_recorded(output.embedding, recording["output"])


def test_sine_cosine_positions_equal_big_visions():
    for name, expected in golden("posemb_sincos2d").items():
        height, width, size = (int(n) for n in name.split("x"))
        actual = sine_cosine_positions(height, width, size)
        np.testing.assert_allclose(actual, expected[0], rtol=1e-5, atol=1e-5, err_msg=name)


def test_sine_cosine_positions_follow_the_formula_row_by_row():
    """[sin(x ω), cos(x ω), sin(y ω), cos(y ω)], ω_i = 10000^(-i / (d/4 - 1))."""
    actual = sine_cosine_positions(2, 3, 8)
    omega = [1.0, 1e-4]
    for y in range(2):
        for x in range(3):
            expected = [f(c * w) for c, f in ((x, np.sin), (x, np.cos), (y, np.sin), (y, np.cos)) for w in omega]
            np.testing.assert_allclose(actual[3 * y + x], expected, atol=1e-6)


def test_sine_cosine_positions_refuse_other_widths():
    with pytest.raises(UserError, match="multiple of 4, not 6"):
        sine_cosine_positions(2, 2, 6)
