"""V-MoE files with attention pooling, sine-cosine positions, pooling of the first token, and experts in any block."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from lit_het.checkpoints.rename import load
from lit_het.checkpoints.vmoe.importing import describe_vmoe
from lit_het.errors import UserError
from lit_het.towers.positions import sine_cosine_positions
from tests.checkpoints.importing import assert_recorded, compiled, golden, image_tower, params_of, pixels
from tests.checkpoints.test_vmoe import recorded, stored

# V-MoE's names of what big_vision has too.
NAMES = {
    "Transformer/": "Encoder/",
    "LayerNorm_0/": "LayerNorm_0/",
    "MAPHead_0/MultiHeadDotProductAttention_0/": "MapHead/MultiHeadDotProductAttention/",
    "MAPHead_0/MlpBlock_0/": "MapHead/Mlp/",
    "MAPHead_0/LayerNorm_0/": "MapHead/LayerNorm/",
    "MAPHead_0/": "MapHead/",
    "MultiHeadDotProductAttention_0/": "SelfAttention/",
    "MlpBlock_0/": "Mlp/",
}


def as_vmoe(arrays):
    """Returns a ViT of big_vision under V-MoE's names."""
    renamed = {}
    for name, array in arrays.items():
        theirs = functools.reduce(lambda name, pair: name.replace(*pair), NAMES.items(), name)
        renamed["Encoder/posembed_input/pos_embedding" if name == "pos_embedding" else theirs] = array
    return renamed


def tower_of(found):
    """Returns an imported tower as a function of images."""
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: image_tower(found).build(nnx.Rngs(0)))))
    sources = [source for source in found.parameter_sources if not source.target.startswith("head/")]
    return compiled(image_tower(found), load(found.arrays, sources, {"image_tower": shapes})["image_tower"])


def test_attention_pooling_gives_the_embeddings_that_big_visions_has():
    recording = golden("two_towers_siglip")
    params = params_of(recording)
    image = {name.removeprefix("img/"): array for name, array in params.items() if name.startswith("img/")}
    found = describe_vmoe(stored(as_vmoe(image), ""))
    assert image_tower(found).pooling == "attention"
    embedding = tower_of(found)(pixels(recording["image"])).embedding
    assert_recorded(embedding / np.linalg.norm(embedding, axis=1, keepdims=True), recording["zimg"])


def test_positions_of_sines_and_cosines_need_an_image_size():
    tree, _ = recorded("last2_K1_eval")
    fixed = {name: array for name, array in tree.items() if "posembed_input" not in name}
    with pytest.raises(UserError, match=r"no positions .* set --image-size"):
        describe_vmoe(stored(fixed))
    found = describe_vmoe(stored(fixed), image_size=16)
    assert image_tower(found).positions == "sine_cosine"
    # As learned positions of the same values, where the class token has none.
    width, side = image_tower(found).encoder.width, image_tower(found).side
    same = np.concatenate([np.zeros((1, width)), sine_cosine_positions(side, side, width)]).astype(np.float32)
    learned = describe_vmoe(stored({**tree, "params/Encoder/posembed_input/pos_embedding": same[None]}))
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3)).astype(np.float32)
    np.testing.assert_allclose(tower_of(found)(images).embedding, tower_of(learned)(images).embedding, atol=1e-5)


def test_pooling_of_the_first_token_is_chosen_where_a_file_does_not_record_it():
    tree, _ = recorded("last2_K1_eval")
    patches_only = {name: array for name, array in tree.items() if name != "params/cls"}
    position = "params/Encoder/posembed_input/pos_embedding"
    patches_only[position] = patches_only[position][:, 1:]
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3)).astype(np.float32)
    mean = tower_of(describe_vmoe(stored(patches_only)))(images)
    first = tower_of(describe_vmoe(stored(patches_only), image_pooling="first"))(images)
    np.testing.assert_allclose(mean.embedding, mean.tokens.mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(first.embedding, mean.tokens[:, 0], atol=1e-6)


def test_experts_may_be_in_any_blocks():
    tree, _ = recorded("last2_K1_eval")
    moved = {name.replace("encoderblock_3/", "encoderblock_x/"): array for name, array in tree.items()}
    moved = {name.replace("encoderblock_2/", "encoderblock_3/"): array for name, array in moved.items()}
    moved = {name.replace("encoderblock_x/", "encoderblock_2/"): array for name, array in moved.items()}
    found = describe_vmoe(stored(moved))
    experts = image_tower(found).encoder.experts
    assert experts is not None
    assert (experts.blocks, experts.block_numbers(4)) == ((1, 2), (1, 2))
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: image_tower(found).build(nnx.Rngs(0)))))
    sources = [source for source in found.parameter_sources if not source.target.startswith("head/")]
    blocks = load(found.arrays, sources, {"image_tower": shapes})["image_tower"]["encoder"]
    router = jax.tree.leaves(blocks["expert_blocks"]["mixture"]["router"])[0]
    for index, number in enumerate((1, 3)):
        theirs = tree[f"params/Encoder/encoderblock_{number}/Moe/Router/dense/kernel"]
        np.testing.assert_array_equal(router[index], theirs)
    assert "blocks" in blocks
