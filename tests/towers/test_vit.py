"""A ViT on images of another size, and with masked patches."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig

ENCODER = EncoderConfig(width=8, depth=1, mlp_width=12, num_heads=2)


def test_an_image_of_another_size_has_the_tokens_of_a_tower_with_resized_positions():
    small, large = (ViTConfig(size, 4, ENCODER, pooling="mean") for size in (8, 12))
    tower, other = small.build(nnx.Rngs(0)), large.build(nnx.Rngs(0))
    grid = tower.positions[...].reshape(2, 2, -1)
    other.positions[...] = jax.image.resize(grid, (3, 3, grid.shape[-1]), "linear").reshape(9, -1)
    image = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 12, 12, 3)), jnp.uint8)
    np.testing.assert_allclose(tower(image).tokens, other(image).tokens, atol=1e-6)


def test_masked_patches_have_the_mask_token_and_their_own_positions():
    tower = ViTConfig(8, 4, ENCODER, pooling="mean").build(nnx.Rngs(0))
    rng = np.random.default_rng(0)
    one, other = jnp.asarray(rng.integers(0, 256, (2, 1, 8, 8, 3)), jnp.uint8)
    masked = jnp.array([[True, False, False, True]])
    token = jnp.asarray(rng.normal(size=ENCODER.width), jnp.float32)
    mixed = one.at[:, :4, :4].set(other[:, :4, :4]).at[:, 4:, 4:].set(other[:, 4:, 4:])
    np.testing.assert_array_equal(
        tower(one, masked=masked, mask_token=token).tokens, tower(mixed, masked=masked, mask_token=token).tokens
    )
    nothing = jnp.zeros((1, 4), bool)
    np.testing.assert_array_equal(tower(one, masked=nothing, mask_token=token).tokens, tower(one).tokens)
    # A kernel of zeros with the mask token as bias embeds every patch as that token.
    assert tower.patches.bias is not None
    tower.patches.kernel[...], tower.patches.bias[...] = jnp.zeros_like(tower.patches.kernel[...]), token
    everything = jnp.ones((1, 4), bool)
    np.testing.assert_allclose(tower(one).tokens, tower(other, masked=everything, mask_token=token).tokens, atol=1e-6)
