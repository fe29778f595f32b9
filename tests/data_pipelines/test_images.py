import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.images import BrokenImage, decode, encode_jpeg, resize

Encode = Callable[..., bytes]


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


def test_a_jpeg_of_the_right_size_is_not_resized():
    assert_close(decode(encode_jpeg(quarters()), 16), quarters())


def test_a_grey_jpeg_has_three_equal_channels():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    assert_close(decode(encode_jpeg(grey), 16), np.repeat(grey, 3, axis=2))


@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {})])
def test_lossless_formats_are_exact(image_bytes: Encode, format: str, options: dict):
    np.testing.assert_array_equal(decode(image_bytes(Image.fromarray(quarters()), format, **options), 16), quarters())


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA"])
def test_every_mode_of_png_becomes_rgb(image_bytes: Encode, mode: str):
    image = Image.fromarray(quarters()).convert(mode)
    np.testing.assert_array_equal(decode(image_bytes(image, "PNG"), 16), np.array(image.convert("RGB")))


def test_sixteen_bits_are_scaled_not_clipped(image_bytes: Encode):
    levels = (np.arange(256, dtype=np.uint16) * 256 + 130).reshape(16, 16)
    pixels = decode(image_bytes(Image.fromarray(levels), "PNG"), 16)
    np.testing.assert_array_equal(pixels[..., 0], np.arange(256).reshape(16, 16))


def test_cmyk_jpeg_is_converted_to_rgb(image_bytes: Encode):
    image = Image.fromarray(quarters()).convert("CMYK")
    assert_close(decode(image_bytes(image, "JPEG", quality=100, subsampling=0), 16), quarters())


def test_transparency_lies_over_white(image_bytes: Encode):
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[..., 3] = [0, 51, 204, 255]
    pixels = decode(image_bytes(Image.fromarray(rgba), "PNG"), 4)
    assert_close(pixels, np.broadcast_to(np.array([255, 204, 51, 0])[None, :, None], (4, 4, 3)), 1)


def test_a_transparent_palette_lies_over_white(image_bytes: Encode):
    image = Image.new("P", (4, 4), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    assert decode(image_bytes(image, "PNG", transparency=0), 4).min() == 255


def test_an_animation_gives_its_first_frame(image_bytes: Encode):
    frames = [Image.fromarray(quarters()), Image.new("RGB", (16, 16), "black")]
    for format in ("GIF", "WEBP", "PNG"):
        data = image_bytes(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
        np.testing.assert_array_equal(decode(data, 16), quarters())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(image_bytes: Encode, orientation: int):
    # How a camera stores the upright image under each orientation (EXIF 2.32, tag 274).
    q = quarters()
    stored = {1: q, 2: q[:, ::-1], 3: q[::-1, ::-1], 4: q[::-1], 5: q.swapaxes(0, 1), 7: q[::-1, ::-1].swapaxes(0, 1)}
    stored |= {6: np.rot90(q, 1), 8: np.rot90(q, -1)}
    exif = Image.Exif()
    exif[274] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored[orientation]))
    assert_close(decode(image_bytes(image, "JPEG", quality=100, subsampling=0, exif=exif), 16), q)


@pytest.mark.parametrize("fill", [1, 2, 5])
def test_exif_orientation_is_found_behind_fill_bytes(image_bytes: Encode, fill: int):
    exif = Image.Exif()
    exif[274] = 6
    data = image_bytes(Image.fromarray(np.rot90(quarters()).copy()), "JPEG", quality=100, subsampling=0, exif=exif)
    at = data.index(b"\xff\xe1")
    assert_close(decode(data[:at] + b"\xff" * fill + data[at:], 16), quarters())


def test_the_first_bytes_decide_the_format(image_bytes: Encode):
    # Oxford-IIIT Pets holds PNG and GIF files under the name .jpg; decode never sees a name.
    assert decode(image_bytes(Image.new("RGB", (5, 3), "red"), "GIF"), 4)[0, 0].tolist() == [255, 0, 0]


def test_shrinking_averages_over_areas():
    stripes = np.zeros((8, 8, 3), np.uint8)
    stripes[:, ::2] = 200
    np.testing.assert_array_equal(resize(stripes, 4), np.full((4, 4, 3), 100))


def test_an_image_that_is_long_one_way_and_short_the_other_is_antialiased():
    stripes = np.zeros((2, 64, 3), np.uint8)
    stripes[:, ::2] = 200
    np.testing.assert_array_equal(resize(stripes, 8), np.full((8, 8, 3), 100))


def test_a_large_jpeg_is_shrunk_to_the_mean_of_its_areas():
    assert_close(decode(encode_jpeg(quarters(256)), 16), quarters())


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP"])
def test_too_many_pixels_are_refused(image_bytes: Encode, format: str):
    data = image_bytes(Image.new("RGB", (40, 30)), format)
    decode(data, 8, max_pixels=1200)
    with pytest.raises(BrokenImage, match=r"too many pixels \(40 x 30, at most 1199\)"):
        decode(data, 8, max_pixels=1199)


def test_a_decompression_bomb_is_refused_by_its_header_alone(image_bytes: Encode):
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    with pytest.raises(BrokenImage, match="too many pixels"):
        decode(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""), 8)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP"])
def test_an_image_cut_short_is_broken(image_bytes: Encode, format: str):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = image_bytes(Image.fromarray(pixels), format)
    for length in (12, 40, len(data) // 2):
        with pytest.raises(BrokenImage):
            decode(data[:length], 64)


@pytest.mark.parametrize("data", [b"", b"<html>404</html>", b"RIFF1234WAVE", b"\xff\xd8\xff"])
def test_bytes_that_are_not_an_image_are_broken(data: bytes):
    with pytest.raises(BrokenImage, match=r"not an image|damaged") as caught:
        decode(data, 8)
    assert caught.value.cause in ("not an image", "damaged JPEG")
