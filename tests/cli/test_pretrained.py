"""A classifier starts from the tower of another run: at its resolution or another, of a classifier or of LiT."""

import dataclasses

import jax
import numpy as np
import pytest

from lit_het import parameters
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.errors import UserError
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.models.opening import open_run
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.directory import checkpoint_dir, config_path
from lit_het.training.durations import Duration
from lit_het.training.initialization import initial_params
from lit_het.weights.native import checksums
from lit_het.weights.native.saving import save_imported
from lit_het.weights.resample import resample_patches, resample_positions

ENCODER = EncoderConfig(width=16, depth=2, mlp_width=16, num_heads=2)
EXPERTS = ExpertsConfig(num_experts=4, num_blocks=1, capacity_factor=1.05)
TOWER = ViTConfig(
    12, 4, dataclasses.replace(ENCODER, experts=EXPERTS), pooling="class_token", representation_size=8, members="apart"
)


def experiment_on(tower, run_dir, **changes) -> ExperimentConfig:
    task = ClassificationConfig(tower, DeterministicConfig(zero_kernel=True), num_classes=3)
    data = LoaderConfig(("nowhere",), tower.image_size, 8, ClassIndex())
    return dataclasses.replace(ExperimentConfig(run_dir, task, data, Duration(1)), **changes)


def save(config, params, locked=()):
    config.run_dir.mkdir()
    experiment.save(config, config_path(config.run_dir))
    locked, trained = parameters.partition(params, locked)
    save_imported(checkpoint_dir(config.run_dir), trained, {"locked_checksum": checksums.digest(locked)})


def drawn(config, seed=1):
    return jax.jit(config.task.build().initialize)(jax.random.key(seed))


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    """A V-MoE of 12 pixels, 3 x 3 patches of 4, with its parameters."""
    config = experiment_on(TOWER, tmp_path_factory.mktemp("runs") / "upstream")
    params = drawn(config)
    save(config, params)
    return config, parameters.flatten(params)


def start(tower, source, run_dir, fsdp=1):
    config = experiment_on(tower, run_dir, pretrained=PretrainedConfig(source))
    mesh = MeshConfig(fsdp=fsdp, data=-1).build()
    return parameters.flatten(parameters.merge(*initial_params(config, config.task.build(), mesh)))


@pytest.mark.slow
@pytest.mark.devices
@pytest.mark.parametrize(("image_size", "patch_size"), [(12, 4), (20, 4), (18, 6)])
def test_positions_and_patches_are_resampled_and_all_else_is_taken_as_it_is(upstream, tmp_path, image_size, patch_size):
    config, theirs = upstream
    experts = dataclasses.replace(EXPERTS, capacity_factor=1.5, dropout_rate=0.1, num_members=2, num_selected=1)
    encoder = dataclasses.replace(ENCODER, experts=experts)
    tower = dataclasses.replace(TOWER, image_size=image_size, patch_size=patch_size, encoder=encoder)
    ours = start(tower, config.run_dir, tmp_path / "run", fsdp=2)
    positions, kernel = "image_tower/positions", "image_tower/patches/kernel"
    expected = dict(theirs)
    expected[positions] = resample_positions(
        np.asarray(theirs[positions]), image_size // patch_size, keeps_corners=patch_size == 4
    )
    square = np.asarray(theirs[kernel]).reshape(4, 4, 3, -1)
    expected[kernel] = resample_patches(square, patch_size).reshape(-1, ENCODER.width)
    for path, array in ours.items():
        if path.startswith("image_tower/"):
            np.testing.assert_array_equal(array, expected[path], path)
    assert not np.asarray(ours["head/logits/kernel"]).any(), "the head is drawn afresh"


@pytest.mark.slow
def test_the_tower_of_a_lit_run_is_found_where_that_run_had_it_from(upstream, tmp_path):
    source, theirs = upstream
    tower = dataclasses.replace(TOWER, members="mean")
    text = TextConfig(10, 4, tower.embedding_size, ENCODER)
    lit = experiment_on(tower, tmp_path / "lit", pretrained=PretrainedConfig(source.run_dir))
    lit = dataclasses.replace(lit, task=ContrastiveConfig(tower, text))
    params = drawn(lit, seed=2)
    towers = {part: array for part, array in parameters.flatten(params).items() if not part.startswith("image_tower/")}
    towers |= {path: array for path, array in theirs.items() if path.startswith("image_tower/")}
    save(lit, parameters.unflatten(towers), lit.task.locked)
    ours = start(dataclasses.replace(TOWER, image_size=20), lit.run_dir, tmp_path / "run")
    direct = start(dataclasses.replace(TOWER, image_size=20), source.run_dir, tmp_path / "run")
    assert checksums.digest(parameters.unflatten(ours)) == checksums.digest(parameters.unflatten(direct))


@pytest.mark.slow
def test_a_dense_layer_behind_the_pooling_is_dropped_or_drawn(upstream, tmp_path):
    config, theirs = upstream
    without = dataclasses.replace(TOWER, representation_size=None)
    ours = start(without, config.run_dir, tmp_path / "run")
    assert not any("pre_logits" in path for path in ours)
    np.testing.assert_array_equal(ours["image_tower/class_token"], theirs["image_tower/class_token"])
    plain = experiment_on(without, tmp_path / "plain")
    save(plain, drawn(plain, seed=3))
    ours = start(TOWER, plain.run_dir, tmp_path / "run")
    assert np.asarray(ours["image_tower/pre_logits/kernel"]).any()


def test_towers_that_differ_otherwise_are_refused(upstream, tmp_path):
    config, _ = upstream
    with pytest.raises(
        UserError, match=r"has pooling = class_token, but this configuration has mean; set --task.image-tower"
    ):
        start(dataclasses.replace(TOWER, pooling="mean"), config.run_dir, tmp_path / "run")


def test_a_frozen_tower_at_another_resolution_is_opened_with_the_parameters_of_training(upstream, tmp_path):
    """The run keeps a checksum of what it locked: resampling gives the same bits again."""
    source, _ = upstream
    tower = dataclasses.replace(TOWER, image_size=20)
    probe = experiment_on(tower, tmp_path / "probe", pretrained=PretrainedConfig(source.run_dir))
    task = dataclasses.replace(probe.task, head=HetXLConfig(), locked=("image_tower/.*",))
    probe = dataclasses.replace(probe, task=task)
    locked, trained = initial_params(probe, task.build(), MeshConfig().build())
    save(probe, parameters.merge(locked, trained), task.locked)
    opened = open_run(probe.run_dir)
    assert checksums.digest(opened.params) == checksums.digest(parameters.merge(locked, trained))


def test_a_tower_without_pooling_keeps_the_class_token(upstream, tmp_path):
    config, theirs = upstream
    ours = start(TOWER.without_pooling(), config.run_dir, tmp_path / "run")
    np.testing.assert_array_equal(ours["image_tower/class_token"], theirs["image_tower/class_token"])
    assert not any("pre_logits" in path for path in ours)
    without = dataclasses.replace(TOWER, pooling="none", class_token=False, representation_size=None)
    with pytest.raises(UserError, match="has a class token; set --task"):
        start(without, config.run_dir, tmp_path / "run")
