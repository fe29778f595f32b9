"""A tower trained with random patch sizes, and ``--patch-size`` and ``--image-size`` of evaluations."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from lit_het.cli.main import main
from lit_het.configs import quickstart_upstream
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.errors import UserError
from lit_het.eval.evaluation import read_records
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.models.opening import open_run
from lit_het.models.sizes import AS_TRAINED, Sizes, with_sizes
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.vit import ViTConfig
from tests import tiny
from tests.cli.conftest import refusal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def flexible(data, tmp_path_factory):
    """A classifier of the names, with its initial parameters; tests only read it."""
    config = tiny.classifier(quickstart_upstream.get_config(), data, tmp_path_factory.mktemp("flexible") / "run")
    tower = config.task.image_tower
    assert isinstance(tower, ViTConfig)
    size = tower.image_size
    tower = dataclasses.replace(tower, patch_size=size // 2, patch_sizes=(size // 4, size // 2), positions="learned")
    task = dataclasses.replace(
        config.task,
        image_tower=tower,
        head=DeterministicConfig(zero_kernel=False),
        loss=SoftmaxCrossEntropy(),
        num_classes=len(tiny.COLOURS) * len(tiny.SHAPES),
    )
    config = dataclasses.replace(config, task=task, data=dataclasses.replace(config.data, labels=ClassIndex()))
    tiny.finish_untrained(config)
    return config.run_dir


def features(run):
    size = run.config.data.image_size
    images = np.random.default_rng(0).integers(0, 256, (3, size, size, 3), np.uint8)
    return np.asarray(jax.jit(run.task.features)(run.params, images))


def test_a_run_has_other_features_at_other_sizes_and_its_own_at_those_of_training(flexible):
    run = open_run(flexible)
    size = run.config.data.image_size
    assert with_sizes(run, AS_TRAINED) is run
    np.testing.assert_array_equal(features(with_sizes(run, Sizes(size // 2, size))), features(run))
    assert np.abs(features(with_sizes(run, Sizes(patch=size // 4))) - features(run)).max() > 1e-3
    larger = with_sizes(run, Sizes(image=2 * size))
    assert larger.config.data.image_size == 2 * size
    tower = larger.config.task.image_tower
    assert isinstance(tower, ViTConfig)
    assert tower.num_patches == 16
    assert larger.tower != run.tower


def test_an_image_and_patches_of_twice_the_size_have_the_same_features(flexible):
    """Of an image of one colour, all enlargements are the same image."""
    run = open_run(flexible)
    size = run.config.data.image_size

    def of_colour(one, size):
        return np.asarray(jax.jit(one.task.features)(one.params, np.full((1, size, size, 3), 200, np.uint8)))

    both = with_sizes(run, Sizes(size, 2 * size))
    np.testing.assert_allclose(of_colour(both, 2 * size), of_colour(run, size), atol=1e-4)


def test_an_evaluation_at_another_size_is_not_saved(flexible, data, tmp_path, capsys):
    size, output = open_run(flexible).config.data.image_size, tmp_path / "figures.json"
    before = list(read_records(flexible))
    command = ["zero-shot", "--checkpoint", str(flexible), "--data", f"shapes={data / 'train'}", "--split", "."]
    assert main([*command, "--patch-size", str(size // 4), "--output", str(output)]) == 0
    assert 0 <= json.loads(output.read_text())["supervised/shapes/top1"] <= 1
    assert "with other sizes it is another model" in "".join(capsys.readouterr())
    assert len(list(read_records(flexible))) == len(before)
    assert "--patch-size 0 must be at least 1" in refusal(capsys, *command, "--patch-size", "0")
    assert "takes squares; set --image-size instead" in refusal(capsys, *command, "--max-patches", "9")
    assert f"image_size = {size} is less than patch_size = 999" in refusal(capsys, *command, "--patch-size", "999")


def test_other_towers_have_no_patches(flexible):
    run = open_run(flexible)
    task = dataclasses.replace(run.config.task, image_tower=ResNetConfig())
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, task=task))
    with pytest.raises(UserError, match="is no ViT with any number of patches; leave out --patch-size"):
        with_sizes(other, Sizes(patch=4))
