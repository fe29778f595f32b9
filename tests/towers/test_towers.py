"""Towers: how they run must not change what they compute, and published sizes have their published sizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig, EncoderOutput
from lit_het.towers.vit import ViTConfig
from tests.towers.models import apply, drawn, initial, like_initial, run, shapes, with_encoder

ENCODER = EncoderConfig(width=16, depth=2, mlp_width=40, num_heads=2)
VIT = ViTConfig(image_size=8, patch_size=4, encoder=ENCODER)
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (3, 8, 8, 3), np.uint8)


@pytest.fixture(scope="module")
def params():
    return like_initial(shapes(VIT))


def value_and_gradient(config, params):
    return jax.jit(jax.value_and_grad(lambda params: jnp.sum(run(config, params, IMAGES).embedding ** 2)))(params)


@pytest.fixture(scope="module")
def scanned(params):
    return value_and_gradient(VIT, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unrolled", "remat"),
    [(True, "none"), (False, "dots"), (True, "full")],
)
def test_unrolling_and_remat_leave_values_and_gradients_unchanged(unrolled, remat, params, scanned):
    value, gradient = value_and_gradient(with_encoder(VIT, unrolled=unrolled, remat=remat), params)
    np.testing.assert_allclose(value, scanned[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient, scanned[1])


def test_remat_recomputes_and_scanning_makes_a_loop(params):
    def lowered(**changes):
        config = with_encoder(VIT, **changes)
        text = jax.jit(jax.grad(lambda params: run(config, params, IMAGES).embedding.sum())).lower(params).as_text()
        return text.count("stablehlo.while"), text.count("stablehlo.dot_general")

    plain = lowered()
    assert plain[0] == 2  # forward and backward
    assert lowered(unrolled=True)[0] == 0
    for remat in ("dots", "full"):
        recomputed = lowered(remat=remat)
        assert recomputed[0] == 2
        # Attention's products have a batch dimension: "dots" computes them again as well.
        assert recomputed[1] > plain[1]


def test_bfloat16_stays_close_to_float32_and_returns_float32(params):
    exact = run(VIT, params, IMAGES)
    rounded = run(with_encoder(VIT, compute_type="bfloat16"), params, IMAGES)
    assert rounded.embedding.dtype == rounded.tokens.dtype == jnp.float32
    difference = np.asarray(rounded.embedding) - np.asarray(exact.embedding)
    assert 0 < np.linalg.norm(difference) < 0.03 * np.linalg.norm(exact.embedding)


@pytest.mark.parametrize("pooling", ["class_token", "mean", "attention"])
def test_an_image_does_not_influence_the_others(pooling):
    config = dataclasses.replace(VIT, pooling=pooling)
    params, changed = drawn(shapes(config)), IMAGES.copy()
    changed[1] = 255 - changed[1]
    before, after = run(config, params, IMAGES), run(config, params, changed)
    for one, other in ((before.embedding, after.embedding), (before.tokens, after.tokens)):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_array_equal(one[[0, 2]], other[[0, 2]])
        assert not np.allclose(one[1], other[1])


@pytest.mark.parametrize("pooling", ["last", "mean", "attention"])
def test_a_text_does_not_influence_the_others_and_every_position_counts(pooling):
    config = TextConfig(vocabulary_size=20, length=4, embedding_size=8, encoder=ENCODER, pooling=pooling)
    params, text = drawn(shapes(config)), np.random.default_rng(0).integers(1, 10, (3, 4), np.int32)
    output = np.asarray(run(config, params, text).embedding)
    assert output.shape == (3, 8)
    for position in range(4):
        changed = text.copy()
        changed[1, position] += 10
        changed = np.asarray(run(config, params, changed).embedding)
        np.testing.assert_array_equal(output[[0, 2]], changed[[0, 2]])
        assert not np.allclose(output[1], changed[1])  # no causal mask, no padding mask


def test_pixels_are_mapped_to_minus_one_and_one_and_patches_are_numbered_row_by_row(params, monkeypatch):
    image = np.arange(8 * 8 * 3).reshape(1, 8, 8, 3).astype(np.uint8) + np.uint8(64)  # up to 255
    expected = [image[0, y : y + 4, x : x + 4].ravel() / 127.5 - 1 for y in (0, 4) for x in (0, 4)]
    # The encoder passes tokens on: what comes out are patches and positions.
    monkeypatch.setattr(
        "lit_het.towers.vit.Encoder.__call__", lambda self, tokens, *_, **__: EncoderOutput(tokens, {}, {})
    )
    tokens = jax.jit(functools.partial(apply, VIT))(params, image).tokens[0]
    wanted = np.stack(expected) @ params["patches"]["kernel"] + params["patches"]["bias"] + params["positions"]
    np.testing.assert_allclose(tokens, wanted, rtol=1e-4, atol=1e-5)


def test_blocks_start_from_different_weights():
    kernel = initial(VIT)["encoder"]["blocks"]["mlp"]["up"]["kernel"]
    assert kernel.shape == (2, 16, 40)
    assert not np.any(np.isclose(kernel[0], kernel[1]).all(axis=0))


def test_the_representation_is_a_dense_layer_with_tanh_after_pooling():
    config = dataclasses.replace(VIT, pooling="class_token", representation_size=24)
    params = drawn(shapes(config), scale=0.1)
    output = run(config, params, IMAGES)
    assert config.embedding_size == output.embedding.shape[1] == 24
    pooled = np.asarray(output.tokens, np.float64)[:, 0]
    layer = params.pop("pre_logits")
    expected = np.tanh(pooled @ layer["kernel"] + layer["bias"])
    np.testing.assert_allclose(output.embedding, expected, rtol=1e-4, atol=1e-5)
    # The rest of the tower is the same one.
    plain = run(dataclasses.replace(config, representation_size=None), params, IMAGES)
    np.testing.assert_array_equal(plain.tokens, output.tokens)
    assert plain.embedding.shape[1] == 16


def test_a_tower_without_pooling_returns_all_tokens_a_class_token_among_them():
    pooled = dataclasses.replace(VIT, pooling="class_token", num_registers=2, representation_size=24)
    whole, params = pooled.without_pooling(), drawn(shapes(pooled))
    assert whole is not None
    assert (whole.num_tokens, whole.embedding_size) == (3 + VIT.num_patches, whole.num_tokens * ENCODER.width)
    kept = {name: params[name] for name in shapes(whole)}
    found = run(whole, kept, IMAGES).embedding.reshape(len(IMAGES), whole.num_tokens, -1)
    np.testing.assert_allclose(found, run(pooled, params, IMAGES).tokens, atol=1e-6)
    with pytest.raises(UserError, match="class_token = True needs pooling 'none'"):
        dataclasses.replace(VIT, pooling="mean", class_token=True)


def test_pixels_beyond_the_last_whole_patch_are_ignored(params):
    wider = np.pad(IMAGES, ((0, 0), (0, 3), (0, 2), (0, 0)), constant_values=200)
    assert dataclasses.replace(VIT, image_size=11).num_patches == VIT.num_patches
    np.testing.assert_array_equal(run(VIT, params, wider).embedding, run(VIT, params, IMAGES).embedding)


def test_an_image_of_another_size_has_the_tokens_of_a_tower_with_resized_positions():
    small, large = (ViTConfig(size, 4, ENCODER, pooling="mean") for size in (8, 12))
    params = drawn(shapes(small))
    grid = jax.image.resize(params["positions"].reshape(2, 2, -1), (3, 3, ENCODER.width), "linear")
    image = RANDOM.integers(0, 256, (2, 12, 12, 3), np.uint8)
    resized = run(large, {**params, "positions": grid.reshape(9, -1)}, image)
    np.testing.assert_allclose(run(small, params, image).tokens, resized.tokens, atol=1e-6)


def test_masked_patches_have_the_mask_token_and_their_own_positions():
    config = dataclasses.replace(VIT, pooling="mean")
    params, token = drawn(shapes(config)), RANDOM.normal(size=ENCODER.width).astype(np.float32)
    one, other = RANDOM.integers(0, 256, (2, 1, 8, 8, 3), np.uint8)

    def tokens(image, masked, params=params):
        return run(config, params, image, masked=np.array([masked]), mask_token=token).tokens

    ends, mixed = [True, False, False, True], one.copy()
    mixed[:, :4, :4], mixed[:, 4:, 4:] = other[:, :4, :4], other[:, 4:, 4:]
    np.testing.assert_array_equal(tokens(one, ends), tokens(mixed, ends))
    np.testing.assert_array_equal(tokens(one, [False] * 4), run(config, params, one).tokens)
    # A kernel of zeros with the mask token as bias embeds every patch as that token.
    same = {**params, "patches": {"kernel": np.zeros_like(params["patches"]["kernel"]), "bias": token}}
    np.testing.assert_allclose(run(config, same, one).tokens, tokens(other, [True] * 4, same), atol=1e-6)


def test_impossible_shapes_are_refused_by_name():
    with pytest.raises(UserError, match=r"encoder.width = 10 is not a multiple of encoder.num_heads = 4"):
        EncoderConfig(width=10, num_heads=4)
    experts = ExpertsConfig(num_experts=2, num_blocks=1)
    for encoder in (EncoderConfig(experts=experts), EncoderConfig(norm_placement="after")):
        with pytest.raises(UserError, match=r"encoder.first_norm = False needs norm_placement = 'before' and no exp"):
            dataclasses.replace(encoder, first_norm=False)
    with pytest.raises(UserError, match="image_size = 15 is less than patch_size = 16"):
        ViTConfig(image_size=15)
    with pytest.raises(UserError, match="representation_size = 0 must be at least 1"):
        ViTConfig(representation_size=0)
    with pytest.raises(UserError, match="pooling_heads = 5 needs pooling 'attention' and a width that is a multiple"):
        ViTConfig(pooling_heads=5)
    with pytest.raises(UserError, match=r"unknown encoder size 'XXL'; the sizes are mu, Ti"):
        encoder_size("XXL")


def count(config):
    return parameters.count(shapes(config))


# name: width, depth, mlp width, heads (Dosovitskiy et al. 2021; Zhai et al. 2022; SoViT; PaLI; big_vision's variants).
SIZES = {
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),
    "So150m": (880, 18, 2320, 16),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "g-opt": (1536, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "G-opt": (1536, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),
}


def encoder_parameters(d, depth, m):
    """Four d x d products of attention, two d x m of the MLP, their biases, two norms a block and one at the end."""
    return depth * (4 * (d * d + d) + (d * m + m) + (m * d + d) + 2 * 2 * d) + 2 * d


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_have_the_shapes_and_counts_of_the_formula(name):
    width, depth, mlp, heads = SIZES[name]
    encoder = encoder_size(name)
    assert (encoder.width, encoder.depth, encoder.mlp_width, encoder.num_heads) == (width, depth, mlp, heads)
    assert encoder.compute_type == "bfloat16"
    patches = 14 * 14 * 3 * width + width
    image = ViTConfig(224, 14, encoder, pooling="class_token")
    assert count(image) == encoder_parameters(width, depth, mlp) + patches + 256 * width + width


@pytest.mark.slow
def test_every_pooling_and_a_text_tower_have_the_counts_of_the_formula():
    width, depth, mlp, _ = SIZES["So150m"]
    blocks, patches = encoder_parameters(width, depth, mlp), 14 * 14 * 3 * width + width
    encoder = encoder_size("So150m")
    image = ViTConfig(224, 14, encoder)
    pooled = width + 4 * (width**2 + width) + 2 * width * mlp + mlp + width + 2 * width
    assert count(dataclasses.replace(image, pooling="attention")) == blocks + patches + 256 * width + pooled
    assert count(dataclasses.replace(image, pooling="mean", positions="sine_cosine")) == blocks + patches
    text = TextConfig(1000, 16, 64, encoder)
    assert count(text) == blocks + 1000 * width + 16 * width + width * 64 + 64


@pytest.mark.parametrize(
    ("size", "patch_size", "more", "classes", "millions"),
    [
        ("So400m", 14, {"pooling": "attention"}, 0, "428"),
        # Zhai et al. 2022, Table 2, and Dosovitskiy et al. 2021, Table 1, without the head.
        ("g", 14, {"pooling": "mean"}, 0, "1011"),
        ("G", 14, {"pooling": "mean"}, 0, "1843"),
        ("B", 16, {"pooling": "class_token"}, 0, "86"),
        # Dehghani et al. 2023, Table 1, with JFT-3B's classes.
        ("e", 14, {"pooling": "attention"}, 29_593, "3926"),
        # HET-XL's Table 3, with a linear classifier. The last dense layer is 1,024 wide, and 1,138 in Appendix P.
        ("L", 32, {"pooling": "class_token", "representation_size": 1024}, 18_291, "325.3"),
        ("L", 32, {"pooling": "class_token", "representation_size": 1024}, 21_843, "328.9"),
        ("L", 32, {"pooling": "class_token", "representation_size": 1024}, 29_593, "336.9"),
        ("L", 32, {"pooling": "class_token", "representation_size": 1138}, 18_291, "327.5"),
    ],
)
def test_published_towers_have_their_published_counts(size, patch_size, more, classes, millions):
    config = ViTConfig(224, patch_size, encoder_size(size), **more)
    total = count(config) + classes * (config.embedding_size + 1)
    assert f"{total / 1e6:.{'1' if '.' in millions else '0'}f}" == millions
