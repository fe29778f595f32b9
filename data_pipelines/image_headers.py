"""What the headers of an image tell before it is decoded, and limits for it: a small file may stand for a large image.

Decoders of libraries allocate what a header asks for, and some read what stands before the pixels in quadratic time.
"""

import re
from collections.abc import Iterator
from typing import Literal

MAX_PIXELS = 2**26
"""Images with more pixels than this (8192 x 8192) are refused before they are decoded."""

MAX_WEBP_PIXELS = 2**25
"""WebP images with more pixels than this are refused: their decoder takes about 20 bytes for each."""

MAX_SIDE = 2**16
"""Images with a longer side than 65,536 pixels are refused: JPEG, GIF and WebP have none, and most panoramas less."""

MAX_SCANS = 32
"""JPEGs with more scans than this are refused: encoders write about 10, and each costs as much as the whole image."""

MAX_PARTS = 2**17
"""Images of more segments (JPEG) or chunks (PNG) than this are refused; 8 KiB of pixels each are usual."""

MAX_PREAMBLE_BYTES = 2**20
"""GIFs whose first frame begins later than this are refused: comments are read in quadratic time."""

_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_SEQUENTIAL_FRAMES, _PROGRESSIVE_FRAMES = (0xC0, 0xC1, 0xC9), (0xC2, 0xCA)
# A marker with a segment behind it, or the end. Fill bytes, stuffed bytes and restarts are none.
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]", re.DOTALL)
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_ORIENTATION = 0x0112
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')


class BrokenImage(ValueError):
    """Bytes that are no readable image.

    Attributes:
        cause: a few words that are the same for all images with this defect, for counting.
    """

    def __init__(self, cause: str, detail: str = ""):
        super().__init__(f"{cause} ({detail})" if detail else cause)
        self.cause = cause


def check_size(width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    """Refuses images that are too large.

    Raises:
        BrokenImage: there are more than ``max_pixels``, or a side is longer than `MAX_SIDE`.
    """
    if width * height > max_pixels:
        raise BrokenImage("too many pixels", f"{width} x {height}, at most {max_pixels}")
    if max(width, height) > MAX_SIDE:
        raise BrokenImage("side too long", f"{width} x {height}, at most {MAX_SIDE}")


def check_parts(data: bytes, max_pixels: int) -> None:
    """Refuses a PNG, GIF or WebP that a decoder would not come to an end with; `check_size` follows when it is open.

    Raises:
        BrokenImage: for what the limits of this module say.
    """
    if data.startswith(b"\x89PNG"):
        _check_chunks(data)
    elif data.startswith(b"GIF8"):
        _check_preamble(data)
    elif data.startswith(b"RIFF"):
        check_size(*_webp_size(data), min(max_pixels, MAX_WEBP_PIXELS))  # its decoder allocates when it is opened


def is_progressive(data: bytes) -> bool:
    """Returns whether a JPEG has several scans for the same pixels; others are looked at up to their first scan.

    Raises:
        BrokenImage: it has more than `MAX_SCANS`, or too many segments.
    """
    num_components, num_scans, progressive = b"", 0, False
    for marker, start in _segments(data):
        if marker in _SEQUENTIAL_FRAMES:
            num_components = data[start + 7 : start + 8]
        elif marker in _PROGRESSIVE_FRAMES:
            num_components, progressive = b"", True
        elif marker == _START_OF_SCAN:
            num_scans += 1
            if num_scans > MAX_SCANS:
                raise BrokenImage("too many scans", f"more than {MAX_SCANS}")
            if data[start + 2 : start + 3] == num_components:  # libjpeg admits no scan after one of all components
                return False
    return progressive or num_scans > 1


def jpeg_orientation(data: bytes) -> int:
    """Returns how the pixels of a JPEG are turned, by EXIF's numbers from 1 (upright) to 8."""
    exif, xmp = b"", b""
    for marker, start in _segments(data):
        if marker == _START_OF_SCAN:
            break
        end = start + int.from_bytes(data[start : start + 2])
        if not exif and data.startswith(_EXIF, start + 2):
            exif = data[start + 2 : end]
        elif not xmp and data.startswith(_XMP, start + 2):
            xmp = data[start + 2 : end]
    return orientation(exif, xmp) if exif else 1


def orientation(exif: bytes, xmp: bytes = b"") -> int:
    """Returns EXIF's number for how pixels are turned, which XMP may give instead; 1 where neither can be read.

    No other field is read. A library reads them all, and some 65,000 of them may point to the same megabytes.
    """
    exif = exif.removeprefix(_EXIF)
    orders: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
    order = orders.get(exif[:4], "little")
    first = int.from_bytes(exif[4:8], order) + 2
    last = min(first + 12 * int.from_bytes(exif[first - 2 : first], order), len(exif) - 11)
    for entry in range(first, last if exif[:4] in orders else 0, 12):
        if int.from_bytes(exif[entry : entry + 2], order) == _ORIENTATION:
            width = {1: 1, 3: 2, 4: 4}.get(int.from_bytes(exif[entry + 2 : entry + 4], order), 0)
            found = int.from_bytes(exif[entry + 8 : entry + 8 + width], order)
            return found if 1 <= found <= 8 else 1
    in_xmp = _XMP_ORIENTATION.search(xmp)
    return int(in_xmp[1]) if in_xmp else 1


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Walks a JPEG, over entropy-coded data too: yields markers and where the lengths behind them stand."""
    place = 2
    for _ in range(MAX_PARTS):
        found = _MARKER.search(data, place)
        if found is None or data[found.end() - 1] == _END_OF_IMAGE:
            return
        start = found.end()
        yield data[start - 1], start
        place = start + int.from_bytes(data[start : start + 2])
    raise BrokenImage("too many segments", f"more than {MAX_PARTS}")


def _check_chunks(data: bytes) -> None:
    place = 8
    for _ in range(MAX_PARTS):
        if place >= len(data):
            return
        place += 12 + int.from_bytes(data[place : place + 4])
    raise BrokenImage("too many chunks", f"more than {MAX_PARTS}")


def _check_preamble(data: bytes) -> None:
    """Walks over the extensions before a GIF's first frame: blocks of up to 255 bytes, the last of which is empty."""
    place = 13 + (3 << (data[10] & 7) + 1 if len(data) > 10 and data[10] & 0x80 else 0)
    while data[place : place + 1] == b"!" and place < MAX_PREAMBLE_BYTES:
        place += 2
        while place < min(len(data), MAX_PREAMBLE_BYTES) and data[place]:
            place += 1 + data[place]
        place += 1
    if place >= MAX_PREAMBLE_BYTES:
        raise BrokenImage("too much before the pixels", f"at most {MAX_PREAMBLE_BYTES} bytes are read")


def _webp_size(data: bytes) -> tuple[int, int]:
    kind, at = data[12:16], data[20:30]
    if kind == b"VP8X":
        return 1 + int.from_bytes(at[4:7], "little"), 1 + int.from_bytes(at[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(at[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(at[6:8], "little") & 0x3FFF, int.from_bytes(at[8:10], "little") & 0x3FFF
