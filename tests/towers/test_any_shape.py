"""A ViT on patches of images of any shape (NaFlex): the mask, and positions resized to each image's shape."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import patches
from lit_het.errors import UserError
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.resizing import bilinear
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from tests.towers.models import drawn, graph, run, shapes, with_encoder

VIT = ViTConfig(16, 4, EncoderConfig(width=16, depth=2, mlp_width=32, num_heads=2), max_patches=20)
GRIDS = [(4, 5), (1, 20), (20, 1), (2, 3), (4, 4)]
IMAGES = [np.random.default_rng(n).integers(0, 256, (4 * r, 4 * c, 3), np.uint8) for n, (r, c) in enumerate(GRIDS)]


def cut(config, images=IMAGES):
    assert config.patches is not None
    return np.stack([patches.cut(config.patches, image) for image in images])


def embed(config, params, images):
    return np.asarray(run(config, params, images).embedding)


@pytest.fixture(scope="module")
def params():
    return drawn(shapes(VIT))


def test_positions_are_resized_with_antialiasing_at_half_pixel_centres(params):
    """As a matrix for each axis, applied one after the other."""
    places = jnp.asarray(patches.split(cut(VIT))[1])
    found = np.asarray(jax.jit(lambda params: nnx.merge(graph(VIT), params)._positions_at(places))(params))
    own = params["positions"].reshape(4, 4, 16)
    for image, (rows, columns) in zip(found, GRIDS, strict=True):
        expected = np.einsum(
            "ra,cb,abd->rcd", bilinear(4, rows, smooth=True), bilinear(4, columns, smooth=True), own
        ).reshape(-1, 16)
        np.testing.assert_allclose(image[: rows * columns], expected, atol=1e-6)


def test_a_square_has_the_embedding_of_its_pixels(params):
    for side in (2, 4):
        image = np.random.default_rng(side).integers(0, 256, (4 * side, 4 * side, 3), np.uint8)
        found = embed(VIT, params, cut(VIT, [image]))
        np.testing.assert_allclose(found, embed(VIT, params, image[None]), atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pooling": "mean", "num_registers": 2},
        {"pooling": "class_and_mean", "num_registers": 2, "top": VIT.encoder},
        {"pooling": "class_token", "num_registers": 2, "input_norm": True},
        {"pooling": "first", "positions": "sine_cosine"},
        {"uncertainty_token": True},
        {"layer_input": True},
    ],
    ids=str,
)
def test_an_image_has_the_same_embedding_however_long_its_row_and_whatever_beside(changes):
    config = dataclasses.replace(VIT, **changes)
    params = drawn(shapes(config))
    longer = dataclasses.replace(config, max_patches=33)
    found = embed(config, params, cut(config))
    np.testing.assert_allclose(found, embed(longer, params, cut(longer)), atol=1e-5)
    for image, alone in zip(IMAGES[:2], found, strict=False):
        np.testing.assert_allclose(embed(config, params, cut(config, [image]))[0], alone, atol=1e-5)


def test_padding_is_no_expert_s_and_leaves_embeddings_as_they_are():
    experts = ExpertsConfig(num_experts=4, num_blocks=1, eval_capacity_factor=4.0)
    config = with_encoder(VIT, experts=experts)
    params = drawn(shapes(config))
    longer = dataclasses.replace(config, max_patches=33)
    np.testing.assert_allclose(embed(config, params, cut(config)), embed(longer, params, cut(longer)), atol=1e-5)


@pytest.mark.parametrize("layer", ["representation_size", "projection_size"])
@pytest.mark.parametrize("pooling", ["attention", "class_token", "mean", "class_and_mean", "first"])
def test_rows_without_an_image_change_no_gradient_of_others(pooling, layer):
    config = dataclasses.replace(VIT, pooling=pooling, num_registers=1, **{layer: 8})
    images = cut(config, IMAGES[:2])
    images[1] = 0

    def loss(params):
        embedding = run(config, params, images).embedding
        return jnp.sum(embedding[0] ** 2), embedding

    gradient, embedding = jax.jit(jax.grad(loss, has_aux=True))(drawn(shapes(config)))
    assert np.isfinite(embedding).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_the_patches_that_are_kept_keep_their_places(params):
    """All of them, in another order, have the same mean."""
    config = dataclasses.replace(VIT, pooling="mean")
    params = {name: tree for name, tree in params.items() if name != "pooling"}
    order = np.stack([np.random.default_rng(n).permutation(20) for n in range(len(IMAGES))])
    images = cut(config)
    found = run(config, params, images, None, order).embedding
    np.testing.assert_allclose(found, embed(config, params, images), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": "none"}, "max_patches = 20 does not go with pooling = 'none'"),
        ({"num_inputs": 2}, "num_inputs"),
        ({"patch_sizes": (4, 8)}, "patch_sizes"),
        ({"max_patches": 0}, "max_patches = 0 must be at least 1"),
        (
            {"encoder": dataclasses.replace(VIT.encoder, experts=ExpertsConfig(4, 1, 1, num_members=2))},
            "an ensemble of experts",
        ),
    ],
)
def test_what_needs_squares_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(VIT, **changes)
