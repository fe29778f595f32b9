import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.images.decoding import BrokenImage, decode, encode_jpeg, resize
from lit_het.data_pipelines.images.transforms import Preprocessing
from tests.data_pipelines.conftest import encoded


def quarters(size: int = 16) -> np.ndarray:
    """Four flat quarters: red, green, blue, white, so that a turn or a swap of channels shows."""
    image = np.zeros((size, size, 3), np.uint8)
    half = size // 2
    image[:half, :half], image[:half, half:] = (255, 0, 0), (0, 255, 0)
    image[half:, :half], image[half:, half:] = (0, 0, 255), (255, 255, 255)
    return image


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: int = 6):
    assert actual.dtype == np.uint8
    assert actual.shape == expected.shape
    assert np.abs(actual.astype(int) - expected).max() <= tolerance


def test_a_jpeg_is_shrunk_to_the_mean_of_its_areas_and_a_grey_one_has_three_equal_channels():
    for size in (16, 256):
        assert_close(decode(encode_jpeg(quarters(size)), 16), quarters())
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    assert_close(decode(encode_jpeg(grey), 16), np.repeat(grey, 3, axis=2))


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_lossless_formats_and_first_frames_of_animations_are_exact(format: str):
    animation = {"save_all": True, "append_images": [Image.new("RGB", (16, 16), "black")]}
    for options in ({},) if format in ("BMP", "PPM") else ({}, animation):
        data = encoded(quarters(), format, lossless=True, **options)
        np.testing.assert_array_equal(decode(data, 16), quarters())


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA"])
def test_every_mode_of_png_becomes_rgb(mode: str):
    image = Image.fromarray(quarters()).convert(mode)
    np.testing.assert_array_equal(decode(encoded(image, "PNG"), 16), np.array(image.convert("RGB")))


def test_sixteen_bits_are_scaled_not_clipped_and_cmyk_is_converted_to_rgb():
    levels = (np.arange(256, dtype=np.uint16) * 256 + 130).reshape(16, 16)
    for format in ("PNG", "TIFF", "PPM"):
        np.testing.assert_array_equal(decode(encoded(levels, format), 16)[..., 0], np.arange(256).reshape(16, 16))
    image = Image.fromarray(quarters()).convert("CMYK")
    assert_close(decode(encoded(image, "JPEG", quality=100, subsampling=0), 16), quarters())


def test_transparency_lies_over_white():
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[..., 3] = [0, 51, 204, 255]
    white = np.broadcast_to(np.array([255, 204, 51, 0])[None, :, None], (4, 4, 3))
    assert_close(decode(encoded(rgba, "PNG"), 4), white, 1)
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    assert decode(encoded(palette, "PNG", transparency=0), 4).min() == 255


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_that_is_dropped_shows_the_colours_of_transformers(mode):
    colours = np.random.default_rng(0).integers(0, 256, (4, 4, 4), np.uint8)
    image = Image.fromarray(colours).convert(mode)
    data = encoded(image, "PNG", **({"transparency": 3} if mode == "P" else {}))
    found = Preprocessing(transparency="dropped").apply(data, 4)
    np.testing.assert_array_equal(found, np.asarray(image.convert("RGB")))  # transformers.image_utils.load_image
    assert not np.array_equal(found, Preprocessing().apply(data, 4))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int):
    # How a camera stores the upright image under each orientation (EXIF 2.32, tag 274).
    q = quarters()
    stored = {1: q, 2: q[:, ::-1], 3: q[::-1, ::-1], 4: q[::-1], 5: q.swapaxes(0, 1), 7: q[::-1, ::-1].swapaxes(0, 1)}
    stored |= {6: np.rot90(q, 1), 8: np.rot90(q, -1)}
    exif = Image.Exif()
    exif[274] = orientation
    data = encoded(np.ascontiguousarray(stored[orientation]), "JPEG", quality=100, subsampling=0, exif=exif)
    at = data.index(b"\xff\xe1")
    for fill in (0, 1, 2, 5):  # bytes that may precede the segment
        assert_close(decode(data[:at] + b"\xff" * fill + data[at:], 16), q)


def test_the_first_bytes_decide_the_format():
    # Oxford-IIIT Pets holds PNG and GIF files under the name .jpg; decode never sees a name.
    assert decode(encoded(Image.new("RGB", (5, 3), "red"), "GIF"), 4)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(("height", "width", "size"), [(8, 8, 4), (2, 64, 8)], ids=["square", "short and long"])
def test_shrinking_averages_over_areas(height: int, width: int, size: int):
    stripes = np.zeros((height, width, 3), np.uint8)
    stripes[:, ::2] = 200
    np.testing.assert_array_equal(resize(stripes, size), np.full((size, size, 3), 100))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_too_many_pixels_are_refused(format: str):
    data = encoded(Image.new("RGB", (40, 30)), format)
    decode(data, 8, max_pixels=1200)
    with pytest.raises(BrokenImage, match=r"too many pixels \(40 x 30, at most 1199\)"):
        decode(data, 8, max_pixels=1199)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_an_image_cut_short_is_broken(format: str):
    data = encoded(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), format)
    for length in (12, 40, len(data) // 2):
        with pytest.raises(BrokenImage):
            decode(data[:length], 64)
