"""Towers: how they run must not change what they compute, and published sizes have their published sizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig, EncoderOutput
from lit_het.towers.vit import ViTConfig


def initial(config):
    return jax.jit(lambda: nnx.to_pure_dict(nnx.state(config.build(nnx.Rngs(0)))))()


def compiled(config, params=None):
    params = initial(config) if params is None else params
    graph = nnx.graphdef(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))
    return functools.partial(jax.jit(lambda params, inputs: nnx.merge(graph, params)(inputs)), params)


ENCODER = EncoderConfig(width=16, depth=2, mlp_width=40, num_heads=2)
VIT = ViTConfig(image_size=8, patch_size=4, encoder=ENCODER)
IMAGES = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3)), jnp.uint8)
PARAMS = initial(VIT)


def with_encoder(config, **changes):
    return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, **changes))


def apply(config, params, inputs):
    graph = nnx.graphdef(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))
    return nnx.merge(graph, params)(inputs)


def value_and_gradient(config):
    def loss(params):
        return jnp.sum(apply(config, params, IMAGES).embedding ** 2)

    return jax.jit(jax.value_and_grad(loss))(PARAMS)


@pytest.fixture(scope="module")
def scanned():
    return value_and_gradient(VIT)


@pytest.mark.parametrize(("unrolled", "remat"), [(True, "none"), (False, "dots"), (False, "full"), (True, "full")])
def test_unrolling_and_remat_leave_values_and_gradients_unchanged(unrolled, remat, scanned):
    value, gradient = value_and_gradient(with_encoder(VIT, unrolled=unrolled, remat=remat))
    np.testing.assert_allclose(value, scanned[0], rtol=1e-5)
    for actual, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(scanned[1]), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_recomputes_and_scanning_makes_a_loop(remat):
    def lowered(**changes):
        config = with_encoder(VIT, **changes)
        text = jax.jit(jax.grad(lambda p: apply(config, p, IMAGES).embedding.sum())).lower(PARAMS).as_text()
        return text.count("stablehlo.while"), text.count("stablehlo.dot_general")

    plain, recomputed = lowered(), lowered(remat=remat)
    assert plain[0] == recomputed[0] == 2  # forward and backward
    assert lowered(unrolled=True)[0] == 0
    # Attention's products have a batch dimension: "dots" computes them again as well.
    assert recomputed[1] > plain[1]


def test_bfloat16_stays_close_to_float32_and_returns_float32():
    exact = compiled(VIT, PARAMS)(IMAGES)
    rounded = compiled(with_encoder(VIT, compute_type="bfloat16"), PARAMS)(IMAGES)
    assert rounded.embedding.dtype == rounded.tokens.dtype == jnp.float32
    difference = np.asarray(rounded.embedding - exact.embedding)
    assert 0 < np.linalg.norm(difference) < 0.03 * np.linalg.norm(exact.embedding)


@pytest.mark.parametrize("pooling", ["class_token", "mean", "attention"])
def test_an_image_does_not_influence_the_others(pooling):
    config = dataclasses.replace(VIT, pooling=pooling)
    tower = compiled(config)
    changed = tower(IMAGES.at[1].set(255 - IMAGES[1]))
    output = tower(IMAGES)
    for name in ("embedding", "tokens"):
        before, after = np.asarray(getattr(output, name)), np.asarray(getattr(changed, name))
        np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
        assert not np.allclose(before[1], after[1])


@pytest.mark.parametrize("pooling", ["last", "mean", "attention"])
def test_a_text_does_not_influence_the_others_and_every_position_counts(pooling):
    config = TextConfig(vocabulary_size=20, length=4, embedding_size=8, encoder=ENCODER, pooling=pooling)
    tower = compiled(config)
    text = jnp.asarray(np.random.default_rng(0).integers(1, 10, (3, 4)), jnp.int32)
    output = np.asarray(tower(text).embedding)
    assert output.shape == (3, 8)
    for position in range(4):
        changed = np.asarray(tower(text.at[1, position].add(10)).embedding)
        np.testing.assert_array_equal(output[[0, 2]], changed[[0, 2]])
        assert not np.allclose(output[1], changed[1])  # no causal mask, no padding mask


def test_pixels_are_mapped_to_minus_one_and_one_and_patches_are_numbered_row_by_row():
    image = np.arange(8 * 8 * 3).reshape(1, 8, 8, 3).astype(np.uint8) + np.uint8(64)  # up to 255
    expected = [image[0, y : y + 4, x : x + 4].ravel() / 127.5 - 1 for y in (0, 4) for x in (0, 4)]
    with pytest.MonkeyPatch.context() as patch:
        # The encoder passes tokens on: what comes out are patches and positions.
        patch.setattr("lit_het.towers.vit.Encoder.__call__", lambda self, tokens, key: EncoderOutput(tokens, {}, {}))
        tokens = compiled(VIT, PARAMS)(jnp.asarray(image)).tokens[0]
    kernel, bias = (np.asarray(PARAMS["patches"][name]) for name in ("kernel", "bias"))
    wanted = np.stack(expected) @ kernel + bias + np.asarray(PARAMS["positions"])
    np.testing.assert_allclose(tokens, wanted, rtol=1e-4, atol=1e-5)


def test_blocks_start_from_different_weights():
    kernel = np.asarray(PARAMS["encoder"]["blocks"]["mlp"]["up"]["kernel"])
    assert kernel.shape == (2, 16, 40)
    assert not np.any(np.isclose(kernel[0], kernel[1]).all(axis=0))


def test_the_representation_is_a_dense_layer_with_tanh_after_pooling():
    config = dataclasses.replace(VIT, pooling="class_token", representation_size=24)
    params = initial(config)
    params["pre_logits"]["bias"] = np.linspace(-1, 1, 24, dtype=np.float32)
    output = compiled(config, params)(IMAGES)
    assert config.embedding_size == output.embedding.shape[1] == 24
    pooled = np.asarray(output.tokens, np.float64)[:, 0]
    expected = np.tanh(pooled @ np.asarray(params["pre_logits"]["kernel"]) + params["pre_logits"]["bias"])
    np.testing.assert_allclose(output.embedding, expected, rtol=1e-4, atol=1e-5)
    # The rest of the tower is the same one.
    del params["pre_logits"]
    plain = compiled(dataclasses.replace(config, representation_size=None), params)(IMAGES)
    np.testing.assert_array_equal(plain.tokens, output.tokens)
    assert plain.embedding.shape[1] == 16


def test_a_tower_without_pooling_returns_all_tokens_a_class_token_among_them():
    pooled = dataclasses.replace(VIT, pooling="class_token", num_registers=2, representation_size=24)
    whole, params = pooled.without_pooling(), initial(pooled)
    assert (whole.num_tokens, whole.embedding_size) == (3 + VIT.num_patches, whole.num_tokens * ENCODER.width)
    kept = {name: params[name] for name in initial(whole)}
    found = compiled(whole, kept)(IMAGES).embedding.reshape(len(IMAGES), whole.num_tokens, -1)
    np.testing.assert_allclose(found, compiled(pooled, params)(IMAGES).tokens, atol=1e-6)
    with pytest.raises(UserError, match="class_token = True needs pooling 'none'"):
        dataclasses.replace(VIT, pooling="mean", class_token=True)


def test_pixels_beyond_the_last_whole_patch_are_ignored():
    wider = jnp.pad(IMAGES, ((0, 0), (0, 3), (0, 2), (0, 0)), constant_values=200)
    assert dataclasses.replace(VIT, image_size=11).num_patches == VIT.num_patches
    np.testing.assert_array_equal(compiled(VIT, PARAMS)(wider).embedding, compiled(VIT, PARAMS)(IMAGES).embedding)


def test_impossible_shapes_are_refused_by_name():
    with pytest.raises(UserError, match=r"encoder.width = 10 is not a multiple of encoder.num_heads = 4"):
        EncoderConfig(width=10, num_heads=4)
    with pytest.raises(UserError, match="image_size = 15 is less than patch_size = 16"):
        ViTConfig(image_size=15)
    with pytest.raises(UserError, match="representation_size = 0 must be at least 1"):
        ViTConfig(representation_size=0)
    with pytest.raises(UserError, match=r"unknown encoder size 'XXL'; the sizes are mu, Ti"):
        encoder_size("XXL")


def count(config):
    return parameters.count(nnx.eval_shape(lambda: nnx.to_pure_dict(nnx.state(config.build(nnx.Rngs(0))))))


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


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_have_the_shapes_and_counts_of_the_formula(name):
    width, depth, mlp, heads = SIZES[name]
    encoder = encoder_size(name)
    assert (encoder.width, encoder.depth, encoder.mlp_width, encoder.num_heads) == (width, depth, mlp, heads)
    assert encoder.compute_type == "bfloat16"
    blocks = encoder_parameters(width, depth, mlp)
    patches = 14 * 14 * 3 * width + width
    image = ViTConfig(224, 14, encoder, pooling="class_token")
    assert count(image) == blocks + patches + 256 * width + width
    pooled = width + 4 * (width**2 + width) + 2 * width * mlp + mlp + width + 2 * width
    assert count(dataclasses.replace(image, pooling="attention")) == blocks + patches + 256 * width + pooled
    assert count(dataclasses.replace(image, pooling="mean", positions="sine_cosine")) == blocks + patches
    text = TextConfig(1000, 16, 64, encoder)
    assert count(text) == blocks + 1000 * width + 16 * width + width * 64 + 64


def test_sovit_400m_14_has_428_million_parameters():
    assert count(ViTConfig(224, 14, encoder_size("So400m"), pooling="attention")) / 1e6 == pytest.approx(428, abs=0.6)


@pytest.mark.parametrize(("size", "millions"), [("g", 1011), ("G", 1843)])
def test_the_giants_have_the_counts_of_zhai_et_al(size, millions):
    # Zhai et al. 2022, Table 2, without the head.
    assert round(count(ViTConfig(224, 14, encoder_size(size), pooling="mean")) / 1e6) == millions


def test_vit_e_14_has_3926_million_parameters():
    # Dehghani et al. 2023, Table 1, with JFT-3B's 29,593 classes.
    config = ViTConfig(224, 14, encoder_size("e"), pooling="attention")
    assert round((count(config) + 29_593 * (config.embedding_size + 1)) / 1e6) == 3926


def test_vit_b_16_has_86_million_parameters():
    # Dosovitskiy et al. 2021, Table 1, without the classifier.
    assert round(count(ViTConfig(224, 16, encoder_size("B"), pooling="class_token")) / 1e6) == 86


# The last dense layer is 1,024 wide, and 1,138 in Appendix P.
@pytest.mark.parametrize(
    ("size", "classes", "millions"),
    [(1024, 18_291, "325.3"), (1024, 21_843, "328.9"), (1024, 29_593, "336.9"), (1138, 18_291, "327.5")],
)
def test_vit_l_32_with_a_linear_classifier_has_the_count_of_het_xls_table_3(size, classes, millions):
    config = ViTConfig(224, 32, encoder_size("L"), pooling="class_token", representation_size=size)
    assert f"{(count(config) + size * classes + classes) / 1e6:.1f}" == millions
