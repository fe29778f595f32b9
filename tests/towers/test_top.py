"""Blocks that are trained on top of a locked tower (dino.txt)."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from lit_het import parameters
from lit_het.configs import experiment
from lit_het.errors import UserError
from lit_het.models.pretrained import load_weights
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.initialization import initial_params
from lit_het.weights import formats
from tests.towers.models import initial, run
from tests.training import tiny_run
from tests.weights.importing import GOLDEN

ENCODER = EncoderConfig(width=16, depth=3, mlp_width=24, num_heads=2, layer_scale=True)
TOP = dataclasses.replace(ENCODER, depth=2, activation="swiglu", initial_layer_scale=1e-5)
PLAIN = ViTConfig(8, 4, ENCODER, pooling="class_and_mean", num_registers=1)
VIT = dataclasses.replace(PLAIN, top=TOP)
CONFIG = Path("configs/quickstart_lit_deterministic.py")
LOCKED = ("image_tower/(?!top/).*",)
EXPERTS = ExpertsConfig(num_experts=2, num_selected=1, blocks=(1,))
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
TASK = ContrastiveConfig(VIT, TextConfig(20, 4, 32, dataclasses.replace(ENCODER, layer_scale=False)), locked=LOCKED)


def test_blocks_on_top_change_almost_nothing_at_first():
    params = initial(VIT)
    np.testing.assert_array_equal(params["top"]["blocks"]["mlp_scale"], np.full((2, 16), 1e-5, np.float32))
    np.testing.assert_array_equal(params["encoder"]["blocks"]["mlp_scale"], 1)
    below = {name: tree for name, tree in params.items() if name != "top"}
    # The norm of normalised tokens is themselves.
    np.testing.assert_allclose(run(VIT, params, IMAGES).embedding, run(PLAIN, below, IMAGES).embedding, atol=1e-3)


def test_only_the_blocks_on_top_have_a_gradient_and_an_optimizer_state():
    trained = tiny_run.Run(config=TASK)
    before = jax.device_get(trained.state.params)
    assert set(before["image_tower"]) == {"top"}
    assert "encoder" in trained.locked["image_tower"]
    moments = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained.state.opt_state)]
    assert any("'top'" in path for path in moments)
    assert not [path for path in moments if "image_tower" in path and "'top'" not in path]
    for batch in trained.batches():
        trained.state, _ = trained.step(trained.state, trained.locked, batch)
    for path, array in parameters.flatten(jax.device_get(trained.state.params)).items():
        if "key/bias" not in path:  # has no gradient but rounding
            assert (array != parameters.flatten(before)[path]).any(), path


def test_a_dinov3_of_a_file_gets_new_blocks_on_top():
    name = str(GOLDEN / "hf_dinov3")
    theirs = formats.open_weights(name).image_tower
    assert isinstance(theirs, ViTConfig)
    top = dataclasses.replace(TOP, width=theirs.encoder.width, num_heads=theirs.encoder.num_heads)
    tower = dataclasses.replace(theirs, pooling="class_and_mean", top=top, weights=name)
    task, plain = (
        dataclasses.replace(
            TASK,
            image_tower=one,
            text_tower=dataclasses.replace(TASK.text_tower, embedding_size=one.embedding_size),
        )
        for one in (tower, dataclasses.replace(theirs, weights=name))
    )
    config = dataclasses.replace(experiment.load_module_config(CONFIG), task=task, pretrained=None)
    locked, trainable = initial_params(config, task.build(), tiny_run.ONE_DEVICE)
    assert set(trainable["image_tower"]) == {"top"}
    found = parameters.flatten(jax.device_get(locked["image_tower"]))
    expected = parameters.flatten(load_weights(plain, {"image_tower": plain.build().shapes["image_tower"]}))
    assert found.keys() == {path.removeprefix("image_tower/") for path in expected}
    for path, array in found.items():
        np.testing.assert_array_equal(array, expected[f"image_tower/{path}"], err_msg=path)
    other = dataclasses.replace(tower, encoder=dataclasses.replace(tower.encoder, activation="relu"))
    with pytest.raises(UserError, match=r"has encoder\.activation = "):
        load_weights(dataclasses.replace(task, image_tower=other), task.build().shapes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top": dataclasses.replace(TOP, width=8)}, "blocks need the width of encoder"),
        (
            {"encoder": dataclasses.replace(ENCODER, experts=ExpertsConfig(2, 1, blocks=(1,)))},
            "have no experts below or in them",
        ),
        ({"pooling": "class_token", "norm_twice": True}, "leave out norm_twice"),
    ],
)
def test_what_does_not_go_with_blocks_on_top_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(VIT, **changes)
