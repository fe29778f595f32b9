"""Masked inclusion (ProLIP): what is masked, the loss against loops, and devices."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.objectives.masking import MaskingConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch
from tests.tasks.meshes import EIGHT_DEVICES, KEYS, assert_eight_devices_have_the_loss_of_one, start

B, EVERY = 32, 2
ENCODER = EncoderConfig(width=16, depth=1, mlp_width=32, num_heads=2)
MASKING = MaskingConfig(weight=0.1, every=EVERY, mask_token=19, padding_token=0)
CONFIG = ContrastiveConfig(
    image_tower=ViTConfig(16, 4, ENCODER, pooling="class_token", projection_size=4, uncertainty_token=True),
    text_tower=TextConfig(20, 4, 8, ENCODER, pooling="class_token", uncertainty_token=True),
    head=GaussianContrastiveConfig(variances="towers", initial_bias=-1.0),
    loss=SigmoidLoss("dense"),
    locked=(),
    masking=MASKING,
)


def host_batch(weight=None) -> Any:
    """Some of the masked rows are invalid, and all rows of one of eight devices."""
    random = np.random.default_rng(0)
    valid = np.ones(B, bool)
    valid[[2, 3, 4, 5, 6, 7]] = False
    image = random.integers(0, 256, (B, 16, 16, 3), dtype=np.uint8)
    return Batch(valid, image, text=random.integers(0, 20, (B, 4)).astype(np.int32), weight=weight)


def reference(mean, log_variance, other_mean, other_log_variance):
    """``-log sigmoid(1000 (log ∫ p² q - log ∫ p q²))`` with variances times exp(10), the mean over dimensions."""
    total = 0.0
    for i in range(len(mean)):
        p, q = np.exp(log_variance[i] + 10), np.exp(other_log_variance[i] + 10)
        squares = (mean[i] - other_mean[i]) ** 2

        def overlap(p, q, squares=squares):
            return -np.log(p) / 2 - np.log(p + 2 * q) / 2 - squares / (p + 2 * q)

        total += np.logaddexp(0, -1000 * (overlap(p, q) - overlap(q, p)))
    return total / len(mean)


def gaussians(embedding):
    mean, log_variance = np.split(np.asarray(embedding, np.float64), 2, axis=1)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True), log_variance


def test_the_loss_is_that_of_loops_over_masked_rows():
    (task, params), batch = start(CONFIG), host_batch()
    without, rows = dataclasses.replace(CONFIG, masking=None).build(), np.arange(0, B, EVERY)

    @jax.jit
    def computed(params, batch):
        pixels, words = batch.image[rows], batch.text[rows]
        model: Any = nnx.merge(task.graph, params)
        of_images, of_texts = jax.random.split(KEYS("masking"))
        kept, masked = MASKING.kept_patches(of_images, len(rows), 16), MASKING.masked_text(of_texts, words)
        images = model.image_tower(pixels), model.image_tower(pixels, None, kept)
        texts = model.text_tower(words), model.text_tower(masked)
        sides = [tuple(output.embedding for output in side) for side in (images, texts)]
        return task.loss(params, batch, KEYS), without.loss(params, batch, KEYS), sides

    (total, metrics), (rest, other_metrics), sides = computed(params, batch)
    assert "masked_inclusion_loss" not in other_metrics
    losses = []
    for row, index in enumerate(rows):
        if batch.valid[index]:
            pairs = [map(gaussians, side) for side in sides]
            losses.append(sum(reference(*(x[row] for x in (*whole, *part))) for whole, part in pairs))
    for found in (total - rest, metrics["masked_inclusion_loss"]):
        assert float(found) == pytest.approx(MASKING.weight * np.mean(losses), rel=1e-4)


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_have_the_loss_of_one():
    (task, params), batch = start(CONFIG), host_batch(np.random.default_rng(1).random(B).astype(np.float32))
    assert_eight_devices_have_the_loss_of_one(task.loss, params, batch)


def test_a_masked_image_depends_on_its_kept_patches_only():
    (task, params), image = start(CONFIG), host_batch().image[:2]

    @jax.jit
    def embedding(image, kept):
        model: Any = nnx.merge(task.graph, params)
        return model.image_tower(image, None, kept).embedding

    kept = np.array([[0, 5, 6], [1, 2, 15]])
    masked = image.copy()
    for row, number in itertools.product(range(2), range(16)):
        if number not in kept[row]:
            top, left = 4 * (number // 4), 4 * (number % 4)
            masked[row, top : top + 4, left : left + 4] = 0
    found, whole = np.asarray(embedding(image, kept)), np.asarray(embedding(image, None))
    np.testing.assert_array_equal(embedding(masked, kept), found)
    np.testing.assert_allclose(embedding(image, np.tile(np.arange(16), (2, 1))), whole, atol=1e-6)
    assert np.abs(whole - found).max() > 0.01


def test_a_quarter_of_the_patches_is_kept_and_three_quarters_of_the_words_are_replaced_and_no_padding():
    text = np.tile(np.array([[5, 7, 0, 0]], np.int32), (2000, 1))
    key = jax.random.key(0)
    kept, found = jax.jit(lambda text: (MASKING.kept_patches(key, 200, 16), MASKING.masked_text(key, text)))(text)
    kept, found = np.asarray(kept), np.asarray(found)
    assert kept.shape == (200, 4)
    assert (np.diff(kept, axis=1) > 0).all()
    assert len(np.unique(kept, axis=0)) > 150
    np.testing.assert_allclose(np.bincount(kept.ravel(), minlength=16) / 200, 0.25, atol=0.12)
    np.testing.assert_array_equal(found[:, 2:], 0)
    words = found[:, :2]
    assert set(np.unique(words)) == {5, 7, 19}
    assert (words == 19).mean() == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"head": DeterministicContrastiveConfig()}, "task.masking needs the head 'gaussian'"),
        ({"masking": dataclasses.replace(MASKING, mask_token=20)}, "task.masking.mask_token = 20 is not below"),
        ({"image_tower": ResNetConfig(), "text_tower": TextConfig(20, 4, 2048, ENCODER)}, "a ViT as image tower"),
    ],
)
def test_masking_that_does_not_fit_the_model_is_refused(change, line):
    plain = {
        "image_tower": dataclasses.replace(CONFIG.image_tower, projection_size=8, uncertainty_token=False),
        "text_tower": dataclasses.replace(CONFIG.text_tower, uncertainty_token=False),
        "head": GaussianContrastiveConfig(),
    }
    with pytest.raises(UserError, match=line):
        dataclasses.replace(CONFIG, **(plain | change))


@pytest.mark.parametrize(
    ("fields", "line"), [({"weight": 0.0}, "above 0"), ({"masked": 1.0}, "between 0 and 1"), ({"every": 0}, "every")]
)
def test_numbers_out_of_range_are_refused(fields, line):
    with pytest.raises(UserError, match=line):
        MaskingConfig(**fields)


@pytest.mark.devices
def test_a_batch_without_whole_groups_and_stored_embeddings_are_refused():
    (task, params), batch = start(CONFIG), host_batch()
    config = dataclasses.replace(CONFIG, masking=dataclasses.replace(MASKING, every=5))
    error = pytest.raises(UserError, match=r"a batch of 32 rows on 8 devices is not a multiple of 40")
    with error, jax.set_mesh(EIGHT_DEVICES.build()):
        jax.eval_shape(config.build().loss, params, batch, KEYS)
    stored = dataclasses.replace(batch, image=None, image_embedding=np.ones((B, 8), np.float32))
    with pytest.raises(UserError, match="needs images and captions, not their stored embeddings"):
        jax.eval_shape(task.loss, params, stored, KEYS)
