"""Decodes images of common formats to uint8 arrays, square or of the form of a part, and encodes JPEG.

A rectangular part of an image, its *box*, is resized with one of four filters:

- ``"fast"`` approximates antialiased bicubic with the nearest cheap method at each ratio. Enlarging is bicubic.
  Shrinking is bilinear down to 1 / 1.3; bilinear to twice the size, then the exact mean of 2 x 2 pixels, down to
  1 / 2.3; and as ``"area"`` beyond that. JPEGs are decoded with libjpeg's fast DCT and fast chroma upsampling.
- ``"area"``: shrinking averages over areas (OpenCV ``INTER_AREA``), enlarging is bilinear.
- ``"bilinear"`` and ``"bicubic"`` are antialiased: Pillow's ``Image.resize`` on exactly decoded pixels.

If a box is at least four times as large as the result, the first two filters first shrink the image with libjpeg's
scaled DCT, so that the box is still at least twice as large as the result.
"""

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterator

import cv2
import numpy as np
import simplejpeg
from jaxtyping import UInt8
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from PIL.ImageFile import ImageFile

from lit_het.data_pipelines.images.headers import (
    MAX_PIXELS,
    BrokenImage,
    check_parts,
    check_size,
    format_of,
    is_progressive,
    jpeg_orientation,
    orientation,
)
from lit_het.data_pipelines.images.repair import (
    check_coded_tiff,
    check_pixels_of_png,
    repaired_jpeg,
    repaired_png,
    without_padding,
)
from lit_het.data_pipelines.images.transforms import Box, Filter, Size, Transparency, whole
from lit_het.data_pipelines.shards.memory import DECODING

UNKNOWN_WHITE = "levels whose white is not known"
"""The cause of images of 32 bits per channel."""

_READERS: dict[str, type[ImageFile]] = {
    "PNG": PngImagePlugin.PngImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
}
_JUNK_BEFORE_END = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
_MAX_JUNK = 32  # bytes of several values
# Measured bytes of memory per pixel while an image is decoded and resized: simplejpeg at full size; simplejpeg with
# scaled DCT; what a JPEG takes in addition if it is progressive, turned, or CMYK; Pillow; Pillow's WebP decoder.
_JPEG_BYTES, _SHRUNK_BYTES, _COPY_BYTES, _PILLOW_BYTES, _WEBP_BYTES = 7, 1, 6, 12, 20
_STRIP_PIXELS = 2**20
_MAX_MARGIN = 12  # pixels read beside a box that does not start at a whole pixel
_PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

# OpenCV's threads would compete with the loader's for the same cores.
cv2.setNumThreads(0)


def decode(
    data: bytes,
    size: Size,
    choose_box: Callable[[int, int], Box] = whole,
    filter: Filter = "area",
    *,
    max_pixels: int = MAX_PIXELS,
    transparency: Transparency = "white",
) -> UInt8[np.ndarray, "height width 3"]:
    """Decodes an image to RGB and resizes a part of it.

    The first bytes decide the format. simplejpeg decodes JPEG, Pillow decodes PNG, WebP, GIF, BMP, TIFF and PPM: the
    first frame of an animation, upright, the upper 8 of 16 bits. What decodes whole is read, whatever lies around the
    pixels (`lit_het.data_pipelines.images.repair`); what lacks pixels is broken. Threads wait while all together would
    exceed `memory.DECODING`.

    Args:
        data: the encoded image.
        size: of the result.
        choose_box: maps height and width of the upright image to the box.
        filter: how the box is resized.
        max_pixels: the largest accepted image.
        transparency: see `Transparency`.

    Raises:
        BrokenImage: unknown format, damaged bytes, or beyond the limits of `lit_het.data_pipelines.images.headers`.
    """
    with _out_of_memory_as_broken():
        if format_of(data) != "JPEG":
            with _decoded_with_pillow(data, max_pixels, transparency) as pixels:
                return resize(pixels, size, filter, choose_box(*pixels.shape[:2]))
        jpeg = _Jpeg(data, max_pixels)
        box = choose_box(*jpeg.upright)
        sides = _sides(size, box)
        min_side = _min_side(box, *jpeg.upright, sides, filter)
        with DECODING.reserve(jpeg.memory(shrunk=min_side > 0)):
            pixels = jpeg.decode(min_side, fast=filter == "fast")
            return resize(pixels, sides, filter, _scaled(box, jpeg.upright, pixels.shape[:2]))


