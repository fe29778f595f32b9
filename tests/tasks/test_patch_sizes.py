"""Random patch sizes: tokens stay as they are on resized images, and losses are those of towers of these sizes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.objectives.distillation import DistillationConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.patch_sizes import at_patch_sizes, resize_tower
from lit_het.towers.resizing import patch_resize
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch
from lit_het.weights.resample import resample
from tests.tasks.meshes import KEYS, start

ENCODER = EncoderConfig(width=8, depth=1, mlp_width=12, num_heads=2)
TOWER = ViTConfig(16, 8, ENCODER, pooling="mean", patch_sizes=(16, 4, 8))
CLASSIFIER = ClassificationConfig(TOWER, DeterministicConfig(zero_kernel=False), num_classes=3)
TEXT = TextConfig(vocabulary_size=20, length=4, embedding_size=8, encoder=ENCODER)
RANDOM = np.random.default_rng(0)
BATCH = Batch(
    valid=jnp.ones(4, bool),
    image=jnp.asarray(RANDOM.integers(0, 256, (4, 16, 16, 3)), jnp.uint8),
    label=jnp.asarray([0, 1, 2, 0]),
    text=jnp.asarray(RANDOM.integers(1, 20, (4, 4)), jnp.int32),
)


def losses(config):
    return at_patch_sizes(config.build().loss, config.image_tower)


@functools.cache
def resizing(old, new):
    """Returns the matrix of `jax.image.resize` for images of one channel, as FlexiViT builds it: from unit images."""
    units = np.eye(old * old, dtype=np.float32).reshape(-1, old, old)
    resize = jax.jit(jax.vmap(lambda unit: jax.image.resize(unit, (new, new), "linear")))
    return np.asarray(resize(units)).reshape(old * old, -1).T


@pytest.mark.parametrize(("old", "new"), [(4, 8), (4, 6), (3, 7)])
def test_larger_patches_of_the_enlarged_image_have_the_same_tokens(old, new):
    """(B x) · pinv(Bᵀ) w = x · w for any patch x and kernel w (FlexiViT, Eq. 4)."""
    patches, kernel = RANDOM.normal(size=(5, old * old)), RANDOM.normal(size=(old * old, 2))
    resize = resizing(old, new)
    np.testing.assert_allclose(patch_resize(old, new), np.linalg.pinv(resize.T), atol=1e-4)
    np.testing.assert_allclose((patches @ resize.T) @ (patch_resize(old, new) @ kernel), patches @ kernel, atol=1e-4)


@pytest.mark.parametrize("size", [4, 16])
def test_resized_parameters_are_those_of_a_resampled_checkpoint(size):
    other = dataclasses.replace(TOWER, patch_size=size, patch_sizes=())
    params = start(CLASSIFIER)[1]["image_tower"]
    found = parameters.flatten(jax.jit(lambda params: resize_tower(params, TOWER, other))(params))
    for path, value in parameters.flatten(params).items():
        np.testing.assert_allclose(found[path], resample(path, np.asarray(value), TOWER, other), atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CLASSIFIER, id="classifier"),
        pytest.param(ContrastiveConfig(TOWER, TEXT), id="contrastive, with a locked tower", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_tasks_of_each_size_the_smallest_first(config):
    _, params = start(config)

    def of_size(size):
        tower = dataclasses.replace(TOWER, patch_size=size)
        task = dataclasses.replace(config, image_tower=tower).build()

        def loss(params, batch, keys):
            resized = {**params, "image_tower": resize_tower(params["image_tower"], TOWER, tower)}
            return task.loss(resized, batch, keys)

        return loss

    both = losses(config), [of_size(size) for size in (4, 8, 16)]
    found, expected = jax.jit(lambda params: [[loss(params, BATCH, KEYS)[0] for loss in some] for some in both])(params)
    assert len({*map(float, found)}) == 3
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_gradient_of_a_size_is_that_of_a_perturbed_kernel():
    _, params = start(CLASSIFIER)
    smallest, kernel = losses(CLASSIFIER)[0], params["image_tower"]["patches"]["kernel"]
    direction = jnp.asarray(RANDOM.normal(size=kernel.shape), jnp.float32)

    @jax.jit
    @jax.value_and_grad
    def along(step):
        patches = {**params["image_tower"]["patches"], "kernel": kernel + step * direction}
        return smallest({**params, "image_tower": {**params["image_tower"], "patches": patches}}, BATCH, KEYS)[0]

    difference = (along(1e-3)[0] - along(-1e-3)[0]) / 2e-3
    np.testing.assert_allclose(along(0.0)[1], difference, rtol=2e-2)


def test_a_tower_of_one_size_has_the_loss_of_its_task():
    task = dataclasses.replace(CLASSIFIER, image_tower=dataclasses.replace(TOWER, patch_sizes=())).build()
    assert at_patch_sizes(task.loss, task.config.image_tower) == [task.loss]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"patch_sizes": (8, 5)}, "patch_sizes = 5 does not divide image_size = 16; leave it out"),
        ({"patch_sizes": (0,)}, "patch_sizes = 0 does not divide"),
        ({"positions": "sine_cosine"}, "several sizes need positions = 'learned'"),
        ({"pooling": "none"}, "several sizes need a pooling other than 'none'"),
    ],
)
def test_sizes_that_do_not_fit_and_self_distillation_are_refused(fields, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        dataclasses.replace(TOWER, **fields)
    with pytest.raises(UserError, match=re.escape("leave out task.image_tower.patch_sizes")):
        ContrastiveConfig(TOWER, TEXT, locked=(), distillation=DistillationConfig(view_size=8))
