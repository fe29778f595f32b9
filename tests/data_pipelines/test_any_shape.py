"""Images that keep their aspect ratio, as patches: decoded, augmented, and in batches."""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.embeddings import describe
from lit_het.data_pipelines.images.augment import HorizontalFlip, RandomAffine
from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing, RandomCrop, Training
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.patches import split
from lit_het.patches_config import Patches
from tests.data_pipelines.conftest import FILTERS, encoded
from tests.data_pipelines.test_transforms import jpeg, mean_difference, psnr, scene

PATCHES = Patches(8, 24)
SHAPES = [(75, 100), (131, 67), (20, 300), (48, 48), (300, 20)]
KEPT = Preprocessing(filter="bilinear", patches=PATCHES)


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_exact_filters_resize_as_pillow_does(height, width):
    data = jpeg(scene(height, width))
    picture = KEPT.picture(KEPT.apply(data, 0))
    size = picture.shape[1], picture.shape[0]
    expected = Image.open(io.BytesIO(data)).resize(size, Image.Resampling.BILINEAR)
    assert mean_difference(picture, np.asarray(expected)) < 0.5  # of 255 levels
    rows, columns = picture.shape[0] / 8, picture.shape[1] / 8
    assert rows * columns <= 24
    # Up to the rounding of both sides to whole patches.
    assert (rows - 1) / columns < height / width < rows / (columns - 1 or 0.1)


@pytest.mark.parametrize("filter", FILTERS)
def test_pixels_and_files_of_them_have_the_same_patches(filter):
    image, kept = scene(60, 95), dataclasses.replace(KEPT, filter=filter)
    np.testing.assert_array_equal(kept.apply_to_pixels(image, 0), kept.apply(encoded(image, "PNG"), 0))


@pytest.mark.parametrize("filter", ["fast", "area"])
def test_a_large_jpeg_that_is_shrunk_while_it_is_decoded_looks_as_one_that_is_not(filter):
    image, kept = scene(480, 1100), dataclasses.replace(KEPT, filter=filter)
    found = kept.picture(kept.apply(jpeg(image), 0))
    assert psnr(found, kept.picture(kept.apply_to_pixels(image, 0))) > 30


def test_the_centre_of_an_image_is_a_square():
    crop = dataclasses.replace(KEPT, fit="crop")
    picture = crop.picture(crop.apply(jpeg(scene(64, 96)), 32))
    assert picture.shape == (32, 32, 3)


@pytest.mark.parametrize("crop", [None, InceptionCrop(0.5), RandomCrop()])
def test_crops_keep_their_shape_and_augmentations_see_whole_images(crop):
    training = Training(KEPT, crop, (HorizontalFlip(1.0), RandomAffine()))
    data = jpeg(scene(60, 95))
    first, second = (training.apply(data, 32, np.random.default_rng(seed)) for seed in (0, 1))
    assert first.shape == second.shape == PATCHES.shape
    assert (first != second).any()
    mirrored = Training(KEPT, None, (HorizontalFlip(1.0),)).apply(data, 32, np.random.default_rng(0))
    np.testing.assert_array_equal(KEPT.picture(mirrored)[:, ::-1], KEPT.picture(KEPT.apply(data, 32)))


def test_a_batch_has_images_of_all_shapes_and_no_patch_where_one_is_broken(tmp_path):
    images = [encode_jpeg(scene(*shape)) for shape in SHAPES] + [b"<html>404</html>"]
    samples = ({"__key__": f"{n}", "jpg": image, "txt": "x"} for n, image in enumerate(images))
    write_shards(tmp_path, samples)
    config = LoaderConfig((str(tmp_path),), 32, 6, preprocessing=KEPT, threads=0, max_bad_fraction=0.5)
    for batch in (next(Loader(config).epoch()), next(Loader(config).batches())):
        assert batch.image is not None
        assert batch.image.shape == (6, *PATCHES.shape)
        _, places = split(batch.image)
        np.testing.assert_array_equal((places > 0).any(axis=(1, 2)), batch.valid)
        shapes = {tuple(places[row].max(axis=0).tolist()) for row in np.flatnonzero(batch.valid)}
        assert len(shapes) == len(SHAPES)


def test_stored_embeddings_of_squares_are_those_of_earlier_versions_and_not_those_of_patches():
    squares, kept = (describe(Training(one), 32, random=False) for one in (Preprocessing(filter="bilinear"), KEPT))
    assert set(squares["preprocessing"]) == {"fit", "crop_fraction", "filter", "transparency"}
    assert kept["preprocessing"] == squares["preprocessing"] | {"patches": {"size": 8, "most": 24}}
