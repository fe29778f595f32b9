"""A batch in parts has the loss and the gradient of the whole batch, in less memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from tests.tasks.meshes import EIGHT_DEVICES, KEYS, loss_and_gradient, start, task_of
from tests.tasks.test_contrastive_task import CONFIG, ENCODER, B, host_batch

EXPERTS = ExpertsConfig(
    num_experts=4,
    num_selected=1,
    blocks=(0,),
    num_members=2,
    capacity_factor=4.0,
    noise_scale=0.0,
    auxiliary_weight=0.0,
)

LABELS = np.random.default_rng(0).integers(0, 3, B, dtype=np.int32)


def assert_equal(config, mesh=None, **changes):
    """Compares microbatches, on a mesh, with the whole batch on one device."""
    batch = dataclasses.replace(host_batch(), **changes)
    _, params = start(dataclasses.replace(config, loss=type(config)().loss))  # parameters do not depend on the loss
    parts = task_of(dataclasses.replace(config, microbatches=2))
    (loss, metrics), gradient = loss_and_gradient(parts.loss, params, batch, mesh)
    (whole_loss, whole_metrics), expected = loss_and_gradient(task_of(config).loss, params, batch)
    assert float(loss) == pytest.approx(float(whole_loss), rel=1e-5)
    assert metrics.keys() == whole_metrics.keys()
    gradient, expected = (parameters.flatten(jax.device_get(tree)) for tree in (gradient, expected))
    largest = max(np.abs(array).max() for array in expected.values())
    for path, array in expected.items():
        # Some gradients, those of keys' biases for example, are zero but for rounding.
        tolerance = 1e-5 * np.abs(array).max() + 1e-7 * largest
        np.testing.assert_allclose(gradient[path], array, rtol=1e-5, atol=tolerance, err_msg=path)


@pytest.mark.devices
@pytest.mark.parametrize(
    ("loss", "head"),
    [
        (SoftmaxLoss("gather", 3), DeterministicContrastiveConfig()),
        pytest.param(SigmoidLoss("ring", 3), CONFIG.head, marks=pytest.mark.slow),
    ],
    ids=["softmax", "sigmoid with noise"],
)
def test_microbatches_have_the_gradient_of_the_whole_batch_with_all_negatives(loss, head):
    assert_equal(dataclasses.replace(CONFIG, loss=loss, head=head), EIGHT_DEVICES.build())


@pytest.mark.slow
def test_a_classifier_that_mixes_rows_and_keeps_members_adjacent_has_the_gradient_of_the_whole_batch():
    tower = ViTConfig(8, 4, dataclasses.replace(ENCODER, experts=EXPERTS), pooling="mean", members="apart")
    assert_equal(ClassificationConfig(tower, num_classes=3, mixup=0.2), label=LABELS)


@pytest.mark.slow
def test_microbatches_need_less_memory():
    deep = EncoderConfig(width=32, depth=4, mlp_width=128, num_heads=2, compute_type="float32", remat="none")
    tower = ViTConfig(32, 4, deep, pooling="mean", representation_size=16)
    config = dataclasses.replace(CONFIG, image_tower=tower, head=DeterministicContrastiveConfig())

    def temporary_bytes(microbatches):
        task = dataclasses.replace(config, microbatches=microbatches).build()
        images = dataclasses.replace(host_batch(), image=np.zeros((B, 32, 32, 3), np.uint8))
        images = jax.tree.map(jnp.asarray, images)
        step = jax.jit(jax.grad(lambda params: task.loss(params, images, KEYS)[0])).lower(task.shapes)
        memory = step.compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary_bytes(4) < 0.4 * temporary_bytes(1)


@pytest.mark.devices
def test_a_batch_that_does_not_divide_is_refused_with_the_flags_that_help():
    config = dataclasses.replace(CONFIG, microbatches=3)
    with pytest.raises(UserError, match="a batch of 16 cannot be divided into 3 parts on 8 devices"):
        loss_and_gradient(task_of(config).loss, start(CONFIG)[1], host_batch(), MeshConfig().build())
