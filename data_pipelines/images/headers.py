"""Checks the headers of an image before it is decoded, because a small file may declare a huge image.

Decoders allocate what a header declares, and some parse metadata in quadratic time.
"""

import re
from collections.abc import Iterator
from typing import Literal

MAX_PIXELS = 2**26
"""The largest accepted image: 8192 x 8192 pixels."""

MAX_WEBP_PIXELS = 2**25
"""The largest accepted WebP image, in pixels: its decoder takes about 20 bytes for each."""

MAX_SIDE = 2**16
"""The longest accepted side, in pixels; JPEG, GIF and WebP cannot have a longer one."""

MAX_SCANS = 32
"""The most scans of a JPEG: encoders write about 10, and each costs as much as decoding the whole image."""

MAX_PARTS = 2**17
"""The most segments of a JPEG or chunks of a PNG; usually each holds 8 KiB of pixels."""

MAX_PREAMBLE_BYTES = 2**20
"""The latest start of a GIF's first frame: Pillow reads the comments before it in quadratic time."""

_STARTS = {b"\xff\xd8": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG", b"GIF87a": "GIF", b"GIF89a": "GIF", b"BM": "BMP"}
_STARTS |= {b"II*\0": "TIFF", b"MM\0*": "TIFF"}
_UNREAD = {b"\0\0\0\x0cjP  ": "JPEG 2000", b"\xff\x4f": "JPEG 2000"}  # with and without a container
_UNREAD |= {b"\0\0\0\x0cJXL ": "JPEG XL", b"\xff\x0a": "JPEG XL"}
START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
SEQUENTIAL_FRAMES, PROGRESSIVE_FRAMES = (0xC0, 0xC1, 0xC9), (0xC2, 0xCA)
FRAMES = frozenset((*range(0xC0, 0xD0), 0xF7)) - {0xC4, 0xC8, 0xCC}  # also of kinds that are not read; 0xF7: JPEG-LS
# A marker that a segment follows, or the end of the image; not fill bytes, stuffed bytes or restart markers.
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]", re.DOTALL)
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
_ORIENTATION, _TILE_WIDTH, _TILE_LENGTH = 0x0112, 0x0142, 0x0143
_WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}  # bytes, by type
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')


class BrokenImage(ValueError):
    """Bytes that cannot be decoded as an image.

    Attributes:
        cause: a short description, equal for all images with this defect, for counting.
    """

    def __init__(self, cause: str, detail: str = ""):
        super().__init__(f"{cause} ({detail})" if detail else cause)
        self.cause = cause


def format_of(data: bytes) -> str:
    """Returns the format of an image by its first bytes, with Pillow's name.

    Raises:
        BrokenImage: none that is read.
    """
    for start, name in _STARTS.items():
        if data.startswith(start):
            return name
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:2] in (b"P4", b"P5", b"P6") and data[2:3].isspace():
        return "PPM"
    unread = "AVIF or HEIC" if data[4:8] == b"ftyp" else _UNREAD.get(data[:8]) or _UNREAD.get(data[:2])
    if unread:
        raise BrokenImage(unread, "is not read; save it as JPEG, PNG or WebP")
    raise BrokenImage("not an image", f"{len(data)} bytes that start with {data[:8]!r}")


