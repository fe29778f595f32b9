"""Pictures to pixels: bytes of any common format to a square uint8 array, and back to JPEG.

The resize method is part of what a tower has learned: shrinking averages over areas (OpenCV ``INTER_AREA``, which
antialiases), enlarging is bilinear (``INTER_LINEAR``); the aspect ratio is not kept. A JPEG at least four times as
large as asked for is first shrunk by libjpeg's scaled DCT to no less than twice the size.
"""

import io

import cv2
import numpy as np
import simplejpeg
from jaxtyping import UInt8
from PIL import GifImagePlugin, Image, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
from PIL.ImageFile import ImageFile

MAX_PIXELS = 2**26
"""Pictures with more pixels than this (8192 x 8192) are refused before they are decoded."""

_EXIF_ORIENTATION = 0x0112

# OpenCV's own threads would fight with the loader's for the same cores.
cv2.setNumThreads(0)


class BrokenImage(ValueError):
    """Bytes that are no readable picture.

    Attributes:
        cause: a few words that are the same for all pictures with this defect, for counting.
    """

    def __init__(self, cause: str, detail: str = ""):
        super().__init__(f"{cause} ({detail})" if detail else cause)
        self.cause = cause


def decode(data: bytes, size: int, *, max_pixels: int = MAX_PIXELS) -> UInt8[np.ndarray, "size size 3"]:
    """Decodes a picture to RGB and resizes it to ``size`` x ``size`` pixels if it has another size.

    The format is told by the first bytes, never by a name. JPEG goes through simplejpeg; PNG, WebP, GIF, CMYK and
    turned JPEG go through Pillow: the first frame of an animation, EXIF orientation applied, 16 bits cut to the
    upper 8, transparency over white.

    Raises:
        BrokenImage: unknown format, more than ``max_pixels`` pixels, or damaged bytes.
    """
    pixels = _decode_jpeg(data, size, max_pixels) if data.startswith(b"\xff\xd8\xff") else None
    if pixels is None:
        pixels = _decode_with_pillow(data, max_pixels)
    return resize(pixels, size)


def encode_jpeg(image: UInt8[np.ndarray, "h w c"], quality: int = 95) -> bytes:
    """Encodes RGB (``c`` = 3, colours not subsampled) or grey (``c`` = 1) pixels; quality is libjpeg's, 1 to 100."""
    colorspace, subsampling = ("GRAY", "Gray") if image.shape[2] == 1 else ("RGB", "444")
    return simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality, colorspace, subsampling)


def resize(image: UInt8[np.ndarray, "h w 3"], size: int) -> UInt8[np.ndarray, "size size 3"]:
    """Resizes to ``size`` x ``size`` pixels: first shrinks by area what is too long, then enlarges bilinearly."""
    height, width = image.shape[:2]
    if height > size or width > size:
        image = cv2.resize(image, (min(width, size), min(height, size)), interpolation=cv2.INTER_AREA)
    if height < size or width < size:
        image = cv2.resize(image, (size, size), interpolation=cv2.INTER_LINEAR)
    return image


def _decode_jpeg(data: bytes, size: int, max_pixels: int) -> np.ndarray | None:
    """Decodes the plain kinds of JPEG fast; None leaves the others to Pillow."""
    try:
        rows, columns, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        raise BrokenImage("damaged JPEG", str(error)) from error
    height, width = int(rows), int(columns)
    _check_pixels(width, height, max_pixels)
    if colorspace not in ("YCbCr", "Gray", "RGB") or _is_turned(data):
        return None
    scaled = 2 * size if min(height, width) >= 4 * size else 0
    try:
        return simplejpeg.decode_jpeg(data, "RGB", min_height=scaled, min_width=scaled, min_factor=2 if scaled else 1)
    except ValueError as error:
        raise BrokenImage("damaged JPEG", str(error)) from error


def _is_turned(data: bytes) -> bool:
    if data.find(b"Exif\0\0", 0, 2**16) < 0:
        return False
    return _open(data, JpegImagePlugin.JpegImageFile).getexif().get(_EXIF_ORIENTATION, 1) != 1


def _decode_with_pillow(data: bytes, max_pixels: int) -> np.ndarray:
    image = _open(data, _reader(data))
    _check_pixels(image.width, image.height, max_pixels)
    try:
        image.load()
        return np.array(_to_rgb(ImageOps.exif_transpose(image)))
    except Exception as error:  # Pillow's readers raise whatever the damage makes them trip over
        raise BrokenImage(f"damaged {image.format}", str(error)) from error


def _reader(data: bytes) -> type[ImageFile]:
    if data.startswith(b"\xff\xd8\xff"):
        return JpegImagePlugin.JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImagePlugin.PngImageFile
    if data.startswith((b"GIF87a", b"GIF89a")):
        return GifImagePlugin.GifImageFile
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile
    raise BrokenImage("no picture", f"{len(data)} bytes that start with {data[:8]!r}")


def _open(data: bytes, reader: type[ImageFile]) -> ImageFile:
    # Not Image.open: it would try 40 formats, and warn about large pictures before they can be refused.
    try:
        return reader(io.BytesIO(data))
    except Exception as error:
        raise BrokenImage("damaged header", str(error)) from error


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise BrokenImage("too many pixels", f"{width} x {height}, at most {max_pixels}")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # Pillow's conversion would clip 16 bits instead of scaling them
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        picture = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    return image.convert("RGB")
