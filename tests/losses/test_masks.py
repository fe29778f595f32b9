"""The loss of pixels and the masks of logits equal slow NumPy references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.losses.base import weights
from lit_het.losses.masks import merged, pixel_loss

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(3, 4, 5)).astype(np.float32)
# The last label is of none of the 5 logits.
LABELS = np.append(RANDOM.integers(0, 5, 11), 7).reshape(3, 4)


def reference(logits, labels, valid):
    """The mean over pixels of valid images, pixel by pixel."""
    total, right, pixels = 0.0, 0, 0
    for i in np.flatnonzero(valid):
        for logit, label in zip(logits[i].astype(float), labels[i], strict=True):
            pixels += 1
            right += logit.argmax() == label
            if label < len(logit):
                total -= logit[label] - np.log(np.exp(logit).sum())
    return total / pixels, right / pixels


@pytest.mark.parametrize("valid", [[True, True, True], [False, True, True], [False, False, False]])
def test_the_loss_is_the_mean_cross_entropy_of_pixels_of_valid_images(valid):
    logits = np.where(np.array(valid)[:, None, None], LOGITS, np.nan)
    found = pixel_loss(jnp.asarray(logits), jnp.asarray(LABELS), weights(jnp.array(valid)))
    expected = reference(LOGITS, LABELS, valid) if any(valid) else (0, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_gradient_is_that_of_the_reference():
    labels, share = jnp.asarray(LABELS), weights(jnp.ones(3, bool))
    gradient = jax.grad(lambda x: pixel_loss(x, labels, share).loss)(jnp.asarray(LOGITS))
    for place in np.ndindex(LOGITS.shape):
        step = np.zeros(LOGITS.shape)
        step[place] = 1e-5
        ends = [reference(LOGITS + sign * step, LABELS, [True] * 3)[0] for sign in (1, -1)]
        assert gradient[place] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-6)
    assert not gradient[2, 3].any()  # the pixel with an unknown label


def merged_slowly(classes, instances, least_share=0.0):
    numbers = instances.argmax(axis=1)
    found = np.zeros((len(numbers), 2), int)
    for number in set(numbers):
        pixels = numbers == number
        if number == 0:
            found[pixels, 0] = classes[pixels].argmax(axis=1)
        elif pixels.mean() > least_share and (label := classes[pixels].sum(axis=0).argmax()):
            found[pixels] = label, number
    return found


@pytest.mark.parametrize("least_share", [0.0, 0.2])
def test_an_instance_has_one_class_and_small_ones_are_void(least_share):
    classes, instances = RANDOM.normal(size=(3, 40, 4)), RANDOM.normal(size=(3, 40, 6))
    found = merged(jnp.asarray(classes, jnp.float32), jnp.asarray(instances, jnp.float32), least_share)
    expected = np.stack([merged_slowly(*one, least_share) for one in zip(classes, instances, strict=True)])
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.int32
    assert (expected[..., 0] == 0).any()
    assert (expected[..., 1] > 0).any()
