"""Distillation from the stored embeddings of another model."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.data_pipelines.embeddings import Recipe
from lit_het.errors import UserError
from lit_het.heads.contrastive_config import GaussianContrastiveConfig
from lit_het.losses.base import weights
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy, softened_divergence
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.losses.relations import relation_divergence
from lit_het.objectives.base import Setup, check_objectives
from lit_het.objectives.mixing import Mixing
from lit_het.objectives.teacher import ImageTeacherConfig, TeacherConfig
from lit_het.random import keys_at
from lit_het.types import Batch
from tests.tasks import test_tasks
from tests.tasks.meshes import assert_eight_devices_have_the_loss_of_one, compiled, forward, start, task_of
from tests.training.tiny_run import TASK, host_batches

SIZE = 6
PROJECTED = TeacherConfig(image_weight=2.0, text_weight=3.0, relation_weight=0.5, projection=SIZE, temperature=0.1)
CONFIG = dataclasses.replace(TASK, teacher=PROJECTED, locked=())
KEYS = keys_at(0, 3)


def batch_with(size=SIZE, seed=0):
    """Rows of a teacher whose embeddings are not unit vectors; those of invalid rows are NaN."""
    (batch,), rng = host_batches(1), np.random.default_rng(seed)
    rows = [rng.normal(size=(len(batch.valid), size)).astype(np.float16) for _ in range(2)]
    for one in rows:
        one[~batch.valid] = np.nan
    return dataclasses.replace(batch, teacher_image=rows[0], teacher_text=rows[1])


BATCH = batch_with()


def of_numpy(x):
    x = np.asarray(x, np.float64)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@functools.cache
def without_teacher():
    return task_of(dataclasses.replace(CONFIG, teacher=None))


def test_the_terms_equal_their_definition():
    task, params = start(CONFIG)
    loss, metrics = forward(task.loss)(params, BATCH, KEYS)
    plain = {name: tree for name, tree in params.items() if name != "teacher"}
    expected, _ = forward(without_teacher().loss)(plain, BATCH, KEYS)
    model: Any = task.model(params)
    valid = BATCH.valid
    image, text = model.image_tower(jnp.asarray(BATCH.image)), model.text_tower(jnp.asarray(BATCH.text))
    keys = model.head.image_key(image.embedding), model.head.text_key(text.embedding)
    distances = []
    for side, key, stored in zip(("image", "text"), keys, (BATCH.teacher_image, BATCH.teacher_text), strict=True):
        layer = params["teacher"][side]
        projected = of_numpy(np.asarray(key) @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"]))
        cosine = np.sum(projected * of_numpy(stored), axis=1)[valid]
        distances.append(np.mean(2 - 2 * cosine))
        assert float(metrics[f"teacher_{side}_distance"]) == pytest.approx(distances[-1], rel=1e-4)
    rows = [
        np.where(valid[:, None], of_numpy(x), 1.0).astype(np.float32) for x in (BATCH.teacher_image, BATCH.teacher_text)
    ]
    temperatures = model.head.temperature(), 0.1
    divergence = relation_divergence(
        keys, (jnp.asarray(rows[0]), jnp.asarray(rows[1])), temperatures, weights(jnp.asarray(valid))
    )
    assert float(metrics["teacher_divergence"]) == pytest.approx(float(divergence), rel=1e-4)
    total = 2 * distances[0] + 3 * distances[1] + 0.5 * float(divergence)
    assert float(loss - expected) == pytest.approx(total, rel=1e-4)


def test_gradients_are_finite_and_reach_towers_projections_and_the_temperature():
    task, params = start(CONFIG)
    _, gradient = compiled(task.loss)(params, BATCH, KEYS)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    for side in ("image", "text"):
        assert np.any(gradient["teacher"][side]["kernel"])


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_have_the_loss_of_one():
    task, params = start(CONFIG)
    assert_eight_devices_have_the_loss_of_one(task.loss, params, BATCH)


def test_a_classifier_learns_the_image_embeddings_of_a_teacher():
    config = dataclasses.replace(test_tasks.CLASSIFIER, teacher=ImageTeacherConfig(projection=SIZE), locked=())
    task, params = start(config)
    rng = np.random.default_rng(0)
    batch = Batch(test_tasks.VALID, test_tasks.IMAGE, label=test_tasks.LABEL)
    stored = rng.normal(size=(len(batch.valid), SIZE)).astype(np.float32)
    loss, metrics = forward(task.loss)(params, dataclasses.replace(batch, teacher_image=stored), KEYS)
    plain = {name: tree for name, tree in params.items() if name != "teacher"}
    expected, _ = forward(task_of(dataclasses.replace(config, teacher=None)).loss)(plain, batch, KEYS)
    assert 0 < float(metrics["teacher_image_distance"]) < 4
    assert float(loss - expected) == pytest.approx(float(metrics["teacher_image_distance"]), rel=1e-4)


LOGITS = ImageTeacherConfig(image_weight=0.0, logits_weight=2.0, temperature=3.0)


@pytest.mark.parametrize("loss", [SoftmaxCrossEntropy(), SigmoidCrossEntropy()], ids=["softmax", "sigmoid"])
def test_a_classifier_learns_the_logits_of_a_teacher_with_the_noise_of_its_loss(loss):
    config = dataclasses.replace(test_tasks.CLASSIFIER, teacher=LOGITS, loss=loss)
    assert {name: x.shape for name, x in LOGITS.columns(config).items()} == {"teacher_logits": (test_tasks.K,)}
    task, params = start(config)
    stored = np.random.default_rng(0).normal(size=(test_tasks.B, test_tasks.K)).astype(np.float16)
    stored[~np.asarray(test_tasks.VALID)] = np.nan
    batch = Batch(test_tasks.VALID, test_tasks.IMAGE, label=test_tasks.LABEL, teacher_logits=stored)
    (total, metrics), gradient = compiled(task.loss)(params, batch, KEYS)
    plain = dataclasses.replace(batch, teacher_logits=None)
    (own, _), own_gradient = compiled(task_of(dataclasses.replace(config, teacher=None)).loss)(params, plain, KEYS)
    model: Any = task.model(params)
    samples = model.head(task.features(params, test_tasks.IMAGE), KEYS("noise"))
    counted, teacher = (test_tasks.VALID, None), np.nan_to_num(stored.astype(np.float32))
    expected = softened_divergence(loss, samples, jnp.asarray(teacher), counted, 3.0)
    assert float(metrics["teacher_divergence"]) == pytest.approx(float(expected.loss), rel=1e-4)
    assert float(metrics["teacher_agreement"]) == pytest.approx(float(expected.top1))
    assert float(total - own) == pytest.approx(2 * float(expected.loss), rel=1e-4)
    for x, y in zip(jax.tree.leaves(gradient["head"]), jax.tree.leaves(own_gradient["head"]), strict=True):
        assert np.isfinite(x).all()
        assert np.any(x != y)


def logits_of(num_classes, **fields):
    recipe = Recipe("classifier", {}, num_classes, 0, "float16", 0, **{"logits": True, **fields})
    return SimpleNamespace(beside={"teacher_logits": SimpleNamespace(address="folder", recipe=recipe)})


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (logits_of(5), r"folder holds the logits of 5 classes, the task has 3; the teacher needs the same classes"),
        (logits_of(3, logits=False), r"folder holds embeddings of images; --data\.teacher-logits needs logits"),
        (SimpleNamespace(beside={}), r"needs the logits .* lit-het embed --logits .* set --data\.teacher-logits"),
    ],
)
def test_logits_that_do_not_fit_are_refused(loader, message):
    with pytest.raises(UserError, match=message):
        check_objectives(Setup(dataclasses.replace(test_tasks.CLASSIFIER, teacher=LOGITS), loader=loader))


def test_logits_in_place_of_embeddings_and_a_student_without_classes_are_refused():
    stored = SimpleNamespace(beside={"teacher_image": logits_of(SIZE).beside["teacher_logits"]})
    with pytest.raises(UserError, match=r"folder holds logits; --data\.teacher-embeddings needs embeddings of images"):
        check_objectives(Setup(CONFIG, loader=stored))
    for config in (TASK, dataclasses.replace(test_tasks.CLASSIFIER, num_heads=2)):
        with pytest.raises(UserError, match=r"logits_weight needs a classifier with num_heads = 1; set it to 0"):
            dataclasses.replace(config, teacher=LOGITS)
    with pytest.raises(UserError, match="must be above 0"):
        ImageTeacherConfig(temperature=0.0)
    with pytest.raises(UserError, match=r"saw no mixed images; leave out task\.mixup"):
        dataclasses.replace(test_tasks.CLASSIFIER, teacher=LOGITS, mixup=0.2)


@pytest.mark.parametrize(
    ("changes", "locked", "message"),
    [
        ({"text_weight": 0.0, "relation_weight": 0.0, "image_weight": 0.0}, (), "has no weight above 0"),
        ({"temperature": 0.0}, (), "must be above 0"),
        ({"projection": 0}, (), "at least 1"),
        ({"text_weight": -1.0}, (), "at least 0"),
        ({}, ("image_tower/.*",), r"image_weight teaches the image tower, which is locked; set it to 0"),
    ],
)
def test_weights_without_a_use_are_refused(changes, locked, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, teacher=dataclasses.replace(PROJECTED, **changes), locked=locked).build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": GaussianContrastiveConfig()}, "the head 'gaussian' has none"),
        ({"mixing": Mixing(), "loss": SigmoidLoss()}, r"saw no mixed images; leave out task\.mixing"),
    ],
)
def test_a_task_whose_rows_are_no_unit_vectors_of_one_image_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **changes)


def recipe_of(side, size):
    return Recipe("tower", {"captions": "txt"} if side == "text" else {}, size, 0, "float16", 0)


def check(teacher, **sizes):
    """Checks a task with stored embeddings of the given sizes, by side."""
    stored = {
        f"teacher_{side}": SimpleNamespace(address=f"{side}s", recipe=recipe_of(side, size))
        for side, size in sizes.items()
    }
    config = dataclasses.replace(CONFIG, teacher=teacher)
    check_objectives(Setup(config, loader=SimpleNamespace(beside=stored)))


@pytest.mark.parametrize(
    ("teacher", "sizes", "message"),
    [
        (
            TeacherConfig(),
            {"image": 24, "text": 24},
            r"images have size 24, this model's 16: set --task.teacher.projection 24",
        ),
        (
            PROJECTED,
            {"image": 24, "text": 24},
            r"images have size 24, the projection 6: set --task.teacher.projection 24",
        ),
        (PROJECTED, {"image": SIZE}, r"needs the text embeddings .* lit-het embed --texts .*teacher-text-embeddings"),
        (PROJECTED, {"text": SIZE}, r"needs the image embeddings .* --data.teacher-embeddings"),
        (
            TeacherConfig(text_weight=0.0, projection=SIZE),
            {"image": SIZE, "text": 7},
            "images have size 6 and its texts 7: embed both with one model",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_by_both_sizes(teacher, sizes, message):
    with pytest.raises(UserError, match=message):
        check(teacher, **sizes)


@pytest.mark.parametrize(("num_tokens", "held"), [(2, "tokens"), (0, "embeddings of captions")])
def test_what_is_no_embedding_of_images_is_refused(num_tokens, held):
    recipe = dataclasses.replace(recipe_of("text", SIZE), num_tokens=num_tokens)
    stored = SimpleNamespace(beside={"teacher_image": SimpleNamespace(address="folder", recipe=recipe)})
    with pytest.raises(UserError, match=f"folder holds {held}; --data.teacher-embeddings needs embeddings of images"):
        check_objectives(Setup(CONFIG, loader=stored))


def test_a_teacher_of_another_size_fits_by_a_projection_or_its_similarities_alone():
    check(PROJECTED, image=SIZE, text=SIZE)
    check(TeacherConfig(image_weight=0.0, text_weight=0.0), image=24, text=24)
    check(TeacherConfig(text_weight=0.0, relation_weight=0.0, projection=SIZE), image=SIZE)
