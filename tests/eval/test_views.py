"""Random views of a probe's training images against plain NumPy."""

import dataclasses
import io
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.eval.fits import LinearProbeOptions
from lit_het.eval.sets.folders import unlabelled
from lit_het.eval.sets.open_sets import Sets
from lit_het.eval.views import Examples, Plan, Views
from lit_het.patches_config import Patches
from tests.refusals import assert_refused

NAMES = ("zero", "one", "two")
OPTIONS = LinearProbeOptions(crops=("random",), mixup=1.0)
# Two epochs of two batches of five of the twelve images.
PLAN = Plan(np.array([[0, 7, 3, 11, 5], [9, 8, 1, 2, 4], [4, 3, 2, 1, 0], [11, 10, 9, 8, 7]]), 2, 3)


@pytest.fixture
def numbers(write_set):
    """Images whose pixels are 0, 1, 2, ..., with classes in turn."""
    return write_set("numbers", [{"cls": number % 3} for number in range(12)], NAMES)


def read(data, tower, options=OPTIONS, plan=PLAN) -> Examples:
    """Returns the examples of all chunks, of a set opened anew."""
    opened = Sets(2, Preprocessing(), lambda: "a tower").open(data)
    found = list(Views(opened, opened.features(tower), tower, options)("random", plan))
    assert [len(one.features) for one in found] == [3, 1]
    return Examples(*map(np.concatenate, zip(*found, strict=True)))


def test_an_image_is_mixed_with_the_one_before_by_one_weight_of_each_batch(numbers, make_encoder):
    found = read(numbers, make_encoder(np.eye(12), ("x",)).features)
    before = np.roll(PLAN.images, 1, axis=1)
    np.testing.assert_array_equal(found.labels, np.stack([PLAN.images % 3, before % 3], axis=-1))
    np.testing.assert_allclose(found.weights.sum(axis=2), 1, rtol=1e-6)
    own = found.weights[:, :, :1]
    assert (own == own[:, :1]).all()
    assert len(np.unique(own)) == 4
    assert own.min() >= 0.5
    # Images of one colour are the same in every crop; pixels are whole numbers.
    expected = np.round(own * PLAN.images[:, :, None] + (1 - own) * before[:, :, None])
    np.testing.assert_array_equal(found.features, expected)
    assert (found.features[:, :, 0] != PLAN.images).any()


def test_views_have_the_means_of_all_members_of_an_ensemble_and_no_variances(numbers, make_encoder):
    def extract(view: np.ndarray) -> np.ndarray:
        number = view[:, 0, 0, :1].astype(np.float32)
        return np.concatenate([number, 1e3 + number, 10 - number, 2e3 + number], axis=1)

    tower = dataclasses.replace(make_encoder(np.eye(12), ("x",)).features, num_members=2)
    tower = dataclasses.replace(tower, extract=extract, mean_size=1)
    found = read(numbers, tower, dataclasses.replace(OPTIONS, mixup=0.0))
    np.testing.assert_array_equal(found.features, np.stack([PLAN.images, 10 - PLAN.images], axis=-1))


def test_the_weights_are_the_larger_parts_of_draws_from_beta(numbers, make_encoder):
    opened = Sets(2, Preprocessing(), lambda: "a tower").open(numbers)
    tower = make_encoder(np.eye(12), ("x",)).features
    views = Views(opened, opened.features(tower), tower, dataclasses.replace(OPTIONS, mixup=0.5))
    shares = views._shares(20_000)
    # Of Beta(1/2, 1/2), the arcsine law, the mean distance from 1/2 is 1/π.
    assert shares.mean() == pytest.approx(0.5 + 1 / np.pi, abs=0.005)


def test_without_mixup_views_are_of_one_image(numbers, make_encoder):
    found = read(numbers, make_encoder(np.eye(12), ("x",)).features, dataclasses.replace(OPTIONS, mixup=0.0))
    np.testing.assert_array_equal(found.features[:, :, 0], PLAN.images)
    assert (found.weights == [1, 0]).all()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_devices_processes_and_batches_of_the_tower_change_no_view(
    numbers, make_encoder, monkeypatch, num_shards, processes
):
    expected = read(numbers, make_encoder(np.eye(12), ("x",)).features)
    tower = make_encoder(np.eye(12), ("x",), num_shards=num_shards).features
    opened = Sets(2, Preprocessing(), lambda: "a tower").open(dataclasses.replace(numbers, batch_size=2))
    views = Views(opened, opened.features(tower), tower, OPTIONS)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    of_process = []
    for process in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        of_process.append(list(views._batches(views._loaders["random"], PLAN, views._shares(4))))
    features = np.full(PLAN.images.size, np.nan)
    for batches in zip(*of_process, strict=True):
        for batch in batches:
            assert len(batch.valid) == 2 * num_shards // processes
            features[batch.label[batch.valid]] = batch.image[batch.valid, 0, 0, 0]
    np.testing.assert_array_equal(features.reshape(PLAN.images.shape), expected.features[:, :, 0])