def check_size(width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    """Checks the size of an image.

    Raises:
        BrokenImage: there are more than ``max_pixels``, or a side is longer than `MAX_SIDE`.
    """
    if width * height > max_pixels:
        raise BrokenImage("too many pixels", f"{width} x {height}, at most {max_pixels}")
    if max(width, height) > MAX_SIDE:
        raise BrokenImage("side too long", f"{width} x {height}, at most {MAX_SIDE}")


def check_parts(data: bytes, max_pixels: int) -> None:
    """Checks the parts of a GIF, TIFF or WebP before it is opened; `check_size` follows after it was opened.

    Raises:
        BrokenImage: it exceeds a limit of this module.
    """
    found = format_of(data)
    if found == "GIF":
        _check_preamble(data)
    elif found == "TIFF":
        _check_fields(data)
    elif found == "WEBP":
        # Pillow's WebP decoder allocates all pixels when it opens the file.
        check_size(*_webp_size(data), min(max_pixels, MAX_WEBP_PIXELS))


def check_frame(data: bytes, marker: int, start: int) -> None:
    """Checks that a JPEG is of a kind that is read, given the marker of its frame and the offset behind it.

    Raises:
        BrokenImage: it is not.
    """
    bits, rows = data[start + 2 : start + 3], data[start + 3 : start + 5]
    if marker not in SEQUENTIAL_FRAMES + PROGRESSIVE_FRAMES:
        kind = "lossless or hierarchical"
    elif bits not in (b"", b"\x08"):
        kind = f"{bits[0]} bits per channel"
    elif rows == b"\0\0":
        kind = "height after the pixels"
    else:
        return
    raise BrokenImage("JPEG of a kind that is not read", f"{kind}; save it as baseline JPEG, PNG or WebP")


def is_progressive(data: bytes) -> bool:
    """Returns whether a JPEG has several scans; a JPEG with one scan is parsed only up to it.

    Raises:
        BrokenImage: it has more than `MAX_SCANS`, or too many segments.
    """
    num_components, num_scans, progressive = b"", 0, False
    for marker, start in segments(data):
        if marker in SEQUENTIAL_FRAMES:
            num_components = data[start + 7 : start + 8]
        elif marker in PROGRESSIVE_FRAMES:
            num_components, progressive = b"", True
        elif marker == START_OF_SCAN:
            num_scans += 1
            if num_scans > MAX_SCANS:
                raise BrokenImage("too many scans", f"more than {MAX_SCANS}")
            # A sequential scan of all components is the last one that libjpeg accepts.
            if data[start + 2 : start + 3] == num_components:
                return False
    return progressive or num_scans > 1


def jpeg_orientation(data: bytes) -> int:
    """Returns the EXIF orientation of a JPEG, from 1 (upright) to 8."""
    exif, xmp = b"", b""
    for marker, start in segments(data):
        if marker == START_OF_SCAN:
            break
        end = start + int.from_bytes(data[start : start + 2])
        if not exif and data.startswith(_EXIF, start + 2):
            exif = data[start + 2 : end]
        elif not xmp and data.startswith(_XMP, start + 2):
            xmp = data[start + 2 : end]
    return orientation(exif, xmp) if exif else 1


def orientation(exif: bytes, xmp: bytes = b"") -> int:
    """Returns the orientation from EXIF, else from XMP, else 1.

    No other field is parsed. Libraries parse all fields, and 65,000 of them may point to the same megabytes.
    """
    for tag, _, _, value in _fields(exif.removeprefix(_EXIF)):
        if tag == _ORIENTATION:
            return value if 1 <= value <= 8 else 1
    in_xmp = _XMP_ORIENTATION.search(xmp)
    return int(in_xmp[1]) if in_xmp else 1


def _fields(tiff: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yields tag, bytes per value, number of values and value of the fields of a TIFF, such as EXIF."""
    order = _ORDERS.get(tiff[:4])
    if order is None:
        return
    first = int.from_bytes(tiff[4:8], order) + 2
    last = min(first + 12 * int.from_bytes(tiff[first - 2 : first], order), len(tiff) - 11)
    # Entries have 12 bytes: tag, type, count, value.
    for entry in range(first, last, 12):
        tag, kind = (int.from_bytes(tiff[at : at + 2], order) for at in (entry, entry + 2))
        width = _WIDTHS.get(kind, 0)
        value = int.from_bytes(tiff[entry + 8 : entry + 8 + width], order) if kind in (1, 3, 4) else 0
        yield tag, width, int.from_bytes(tiff[entry + 4 : entry + 8], order), value


def _check_fields(data: bytes) -> None:
    """Checks the fields of a TIFF, which Pillow reads all, and its tiles, which libtiff allocates."""
    size, tile = 0, {_TILE_WIDTH: 1, _TILE_LENGTH: 1}
    for tag, width, count, value in _fields(data):
        size += width * count
        if tag in tile:
            tile[tag] = value
    if size > len(data):
        raise BrokenImage("damaged TIFF", f"fields of {size:,} bytes in a file of {len(data):,}")
    check_size(*tile.values())


def segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields each marker of a JPEG and the offset of the segment length after it; skips entropy-coded data.

    Raises:
        BrokenImage: there are more than `MAX_PARTS`.
    """
    place = 2
    for _ in range(MAX_PARTS):
        found = _MARKER.search(data, place)
        if found is None or data[found.end() - 1] == _END_OF_IMAGE:
            return
        start = found.end()
        # The segment's length includes its own two bytes.
        yield data[start - 1], start
        place = start + int.from_bytes(data[start : start + 2])
    raise BrokenImage("too many segments", f"more than {MAX_PARTS}")


def _check_preamble(data: bytes) -> None:
    """Skips the extensions before a GIF's first frame: blocks of up to 255 bytes, ended by an empty one."""
    place = 13 + (3 << (data[10] & 7) + 1 if len(data) > 10 and data[10] & 0x80 else 0)
    while data[place : place + 1] == b"!" and place < MAX_PREAMBLE_BYTES:
        place += 2
        while place < min(len(data), MAX_PREAMBLE_BYTES) and data[place]:
            place += 1 + data[place]
        place += 1
    if place >= MAX_PREAMBLE_BYTES:
        raise BrokenImage("too much before the pixels", f"at most {MAX_PREAMBLE_BYTES} bytes are read")


def _webp_size(data: bytes) -> tuple[int, int]:
    # The three kinds of WebP store their size in different places: extended, lossless, lossy.
    kind, at = data[12:16], data[20:30]
    if kind == b"VP8X":
        return 1 + int.from_bytes(at[4:7], "little"), 1 + int.from_bytes(at[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(at[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(at[6:8], "little") & 0x3FFF, int.from_bytes(at[8:10], "little") & 0x3FFF
