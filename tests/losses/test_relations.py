"""The divergence of a student's similarities from a teacher's against NumPy, its gradient, and what it ignores."""

import functools
from unittest import mock

import jax
import numpy as np
import pytest

from lit_het.losses import relations
from lit_het.losses.relations import relation_divergence
from lit_het.sharding import MeshConfig, batch_sharding

B, D, T = 16, 6, 5
WEIGHT = np.array([0.0, 0.1, *[0.9 / 14] * 14], np.float32)
TEACHER_TEMPERATURE = 0.2


def unit(rng, size):
    x = rng.normal(size=(B, size))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def inputs(seed=0):
    """Images and texts of student and teacher, the student's temperature, and weights."""
    rng = np.random.default_rng(seed)
    return unit(rng, D), unit(rng, D), unit(rng, T), unit(rng, T), np.float32(0.3), WEIGHT


def reference(image, text, teacher_image, teacher_text, temperature, weight):
    """Query by query and key by key, in float64."""
    valid, total = [n for n in range(B) if weight[n] > 0], 0.0

    def log_softmax(query, keys, tau):
        logits = np.array([query.astype(np.float64) @ keys[m] for m in valid]) / tau
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    sides = ((image, text, teacher_image, teacher_text), (text, image, teacher_text, teacher_image))
    for queries, keys, teacher_queries, teacher_keys in sides:
        for n in valid:
            log_q = log_softmax(queries[n], keys, temperature)
            log_p = log_softmax(teacher_queries[n], teacher_keys, TEACHER_TEMPERATURE)
            total += weight[n] * np.sum(np.exp(log_p) * (log_p - log_q)) / 2
    return total


@functools.partial(jax.jit, static_argnames="vectors_per_block")
def value_and_gradient(*arrays, vectors_per_block=1024):
    def loss(image, text, teacher_image, teacher_text, temperature, weight):
        temperatures = temperature, TEACHER_TEMPERATURE
        return relation_divergence((image, text), (teacher_image, teacher_text), temperatures, weight)

    with mock.patch.object(relations, "VECTORS_PER_BLOCK", vectors_per_block):
        return jax.value_and_grad(loss, argnums=range(5))(*arrays)


@pytest.mark.parametrize("vectors_per_block", [1024, 4])
def test_the_divergence_and_its_gradient_equal_numpy_and_the_teacher_has_none(vectors_per_block):
    arrays = inputs()
    value, gradients = value_and_gradient(*arrays, vectors_per_block=vectors_per_block)
    assert float(value) == pytest.approx(reference(*arrays), rel=1e-5)
    for argument in (0, 1, 4):
        direction = np.random.default_rng(1).normal(size=arrays[argument].shape)
        moved = [
            reference(*(x + sign * 1e-5 * direction if i == argument else x for i, x in enumerate(arrays)))
            for sign in (1, -1)
        ]
        found = np.sum(np.asarray(gradients[argument]) * direction)
        assert found == pytest.approx((moved[0] - moved[1]) / 2e-5, rel=1e-3)
    assert not np.any(gradients[2])
    assert not np.any(gradients[3])


def test_a_student_with_the_similarities_of_its_teacher_has_no_divergence_and_others_have_one():
    _, _, image, text, _, weight = inputs()
    found = value_and_gradient(image, text, image, text, np.float32(TEACHER_TEMPERATURE), weight)[0]
    assert float(found) == pytest.approx(0, abs=1e-6)
    assert float(value_and_gradient(*inputs())[0]) > 0.1


def test_rows_without_weight_are_neither_queries_nor_keys():
    arrays = inputs()
    changed = [np.array(x) for x in arrays]
    for one in changed[:4]:
        one[0] = 7.0
    assert float(value_and_gradient(*changed)[0]) == pytest.approx(float(value_and_gradient(*arrays)[0]), rel=1e-6)
    value, gradients = value_and_gradient(*arrays[:5], np.zeros(B, np.float32))
    assert float(value) == 0
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.devices
def test_eight_devices_give_the_divergence_and_the_gradient_of_one():
    arrays = inputs()
    value, gradients = value_and_gradient(*arrays, vectors_per_block=1)
    mesh = MeshConfig(data=4, fsdp=2).build()
    with jax.set_mesh(mesh):
        split = [x if x.ndim == 0 else jax.device_put(x, batch_sharding(mesh)) for x in arrays]
        of_split, split_gradients = value_and_gradient(*split, vectors_per_block=1)
    assert float(of_split) == pytest.approx(float(value), rel=1e-5)
    for found, expected in zip(split_gradients, gradients, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_no_array_has_the_size_of_all_pairs():
    def largest(vectors_per_block):
        found = jax.make_jaxpr(functools.partial(value_and_gradient, vectors_per_block=vectors_per_block))(*inputs())
        return f"f32[{B},{B}]" in str(found)

    assert largest(B)
    assert not largest(4)
