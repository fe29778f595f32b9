"""Images of any kind become the same squares."""

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.errors import UserError
from lit_het.models.images import Images
from tests.refusals import assert_refused

SIZE = 16
DATA = LoaderConfig((), SIZE)


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)


@pytest.fixture
def path(pixels, tmp_path):
    Image.fromarray(pixels).save(tmp_path / "a.png")
    return tmp_path / "a.png"


@pytest.mark.parametrize("preprocessing", [Preprocessing(), Preprocessing("crop", 0.875, "bicubic")])
def test_a_path_bytes_a_file_an_image_and_an_array_of_it_are_equal(preprocessing, pixels, path: Path):
    with path.open("rb") as file, Image.open(path) as opened:
        opaque = np.concatenate([pixels, np.full((40, 30, 1), 255, np.uint8)], axis=2)
        content = path.read_bytes()
        forms = [path, str(path), f"file://{path}", content, file, io.BytesIO(content), file]
        forms += [bytearray(content), memoryview(content)]
        forms += [opened, Image.fromarray(pixels), pixels, opaque]
        squares = list(Images(forms, LoaderConfig((), SIZE, preprocessing=preprocessing)))
    assert len(squares) == len(forms)
    for square in squares:
        np.testing.assert_array_equal(square, preprocessing.apply(path.read_bytes(), SIZE))


def test_one_image_is_single_and_lists_and_arrays_of_images_are_not(pixels, path):
    for one in (path, str(path), path.read_bytes(), Image.fromarray(pixels), pixels, pixels[:, :, 0]):
        assert Images(one, DATA).is_single
    for several in ([path], (pixels,), np.stack([pixels, pixels]), (image for image in [path])):
        assert not Images(several, DATA).is_single


def test_grey_pixels_are_grey_and_transparent_ones_are_white(pixels):
    grey = pixels[:, :, 0]
    alone, with_axis, repeated = Images([grey, grey[:, :, None], np.stack([grey] * 3, axis=2)], DATA)
    np.testing.assert_array_equal(alone, repeated)
    np.testing.assert_array_equal(with_axis, repeated)
    (clear,) = Images(np.zeros((8, 8, 4), np.uint8), DATA)
    assert (clear == 255).all()
    dropped = dataclasses.replace(DATA, preprocessing=Preprocessing(transparency="dropped"))
    (hidden,) = Images(np.zeros((8, 8, 4), np.uint8), dropped)
    assert (hidden == 0).all()


def test_an_image_is_turned_upright_like_its_file(pixels, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as opened:
        from_file, from_image, as_stored = Images([tmp_path / "turned.png", opened, pixels], DATA)
    np.testing.assert_array_equal(from_image, from_file)
    assert (from_image != as_stored).any()


def test_many_images_keep_their_order():
    shades = [np.full((4, 4, 3), number, np.uint8) for number in range(100)]
    assert [int(square[0, 0, 0]) for square in Images(shades, DATA)] == list(range(100))


def test_images_are_named_by_their_path_or_their_index(pixels, path):
    with Image.open(path) as opened, path.open("rb") as file:
        names = Images([path, pixels, opened, file, b""], DATA).names
    assert names == (str(path), "image 1", str(path), str(path), "image 4")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"no image at all", "image 1: not an image"),
        (np.zeros((4, 4, 3)), r"image 1: an array of float64 \[4, 4, 3\]; give uint8"),
        (np.zeros((3, 4, 8), np.uint8), r"image 1: an array of uint8 \[3, 4, 8\]; give uint8 \[h w\], \[h w 1\]"),
        (np.zeros(4, np.uint8), r"image 1: an array of uint8 \[4\]"),
        (np.zeros((0, 4, 3), np.uint8), "image 1: has no pixels"),
        (np.zeros((2, 4, 4, 3), np.uint8), r"image 1: an array \[2, 4, 4, 3\] is not an image"),
        (7, "image 1: int is not an image"),
        (np.broadcast_to(np.uint8(0), (1, 70_000)), "image 1: .*side too long.*70000 x 1"),
        (np.broadcast_to(np.uint8(0), (9000, 8000)), "image 1: .*too many pixels.*8000 x 9000"),
        (Image.new("F", (4, 4), 0.5), "image 1: .*levels whose white is not known.*mode F; save them with 8 or 16"),
        (Image.new("I", (4, 4), 200), "image 1: .*levels whose white is not known.*mode I"),
        ("nowhere.png", "nowhere.png: cannot be read"),
        (Path("/"), "/: cannot be read"),
    ],
)
def test_an_image_that_cannot_be_used_is_named(pixels, image, message: str):
    with pytest.raises(UserError, match=message):
        list(Images([pixels, image], DATA))


def test_too_large_an_array_is_refused_before_it_is_copied(monkeypatch):
    monkeypatch.setattr(Image, "fromarray", lambda *_: pytest.fail("copied"))
    with pytest.raises(UserError, match=r"image 0: .*too many pixels"):
        list(Images(np.broadcast_to(np.uint8(3), (25_000, 25_000, 3)), DATA))


@pytest.mark.parametrize(("mode", "format"), [("I;16", "PNG"), ("I;16", "TIFF"), ("I", "PPM")])
def test_sixteen_bits_are_read_as_their_file(mode, format):
    stream = io.BytesIO()
    Image.fromarray(np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)).save(stream, format)
    with Image.open(stream) as opened:
        assert opened.mode == mode
        from_image, from_file = Images([opened, stream.getvalue()], DATA)
    np.testing.assert_array_equal(from_image, from_file)
    assert from_image.max() > 200


def test_a_damaged_image_that_pillow_opened_is_named_and_no_images_are_an_error(path):
    data = path.read_bytes()
    with Image.open(io.BytesIO(data[: len(data) // 2])) as opened, pytest.raises(UserError, match="image 0: cannot be"):
        list(Images(opened, DATA))
    for images in ([], (), 3, None):
        assert_refused("give an image, or a list of one or more", Images, images, DATA)
