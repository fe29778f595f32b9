import io

import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.images.decoding import BrokenImage, decode
from lit_het.data_pipelines.prepare.images import as_stored, encode_png
from tests.data_pipelines.conftest import encoded
from tests.data_pipelines.prepare.conftest import make_image


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(("format", "extension"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
def test_formats_of_shards_are_not_converted(format, extension):
    data = make_image(7, format)
    assert as_stored(data, check=True) == (extension, data)


@pytest.mark.parametrize(
    ("format", "mode"),
    [
        ("GIF", "P"),
        ("GIF", "RGB"),
        ("BMP", "RGB"),
        ("BMP", "L"),
        ("TIFF", "RGB"),
        ("TIFF", "CMYK"),
        ("TIFF", "I;16"),
        ("PPM", "RGB"),
        ("PPM", "I;16"),
    ],
)
def test_other_formats_become_png_with_the_same_pixels(format, mode):
    data = make_image(9, format, mode)
    extension, stored = as_stored(data, check=True)
    assert extension == "png"
    assert opened(stored).format == "PNG"
    ours, theirs = (opened(one) if mode == "I;16" else opened(one).convert("RGB") for one in (stored, data))
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("order", ["<", ">"])
def test_sixteen_bit_levels_are_kept_in_either_byte_order(order):
    levels = (np.arange(256) * 257).reshape(16, 16)
    mode = "I;16B" if order == ">" else "I;16"
    image = Image.frombytes(mode, (16, 16), levels.astype(f"{order}u2").tobytes())
    stored = as_stored(encoded(image, "TIFF"), check=True)[1]
    np.testing.assert_array_equal(np.asarray(opened(stored)), levels)
    np.testing.assert_array_equal(decode(stored, 16)[..., 0], np.arange(256).reshape(16, 16))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_levels_with_an_unknown_white_are_refused(dtype):
    with pytest.raises(BrokenImage, match=r"white is not known \(TIFF in mode [IF]; save it with 8 or 16 bits\)"):
        as_stored(encoded(np.ones((4, 4), dtype), "TIFF"))


def test_transparency_of_a_palette_is_kept():
    stored = opened(as_stored(encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 0)).convert("PA"), "TIFF"))[1])
    assert np.asarray(stored.convert("RGBA"))[..., 3].max() == 0


def test_an_animation_keeps_its_first_frame_and_its_transparency():
    first, second = Image.new("P", (4, 4), 0), Image.new("P", (4, 4), 1)
    for frame in (first, second):
        frame.putpalette([255, 0, 0, 0, 255, 0])
    first.putpixel((0, 0), 1)
    stored = opened(as_stored(encoded(first, "GIF", save_all=True, append_images=[second], transparency=1))[1])
    assert getattr(stored, "n_frames", 1) == 1
    pixels = np.asarray(stored.convert("RGBA"))
    assert pixels[1, 1].tolist() == [255, 0, 0, 255]
    assert pixels[0, 0, 3] == 0


def test_pixels_become_png_without_loss():
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    np.testing.assert_array_equal(np.asarray(opened(encode_png(image))), image)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "not an image"),
        (b"<html>", "not an image"),
        (b"GIF89a", "damaged GIF"),
        (b"BM" + bytes(60), "damaged BMP"),
        (b"II*\0" + bytes(9), "damaged TIFF"),
    ],
)
def test_bytes_that_are_not_an_image_are_refused(data, cause):
    with pytest.raises(BrokenImage, match=cause):
        as_stored(data)


def test_a_bomb_is_refused_before_it_is_decoded():
    bmp = bytearray(b"BM" + bytes(52))
    bmp[10:14], bmp[14:18] = (54).to_bytes(4, "little"), (40).to_bytes(4, "little")
    bmp[18:26] = (40_000).to_bytes(4, "little") * 2
    bmp[26:30] = b"\1\0\x18\0"
    with pytest.raises(BrokenImage, match="too many pixels"):
        as_stored(bytes(bmp))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_damage_is_found_if_images_are_checked(format):
    data = encoded(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), format)[:-200]
    as_stored(data)
    with pytest.raises(BrokenImage, match="damaged"):
        as_stored(data, check=True)


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP"])
def test_a_border_is_removed_and_the_pixels_within_are_kept(format):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    data = encoded(pixels, format, lossless=True)
    extension, stored = as_stored(data, border=3)
    assert extension == "png"
    np.testing.assert_array_equal(np.asarray(opened(stored)), pixels[3:-3, 3:-3])
    with pytest.raises(BrokenImage, match=r"nothing within the border \(4 pixels at each side"):
        as_stored(data, border=4)