def without_three(monkeypatch):
    """Image 3 cannot be read any more."""
    make = Loader._read

    def read(self, samples, positions):
        batch = make(self, samples, positions)
        return dataclasses.replace(batch, valid=batch.valid & (np.asarray(samples) != 3))

    monkeypatch.setattr(Loader, "_read", read)


def test_images_that_evaluation_cannot_read_are_in_no_view(numbers, make_encoder, monkeypatch):
    without_three(monkeypatch)
    plan = dataclasses.replace(PLAN, images=np.minimum(PLAN.images, 10))
    tower = make_encoder(np.eye(12), ("x",)).features
    found = read(numbers, tower, dataclasses.replace(OPTIONS, mixup=0.0), plan)
    readable = np.delete(np.arange(12), 3)
    np.testing.assert_array_equal(found.features[:, :, 0], readable[plan.images])
    np.testing.assert_array_equal(found.labels[:, :, 0], readable[plan.images] % 3)


def test_a_view_that_cannot_be_read_is_left_out_and_not_mixed(numbers, make_encoder, monkeypatch):
    tower = make_encoder(np.eye(12), ("x",)).features
    opened = Sets(2, Preprocessing(), lambda: "a tower").open(numbers)
    views = Views(opened, opened.features(tower), tower, OPTIONS)
    without_three(monkeypatch)
    found = Examples(*map(np.concatenate, zip(*views("random", PLAN), strict=True)))
    np.testing.assert_array_equal(found.weights.sum(axis=2) == 0, PLAN.images == 3)
    after = np.roll(PLAN.images, 1, axis=1) == 3
    assert after.any()
    assert (found.weights[after] == [1, 0]).all()
    np.testing.assert_array_equal(found.features[after, 0], PLAN.images[after])


@pytest.fixture
def noise(tmp_path):
    """A folder with four images of which all crops differ."""
    random, samples = np.random.default_rng(0), []
    for number in range(4):
        buffer = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (9, 9, 3), np.uint8)).save(buffer, "png")
        samples.append({"__key__": f"s{number}", "png": buffer.getvalue()})
    write_shards(tmp_path / "noise", samples)
    return tmp_path / "noise"


def test_every_epoch_has_crops_of_its_own(noise, make_encoder):
    opened = Sets(6, Preprocessing(), lambda: "a tower").open(unlabelled(str(noise)))
    tower = dataclasses.replace(
        make_encoder(np.eye(4), ("x",)).features, extract=lambda view: np.asarray(view, np.float32).reshape(-1, 108)
    )
    # Two epochs of two batches.
    plan = Plan(np.array([[0, 1], [2, 3], [3, 1], [0, 2]]), 2, 4)
    options = LinearProbeOptions(crops=("inception",), mixup=0.0)
    [found] = Views(opened, opened.features(tower), tower, options)("inception", plan)
    [epoch] = opened.augmented(InceptionCrop(), options.seed).epoch(8, num_crops=2)
    crops = np.asarray(epoch.image).reshape(4, 2, 108)
    np.testing.assert_array_equal(found.features[:2], crops[plan.images[:2], 0])
    np.testing.assert_array_equal(found.features[2:], crops[plan.images[2:], 1])
    assert (crops[:, 0] != crops[:, 1]).any(axis=1).all()


def test_views_are_the_random_crops_of_an_epoch(noise):
    crop: Any = {"crop": InceptionCrop(), "augmentations": (HorizontalFlip(),)}
    loader = Loader(LoaderConfig((str(noise),), image_size=6, **crop), has_captions=False)
    [epoch] = loader.epoch(12, num_crops=3)
    crops = np.asarray(epoch.image).reshape(4, 3, 6, 6, 3)
    chosen = [(np.array([2, 0, -1]), np.array([1, 2, 0])), (np.array([3]), np.array([0]))]
    first, second = loader.views(2, lambda number: chosen[number])
    np.testing.assert_array_equal(np.asarray(first.image)[:2], [crops[2, 1], crops[0, 2]])
    np.testing.assert_array_equal(first.valid, [True, True, False])
    np.testing.assert_array_equal(second.image, crops[3, :1])
    assert len(np.unique(crops.reshape(12, -1), axis=0)) == 12


def test_stored_embeddings_and_images_of_any_shape_have_no_random_crops(numbers, make_encoder):
    tower = make_encoder(np.eye(12), ("x",)).features
    opened = Sets(2, Preprocessing(), lambda: "a tower").open(numbers)
    clean = opened.features(tower)
    stored: Any = object()
    opened.loader.config = dataclasses.replace(opened.loader.config, preprocessing=Preprocessing(patches=Patches(1, 4)))
    assert_refused("the tower takes images of any shape; leave out --crops", Views, opened, clean, tower, OPTIONS)
    opened.loader.stored = stored
    assert_refused("not of stored embeddings; leave out --embeddings", Views, opened, clean, tower, OPTIONS)
