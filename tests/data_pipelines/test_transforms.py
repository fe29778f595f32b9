import io

import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.images.augment import HorizontalFlip, RandomAffine, StreamRandom
from lit_het.data_pipelines.images.decoding import decode, encode_jpeg, resize
from lit_het.data_pipelines.images.rand_augment import RandAugment
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing, RandomCrop, Training
from tests.data_pipelines.conftest import FILTERS, encoded
from tests.refusals import assert_refused

BICUBIC = Image.Resampling.BICUBIC


def scene(height: int, width: int) -> np.ndarray:
    """Noise whose amplitude falls with frequency as in photographs, its colours paler than its light."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    phases = np.random.default_rng(0).normal(size=(4, *frequency.shape, 2)) @ [1, 1j]
    light, *colours = (noise / noise.std() for noise in np.fft.irfft2(phases / frequency**1.3, (height, width)))
    return np.clip(128 + 45 * light[..., None] + 10 * np.stack(colours, axis=-1), 0, 255).astype(np.uint8)


def jpeg(image: np.ndarray) -> bytes:
    return encoded(image, "JPEG", quality=90)  # Pillow subsamples colours unless told not to


def psnr(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / np.mean((actual.astype(float) - expected) ** 2)))


def mean_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual.astype(float) - expected).mean())


def resize_then_crop(image: Image.Image, size: int, crop_fraction: float, filter: Image.Resampling) -> np.ndarray:
    """torchvision's ``Resize(round(size / crop_fraction))`` and ``CenterCrop(size)``, in Pillow."""
    shorter = round(size / crop_fraction)
    width, height = image.size
    scale = shorter / min(width, height)
    resized = image.resize((int(width * scale + 1e-9), int(height * scale + 1e-9)), filter)
    left, top = round((resized.width - size) / 2), round((resized.height - size) / 2)
    return np.asarray(resized.crop((left, top, left + size, top + size)))


@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop_fraction", [1.0, 0.875])
@pytest.mark.parametrize(("height", "width"), [(75, 100), (131, 67), (200, 333), (30, 41)])
def test_exact_filters_crop_as_pillow_resizes_and_crops(filter, crop_fraction, height, width):
    data = jpeg(scene(height, width))
    ours = Preprocessing("crop", crop_fraction, filter).apply(data, 48)
    image = Image.open(io.BytesIO(data))
    expected = resize_then_crop(image, 48, crop_fraction, getattr(Image.Resampling, filter.upper()))
    assert mean_difference(ours, expected) < 0.5  # of 255 levels


@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width"), [(75, 100), (48, 48), (20, 300)])
def test_exact_filters_squash_as_pillow_does(filter, height, width):
    data = jpeg(scene(height, width))
    expected = Image.open(io.BytesIO(data)).resize((48, 48), getattr(Image.Resampling, filter.upper()))
    assert mean_difference(Preprocessing(filter=filter).apply(data, 48), np.asarray(expected)) < 0.5


@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.2, 1.5, 1.7, 2.0, 2.4, 3.0, 5.0])
def test_the_fast_filter_approximates_antialiased_bicubic(ratio):
    side = round(96 * ratio)
    data = jpeg(scene(side, side))
    expected = np.asarray(Image.open(io.BytesIO(data)).resize((96, 96), BICUBIC))
    assert psnr(Preprocessing(filter="fast").apply(data, 96), expected) > 35
    # most of what is missing, the decoder's fast transforms lose
    assert psnr(resize(np.asarray(Image.open(io.BytesIO(data))), 96, "fast"), expected) > 38


def test_the_fast_filter_decodes_large_images_at_reduced_size():
    data = jpeg(scene(512, 640))
    expected = np.asarray(Image.open(io.BytesIO(data)).resize((64, 64), BICUBIC))
    assert psnr(Preprocessing(filter="fast").apply(data, 64), expected) > 34


