"""A batch in parts has the loss and the gradient of the whole batch, in less memory."""

import dataclasses

import jax
import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch
from tests.tasks.meshes import EIGHT_DEVICES, KEYS, compiled, forward, loss_and_gradient, on_devices, start, task_of
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


def both(program, config, batch):
    """Returns what ``program`` makes of the loss for microbatches, on eight devices, and for the whole batch on one."""
    _, params = start(dataclasses.replace(config, loss=type(config)().loss))  # parameters do not depend on the loss
    parts, whole = (program(task_of(one).loss) for one in (dataclasses.replace(config, microbatches=2), config))
    return on_devices(parts, EIGHT_DEVICES, params, batch, KEYS), whole(params, batch, KEYS)


def assert_same_losses(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert found[1].keys() == expected[1].keys()


@pytest.mark.devices
@pytest.mark.slow
def test_microbatches_have_the_loss_and_the_gradient_of_the_whole_batch_with_all_negatives():
    config = dataclasses.replace(CONFIG, loss=SoftmaxLoss("gather", 3), head=DeterministicContrastiveConfig())
    (found, gradient), (expected, of_whole) = both(compiled, config, host_batch())
    assert_same_losses(found, expected)
    gradient, of_whole = (parameters.flatten(jax.device_get(tree)) for tree in (gradient, of_whole))
    largest = max(np.abs(array).max() for array in of_whole.values())
    for path, array in of_whole.items():
        # Some gradients, those of keys' biases for example, are zero but for rounding.
        tolerance = 1e-5 * np.abs(array).max() + 1e-7 * largest
        np.testing.assert_allclose(gradient[path], array, rtol=1e-5, atol=tolerance, err_msg=path)


@pytest.mark.devices
@pytest.mark.slow
def test_a_classifier_that_mixes_rows_and_keeps_members_adjacent_has_the_loss_of_the_whole_batch():
    tower = ViTConfig(8, 4, dataclasses.replace(ENCODER, experts=EXPERTS), pooling="mean", members="apart")
    config = ClassificationConfig(tower, num_classes=3, mixup=0.2)
    assert_same_losses(*both(forward, config, dataclasses.replace(host_batch(), label=LABELS)))


@pytest.mark.slow
def test_microbatches_need_less_memory():
    deep = EncoderConfig(width=32, depth=4, mlp_width=128, num_heads=2, compute_type="float32", remat="none")
    config = ClassificationConfig(ViTConfig(32, 4, deep, pooling="mean"), num_classes=3)

    def temporary_bytes(microbatches):
        task = dataclasses.replace(config, microbatches=microbatches).build()
        images = Batch(np.ones(B, bool), image=np.zeros((B, 32, 32, 3), np.uint8), label=LABELS)
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
