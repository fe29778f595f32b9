"""Takes out of JPEG and PNG files what decoders refuse although no pixel depends on it.

All decoders are strict: libjpeg reports only its first warning, so that a harmless one would hide the damage behind it.
"""

import struct
import zlib
from collections.abc import Mapping
from typing import Any

from lit_het.data_pipelines.images.headers import (
    FRAMES,
    MAX_PARTS,
    MAX_PIXELS,
    SEQUENTIAL_FRAMES,
    START_OF_SCAN,
    BrokenImage,
    check_frame,
    segments,
)

MAX_TEXT_BYTES = 2**20
"""The most that is unpacked of a text of a PNG: only its orientation is looked for."""

_LONGEST_ZEROS = 64  # bytes
_JFIF, _ADOBE, _TABLES = 0xE0, 0xEE, 0xC4
_END_OF_JPEG, _END_OF_PNG = b"\xff\xd9", b"\0\0\0\0IEND\xaeB`\x82"
_ALL_COEFFICIENTS = b"\0\x3f\0"  # of a scan that is not progressive: from 0 to 63, of all bits
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""Of an interlaced PNG: the left column and top row of each, and the distances of its columns and rows."""
_BLOCK_BYTES = 2**16
# Tags of a TIFF, of strips and of tiles, and values of the compression: RLE, Group 4 and LZW; Deflate of two numbers.
_COMPRESSION, _BIT_ORDER, _JPEG_TABLES, _OFFSETS, _SIZES = 259, 266, 347, (273, 324), (279, 325)
_WITHOUT_ZEROS, _DEFLATE, _JPEG = (2, 4, 5), (8, 32946), 7
_EXIF_TEXT, _XMP_TEXT = "Raw profile type exif", "XML:com.adobe.xmp"


def repaired_jpeg(data: bytes) -> bytes:
    """Returns a JPEG without stray bytes among its headers, and with valid fields in them; itself if it is valid.

    Repaired are JFIF versions other than 1, unknown colour transforms of Adobe, and the range of coefficients in scans
    that have no range, as libjpeg takes them after a warning; and a missing end, before which libjpeg misses pixels.

    Raises:
        BrokenImage: it has too many segments, or is of a kind that is not read.
    """
    edits: list[tuple[int, int, bytes]] = []  # start, end, what replaces these bytes
    end, transform, is_sequential, num_components, tables = 2, 0, False, 0, b""
    for marker, start in segments(data):
        # Between a scan and the next marker lies the coded image; fill bytes are valid.
        if end and data[end : start - 2].strip(b"\xff"):
            edits.append((end, start - 2, b""))
        end = start + int.from_bytes(data[start : start + 2])
        if marker == _JFIF and data.startswith(b"JFIF\0", start + 2):
            edits.append((start + 7, start + 8, b"\1"))
        elif marker == _ADOBE and data.startswith(b"Adobe", start + 2):
            transform = start + 13
        elif marker == _TABLES:
            tables += data[start + 2 : end]
        elif marker in FRAMES:
            check_frame(data, marker, start)
            is_sequential, num_components = marker in SEQUENTIAL_FRAMES, data[start + 7] if start + 7 < len(data) else 0
            valid = {3: b"\1\0", 4: b"\2\0"}.get(num_components)  # the first is what libjpeg assumes
            if transform and valid and data[transform : transform + 1] not in (valid[:1], valid[1:]):
                edits.append((transform, transform + 1, valid[:1]))
        elif marker == START_OF_SCAN:
            of_scan = data[start + 2] if start + 2 < len(data) else 0
            if is_sequential:
                edits.append((end - 3, end, _ALL_COEFFICIENTS))
            if not is_sequential or of_scan == num_components:
                break
            end = 0
    if is_sequential and end:
        _check_zeros(data, end, tables)
    if data.rfind(_END_OF_JPEG, end) < 0:  # from the end, where it is nearly always
        edits.append((len(data), len(data), _END_OF_JPEG))
    edits = [edit for edit in edits if data[edit[0] : edit[1]] != edit[2]]
    if not edits:
        return data
    parts, place = list[bytes](), 0
    for start, end, replacement in sorted(edits):
        parts += data[place:start], replacement
        place = end
    return b"".join((*parts, data[place:]))


def _check_zeros(data: bytes, start: int, tables: bytes) -> None:
    """Checks that no hole of zeros, as lost blocks of a disk leave, is among the coded pixels: libjpeg may decode it.

    Only where zeros code an empty block of every component, as in optimal tables of images with blank parts, is a long
    run of them an image. The runs before the end and behind it are padding.
    """
    place = 0
    while place + 17 < len(tables):
        if tables[place] & 0x10 and tables[place + 17]:  # of coefficients, and its shortest code is not that of none
            # The hole first: to look for two bytes among all pixels takes fifteen times as long as for 64.
            if (hole := data.find(bytes(_LONGEST_ZEROS), start)) >= 0:
                stop = data.find(_END_OF_JPEG, start)
                if data[hole : len(data) if stop < 0 else stop].strip(b"\0"):
                    raise BrokenImage("damaged JPEG", f"zeros in place of coded pixels at byte {hole}")
            return
        place += 17 + sum(tables[place + 1 : place + 17])


def check_coded_tiff(data: bytes, tags: Mapping[int, Any]) -> None:
    """Checks that no hole of zeros is among the coded pixels of a TIFF: libtiff decodes it, and often without a word.

    LZW and CCITT code no image as so many zeros. Deflate does, and has a checksum that libtiff does not read; JPEG has
    the rule of its own files. PackBits, as pixels that are not compressed, may hold any number of zeros.

    Args:
        data: the file.
        tags: of its first image, as Pillow parses them.

    Raises:
        BrokenImage: there is one.
    """
    compression, most_bytes = tags.get(_COMPRESSION), 8 * MAX_PIXELS
    starts, sizes = (tags.get(strips) or tags.get(tiles, ()) for strips, tiles in (_OFFSETS, _SIZES))
    for start, size in zip(starts, sizes, strict=False):
        coded = data[start : start + size]
        hole = coded.rstrip(b"\0").find(bytes(_LONGEST_ZEROS))
        if hole < 0:
            continue
        is_damaged = compression in _WITHOUT_ZEROS
        if compression in _DEFLATE and tags.get(_BIT_ORDER, 1) == 1:
            decoder = zlib.decompressobj()  # raises zlib.error at the end if the checksum is another one
            while coded and most_bytes > 0:
                most_bytes -= len(decoder.decompress(coded, _BLOCK_BYTES))
                coded = decoder.unconsumed_tail
            is_damaged = not decoder.eof
        elif compression == _JPEG:
            repaired_jpeg(tags.get(_JPEG_TABLES, b"\xff\xd8\xff\xd9")[:-2] + coded[2:])
        if is_damaged:
            raise BrokenImage("damaged TIFF", f"zeros in place of coded pixels at byte {start + hole}")


def without_padding(data: bytes) -> bytes:
    """Returns a JPEG without the repeated byte before its end; itself if there is none."""
    body, end, rest = data.rpartition(_END_OF_JPEG)
    # One is left: it may be the second half of a coded byte.
    return body.rstrip(body[-1:]) + body[-1:] + end + rest


def repaired_png(data: bytes) -> tuple[bytes, dict[str, bytes | str]]:
    """Returns a PNG of only the chunks that its pixels need, and what its other chunks say of the orientation.

    Returns:
        The file, and entries of Pillow's ``Image.info``.

    Raises:
        BrokenImage: a chunk that the pixels need is damaged, or there are too many chunks.
    """
    parts, info, place = [data[:8]], dict[str, bytes | str](), 8
    for _ in range(MAX_PARTS):
        kind, end = data[place + 4 : place + 8], place + 12 + int.from_bytes(data[place : place + 4])
        if kind == b"IEND" or end > len(data):
            # The pixels have an end of their own, so that a decoder misses it where the file is cut.
            return b"".join((*parts, _END_OF_PNG)), info
        is_whole = zlib.crc32(data[place + 4 : end - 4]) == int.from_bytes(data[end - 4 : end])
        if kind[:1].isupper() or kind == b"tRNS":
            if not is_whole:
                raise BrokenImage("damaged PNG", f"wrong checksum of {kind!r} at byte {place}")
            parts.append(data[place:end])
        elif is_whole:
            info |= _orientation_in(kind, data[place + 8 : end - 4])
        place = end
    raise BrokenImage("too many chunks", f"more than {MAX_PARTS}")


def check_pixels_of_png(data: bytes) -> None:
    """Checks that a PNG has coded bytes for all of its pixels: Pillow leaves those black that it has none for.

    Raises:
        BrokenImage: it has fewer.
    """
    width, height, depth, colour, *_, is_interlaced = struct.unpack(">2I5B", data[16:29])
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    missing = 0
    for left, top, x_step, y_step in _PASSES if is_interlaced else [(0, 0, 1, 1)]:
        columns, rows = -((left - width) // x_step), -((top - height) // y_step)
        # Each row begins with a byte for its filter.
        missing += rows * (1 + (columns * bits + 7) // 8) if columns > 0 < rows else 0
    decoder, place = zlib.decompressobj(), 8
    while missing > 0 and place < len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4])
        coded = data[place + 8 : end - 4] if data[place + 4 : place + 8] == b"IDAT" else b""
        while coded and not decoder.eof and missing > 0:
            missing -= len(decoder.decompress(coded, _BLOCK_BYTES))
            coded = decoder.unconsumed_tail
        place = end
    if missing > 0:
        raise BrokenImage("damaged PNG", f"{missing} bytes of its pixels are missing")


def _orientation_in(kind: bytes, content: bytes) -> dict[str, bytes | str]:
    """Returns EXIF or XMP of a chunk."""
    if kind == b"eXIf":
        return {"exif": content}
    keyword, _, text = content.partition(b"\0")
    name = keyword.decode("latin-1")
    if kind not in (b"tEXt", b"zTXt", b"iTXt") or name not in (_EXIF_TEXT, _XMP_TEXT):
        return {}
    is_packed = kind == b"zTXt" or (kind == b"iTXt" and text[:1] == b"\1")
    if kind == b"iTXt":
        text = b"".join(text[2:].split(b"\0", 2)[2:])  # behind the language and the translated keyword
    elif kind == b"zTXt":
        text = text[1:]
    if is_packed:
        try:
            text = zlib.decompressobj().decompress(text, MAX_TEXT_BYTES)
        except zlib.error:
            return {}
    return {name: text.decode("latin-1")}
