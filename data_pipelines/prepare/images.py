"""Converts images to the formats of shards: JPEG, PNG and WebP are stored unchanged, other formats become PNG."""

import io

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from lit_het.data_pipelines.images.decoding import UNKNOWN_WHITE, decode, decode_whole, open_with_pillow
from lit_het.data_pipelines.images.headers import BrokenImage, format_of
from lit_het.data_pipelines.shards.memory import DECODING
from lit_het.data_pipelines.shards.writing import IMAGE_EXTENSIONS, OTHER_IMAGES

SUFFIXES = tuple(f".{extension}" for extension in (*IMAGE_EXTENSIONS, *OTHER_IMAGES))
"""Suffixes of image files, in lower case; the content decides the format."""

UNREAD_SUFFIXES = frozenset((".avif", ".heic", ".heif", ".jxl", ".jp2", ".svg", ".ico", ".psd", ".tga", ".exr", ".dng"))
"""Suffixes of images in formats that are not read."""

_STORED = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}

_PNG_MODES = {mode: mode for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")}
_PNG_MODES |= {"PA": "RGBA", "RGBX": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}
_BYTES_PER_PIXEL = 12  # upper bound of the memory
_CHECKED_SIZE = 8  # pixels; the whole image is decoded at any size, and a small one is fast


def as_stored(data: bytes, *, check: bool = False, border: int = 0) -> tuple[str, bytes]:
    """Returns the extension and bytes of an image in a shard; the first bytes decide the format.

    JPEG, PNG and WebP are returned unchanged, unless a border is removed. BMP, TIFF, PPM and the first frame of a GIF
    become PNG, without loss for 8 bits per channel and for 16-bit grey; CMYK and YCbCr become RGB.

    Args:
        data: the image in the format of its source.
        check: also decode it, as the loader would.
        border: pixels to remove at each side; the others become PNG, without loss for 8 bits per channel.

    Raises:
        BrokenImage: an unknown format, levels with an unknown white point, damage, or nothing within the border.
    """
    extension = _STORED.get(format_of(data))
    if extension is None:
        extension, data = "png", _to_png(data)
    if border:
        extension, data = "png", _without_border(data, border)
    if check:
        decode(data, _CHECKED_SIZE)
    return extension, data


def encode_png(image: UInt8[np.ndarray, "h w 3"]) -> bytes:
    """Encodes RGB pixels as PNG."""
    return cv2.imencode(".png", image[:, :, ::-1])[1].tobytes()


def _without_border(data: bytes, border: int) -> bytes:
    pixels = decode_whole(data)[border:-border, border:-border]
    if not pixels.size:
        raise BrokenImage("nothing within the border", f"{border} pixels at each side")
    return encode_png(pixels)


def _to_png(data: bytes) -> bytes:
    stream = io.BytesIO()
    with open_with_pillow(data) as image, DECODING.reserve(image.width * image.height * _BYTES_PER_PIXEL):
        try:
            _as_png_holds_it(image).save(stream, "PNG")
        except BrokenImage:
            raise
        except Exception as error:  # Pillow's readers raise arbitrary exceptions on damage
            raise BrokenImage(f"damaged {image.format}", str(error)) from error
    return stream.getvalue()


def _as_png_holds_it(image: Image.Image) -> Image.Image:
    # The conversion of Pillow 13.0 to native byte order would clip levels to 255.
    if image.mode in ("I;16B", "I;16L") or (image.format, image.mode) == ("PPM", "I"):
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    if image.mode not in _PNG_MODES:
        detail = f"{image.format} in mode {image.mode}; save it with 8 or 16 bits"
        raise BrokenImage(UNKNOWN_WHITE, detail)
    mode = _PNG_MODES[image.mode]
    return image if image.mode == mode else image.convert(mode)
