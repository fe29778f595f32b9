"""Random views on the device: their pixels against Pillow, their areas, colours and independence of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from lit_het.objectives import views
from lit_het.objectives.views import random_views
from lit_het.sharding import MeshConfig, batch_sharding

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (4, 40, 40, 3), np.uint8)


def plain(monkeypatch):
    """Leaves colours and reflections out."""
    monkeypatch.setattr(views, "_colours", lambda key, image: image)
    monkeypatch.setattr(jax.random, "bernoulli", lambda key, p=0.5, shape=(): jnp.zeros(shape, bool))


def views_of(image, *how):
    return np.asarray(jax.jit(lambda image: random_views(KEY, image, *how))(image), int)


@pytest.mark.parametrize("size", [40, 16, 64])
def test_a_crop_of_the_whole_image_is_pillows_bilinear_resize(monkeypatch, size):
    plain(monkeypatch)
    monkeypatch.setattr(views, "_LOG_ASPECT", 0.0)
    found = views_of(NOISE[:1], 1, size, (1.0, 1.0))[0]
    expected = Image.fromarray(np.asarray(NOISE[0])).resize((size, size), Image.Resampling.BILINEAR)
    assert np.abs(found - np.asarray(expected, int)).max() <= 1


def test_crops_have_areas_aspects_and_places_within_their_ranges(monkeypatch):
    plain(monkeypatch)
    # Each pixel holds its own place: a crop shows which part of the image it is.
    rows, columns = np.meshgrid(np.linspace(0, 255, 256), np.linspace(0, 255, 256), indexing="ij")
    image = np.stack([rows, columns, rows], axis=-1).astype(np.uint8)[None]
    found = views_of(image, 200, 32, (0.1, 0.5))
    # Between the centres of the first and the last pixel lie 31 of 32 parts of a side.
    heights, widths = (
        (found[:, -1, 0, 0] - found[:, 0, 0, 0]) * 32 / 31 / 255,
        (found[:, 0, -1, 1] - found[:, 0, 0, 1]) * 32 / 31 / 255,
    )
    areas, aspects = heights * widths, heights / widths
    assert 0.09 < areas.min() < areas.max() < 0.52
    assert np.mean(areas) == pytest.approx(0.3, abs=0.03)
    assert 0.73 < aspects.min() < aspects.max() < 1.37
    assert (found[:, 0, 0, :2].std(axis=0) > 30).all()


def test_half_of_the_views_are_reflected_and_a_fifth_is_grey():
    image = np.zeros((1, 32, 32, 3), np.uint8)
    image[:, :, 16:, 0], image[:, :, :16, 2] = 200, 200
    found = views_of(image, 400, 16, (1.0, 1.0))
    is_grey = np.ptp(found, axis=-1).max(axis=(1, 2)) <= 1
    assert is_grey.mean() == pytest.approx(0.2, abs=0.07)
    red_is_left = found[~is_grey][:, :, 0, 0].mean(axis=1) > found[~is_grey][:, :, -1, 0].mean(axis=1)
    assert red_is_left.mean() == pytest.approx(0.5, abs=0.1)


def test_views_of_an_image_are_adjacent_and_differ():
    images = jnp.asarray(np.stack([NOISE[0], np.zeros_like(NOISE[0])]))
    found = jax.jit(lambda images: random_views(KEY, images, 3, 16, (0.2, 0.5)))(images)
    assert found.shape == (6, 16, 16, 3)
    assert found.dtype == jnp.uint8
    one, other, _, *black = np.asarray(found)
    assert not np.any(black)
    assert np.any(one != other)


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_give_the_views_of_one():
    images = np.tile(NOISE, (2, 1, 1, 1))

    def make(images):
        return random_views(KEY, images, 2, 16, (0.2, 0.5))

    expected = jax.jit(make)(images)
    mesh = MeshConfig(data=8).build()
    with jax.set_mesh(mesh):
        found = jax.jit(make)(jax.device_put(images, batch_sharding(mesh)))
    assert np.abs(np.asarray(found, int) - np.asarray(expected, int)).max() <= 1