def test_a_small_part_of_a_large_image_is_as_sharp_as_the_whole_would_be():
    data = jpeg(scene(512, 640))
    box = (100.0, 50.0, 180.0, 130.0)
    expected = np.asarray(Image.open(io.BytesIO(data)).resize((64, 64), BICUBIC, box))
    assert psnr(decode(data, 64, lambda height, width: box, "fast"), expected) > 34
    large = (10.0, 20.0, 410.0, 420.0)  # 6.25 times the square: read at half size
    expected = np.asarray(Image.open(io.BytesIO(data)).resize((64, 64), BICUBIC, large))
    assert psnr(decode(data, 64, lambda height, width: large, "fast"), expected) > 32


def test_the_default_preprocessing_has_not_changed():
    data = jpeg(scene(100, 70))
    np.testing.assert_array_equal(Preprocessing().apply(data, 32), decode(data, 32))
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(decode(data, 32), resize(pixels, 32, "area"))


def test_the_central_square_is_central_for_every_filter():
    image = np.zeros((40, 100, 3), np.uint8)
    image[:, 30:70] = 255
    image[10:30, 40:60] = 80
    for filter in FILTERS:
        whole = Preprocessing("crop", 1.0, filter).apply(encode_jpeg(image), 40)
        assert whole[2, 2:38].min() > 240
        part = Preprocessing("crop", 0.5, filter).apply(encode_jpeg(image), 40)
        assert abs(int(part[3:37, 3:37].max()) - 80) < 20


def test_inception_crops_have_the_drawn_areas_and_aspect_ratios():
    random, crop = StreamRandom(0), InceptionCrop(0.1, 0.4)
    boxes = np.array([crop.draw(random.at(i), 300, 400) for i in range(4000)])
    left, top, right, bottom = boxes.T
    assert boxes.min() >= 0
    assert right.max() <= 400
    assert bottom.max() <= 300
    areas = (right - left) * (bottom - top) / (300 * 400)
    logs = np.log((right - left) / (bottom - top))
    assert areas.min() == pytest.approx(0.1, abs=0.005)
    assert areas.max() == pytest.approx(0.4, abs=0.005)
    assert areas.mean() == pytest.approx(0.25, abs=0.01)
    assert np.abs(logs).max() == pytest.approx(np.log(4 / 3), abs=0.03)
    assert abs(logs.mean()) < 0.02
    np.testing.assert_array_equal(boxes, boxes.astype(int))


def test_an_image_too_long_for_any_crop_gives_its_centre():
    assert InceptionCrop(0.9, 1.0).draw(np.random.default_rng(0), 30, 3000) == (1480.0, 0.0, 1520.0, 30.0)
    assert InceptionCrop(0.9, 1.0).draw(np.random.default_rng(0), 3000, 30) == (0.0, 1480.0, 30.0, 1520.0)
    assert InceptionCrop().draw(np.random.default_rng(0), 1, 1) == (0.0, 0.0, 1.0, 1.0)


def test_a_crop_of_area_one_is_the_whole_image():
    data = jpeg(scene(60, 60))
    for filter in FILTERS:
        for seed in range(20):
            box = InceptionCrop(1.0, 1.0).draw(np.random.default_rng(seed), 60, 60)
            pixels = Training(Preprocessing(filter=filter), InceptionCrop(1.0, 1.0)).apply(
                data, 24, np.random.default_rng(seed)
            )
            np.testing.assert_array_equal(pixels, decode(data, 24, lambda height, width, box=box: box, filter))


def test_impossible_fractions_areas_and_probabilities_are_refused():
    for fraction in (0.0, 1.1):
        assert_refused("crop_fraction", Preprocessing, crop_fraction=fraction)
    for areas in ((0.0, 1.0), (0.5, 0.4), (0.5, 1.1)):
        assert_refused("areas from", InceptionCrop, *areas)
    assert_refused("probability = 2", HorizontalFlip, 2.0)
    assert_refused(r"RandomCrop: fraction = 1\.5 must be above 0 and at most 1", RandomCrop, 1.5)


