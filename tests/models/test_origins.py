"""The digest of the towers that a run starts from."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from lit_het import parameters
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.models import origins
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.tuning import divided
from lit_het.towers.tuning_config import LoRA, Tuning
from lit_het.towers.vit import ViTConfig
from lit_het.training.durations import Duration
from tests.towers.models import drawn

ENCODER = EncoderConfig(width=16, depth=2, mlp_width=16, num_heads=2)
TASK = ContrastiveConfig(ViTConfig(8, 4, ENCODER), TextConfig(20, 4, 16, ENCODER), locked=())
PLAIN = drawn(TASK.build().shapes)


@pytest.mark.parametrize("tuning", [Tuning(last_blocks=1), Tuning(lora=LoRA(rank=2, dora=True))])
def test_towers_that_are_tuned_or_locked_are_known_by_what_they_were(tuning):
    task = dataclasses.replace(TASK, image_tower=dataclasses.replace(TASK.image_tower, tuning=tuning))
    shapes = parameters.flatten(task.build().shapes)
    flat = {path: jnp.asarray(array) for path, array in parameters.flatten(PLAIN).items()}
    found = {path: jnp.ones(leaf.shape) for path, leaf in shapes.items()} | divided(flat, shapes)
    tuned = parameters.unflatten(found)
    assert origins.digest(tuned) == origins.digest(PLAIN) == origins.digest(parameters.cast(tuned, jnp.bfloat16))
    other = parameters.unflatten(found | {"text_tower/positions": found["text_tower/positions"] + 1})
    assert origins.digest(other) != origins.digest(PLAIN)


def test_towers_of_files_are_a_start_and_drawn_ones_are_not():
    fields: Any = TASK.towers
    towers = {part: dataclasses.replace(tower, weights="a.npz") for part, tower in fields.items()}
    config = ExperimentConfig(Path("run"), dataclasses.replace(TASK, **towers), LoaderConfig((), 8), Duration(1))
    assert origins.of_start(config, PLAIN) == origins.digest(PLAIN)
    partly = dataclasses.replace(TASK, image_tower=towers["image_tower"])
    assert origins.of_start(dataclasses.replace(config, task=partly), PLAIN) is None
