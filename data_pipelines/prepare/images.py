"""Images as shards hold them: the bytes of the source where readers know the format, PNG where they do not."""

import io

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import BmpImagePlugin, GifImagePlugin, Image, TiffImagePlugin
from PIL.ImageFile import ImageFile

from lit_het.data_pipelines.image_headers import MAX_PIXELS, BrokenImage, check_parts, check_size
from lit_het.data_pipelines.images import decode
from lit_het.data_pipelines.memory import DECODING

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""What names of images end with, in lower case; the content decides what they are."""

_PNG_MODES = {mode: mode for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")}
_PNG_MODES |= {"PA": "RGBA", "RGBX": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}
_BYTES_PER_PIXEL = 12  # at most, of memory
_CHECKED_SIZE = 8  # pixels: every byte is decoded whatever the size, and a small one is resized fast


def as_stored(data: bytes, *, check: bool = False) -> tuple[str, bytes]:
    """Returns an image's extension and bytes in a shard, told by its first bytes.

    JPEG, PNG and WebP stay as they are. The first frame of a GIF, a BMP and a TIFF become PNG: levels of 8 bits, and of
    16 in grey, stay what they are; CMYK and YCbCr become RGB.

    Args:
        data: the image as its source holds it.
        check: also decode it, as the loader would.

    Raises:
        BrokenImage: it is in no format that can be read, its levels have no known white, or it is damaged.
    """
    if data.startswith(b"\xff\xd8\xff"):
        extension = "jpg"
    elif data.startswith(b"\x89PNG\r\n\x1a\n"):
        extension = "png"
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        extension = "webp"
    else:
        extension, data = "png", _to_png(data)
    if check:
        decode(data, _CHECKED_SIZE)
    return extension, data


def encode_png(image: UInt8[np.ndarray, "h w 3"]) -> bytes:
    """Encodes RGB pixels as PNG."""
    return cv2.imencode(".png", image[:, :, ::-1])[1].tobytes()


def _to_png(data: bytes) -> bytes:
    reader = _reader(data)
    stream = io.BytesIO()
    check_parts(data, MAX_PIXELS)
    try:
        with reader(io.BytesIO(data)) as image:
            check_size(image.width, image.height)
            with DECODING.held(image.width * image.height * _BYTES_PER_PIXEL):
                _as_png_holds_it(image).save(stream, "PNG")
    except BrokenImage:
        raise
    except Exception as error:  # Pillow's readers raise whatever the damage makes them trip over
        raise BrokenImage(f"damaged {reader.format}", str(error)) from error
    return stream.getvalue()


def _as_png_holds_it(image: Image.Image) -> Image.Image:
    if image.mode in ("I;16B", "I;16L"):  # Pillow's conversion to its own order of bytes clips to 255
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
    raise BrokenImage("no image", f"{len(data)} bytes that start with {data[:8]!r}")
