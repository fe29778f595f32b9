"""The loss of self-distillation against NumPy, its gradient, and what it ignores."""

import functools
from unittest import mock

import jax
import numpy as np
import pytest

from lit_het.losses import distillation
from lit_het.losses.distillation import prototype_cross_entropy
from lit_het.sharding import MeshConfig, batch_sharding, replicated

B, V, D, K = 16, 4, 6, 12
WEIGHT = np.array([0.0, 0.1, *[0.9 / 14] * 14], np.float32)


def unit(rng, *shape, axis=-1):
    x = rng.normal(size=shape)
    return (x / np.linalg.norm(x, axis=axis, keepdims=True)).astype(np.float32)


def inputs(views=V, seed=0):
    rng = np.random.default_rng(seed)
    prototypes = unit(rng, D, K, axis=0), unit(rng, D, K, axis=0)
    return unit(rng, B, V, D), unit(rng, B, views, D), *prototypes, WEIGHT


def reference(student, teacher, of_student, of_teacher, weight):
    """Image by image, view by view, in float64."""
    softmax = lambda z: np.exp(z - z.max()) / np.exp(z - z.max()).sum()  # noqa: E731
    logits = np.array([[view @ of_teacher for view in image] for image in teacher.astype(np.float64)])
    centre = sum(w * image.mean(axis=0) for w, image in zip(weight, logits, strict=True)) / weight.sum()
    total, entropy, mean_p = 0.0, 0.0, np.zeros(K)
    for b in range(B):
        for v in range(V):
            p = softmax((logits[b, v if len(logits[b]) > 1 else 0] - centre) / 0.04)
            q = softmax(student[b, v].astype(np.float64) @ of_student / 0.1)
            total += weight[b] * -(p * np.log(q)).sum() / V
            entropy += weight[b] * -(p * np.log(p)).sum() / V
            mean_p += weight[b] * p / V
    return total, entropy, -(mean_p * np.log(mean_p)).sum()


@functools.partial(jax.jit, static_argnames="vectors_per_block")
def loss_and_gradient(*arrays, vectors_per_block=1024):
    """Returns the loss and its metrics, and the gradients of the four matrices."""

    def loss(*arrays):
        return prototype_cross_entropy(*arrays, student_temperature=0.1, teacher_temperature=0.04)

    with mock.patch.object(distillation, "VECTORS_PER_BLOCK", vectors_per_block):
        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)


def loss(*arrays):
    return loss_and_gradient(*arrays)[0]


@pytest.mark.parametrize("views", [1, V], ids=["one target of an image", "a target of each patch"])
@pytest.mark.parametrize("vectors_per_block", [1024, 12])
def test_the_loss_and_its_metrics_equal_numpy(views, vectors_per_block):
    arrays = inputs(views)
    (value, metrics), _ = loss_and_gradient(*arrays, vectors_per_block=vectors_per_block)
    expected, entropy, spread = reference(*arrays)
    assert float(value) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["teacher_entropy"]) == pytest.approx(entropy, rel=1e-4)
    assert float(metrics["prototype_entropy"]) == pytest.approx(spread, rel=1e-4)


def test_the_gradient_equals_differences_of_numpy_and_the_teacher_has_none():
    arrays = inputs()
    _, gradients = loss_and_gradient(*arrays)
    for argument in (0, 2):
        direction = np.random.default_rng(1).normal(size=arrays[argument].shape)
        moved = [
            reference(*(x + sign * 1e-4 * direction if i == argument else x for i, x in enumerate(arrays)))[0]
            for sign in (1, -1)
        ]
        expected = (moved[0] - moved[1]) / 2e-4
        assert np.sum(np.asarray(gradients[argument]) * direction) == pytest.approx(expected, rel=1e-3)
        assert not np.any(gradients[argument + 1])


def test_a_student_that_predicts_the_teacher_has_the_entropy_as_loss_and_an_equal_teacher_becomes_uniform():
    student, teacher, _, prototypes, weight = inputs()
    centred = teacher - (weight / weight.sum()) @ teacher.mean(axis=1)
    value, metrics = loss(centred * np.float32(0.1 / 0.04), teacher, prototypes, prototypes, weight)
    assert float(value) == pytest.approx(float(metrics["teacher_entropy"]), rel=1e-4)
    _, metrics = loss(student, np.broadcast_to(teacher[:1, :1], teacher.shape), *inputs()[2:])
    assert float(metrics["teacher_entropy"]) == pytest.approx(np.log(K), rel=1e-5)


def test_rows_without_weight_change_nothing():
    arrays = inputs()
    changed = [x.copy() for x in arrays]
    changed[0][0], changed[1][0] = 7.0, -5.0
    assert float(loss(*changed)[0]) == pytest.approx(float(loss(*arrays)[0]), rel=1e-6)
    nothing = loss(*arrays[:4], np.zeros(B, np.float32))
    assert float(nothing[0]) == 0
    assert np.isfinite(float(nothing[1]["prototype_entropy"]))


@pytest.mark.devices
def test_eight_devices_give_the_loss_and_the_gradient_of_one():
    arrays = inputs()
    (value, _), gradient = loss_and_gradient(*arrays, vectors_per_block=V)
    mesh = MeshConfig(data=4, fsdp=2).build()
    rows, whole = batch_sharding(mesh), replicated(mesh)
    with jax.set_mesh(mesh):
        split = map(jax.device_put, arrays, (rows, rows, whole, whole, rows))
        (of_split, _), split_gradient = loss_and_gradient(*split, vectors_per_block=V)
    assert float(of_split) == pytest.approx(float(value), rel=1e-5)
    for argument in (0, 2):
        np.testing.assert_allclose(split_gradient[argument], gradient[argument], atol=1e-6)