def decode_whole(data: bytes) -> UInt8[np.ndarray, "h w 3"]:
    """Decodes an image to upright RGB at its own size, by the rules of `decode`.

    Raises:
        BrokenImage: as `decode`.
    """
    with _out_of_memory_as_broken():
        if format_of(data) != "JPEG":
            with _decoded_with_pillow(data, MAX_PIXELS, "white") as pixels:
                return pixels
        jpeg = _Jpeg(data, MAX_PIXELS)
        with DECODING.reserve(jpeg.memory(shrunk=False)):
            return jpeg.decode(0, fast=False)


def sides_of(data: bytes) -> tuple[int, int]:
    """Returns the sides of an upright or turned image, in pixels, by its headers.

    Raises:
        BrokenImage: an unknown format, a damaged header, or beyond the limits.
    """
    with _out_of_memory_as_broken():
        if format_of(data) == "JPEG":
            return _Jpeg(data, MAX_PIXELS).upright
        image = open_with_pillow(data)
        return image.height, image.width


@contextlib.contextmanager
def _out_of_memory_as_broken() -> Iterator[None]:
    try:
        yield
    except (MemoryError, cv2.error) as error:
        raise BrokenImage("too large for the memory", " ".join(str(error).split())) from error


def encode_jpeg(image: UInt8[np.ndarray, "h w c"], quality: int = 95) -> bytes:
    """Encodes RGB (``c`` = 3, no chroma subsampling) or grey (``c`` = 1) pixels; quality is libjpeg's, 1 to 100."""
    colorspace, subsampling = ("GRAY", "Gray") if image.shape[2] == 1 else ("RGB", "444")
    return simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality, colorspace, subsampling)


def resize(
    image: UInt8[np.ndarray, "h w 3"], size: Size | tuple[int, int], filter: Filter = "area", box: Box | None = None
) -> UInt8[np.ndarray, "height width 3"]:
    """Resizes a box, or the whole image, to a size, or to so many rows and columns of pixels."""
    box = box or whole(*image.shape[:2])
    height, width = size if isinstance(size, tuple) else _sides(size, box)
    if filter in _PILLOW_FILTERS:
        return np.array(Image.fromarray(image).resize((width, height), _PILLOW_FILTERS[filter], box))
    left, top, right, bottom = box
    rows, of_rows, above = _whole_pixels(top, bottom, height, image.shape[0])
    columns, of_columns, before = _whole_pixels(left, right, width, image.shape[1])
    resize_part = _resize_fast if filter == "fast" else _resize_by_area
    return resize_part(image[rows, columns], of_rows, of_columns)[above : above + height, before : before + width]


def _sides(size: Size, box: Box) -> tuple[int, int]:
    """Returns the height and the width to which a box is resized."""
    left, top, right, bottom = box
    return (size, size) if isinstance(size, int) else size(bottom - top, right - left)


def _whole_pixels(start: float, stop: float, size: int, length: int) -> tuple[slice, int, int]:
    """Returns whole pixels of an axis that cover an interval, which is resized to ``size`` pixels.

    OpenCV resizes whole pixels only. The interval is extended to those nearby pixels whose positions after the resize
    are closest to whole pixels.

    Returns:
        The pixels, their number after the resize, and how many of these precede the interval.
    """
    scale = size / (stop - start)
    first, last = math.floor(start), math.ceil(stop)
    if (first, last) == (start, stop):
        return slice(first, last), size, 0

    def distance(pixel: int) -> float:
        return abs((pixel - start) * scale - round((pixel - start) * scale))

    first = min(range(first, max(first - _MAX_MARGIN, -1), -1), key=distance)
    last = min(range(last, min(last + _MAX_MARGIN, length + 1)), key=distance)
    before = round((start - first) * scale)
    return slice(first, last), before + round((last - start) * scale), before


