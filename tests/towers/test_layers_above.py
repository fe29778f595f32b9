"""How many layers stand above a parameter: what layer-wise learning-rate decay counts."""

import dataclasses

import jax
import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.bert import BertConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from tests.towers.models import shapes

ENCODER = EncoderConfig(width=8, depth=3, mlp_width=8, num_heads=2)
VIT = ViTConfig(8, 4, ENCODER, pooling="attention", num_registers=1, input_norm=True, representation_size=8)
TEXT = TextConfig(20, 4, 8, dataclasses.replace(ENCODER, depth=2), pooling="attention")


def above(tower):
    """Returns the numbers of a tower's parameters by the first parts of their paths, of stacked blocks in lists."""
    params = shapes(tower)
    found = tower.layers_above(params)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    numbers = {}
    for path, number in parameters.flatten(found).items():
        if "blocks" in path:
            assert np.broadcast_shapes(number.shape, parameters.flatten(params)[path].shape) is not None
            assert number.shape[1:] == (1,) * (len(parameters.flatten(params)[path].shape) - 1)
            number = number.ravel().tolist()
        part = "/".join(path.split("/")[: 2 if path.startswith("encoder") else 1])
        assert numbers.setdefault(part, number) == number, path
    return numbers


def test_the_embedding_of_a_vit_counts_one_layer_more_than_its_first_block():
    inputs = dict.fromkeys(("patches", "positions", "registers", "input_norm"), 4)
    outputs = dict.fromkeys(("encoder/norm", "pooling", "pre_logits"), 0)
    assert above(VIT) == {**inputs, "encoder/blocks": [3, 2, 1], **outputs}


def test_text_towers_count_from_their_own_depth():
    outputs = dict.fromkeys(("encoder/norm", "pooling", "projection"), 0)
    assert above(TEXT) == {"tokens": 3, "positions": 3, "encoder/blocks": [2, 1], **outputs}
    bert = BertConfig(20, 4, 8, dataclasses.replace(ENCODER, norm_placement="after"), pooler=True)
    inputs = dict.fromkeys(("tokens", "positions", "segments", "input_norm"), 4)
    assert above(bert) == {**inputs, "encoder/blocks": [3, 2, 1], "pre_logits": 0, "projection": 0}


@pytest.mark.parametrize(
    ("depth", "num_blocks", "plain", "with_experts"),
    [
        (8, 2, [8, 7, 6, 5, 4, 2], [3, 1]),  # plain ones, a pair, then blocks with experts: 5 and 7 of 0 to 7
        (5, None, [5, 3, 1], [4, 2]),
        (7, 1, [7, 6, 5, 4, 3, 1], [2]),
    ],
)
def test_blocks_with_experts_stand_between_plain_ones(depth, num_blocks, plain, with_experts):
    experts = ExpertsConfig(num_experts=2, num_selected=1, num_blocks=num_blocks)
    numbers = above(ViTConfig(8, 4, dataclasses.replace(ENCODER, depth=depth, experts=experts), pooling="class_token"))
    assert numbers["encoder/blocks"] == plain
    assert numbers["encoder/expert_blocks"] == with_experts
    assert numbers["class_token"] == depth + 1


def test_heads_have_no_layer_above_and_parts_of_a_model_are_accepted():
    task = ContrastiveConfig(
        dataclasses.replace(VIT, representation_size=None), TEXT, DeterministicContrastiveConfig(), locked=()
    ).build()
    params = task.shapes
    numbers = task.layers_above(params)
    assert jax.tree.structure(numbers) == jax.tree.structure(params)
    assert set(jax.tree.leaves(numbers["head"])) == {0}
    assert (numbers["image_tower"]["positions"], numbers["text_tower"]["positions"]) == (4, 3)
    part = {"text_tower": {"positions": params["text_tower"]["positions"]}}
    assert task.layers_above(part) == {"text_tower": {"positions": 3}}


def test_a_resnet_is_refused():
    task = ClassificationConfig(ResNetConfig(depth=50), num_classes=3).build()
    with pytest.raises(UserError, match=r"--optimizer\.layer-decay needs a Transformer"):
        task.layers_above({"image_tower": {}})