def test_half_of_the_images_are_mirrored():
    image, random = scene(8, 9), StreamRandom(1)
    flipped = [HorizontalFlip().apply(image, random.at(i)) for i in range(1000)]
    mirrored = [not np.array_equal(one, image) for one in flipped]
    assert 430 < sum(mirrored) < 570
    np.testing.assert_array_equal(flipped[mirrored.index(True)], image[:, ::-1])
    np.testing.assert_array_equal(HorizontalFlip(1.0).apply(image, random.at(0)), image[:, ::-1])
    np.testing.assert_array_equal(HorizontalFlip(0.0).apply(image, random.at(0)), image)


def test_training_is_crop_then_augmentations_in_order_from_one_generator():
    data, random = jpeg(scene(60, 80)), StreamRandom(5)
    augmentations = (HorizontalFlip(), RandAugment(), RandomAffine())
    training = Training(Preprocessing(filter="fast"), InceptionCrop(), augmentations)
    pixels = [training.apply(data, 32, random.at(position)) for position in range(10)]
    for position in (7, 0):
        generator = StreamRandom(5).at(position)
        expected = Training(training.preprocessing, InceptionCrop()).apply(data, 32, generator)
        for augmentation in augmentations:
            expected = augmentation.apply(expected, generator)
        np.testing.assert_array_equal(pixels[position], expected)
    assert len({one.tobytes() for one in pixels}) == 10


def test_without_a_crop_training_images_are_fitted_as_in_evaluation():
    data, preprocessing = jpeg(scene(60, 80)), Preprocessing("crop", 0.875, "bicubic")
    pixels = Training(preprocessing).apply(data, 32, np.random.default_rng(0))
    np.testing.assert_array_equal(pixels, preprocessing.apply(data, 32))


@pytest.mark.parametrize("filter", FILTERS)
def test_boxes_stay_within_images_of_every_size(filter):
    for side in range(1, 400, 3):
        data = encode_jpeg(np.full((side, 400 - side, 3), 90, np.uint8))
        for preprocessing in (Preprocessing(filter=filter), Preprocessing("crop", 1.0, filter)):
            for size in (7, 12):
                assert np.abs(preprocessing.apply(data, size).astype(int) - 90).max() <= 2


ODD_SIZES = [(1, 1), (1, 5000), (5000, 1), (7, 3), (1, 64), (33, 32)]


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_images_of_any_shape_become_squares(fit, filter):
    for height, width in ODD_SIZES:
        image = np.full((height, width, 3), 90, np.uint8)
        for format in ("JPEG", "PNG"):
            data = encoded(image, format)
            pixels = Preprocessing(fit, 0.875, filter).apply(data, 32)
            assert pixels.shape == (32, 32, 3)
            assert np.abs(pixels.astype(int) - 90).max() <= 2
            crop = Training(Preprocessing(filter=filter), InceptionCrop()).apply(data, 32, np.random.default_rng(0))
            assert np.abs(crop.astype(int) - 90).max() <= 2


def test_a_random_crop_is_a_part_of_the_image_resized_to_a_larger_square():
    """Resize to 64 x 64, then 56 x 56 at any of 9 x 9 places (SoViT App. E.2 with 256 and 224)."""
    image, crop = scene(90, 120), RandomCrop(0.875)
    larger = np.asarray(Image.fromarray(image).resize((64, 64), BICUBIC)).astype(float)
    data, places = encoded(image, "PNG"), set()
    for position in range(200):
        random = StreamRandom(1)
        left, top, right, bottom = crop.draw(random.at(position), 56, 90, 120)
        assert (right - left, bottom - top) == pytest.approx((56 / 64 * 120, 56 / 64 * 90))
        column, row = round(left / 120 * 64), round(top / 90 * 64)
        places.add((column, row))
        if position < 5:
            ours = Training(Preprocessing(filter="bicubic"), crop).apply(data, 56, random.at(position))
            assert mean_difference(ours, larger[row : row + 56, column : column + 56]) < 1.0
    assert {column for column, _ in places} == {row for _, row in places} == set(range(9))
    assert RandomCrop(1.0).draw(StreamRandom(0).at(0), 56, 90, 120) == (0.0, 0.0, 120.0, 90.0)
