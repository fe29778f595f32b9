"""Converts images to the formats of shards: JPEG, PNG and WebP are stored unchanged, other formats become PNG."""

import io

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import BmpImagePlugin, GifImagePlugin, Image, TiffImagePlugin
from PIL.ImageFile import ImageFile

from lit_het.data_pipelines.image_headers import MAX_PIXELS, BrokenImage, check_parts, check_size
from lit_het.data_pipelines.images import decode, decode_whole
from lit_het.data_pipelines.memory import DECODING

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Suffixes of image files, in lower case; the content decides the format."""

_PNG_MODES = {mode: mode for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")}
_PNG_MODES |= {"PA": "RGBA", "RGBX": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}
_BYTES_PER_PIXEL = 12  # upper bound of the memory
_CHECKED_SIZE = 8  # pixels; the whole image is decoded at any size, and a small one is fast


def as_stored(data: bytes, *, check: bool = False, border: int = 0) -> tuple[str, bytes]:
    """Returns the extension and bytes of an image in a shard; the first bytes decide the format.

    JPEG, PNG and WebP are returned unchanged, unless a border is removed. BMP, TIFF and the first frame of a GIF become
    PNG, without loss for 8 bits per channel and for 16-bit grey; CMYK and YCbCr become RGB.

    Args:
        data: the image in the format of its source.
        check: also decode it, as the loader would.
        border: pixels to remove at each side; the others become PNG, without loss for 8 bits per channel.

    Raises:
        BrokenImage: an unknown format, levels with an unknown white point, damage, or nothing within the border.
    """
    if data.startswith(b"\xff\xd8\xff"):
        extension = "jpg"
    elif data.startswith(b"\x89PNG\r\n\x1a\n"):
        extension = "png"
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        extension = "webp"
    else:
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
    reader = _reader(data)
    stream = io.BytesIO()
    check_parts(data, MAX_PIXELS)
    try:
        with reader(io.BytesIO(data)) as image:
            check_size(image.width, image.height)
            with DECODING.reserve(image.width * image.height * _BYTES_PER_PIXEL):
                _as_png_holds_it(image).save(stream, "PNG")
    except BrokenImage:
        raise
    except Exception as error:  # Pillow's readers raise arbitrary exceptions on damage
        raise BrokenImage(f"damaged {reader.format}", str(error)) from error
    return stream.getvalue()


def _as_png_holds_it(image: Image.Image) -> Image.Image:
    # The conversion of Pillow 13.0 to native byte order would clip levels to 255.
    if image.mode in ("I;16B", "I;16L"):
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    if image.mode not in _PNG_MODES:
        detail = f"{image.format} in mode {image.mode}; save it with 8 or 16 bits"
        raise BrokenImage("levels whose white is not known", detail)
    mode = _PNG_MODES[image.mode]
    return image if image.mode == mode else image.convert(mode)


def _reader(data: bytes) -> type[ImageFile]:
    if data.startswith((b"GIF87a", b"GIF89a")):
        return GifImagePlugin.GifImageFile
    if data.startswith(b"BM"):
        return BmpImagePlugin.BmpImageFile
    if data.startswith((b"II*\0", b"MM\0*")):
        return TiffImagePlugin.TiffImageFile
    raise BrokenImage("not an image", f"{len(data)} bytes that start with {data[:8]!r}")
