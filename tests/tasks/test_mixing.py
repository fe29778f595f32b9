"""Mixup and CutMix of image-text pairs: pixels and shares agree, and so do the loss and any number of devices."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lit_het import distributed, parameters
from lit_het.errors import UserError
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.random import keys_at
from lit_het.sharding import batch_sharding
from lit_het.tasks.mixing import Mixing, boxes
from tests.tasks.test_contrastive_task import CONFIG, EIGHT_DEVICES, ONE_DEVICE, host_batch, initial

B, SIZE = 16, 8
KEY = jax.random.key(1)
IMAGE = np.random.default_rng(0).integers(0, 256, (B, SIZE, SIZE, 3)).astype(np.uint8)
VALID = np.arange(B) % 6 != 3
IDS = (jnp.asarray(np.random.default_rng(1).integers(0, 9, (B, 2)), jnp.uint32),)
# More mixed images than in a usual batch, so that every form is among the sixteen.
MIXING = Mixing(fraction=0.75)
TASK = dataclasses.replace(
    CONFIG,
    head=GaussianContrastiveConfig(initial_bias=-1.0),
    loss=SigmoidLoss(pseudo_positives=0.1),
    mixing=MIXING,
)

PLAIN = dataclasses.replace(TASK, mixing=None)


def mixed(config=MIXING, valid=VALID):
    return config(jnp.asarray(IMAGE), jnp.asarray(valid), IDS, KEY)


def test_an_image_has_its_share_of_its_own_pixels_and_the_rest_of_the_row_before():
    found, of = mixed()
    forms = set()
    for row in range(B):
        own, other, share = IMAGE[row].astype(np.float64), IMAGE[row - 1].astype(np.float64), float(of.share[row])
        pixels = np.asarray(found[row], np.float64)
        is_own, is_other = np.all(pixels == own, axis=2), np.all(pixels == other, axis=2)
        if share == 1:
            assert is_own.all()
        elif np.logical_or(is_own, is_other).all():
            np.testing.assert_allclose(is_own.mean(), share, rtol=1e-6)
            inside = np.argwhere(~is_own)
            assert len(inside) == np.prod(np.ptp(inside, axis=0) + 1)  # a box without holes
            forms.add("cut")
        else:
            assert np.abs(pixels - (share * own + (1 - share) * other)).max() <= 0.5 + 1e-4
            forms.add("mean")
        assert share >= 0.5
    assert forms == {"cut", "mean"}
    np.testing.assert_array_equal(of.index, (np.arange(B) - 1) % B)
    np.testing.assert_array_equal(of.ids[0], np.roll(IDS[0], 1, axis=0))


def test_neither_an_invalid_row_nor_the_one_after_it_is_mixed():
    untouched = ~VALID | ~np.roll(VALID, 1)
    found, of = mixed(Mixing(fraction=1.0))
    np.testing.assert_array_equal(found[untouched], IMAGE[untouched])
    np.testing.assert_array_equal(np.asarray(of.share) == 1, untouched)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_as_many_images_are_mixed_as_configured_each_with_a_share_of_its_own(alpha):
    mixing, rows = Mixing(fraction=0.3, alpha=alpha, cutmix=0.0), 4000
    image, valid = jnp.zeros((rows, 1, 1, 1), jnp.uint8), jnp.ones(rows, bool)
    share = np.asarray(mixing(image, valid, (), KEY)[1].share, np.float64)
    count = np.sum(share < 1)
    assert stats.binomtest(int(count), rows, 0.3).pvalue > 0.01
    folded = stats.kstest(share[share < 1], lambda x: 2 * stats.beta.cdf(x, alpha, alpha) - 1)
    assert folded.pvalue > 0.01


def test_boxes_have_the_form_of_the_image_and_every_pixel_may_be_their_centre():
    area = jnp.full(4000, 0.25)
    inside = np.asarray(boxes(KEY, area, 8, 12))
    heights, widths = inside.any(axis=2).sum(axis=1), inside.any(axis=1).sum(axis=1)
    assert (heights.max(), widths.max()) == (4, 6)
    # 4 rows around each of 8: centres in rows 0, 1 and 7 lose 2, 1 and 1 rows.
    assert {int(height): round(float(np.mean(heights == height)), 1) for height in (2, 3, 4)} == {
        2: 0.1,
        3: 0.2,
        4: 0.6,
    }
    np.testing.assert_array_equal(inside.sum(axis=(1, 2)), heights * widths)
    assert not boxes(KEY, jnp.zeros(5), 8, 12).any()


def loss_and_gradient(config, batch, mesh=ONE_DEVICE):
    task, batch = config.build(), distributed.to_global(batch, mesh)
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(lambda *x: task.loss(*x)[0]))(initial(PLAIN), batch, keys_at(0, 0))


@functools.cache
def expected_of_one_device():
    """Returns the loss and the gradient with all logits at once."""
    return loss_and_gradient(dataclasses.replace(TASK, loss=SigmoidLoss("dense", pseudo_positives=0.1)), host_batch())


def test_the_task_takes_the_loss_of_mixed_images():
    """The plain task on the mixed images has the embeddings; its loss then has the labels."""
    batch = jax.tree.map(jnp.asarray, host_batch())
    pixels, of = MIXING(batch.image, batch.valid, [batch.image_id, batch.text_id], keys_at(0, 0)("mixing"))
    given = []

    class Recorded(SigmoidLoss):
        def __call__(self, *arguments):
            given.append(arguments)
            return super().__call__(*arguments)

    task, params = dataclasses.replace(PLAIN, loss=Recorded()).build(), initial(PLAIN)
    _, metrics = task.loss(params, dataclasses.replace(batch, image=pixels), keys_at(0, 0))
    (arguments,) = given
    plain, with_labels = (SigmoidLoss(pseudo_positives=0.1)(*arguments, *more) for more in ((), (of,)))
    bottleneck = sum(metrics[name] for name in ("bottleneck_loss", "inclusion_loss"))
    found = jax.jit(TASK.build().loss)(params, batch, keys_at(0, 0))[0]
    np.testing.assert_allclose(found - bottleneck, with_labels, rtol=1e-4)
    assert abs(float(plain - with_labels)) > 1e-3


@pytest.mark.parametrize("form", ["gather", "ring"])
def test_eight_devices_have_the_loss_and_gradient_of_one(form):
    config = dataclasses.replace(TASK, loss=SigmoidLoss(form, 3, pseudo_positives=0.1))
    expected = expected_of_one_device()
    found = loss_and_gradient(config, host_batch(), EIGHT_DEVICES.build())
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    gradients = (parameters.flatten(tree) for tree in (found[1], expected[1]))
    for (path, one), other in zip(next(gradients).items(), next(gradients).values(), strict=True):
        atol = max(1e-5 * np.abs(other).max(), 1e-6)
        np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=path)


def test_a_device_passes_on_one_image():
    mesh = EIGHT_DEVICES.build()
    with jax.set_mesh(mesh):
        rows = jax.device_put((jnp.asarray(IMAGE), jnp.asarray(VALID)), batch_sharding(mesh))
        program = jax.jit(lambda image, valid: MIXING(image, valid, (), KEY)[0])
        text = program.lower(*rows).compile().as_text()
    assert text is not None
    assert re.findall(r"= (u8\[[\d,]*\])\S* collective-permute\(", text) == [f"u8[1,{SIZE},{SIZE},3]"]
    assert not re.findall(r"u8\S* all-gather", text)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UserError, match=r"task.mixing gives an image a share of two texts, .*--task.loss sigmoid"):
        dataclasses.replace(TASK, loss=SoftmaxLoss())
    with pytest.raises(UserError, match=r"Mixing: fraction = 1.5 must be at most 1"):
        Mixing(fraction=1.5)
    with pytest.raises(UserError, match=r"Mixing: cutmix = -0.5 must be at least 0"):
        Mixing(cutmix=-0.5)
    with pytest.raises(UserError, match=r"Mixing: alpha = 0.0 must be positive"):
        Mixing(alpha=0.0)