def _resize_fast(image: np.ndarray, height: int, width: int) -> np.ndarray:
    ratio = max(image.shape[0] / height, image.shape[1] / width)
    if ratio > 2.3:
        return _resize_by_area(image, height, width)
    if ratio > 1.3:
        twice = cv2.resize(image, (2 * width, 2 * height), interpolation=cv2.INTER_LINEAR)
        return cv2.resize(twice, (width, height), interpolation=cv2.INTER_AREA)
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR if ratio > 1 else cv2.INTER_CUBIC)


def _resize_by_area(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Shrinks the axes that are too long by area, then enlarges the others bilinearly."""
    rows, columns = image.shape[:2]
    if rows > height or columns > width:
        image = cv2.resize(image, (min(columns, width), min(rows, height)), interpolation=cv2.INTER_AREA)
    if rows < height or columns < width:
        image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    return image


class _Jpeg:
    """The header of a JPEG; simplejpeg decodes all of them, by the same rule.

    Attributes:
        upright: height and width of the upright image.
    """

    def __init__(self, data: bytes, max_pixels: int):
        self._data = repaired_jpeg(data)
        try:
            rows, columns, colorspace, _ = simplejpeg.decode_jpeg_header(self._data)
        except ValueError as error:
            raise BrokenImage("damaged JPEG", str(error)) from error
        height, width = int(rows), int(columns)
        check_size(width, height, max_pixels)
        self._is_cmyk, self._turn = colorspace in ("CMYK", "YCCK"), jpeg_orientation(self._data)
        self._copies = is_progressive(self._data) + self._is_cmyk + (self._turn != 1)
        self.upright = (width, height) if self._turn >= 5 else (height, width)

    def memory(self, *, shrunk: bool) -> int:
        """Returns the bytes of memory for decoding, at full size or by scaled DCT."""
        bytes_per_pixel = (_SHRUNK_BYTES if shrunk else _JPEG_BYTES) + self._copies * _COPY_BYTES
        return self.upright[0] * self.upright[1] * bytes_per_pixel

    def decode(self, min_side: int, *, fast: bool) -> UInt8[np.ndarray, "h w 3"]:
        """Returns upright RGB whose sides have at least this length; 0 for full size."""
        pixels = self._decode(self._data, (min_side, min_side, 2 if min_side else 1), fast)
        return turned(_in_strips(pixels, _cmyk_to_rgb) if self._is_cmyk else pixels, self._turn)

    def _decode(self, data: bytes, size: tuple[int, int, int], fast: bool) -> np.ndarray:
        mode = "CMYK" if self._is_cmyk else "RGB"
        try:
            return simplejpeg.decode_jpeg(data, mode, fast, fast, *size)
        except ValueError as error:
            # The first warning, the only one that libjpeg reports, came after all pixels were read.
            if (junk := _JUNK_BEFORE_END.search(str(error))) is not None:
                if int(junk[1]) <= _MAX_JUNK:
                    return simplejpeg.decode_jpeg(data, mode, fast, fast, *size, strict=False)
                # More is padding, if all pixels can be read without it; or damage let the decoder lose its place.
                if len(shorter := without_padding(data)) < len(data):
                    return self._decode(shorter, size, fast)
            raise BrokenImage("damaged JPEG", str(error)) from error


def _cmyk_to_rgb(strip: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(255 - strip, "CMYK").convert("RGB"))  # stored inverted, as by Adobe


def _in_strips(image: np.ndarray, convert: Callable[[np.ndarray], np.ndarray]) -> UInt8[np.ndarray, "h w 3"]:
    """Converts pixels ``[h w c]`` to RGB in strips, because conversions make several copies."""
    pixels = np.empty((*image.shape[:2], 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // image.shape[1])
    for top in range(0, len(image), rows):
        pixels[top : top + rows] = convert(image[top : top + rows])
    return pixels


def _min_side(box: Box, height: int, width: int, sides: tuple[int, int], filter: Filter) -> int:
    """Returns the least length of the image's shorter side after the scaled DCT; 0 to decode at full size."""
    left, top, right, bottom = box
    lengths = (bottom - top, right - left)
    # The exact filters need exactly decoded pixels.
    if filter in _PILLOW_FILTERS or any(length < 4 * side for length, side in zip(lengths, sides, strict=True)):
        return 0
    # At least twice the target, so that the final resize, not the coarse scaled DCT, decides the filter.
    return max(math.ceil(2 * side * min(height, width) / length) for length, side in zip(lengths, sides, strict=True))


def _scaled(box: Box, before: tuple[int, int], now: tuple[int, ...]) -> Box:
    """Returns the box after the image was scaled; multiplies before it divides, so that a whole image stays whole."""
    left, top, right, bottom = box
    (height, width), (rows, columns) = before, now
    return left * columns / width, top * rows / height, right * columns / width, bottom * rows / height


@contextlib.contextmanager
def _decoded_with_pillow(data: bytes, max_pixels: int, transparency: Transparency) -> Iterator[np.ndarray]:
    """Yields RGB pixels and keeps their memory reserved until the context ends."""
    image = open_with_pillow(data, max_pixels)
    with DECODING.reserve(image.width * image.height * (_WEBP_BYTES if image.format == "WEBP" else _PILLOW_BYTES)):
        try:
            pixels = upright_rgb(image, transparency)
            # To unpack every PNG twice would double the time: where pixels are missing, the last row is black.
            if image.format == "PNG" and (image.info.get("interlace") or _has_empty_end(image)):
                check_pixels_of_png(data)
        except (MemoryError, BrokenImage):
            raise
        except Exception as error:  # Pillow's readers raise arbitrary exceptions on damage
            raise BrokenImage(f"damaged {image.format}", str(error)) from error
        del image  # frees its pixels before the resize
        yield pixels


def _has_empty_end(image: Image.Image) -> bool:
    last = image.crop((0, image.height - 1, image.width, image.height))
    return last.getbbox(alpha_only=False) is None


def upright_rgb(image: Image.Image, transparency: Transparency = "white") -> UInt8[np.ndarray, "h w 3"]:
    """Returns the pixels of Pillow's image by the rules of `decode`; Pillow's readers raise arbitrary exceptions."""
    # Pillow reads 16 bits of these two formats as 32.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        kind = image.format or "pixels"
        raise BrokenImage(UNKNOWN_WHITE, f"{kind} in mode {image.mode}; save them with 8 or 16 bits")
    image.load()
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    # In strips, because conversions make several copies.
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        part = image.crop((0, top, image.width, min(top + rows, image.height)))
        pixels[top : top + rows] = np.asarray(_to_rgb(part, transparency))
    exif, xmp = image.info.get("exif"), image.info.get("xmp") or image.info.get("XML:com.adobe.xmp", b"")
    if exif is None and "Raw profile type exif" in image.info:
        with contextlib.suppress(ValueError):  # not hexadecimal
            exif = bytes.fromhex("".join(image.info["Raw profile type exif"].split("\n")[3:]))
    turn = orientation(exif or b"", xmp.encode() if isinstance(xmp, str) else xmp)
    return turned(pixels, turn)


def turned(pixels: np.ndarray, turn: int) -> np.ndarray:
    """Returns pixels ``[h w ...]`` upright that were stored with an EXIF orientation from 1 to 8."""
    if turn >= 5:
        pixels = cv2.transpose(pixels)
    axis = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}.get(turn)
    return pixels if axis is None else cv2.flip(pixels, axis)


def open_with_pillow(data: bytes, max_pixels: int = MAX_PIXELS) -> ImageFile:
    """Opens an image other than JPEG, whose pixels are decoded later.

    Raises:
        BrokenImage: an unknown format, a damaged header, a hole in a TIFF, or beyond the limits of
            `lit_het.data_pipelines.images.headers`.
    """
    reader, info = _READERS[format_of(data)], {}
    check_parts(data, max_pixels)
    if reader is PngImagePlugin.PngImageFile:
        data, info = repaired_png(data)
    # Not Image.open of Pillow 13.0: it tries 40 formats, and warns about large images before they are rejected.
    try:
        image = reader(io.BytesIO(data))
        check_size(image.width, image.height, max_pixels)
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            check_coded_tiff(data, image.tag_v2)
    except BrokenImage:
        raise
    except Exception as error:
        raise BrokenImage(f"damaged {reader.format}", str(error)) from error
    image.info |= info
    return image


def _to_rgb(image: Image.Image, transparency: Transparency) -> Image.Image:
    # The conversion of Pillow 13.0 would clip 16-bit levels instead of scaling them.
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        if transparency == "dropped":
            return rgba.convert("RGB")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")
