"""Self-distillation and masked prediction beside a contrastive loss (SigLIP 2)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.losses.base import weights
from lit_het.losses.distillation import prototype_cross_entropy
from lit_het.objectives.distillation import (
    DistillationConfig,
    distillation_loss,
    masked_patches,
    unit_prototypes,
    unit_vectors,
)
from lit_het.objectives.views import random_views
from lit_het.random import keys_at
from lit_het.sharding import MeshConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.durations import Duration
from lit_het.types import Batch
from tests.tasks.meshes import assert_same_loss, compiled, forward, on_devices, placed, start, task_of
from tests.training.tiny_run import STEPS, TASK, Run, host_batches

SMALL = DistillationConfig(Duration(0), num_views=2, view_size=4, hidden=16, bottleneck=8, num_prototypes=12)
CONFIG = dataclasses.replace(TASK, distillation=SMALL, locked=())
assert isinstance(TASK.image_tower, ViTConfig)
WITH_EXPERTS = dataclasses.replace(TASK.image_tower.encoder, depth=4, experts=ExpertsConfig(num_experts=2))
BATCH = next(host_batches(1))
KEYS = keys_at(0, 3)


def with_distillation(**changes):
    return dataclasses.replace(CONFIG, distillation=dataclasses.replace(SMALL, **changes))


@functools.cache
def term_of(config):
    """Returns the loss of self-distillation alone, of the parameters of student and teacher."""
    task = task_of(config)

    def term(student, teacher, batch, keys):
        models: list[Any] = [task.model(params) for params in (student, teacher)]
        one, other = ((model.image_tower, model.distillation) for model in models)
        return distillation_loss(config.distillation, one, other, batch, keys)

    return term


def value_and_gradient(config, student, teacher):
    return compiled(term_of(config))(student, teacher, BATCH, KEYS)


def both():
    return start(CONFIG)[1], start(CONFIG, seed=1)[1]


def test_both_losses_equal_their_definition():
    """Towers, heads and the loss put together by hand; each of them has tests of its own."""
    task, (of_whole, of_parts, of_mask) = task_of(CONFIG), jax.random.split(KEYS("distillation"), 3)
    masked = np.zeros((16, 4), bool)
    np.put_along_axis(masked, np.asarray(masked_patches(of_mask, 0.5, 16, 4)), True, axis=1)
    assert (masked.sum(axis=1) == 2).all()

    @jax.jit
    def computed(params, batch):
        models: list[Any] = [task.model(one) for one in params]
        student, teacher = models
        image = batch.image
        whole = random_views(of_whole, image, 1, 8, SMALL.global_areas)
        parts = random_views(of_parts, image, 2, 4, SMALL.view_areas).reshape(16, 2, 4, 4, 3)
        share, target = weights(batch.valid), teacher.image_tower(whole)

        def loss(found, wanted, heads):
            prototypes = unit_prototypes(heads[0]), unit_prototypes(heads[1])
            temperatures = {"student_temperature": 0.1, "teacher_temperature": 0.04}
            return prototype_cross_entropy(found, wanted, *prototypes, share, **temperatures)[0]

        heads = student.distillation.image_head, teacher.distillation.image_head
        views = jnp.stack(
            [unit_vectors(heads[0], student.image_tower(parts[:, i]).embedding) for i in range(2)], axis=1
        )
        distillation = loss(views, unit_vectors(heads[1], target.embedding)[:, None], heads)
        heads = student.distillation.patch_head, teacher.distillation.patch_head
        token = student.distillation.mask_token[...]
        tokens = student.image_tower(whole, masked=jnp.asarray(masked), mask_token=token).tokens, target.tokens
        at_mask = [
            unit_vectors(head, x[np.nonzero(masked)]).reshape(16, 2, -1) for head, x in zip(heads, tokens, strict=True)
        ]
        return term_of(CONFIG)(params[0], params[1], batch, KEYS), distillation, loss(at_mask[0], at_mask[1], heads)

    (value, metrics), expected, masked_prediction = computed(both(), BATCH)
    assert float(metrics["distillation_loss"]) == pytest.approx(float(expected), rel=1e-4)
    assert float(metrics["masked_prediction_loss"]) == pytest.approx(float(masked_prediction), rel=1e-4)
    assert float(value) == pytest.approx(float(expected) + 0.25 * float(masked_prediction), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "name", "unused"),
    [
        ({"masked_weight": 0.0, "weight": 3.0}, "distillation_loss", "patch_head"),
        ({"weight": 0.0, "masked_weight": 3.0}, "masked_prediction_loss", "image_head"),
    ],
)
def test_each_loss_alone(changes, name, unused):
    config = with_distillation(**changes)
    _, params = start(config)
    assert unused not in params["distillation"]
    (value, metrics), gradient = value_and_gradient(config, params, params)
    assert float(value) == pytest.approx(3 * float(metrics[name]), rel=1e-5)
    sizes = {path: np.abs(x).max() for path, x in parameters.flatten(jax.device_get(gradient)).items()}
    assert all(size > 0 for path, size in sizes.items() if path.startswith("distillation/") and "bias" not in path)
    assert sizes["image_tower/patches/kernel"] > 0
    assert not any(size for path, size in sizes.items() if path.startswith(("text_tower", "head")))


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_give_the_loss_of_one():
    """Its gradient by students and prototypes is compared in tests/losses/test_distillation_loss.py."""
    (student, teacher), mesh = both(), MeshConfig(data=4, fsdp=2)
    loss = forward(lambda student, batch, *more: term_of(CONFIG)(student, more[0], batch, more[1]))
    found = on_devices(loss, mesh, student, BATCH, placed(teacher, mesh.build()), KEYS)
    expected, _ = value_and_gradient(CONFIG, student, teacher)
    assert_same_loss(found, expected)


@functools.cache
def trained(config, **fields):
    """States after every step, and metrics."""
    run, states, records = Run(config=config, **fields), [], []
    for batch in run.batches():
        states.append(jax.tree.map(np.asarray, run.state))
        run.state, metrics = run.step(run.state, run.locked, batch)
        records.append({name: float(x) for name, x in metrics.items()})
    return [*states, jax.tree.map(np.asarray, run.state)], records


@pytest.mark.slow
def test_the_losses_begin_at_their_step_leave_earlier_ones_as_they_are_and_the_teacher_is_the_average():
    plain, of_plain = trained(dataclasses.replace(CONFIG, distillation=None))
    states, records = trained(with_distillation(start=Duration(3)))
    for step, record in enumerate(records):
        has_begun = step >= 3
        assert (record["distillation_loss"] > 0) == has_begun
        assert (record["masked_prediction_loss"] > 0) == has_begun
        before, after = (parameters.flatten(states[i].params["distillation"]) for i in (step, step + 1))
        assert all(np.array_equal(before[path], after[path]) for path in before) != has_begun, step
        if not has_begun:
            assert record["loss"] == pytest.approx(of_plain[step]["loss"], rel=1e-5)
    assert records[3]["loss"] > of_plain[3]["loss"]
    for path, x in parameters.flatten(plain[3].params).items():
        np.testing.assert_allclose(parameters.flatten(states[3].params)[path], x, atol=1e-5, err_msg=path)
    # The loss of a step is that of the state's parameters with the state's average as teacher.
    last, batch = states[STEPS - 1], list(host_batches())[STEPS - 1]
    keys = keys_at(0, STEPS - 1)
    (loss, _), _ = compiled(term_of(CONFIG))(last.params, last.average, batch, keys)
    contrastive, _ = forward(task_of(with_distillation(start=Duration(3))).loss)(last.params, batch, keys)
    assert records[-1]["loss"] == pytest.approx(float(loss) + float(contrastive), rel=1e-5)


@pytest.mark.slow
def test_students_learn_to_predict_their_teacher():
    first, run = jax.device_get(start(CONFIG)[1]), compiled(term_of(CONFIG))
    student = teacher = first
    for step, batch in enumerate(host_batches(30)):
        _, gradient = run(student, teacher, batch, keys_at(1, step))
        student = jax.tree.map(lambda x, slope: x - np.float32(0.1) * np.asarray(slope), student, gradient)
        teacher = jax.tree.map(lambda average, x: np.float32(0.99) * average + np.float32(0.01) * x, teacher, student)
    # The same images, views and teacher, so that only the student has changed.
    (before, _), (after, metrics) = (value_and_gradient(CONFIG, one, teacher)[0] for one in (first, student))
    assert after < before
    assert metrics["prototype_entropy"] > 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": 0.0, "masked_weight": 0.0}, "needs weight or masked_weight above 0"),
        ({"masked": 1.0}, "must be between 0 and 1"),
        ({"teacher_temperature": 0.0}, "must be above 0"),
        ({"view_areas": (0.5, 0.2)}, "the smaller first"),
        ({"view_size": 9}, "from 4 (a patch) to 8 (an image) pixels"),
        ({"view_size": 6}, "6 is not a multiple of 4: take 4"),
        ({"num_prototypes": 1}, "at least 2"),
    ],
)
def test_numbers_out_of_range_are_refused(changes, message):
    with pytest.raises(UserError) as caught:
        with_distillation(**changes)
    assert message in str(caught.value)


def test_towers_that_do_not_fit_or_are_locked_and_stored_embeddings_are_refused():
    large = dataclasses.replace(TASK.text_tower, embedding_size=2048)
    with pytest.raises(UserError, match="needs a ViT with pooling"):
        dataclasses.replace(CONFIG, image_tower=ResNetConfig(), text_tower=large)
    with pytest.raises(UserError, match="without experts"):
        dataclasses.replace(CONFIG, image_tower=dataclasses.replace(TASK.image_tower, encoder=WITH_EXPERTS))
    with pytest.raises(UserError, match=r"leave both out of task\.locked"):
        dataclasses.replace(CONFIG, locked=("image_tower/.*",)).build()
    params = start(CONFIG)[1]
    batch = Batch(jnp.ones(4, bool), image_embedding=jnp.zeros((4, 16)), text=jnp.zeros((4, 4), jnp.int32))
    with pytest.raises(UserError, match="needs images"):
        term_of(CONFIG)(params, params, batch, KEYS)
