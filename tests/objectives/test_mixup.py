"""Mixup: images and labels of rows are averaged, invalid rows left out of it, whatever the number of devices."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from scipy import stats

from lit_het.errors import UserError
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.mixtures import LabelMixture
from lit_het.objectives import mixup
from lit_het.random import keys_at
from lit_het.sharding import MeshConfig, batch_sharding
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch
from tests.tasks.meshes import start

B, K, ALPHA = 16, 5, 0.5
RANDOM = np.random.default_rng(0)
IMAGE = RANDOM.integers(0, 256, (B, 8, 8, 3)).astype(np.uint8)
VALID = np.arange(B) % 6 != 3
LABELS = {
    "softmax": RANDOM.integers(0, K, B).astype(np.int32),
    "sigmoid": (RANDOM.random((B, K)) < 0.3).astype(np.float32),
}
STEP = 7
KEYS = keys_at(0, STEP)
ENCODER = EncoderConfig(width=16, depth=1, mlp_width=16, num_heads=2, compute_type="float32")
EXPERTS = ExpertsConfig(num_experts=4, num_members=2, num_selected=1, blocks=(0,))
ENSEMBLE = dataclasses.replace(ENCODER, experts=EXPERTS)
HEAD = HetXLConfig(CovarianceConfig(2, initial_noise_norm=0.5), sampling=SamplingConfig(num_samples=6, block_size=8))
PLAIN = ClassificationConfig(ViTConfig(8, 4, ENCODER, pooling="mean"), HEAD, num_classes=K)
MIXED = dataclasses.replace(PLAIN, mixup=ALPHA)


@functools.partial(jax.jit, static_argnames="alpha")
def draw_weight(step, valid, alpha=ALPHA):
    return mixup.draw_weight(keys_at(0, step)("mixup"), alpha, valid)


def draw(step, valid=VALID):
    return np.asarray(draw_weight(step, valid))


@functools.cache
def loss_and_gradient(config):
    """Returns a compiled function of parameters and a batch."""
    task = config.build()
    return jax.jit(jax.value_and_grad(lambda params, batch: task.loss(params, batch, KEYS)[0]))


@functools.cache
def loss_alone(config):
    """The loss alone, which takes a third of the time to compile."""
    task = config.build()
    return jax.jit(lambda params, batch: task.loss(params, batch, KEYS)[0])


def initial(config):
    """Returns parameters, which neither the loss nor mixup changes."""
    return start(dataclasses.replace(config, mixup=0.0, loss=PLAIN.loss))[1]


def batch(loss="softmax", *, valid=VALID, image=IMAGE, label=None):
    label = LABELS[loss] if label is None else label
    return Batch(valid, image=image, label=label, weight=np.ones(B, np.float32))


def assert_close(actual, expected, rtol=1e-4):
    """Compares losses, alone or with their gradients."""
    np.testing.assert_allclose(jax.tree.leaves(actual)[0], jax.tree.leaves(expected)[0], rtol=1e-5)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=rtol, atol=1e-6), actual, expected)


@pytest.mark.parametrize("alpha", [0.2, 3.0])
def test_the_weight_of_an_example_follows_the_beta_distribution_folded_at_a_half(alpha):
    draws = jax.jit(jax.vmap(lambda step: draw_weight(step, np.ones(2, bool), alpha)))(np.arange(2000))
    np.testing.assert_array_equal(draws[:, 0], draws[:, 1])
    folded = stats.kstest(np.asarray(draws, np.float64)[:, 0], lambda x: 2 * stats.beta.cdf(x, alpha, alpha) - 1)
    assert folded.pvalue > 0.01


def test_every_step_draws_its_own_weight_again_after_a_resume_and_mixes_no_invalid_example_or_the_one_after_it():
    assert len({draw(step).min() for step in range(10)}) == 10
    np.testing.assert_array_equal(draw(3), draw(3))
    np.testing.assert_array_equal(draw(0) == 1, ~VALID | ~np.roll(VALID, 1))


def mixed_pixels(share):
    return np.asarray(jax.jit(mixup.mix_pixels)(IMAGE, share))


def test_images_and_labels_are_the_means_that_a_loop_computes():
    share = draw(0)
    mix = jax.jit(mixup.mix_labels)
    mixed, targets = mix(LABELS["softmax"], share), mix(LABELS["sigmoid"], share)
    assert isinstance(mixed, LabelMixture)
    assert isinstance(targets, jax.Array)
    averaged = mixed_pixels(share).astype(np.int32)
    for row in range(B):
        own, other = share[row], 1 - share[row]
        # Rounded to the nearest level, and no further.
        expected_row = own * IMAGE[row].astype(np.float64) + other * IMAGE[row - 1]
        assert np.abs(averaged[row] - expected_row).max() <= 0.5 + 1e-4
        target = own * LABELS["sigmoid"][row] + other * LABELS["sigmoid"][row - 1]
        np.testing.assert_allclose(targets[row], target, rtol=1e-6)
        np.testing.assert_array_equal(mixed.label[row], [LABELS["softmax"][row], LABELS["softmax"][row - 1]])
        np.testing.assert_allclose(mixed.weight[row], [own, other], rtol=1e-6)


LOSSES = {"softmax": SoftmaxCrossEntropy(), "sigmoid": SigmoidCrossEntropy()}


@pytest.mark.parametrize(
    ("loss", "encoder"),
    [
        ("softmax", ENCODER),
        pytest.param("sigmoid", ENCODER, marks=pytest.mark.slow),
        pytest.param("softmax", ENSEMBLE, marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_the_weighted_mean_of_the_losses_for_both_labels_with_the_same_noise(loss, encoder):
    """Example by example with the plain task, which is told of mixed images and one label at a time."""
    members = "mean" if encoder is ENCODER else "apart"
    tower = dataclasses.replace(PLAIN.image_tower, encoder=encoder, members=members)
    plain = dataclasses.replace(PLAIN, loss=LOSSES[loss], image_tower=tower)
    # The gradient of one of them: that of a sum is the sum of gradients.
    of = loss_and_gradient if encoder is ENCODER and loss == "softmax" else loss_alone
    run, params = of(plain), initial(plain)
    share = draw(STEP)
    averaged = mixed_pixels(share)
    # The losses that a router adds count once: they depend on images alone.
    nothing = jax.device_get(run(params, batch(loss, valid=np.zeros(B, bool), image=averaged)))
    expected = nothing
    for row in np.flatnonzero(VALID):
        for weight, label in ((share[row], LABELS[loss]), (1 - share[row], np.roll(LABELS[loss], 1, axis=0))):
            one = run(params, batch(loss, valid=np.arange(B) == row, image=averaged, label=label))
            weight /= VALID.sum()
            expected = jax.tree.map(lambda e, x, n, w=weight: e + w * (np.asarray(x) - n), expected, one, nothing)
    actual = of(dataclasses.replace(plain, mixup=ALPHA))(params, batch(loss))
    assert_close(actual, expected, rtol=1e-3)
    value, unmixed = (jax.tree.leaves(found)[0] for found in (actual, run(params, batch(loss))))
    assert not np.allclose(value, unmixed, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LABELS)
def test_pixels_of_an_invalid_example_do_not_change_other_examples(loss):
    config = dataclasses.replace(MIXED, loss=LOSSES[loss])
    run, params = (loss_and_gradient if loss == "softmax" else loss_alone)(config), initial(config)
    image, label = IMAGE.copy(), LABELS[loss].copy()
    image[~VALID], label[~VALID] = 255 - image[~VALID], 99
    expected = run(params, batch(loss))
    assert_close(run(params, batch(loss, image=image, label=label)), expected)


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_give_the_loss_of_one_and_pass_on_one_image_each():
    expected, _ = loss_and_gradient(MIXED)(initial(MIXED), batch())
    mesh = MeshConfig(fsdp=2, expert=2).build()
    with jax.set_mesh(mesh):
        rows = jax.device_put(batch(), batch_sharding(mesh))
        np.testing.assert_allclose(loss_alone(MIXED)(initial(MIXED), rows), expected, rtol=1e-5)
        program = jax.jit(lambda rows: mixup.mix_pixels(rows.image, mixup.draw_weight(KEYS("m"), 1.0, rows.valid)))
        text = str(program.lower(rows).compile().as_text())
    assert re.findall(r"= (u8\[[\d,]*\])\S* collective-permute\(", text) == ["u8[1,8,8,3]"]
    assert "all-gather" not in text


def test_a_batch_that_is_not_mixed_has_the_loss_of_the_plain_task():
    params = initial(PLAIN)
    alternate = np.arange(B) % 2 == 0  # no example has a valid neighbour
    expected = loss_and_gradient(PLAIN)(params, batch(valid=alternate))
    assert_close(loss_and_gradient(MIXED)(params, batch(valid=alternate)), expected)


def test_an_alpha_below_zero_is_refused_with_the_field():
    with pytest.raises(UserError, match=r"ClassificationConfig: mixup = -0.1 must be at least 0"):
        dataclasses.replace(PLAIN, mixup=-0.1)


def test_a_mixed_example_has_the_mean_weight_of_both_in_the_loss():
    weight = RANDOM.random(B).astype(np.float32)
    shares = draw(STEP, valid=np.ones(B, bool))
    expected = np.array([shares[i] * weight[i] + (1 - shares[i]) * weight[i - 1] for i in range(B)])
    np.testing.assert_allclose(jax.jit(mixup.mix_weights)(weight, shares), expected, rtol=1e-6)
    params, everything = initial(MIXED), batch(valid=np.ones(B, bool))
    program, one = loss_and_gradient(MIXED), np.eye(B, dtype=np.float32)

    def loss_of(weight, **changes):
        return float(program(params, dataclasses.replace(everything, weight=weight, **changes))[0])

    of_rows = [loss_of(one[row]) for row in (4, 6)]
    assert loss_of(one[4] + one[6]) == pytest.approx(np.mean(of_rows), rel=1e-5)
    # The row after it holds a part of it.
    label = np.where(np.arange(B) == 5, (LABELS["softmax"] + 1) % K, LABELS["softmax"])
    assert abs(loss_of(one[4], label=label) - of_rows[0]) > 1e-4
