"""Towers equal big_vision's recorded outputs, and fixed positions are its positions."""

import dataclasses
import functools
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.towers.positions import sine_cosine_positions
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViT, ViTConfig

GOLDEN = Path(__file__).parents[1] / "golden"
ENCODER = EncoderConfig(width=16, depth=2, mlp_width=40, num_heads=2)
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def attention(golden, prefix):
    """Their heads have an axis of their own: kernels [d, heads, size] and, for the output, [heads, size, d]."""
    layers = {}
    for name in ("query", "key", "value", "out"):
        kernel, bias = golden[f"{prefix}/{name}/kernel"], golden[f"{prefix}/{name}/bias"]
        kernel = kernel.reshape(-1, kernel.shape[-1]) if name == "out" else kernel.reshape(kernel.shape[0], -1)
        layers[name] = {"kernel": kernel, "bias": bias.reshape(-1)}
    return layers


def dense(golden, prefix):
    return {"kernel": golden[f"{prefix}/kernel"], "bias": golden[f"{prefix}/bias"]}


def norm(golden, prefix):
    return {"scale": golden[f"{prefix}/scale"], "bias": golden[f"{prefix}/bias"]}


def mlp(golden, prefix):
    return {"up": dense(golden, f"{prefix}/Dense_0"), "down": dense(golden, f"{prefix}/Dense_1")}


def encoder(golden, prefix):
    blocks = []
    for i in range(ENCODER.depth):
        block = f"{prefix}/encoderblock_{i}"
        blocks.append(
            {
                "attention_norm": norm(golden, f"{block}/LayerNorm_0"),
                "attention": attention(golden, f"{block}/MultiHeadDotProductAttention_0"),
                "mlp_norm": norm(golden, f"{block}/LayerNorm_1"),
                "mlp": mlp(golden, f"{block}/MlpBlock_0"),
            }
        )
    return {"blocks": stack(blocks), "norm": norm(golden, f"{prefix}/encoder_norm")}


def stack(trees):
    first = trees[0]
    if isinstance(first, dict):
        return {name: stack([tree[name] for tree in trees]) for name in first}
    return np.stack(trees)


def vit_params(golden, pooling, positions):
    params = {
        "patches": {
            "kernel": golden["params/embedding/kernel"].reshape(-1, ENCODER.width),
            "bias": golden["params/embedding/bias"],
        },
        "encoder": encoder(golden, "params/Transformer"),
    }
    if positions == "learned":
        params["positions"] = golden["params/pos_embedding"][0]
    if pooling == "class_token":
        params["class_token"] = golden["params/cls"][0, 0]
    if pooling == "attention":
        params["pooling"] = {
            "probe": golden["params/MAPHead_0/probe"][0],
            "attention": attention(golden, "params/MAPHead_0/MultiHeadDotProductAttention_0"),
            "norm": norm(golden, "params/MAPHead_0/LayerNorm_0"),
            "mlp": mlp(golden, "params/MAPHead_0/MlpBlock_0"),
        }
    return params


def with_params(config, params):
    """Returns the compiled tower with every parameter replaced; a missing or an extra one is an error."""
    graph, state = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))
    expected = nnx.to_pure_dict(state)

    def check(ours, theirs, path):
        assert isinstance(ours, dict) == isinstance(theirs, dict), path
        if isinstance(ours, dict):
            assert ours.keys() == theirs.keys(), path
            return {name: check(ours[name], theirs[name], f"{path}/{name}") for name in ours}
        assert ours.shape == theirs.shape, path
        return jnp.asarray(theirs)

    params = check(expected, params, "")

    # Recorded images are floats where the signature, which tests enforce, asks for uint8: this is the bare function.
    def call(params, x):
        tower = nnx.merge(graph, params)
        return inspect.unwrap(type(tower).__call__)(tower, x)

    return functools.partial(jax.jit(call), params)


@pytest.mark.parametrize("unrolled", [True, False])
@pytest.mark.parametrize(
    ("name", "pooling", "positions"),
    [
        ("vit_tok_learn", "class_token", "learned"),
        ("vit_map_learn", "attention", "learned"),
        ("vit_gap_sincos2d", "mean", "sine_cosine"),
    ],
)
def test_the_image_tower_equals_big_visions(name, pooling, positions, unrolled, monkeypatch):
    with np.load(GOLDEN / f"{name}.npz") as golden:
        config = ViTConfig(16, 4, dataclasses.replace(ENCODER, unrolled=unrolled), pooling, positions)
        # The recorded images are 16 x 24: the grid of positions is 4 x 6.
        params = vit_params(golden, pooling, positions)
        rectangle = params.pop("positions", sine_cosine_positions(4, 6, ENCODER.width))
        if positions == "learned":
            params["positions"] = np.zeros((16, ENCODER.width), np.float32)
        monkeypatch.setattr(ViT, "_positions", lambda self: jnp.asarray(rectangle))

        # Pixels that the tower maps to the recorded floats: (x + 1) · 127.5, left unrounded.
        pixels = (golden["image"].astype(np.float64) + 1) * 127.5
        output = with_params(config, params)(jnp.asarray(pixels, jnp.float32))
        assert_close(output.tokens, golden["out/encoded"])
        assert_close(output.embedding, golden["out/pre_logits"])


@pytest.mark.parametrize("unrolled", [True, False])
def test_the_text_tower_equals_big_visions(unrolled):
    with np.load(GOLDEN / "text_last.npz") as golden:
        config = TextConfig(
            vocabulary_size=50, length=8, embedding_size=8, encoder=dataclasses.replace(ENCODER, unrolled=unrolled)
        )
        params = {
            "tokens": {"embedding": golden["params/Embed_0/embedding"]},
            "positions": golden["params/pos_embedding"][0],
            "encoder": encoder(golden, "params/Encoder_0"),
            "projection": dense(golden, "params/head"),
        }
        output = with_params(config, params)(jnp.asarray(golden["text"]))
        assert_close(output.tokens, golden["out/transformed"])
        assert_close(output.embedding, golden["output"])


def test_sine_cosine_positions_equal_big_visions():
    with np.load(GOLDEN / "posemb_sincos2d.npz") as golden:
        for name in golden.files:
            height, width, size = (int(n) for n in name.split("x"))
            actual = sine_cosine_positions(height, width, size)
            np.testing.assert_allclose(actual, golden[name][0], rtol=1e-5, atol=1e-5, err_msg=name)


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
