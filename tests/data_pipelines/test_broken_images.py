"""Any bytes decode to an image or raise `BrokenImage`: no other exception, no crash, no hang."""

import io
import re
import struct
import time
import warnings
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin

from lit_het.data_pipelines.images import decoding
from lit_het.data_pipelines.images.decoding import decode, decode_whole, open_with_pillow
from lit_het.data_pipelines.images.headers import MAX_SCANS, BrokenImage
from lit_het.data_pipelines.images.repair import repaired_jpeg
from lit_het.data_pipelines.images.transforms import Filter, InceptionCrop, Preprocessing, Training
from tests.data_pipelines.conftest import FILTERS, encoded

SIZE = 16


def scene(height: int = 40, width: int = 56) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(0).integers(0, 20, (height, width, 1))
    levels = np.stack([4 * x, 6 * y, 3 * (x + y)], axis=-1) + noise
    return Image.fromarray((levels % 256).astype(np.uint8))


FRAMES = {"save_all": True, "append_images": [scene().rotate(90), scene().rotate(180)]}
EXIF = Image.Exif()
EXIF[0x0112] = 6
FILES = {
    "JPEG": encoded(scene(), "JPEG", quality=80),
    "progressive JPEG": encoded(scene(), "JPEG", quality=80, progressive=True),
    "turned JPEG": encoded(scene(), "JPEG", exif=EXIF),
    "CMYK JPEG": encoded(scene().convert("CMYK"), "JPEG"),
    "large JPEG": encoded(scene(160, 160), "JPEG"),
    "PNG": encoded(scene(), "PNG"),
    "palette PNG": encoded(scene().convert("P"), "PNG", transparency=3),
    "animated PNG": encoded(scene(), "PNG", **FRAMES),
    "GIF": encoded(scene(), "GIF"),
    "animated GIF": encoded(scene(), "GIF", **FRAMES),
    "WebP": encoded(scene(), "WEBP"),
    "lossless WebP": encoded(scene(), "WEBP", lossless=True),
    "animated WebP": encoded(scene(), "WEBP", **FRAMES),
}
WHOLE = st.sampled_from(sorted(FILES)).map(FILES.__getitem__)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A real file that was cut, in which bits are flipped or bytes replaced, inserted or lost."""
    data = bytearray(draw(WHOLE))
    for _ in range(draw(st.integers(1, 6))):
        # half of the damage lies among the headers
        place = draw(st.integers(0, max(0, len(data) - 1)) | st.integers(0, min(200, max(0, len(data) - 1))))
        match draw(st.sampled_from(["flip", "replace", "insert", "lose", "cut"])):
            case "flip" if data:
                data[place] ^= 1 << draw(st.integers(0, 7))
            case "replace":
                data[place : place + 4] = draw(st.binary(max_size=4))
            case "insert":
                data[place:place] = draw(st.binary(max_size=8))
            case "lose":
                del data[place : place + draw(st.integers(1, 50))]
            case "cut":
                del data[place:]
    return bytes(data)


def check(data: bytes, filter: Filter) -> None:
    for convert in (
        lambda: decode(data, SIZE, filter=filter, max_pixels=2**20),
        lambda: Preprocessing("crop", 0.875, filter).apply(data, SIZE),
        lambda: Training(Preprocessing(filter=filter), InceptionCrop()).apply(data, SIZE, np.random.default_rng(0)),
    ):
        began = time.monotonic()
        try:
            pixels = convert()
        except BrokenImage as error:
            cause = error.cause
        else:
            cause = "none"
            assert (pixels.shape, pixels.dtype) == ((SIZE, SIZE, 3), np.uint8)
        assert 0 < len(cause) < 40
        assert time.monotonic() - began < 20


MAGIC = [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\x40\0\0\0WEBPVP8 ", b"RIFF\x40\0\0\0WEBPVP8L"]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(magic=st.sampled_from(MAGIC), rest=st.binary(max_size=300), filter=st.sampled_from(FILTERS))
def test_random_bytes_are_an_image_or_broken(magic: bytes, rest: bytes, filter: Filter):
    check(magic + rest, filter)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=damaged(), filter=st.sampled_from(FILTERS))
@example(data=FILES["JPEG"][:-1], filter="fast")
@example(data=FILES["animated GIF"][:200], filter="area")
def test_damaged_files_are_an_image_or_broken(data: bytes, filter: Filter):
    check(data, filter)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_byte_is_an_image_or_broken(name: str):
    data = FILES[name]
    for end in {*range(0, min(len(data), 64)), *range(64, len(data), max(1, len(data) // 50))}:
        check(data[:end], "fast")


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, body: bytes = b"", between: bytes = b"", is_interlaced: bool = False) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, is_interlaced)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + between + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def with_comment(data: bytes, size: int) -> bytes:
    """A GIF with a comment of so many bytes before its first frame."""
    place = 13 + (3 << (data[10] & 7) + 1)
    return data[:place] + b"!\xfe" + (b"\xff" + bytes(255)) * (size // 256) + b"\0" + data[place:]


def webp(kind: bytes, size: bytes) -> bytes:
    return b"RIFF\x40\0\0\0WEBP" + kind + b"\x0a\0\0\0" + size + bytes(40)


def claiming(data: bytes, width: int, height: int) -> bytes:
    """A JPEG whose header says another size."""
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def tiff(*fields: tuple[int, int, int, int]) -> bytes:
    """The header of a TIFF with fields of tag, type, count and value."""
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(fields)) + b"".join(struct.pack("<HHII", *f) for f in fields)


def with_wrong_checksum(kind: bytes) -> bytes:
    """A PNG with a palette, and one chunk whose checksum is wrong."""
    data = bytearray(FILES["palette PNG"])
    at = data.index(kind)
    data[at + 4 + int.from_bytes(data[at - 4 : at])] ^= 1
    return bytes(data)


SOI = b"\xff\xd8"
BROKEN = {
    "nothing": (b"", "not an image"),
    "text": (b"<html>404</html>", "not an image"),
    "an AVIF": (b"\0\0\0 ftypavif" + bytes(40), "AVIF or HEIC"),
    "a JPEG 2000": (b"\0\0\0\x0cjP  \r\n" + bytes(40), "JPEG 2000"),
    "a JPEG XL": (b"\xff\x0a" + bytes(40), "JPEG XL"),
    "a TIFF whose fields share bytes": (tiff((256, 7, 2**20, 8), (257, 7, 2**20, 8)), "damaged TIFF"),
    "a TIFF of one huge tile": (tiff((322, 4, 1, 2**16), (323, 4, 1, 2**16)), "too many pixels"),
    "a TIFF of 32 bits": (encoded(scene().convert("F"), "TIFF"), "levels whose white is not known"),
    "a BMP cut short": (encoded(scene(), "BMP")[:-100], "damaged BMP"),
    "a WAVE": (b"RIFF1234WAVE", "not an image"),
    "a JPEG's first bytes": (b"\xff\xd8\xff\xe0", "damaged JPEG"),
    "a JPEG's first three bytes": (b"\xff\xd8\xff", "damaged JPEG"),
    "a PNG of 30,000 x 30,000": (png(30_000, 30_000), "too many pixels"),
    "a JPEG that claims 30,000 x 30,000": (claiming(FILES["JPEG"], 30_000, 30_000), "too many pixels"),
    "a JPEG without width": (claiming(FILES["JPEG"], 0, 40), "damaged JPEG"),
    "a GIF of 65,535 x 65,535": (b"GIF89a" + b"\xff" * 4 + FILES["GIF"][10:], "too many pixels"),
    "a PNG of 1 x 67 million": (png(1, 2**26, zlib.compress(bytes(2**20))), "side too long"),
    "a PNG of 67 million x 1": (png(2**26, 1, zlib.compress(bytes(2**20))), "side too long"),
    "a PNG of a million chunks": (png(8, 8, between=chunk(b"abCd", b"") * 2**18), "too many chunks"),
    "a JPEG of a million segments": (SOI + b"\xff\xfe\0\2" * 2**18 + FILES["JPEG"][2:], "too many segments"),
    "a GIF with a comment of megabytes": (with_comment(FILES["GIF"], 2**21), "too much before the pixels"),
    "a WebP that claims 16,384 x 16,384": (webp(b"VP8X", bytes(4) + b"\xff\x3f\0" * 2), "too many pixels"),
    "a lossless WebP that claims as many": (webp(b"VP8L", b"\x2f\xff\xff\xff\x0f"), "too many pixels"),
    "a lossy WebP that claims as many": (webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a\xff\x3f\xff\x3f"), "too many pixels"),
    "a PNG that ends within its last pixels": (FILES["PNG"][:-20], "damaged PNG"),
    "a PNG with a wrong checksum of its pixels": (with_wrong_checksum(b"IDAT"), "damaged PNG"),
    "a PNG with a wrong checksum of its palette": (with_wrong_checksum(b"PLTE"), "damaged PNG"),
    "a PNG with a wrong checksum of its transparency": (with_wrong_checksum(b"tRNS"), "damaged PNG"),
    "a PNG without pixels": (png(10, 10), "damaged PNG"),
    "a PNG that ends within its pixels": (png(10, 10, zlib.compress(bytes(310))[:-8]), "damaged PNG"),
    "a PNG without its last row": (png(10, 10, zlib.compress(bytes(279))), "damaged PNG"),
    "a PNG without its last byte": (png(10, 10, zlib.compress(bytes(309))), "damaged PNG"),
    "an interlaced PNG without its end": (png(10, 10, zlib.compress(bytes(319)), is_interlaced=True), "damaged PNG"),
}


@pytest.mark.parametrize(("coded", "is_interlaced"), [(310, False), (320, True)])
def test_a_black_png_with_all_of_its_bytes_is_read(coded: int, is_interlaced: bool):
    """Rows of 31 bytes; interlaced, passes of 14, 8, 10, 21, 32, 80 and 155."""
    data = png(10, 10, zlib.compress(bytes(coded)), is_interlaced=is_interlaced)
    np.testing.assert_array_equal(decode_whole(data), 0)


def with_last_scan_again(data: bytes, times: int) -> bytes:
    scan = data.rindex(b"\xff\xda")
    return data[:scan] + data[scan:-2] * times + data[-2:]


MANY_SCANS = {
    "progressive": FILES["progressive JPEG"],
    "grey and progressive": encoded(scene().convert("L"), "JPEG", progressive=True),
    "progressive and turned": encoded(scene(), "JPEG", progressive=True, exif=EXIF),
    "progressive in CMYK": encoded(scene().convert("CMYK"), "JPEG", progressive=True),
    "progressive with restarts": encoded(scene(), "JPEG", progressive=True, restart_marker_blocks=2),
}


@pytest.mark.parametrize("name", MANY_SCANS)
def test_too_many_scans_are_refused_before_they_are_decoded(name: str):
    assert decode(MANY_SCANS[name], SIZE).shape == (SIZE, SIZE, 3)
    with pytest.raises(BrokenImage, match=f"more than {MAX_SCANS}") as caught:
        decode(with_last_scan_again(MANY_SCANS[name], MAX_SCANS), SIZE)
    assert caught.value.cause == "too many scans"


def test_a_small_file_does_not_block_a_thread_for_minutes():
    grey = encoded(Image.new("L", (8192, 8192)), "JPEG", progressive=True)
    began = time.monotonic()
    with pytest.raises(BrokenImage, match="too many scans"):
        decode(with_last_scan_again(grey, 200), SIZE)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["JPEG", "progressive JPEG", "large JPEG"])
@pytest.mark.parametrize("filter", FILTERS)
def test_junk_before_the_end_of_a_jpeg_is_ignored_but_truncation_is_not(name: str, filter: Filter):
    data, junk = FILES[name], bytes(range(1, 33))
    for whole in (data[:-2] + junk + data[-2:], data[:-2] + junk):
        np.testing.assert_array_equal(decode(whole, SIZE, filter=filter), decode(data, SIZE, filter=filter))
    scan = data.rindex(b"\xff\xda")
    start, end = data[scan : scan + 20], data[-2:]
    cuts = [data[:-6], data[:-6] + end, data[:-100]]
    for cut in (*cuts, data[:scan] + start + end, data[:scan] + start, data[:scan] + junk + start + end):
        with pytest.raises(BrokenImage, match="damaged"):
            decode(cut, SIZE, filter=filter)


def before(marker: bytes, junk: bytes = b"\0\1\2") -> Callable[[bytes], bytes]:
    return lambda data: data[: data.index(marker)] + junk + data[data.index(marker) :]


def with_scan(data: bytes, coefficients: bytes) -> bytes:
    at = data.index(b"\xff\xda") + 2
    end = at + int.from_bytes(data[at : at + 2])
    return data[: end - 3] + coefficients + data[end:]


HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    "stray bytes before the first marker": lambda data: SOI + b"\0\1" + data[2:],
    "stray bytes before tables": before(b"\xff\xdb"),
    "stray bytes before the frame": lambda data: before(b"\xff\xc2" if b"\xff\xc2" in data else b"\xff\xc0")(data),
    "stray bytes before the scan": before(b"\xff\xda"),
    "the scan of a phone": lambda data: data if b"\xff\xc2" in data else with_scan(data, bytes(3)),
    "JFIF 2.01": lambda data: data.replace(b"JFIF\0\1", b"JFIF\0\2"),
    "an unknown transform of Adobe": lambda data: re.sub(b"(?s)(?<=Adobe.{6}).", b"\7", data),
    "padding before the end": lambda data: data[:-2] + bytes(500) + data[-2:],
    "no end": lambda data: data[:-2],
    "half of an end": lambda data: data[:-1],
}
JPEGS = {
    "upright": {},
    "grey": {"mode": "L"},
    "turned": {"exif": EXIF},
    "progressive": {"progressive": True},
    "progressive and turned": {"progressive": True, "exif": EXIF},
    "CMYK": {"mode": "CMYK"},
    "CMYK and turned": {"mode": "CMYK", "exif": EXIF},
    "with restarts": {"restart_marker_rows": 1},
}


def jpeg(kind: str) -> bytes:
    options = dict(JPEGS[kind])
    return encoded(scene(256, 384).convert(options.pop("mode", "RGB")), "JPEG", quality=90, **options)


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_faults_around_the_pixels_of_a_jpeg_change_none(name: str, kind: str):
    data = jpeg(kind)
    if "unknown transform" in name and "CMYK" in kind:
        data = data.replace(b"Adobe\0d\0\0\0\0\0", b"Adobe\0d\0\0\0\0\2")  # libjpeg's guess is YCCK
    np.testing.assert_array_equal(decode_whole(HARMLESS[name](data)), decode_whole(data))


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("name", ["none", *sorted({*HARMLESS} - {"padding before the end"})])
def test_damage_is_refused_in_every_kind_of_jpeg_also_behind_a_harmless_fault(name: str, kind: str):
    data = HARMLESS.get(name, bytes)(jpeg(kind))
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    for damaged in (data[:middle] + bytes(400) + data[middle + 400 :], data[:middle] + data[-2:], data[:middle]):
        with pytest.raises(BrokenImage, match="damaged JPEG"):
            decode(damaged, SIZE)


def noise(mode: str) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)).convert(mode)


TIFFS = {"tiff_lzw": "RGB", "tiff_adobe_deflate": "RGB", "tiff_deflate": "L", "jpeg": "RGB", "group4": "1"}
TIFFS |= {"tiff_ccitt": "1"}


@pytest.mark.parametrize("compression", TIFFS)
def test_a_hole_of_zeros_in_a_compressed_tiff_is_damage(compression: str):
    image = noise(TIFFS[compression])
    data = encoded(image, "TIFF", compression=compression)
    assert decode_whole(data).shape == (96, 96, 3)
    for start in (len(data) // 4, len(data) // 2):
        with pytest.raises(BrokenImage, match=r"damaged (TIFF|JPEG)"):
            open_with_pillow(data[:start] + bytes(100) + data[start + 100 :])


@pytest.mark.parametrize("compression", [*TIFFS, "packbits", "group3", "raw"])
def test_a_tiff_of_one_colour_is_no_damage_whatever_its_zeros(compression: str):
    for colour in ("black", "white", "grey"):
        image = Image.new("RGB", (1500, 1500), colour)
        image.paste(noise("RGB"), (700, 700))  # what follows zeros is no padding
        image = image.convert(TIFFS.get(compression, "1" if compression == "group3" else "RGB"))
        data = encoded(image, "TIFF", compression=compression, tiffinfo={278: 1500})  # all rows in one strip
        assert compression == "jpeg" or (decode_whole(data) == np.asarray(image.convert("RGB"))).all()
    assert compression != "tiff_adobe_deflate" or bytes(64) in data


def test_coded_pixels_that_are_left_over_are_damage():
    data, rng = encoded(scene(256, 384), "JPEG", quality=95), np.random.default_rng(0)
    end_of_pixels = data[:-2] + rng.integers(0, 255, 200, np.uint8).tobytes() + data[-2:]
    with pytest.raises(BrokenImage, match="bytes before marker 0xd9"):
        decode(end_of_pixels, SIZE)


@pytest.mark.parametrize("end", [b"", b"\xff\xd9"])
def test_coded_pixels_that_are_zero_bytes_are_no_padding(end: bytes):
    # With optimal codes a zero may stand for an empty block, so that few zeros code many pixels.
    data = encoded(scene(256, 384), "JPEG", quality=30, optimize=True)
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    with pytest.raises(BrokenImage, match="damaged JPEG"):
        decode(data[:middle] + bytes(len(data) - middle) + end, SIZE)


@pytest.mark.parametrize(
    ("offset", "change", "kind"),
    [
        (1, b"\xc3", "lossless"),
        (1, b"\xf7", "lossless"),
        (4, b"\x0c", "12 bits"),
        (5, b"\0\0", "height after the pixels"),
    ],
)
def test_a_kind_of_jpeg_that_is_not_read_is_named_and_no_damage(offset: int, change: bytes, kind: str):
    data = jpeg("upright")
    at = data.index(b"\xff\xc0") + offset
    with pytest.raises(BrokenImage, match=f"^JPEG of a kind that is not read .{kind}"):
        decode(data[:at] + change + data[at + len(change) :], SIZE)


def test_a_valid_jpeg_is_not_copied():
    for kind in JPEGS:
        assert repaired_jpeg(data := jpeg(kind)) is data


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("kind", ["turned", "CMYK", "CMYK and turned"])
def test_turned_and_cmyk_jpegs_have_the_pixels_of_pillow(kind: str, filter: Filter):
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg(kind)))).convert("RGB")
    np.testing.assert_array_equal(decode_whole(jpeg(kind)), np.asarray(image))
    expected = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(decode(jpeg(kind), SIZE, filter=filter) - expected).mean() < 14


LONG = b"<x>" * 500_000
ODD_CHUNKS = {
    "a comment with a wrong checksum": chunk(b"tEXt", b"a\0b")[:-1] + b"!",
    "megabytes of packed text": chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**7))),
    "megabytes of packed XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(LONG)),
    "XMP that cannot be unpacked": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + LONG[:99]),
    "megabytes of a profile": chunk(b"iCCP", b"a\0\0" + zlib.compress(LONG)),
    "a profile packed in an unknown way": chunk(b"iCCP", b"a\0\7"),
    "EXIF that is not hexadecimal": chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 2\nzz\n"),
    **{
        f"an empty {kind}": chunk(kind.encode(), b"")
        for kind in ("cHRM", "gAMA", "sRGB", "iCCP", "pHYs", "eXIf", "acTL", "fcTL", "tIME")
    },
}


@pytest.mark.parametrize("cut", [1, 4, 12])
def test_a_png_without_its_end_is_read_if_its_pixels_are_whole(cut: int):
    data = FILES["palette PNG"]
    np.testing.assert_array_equal(decode_whole(data[:-cut]), decode_whole(data))
    with pytest.raises(BrokenImage, match="damaged PNG"):
        decode(data[: -12 - cut], SIZE)


@pytest.mark.parametrize("place", ["before the pixels", "after them"])
@pytest.mark.parametrize("name", ODD_CHUNKS)
def test_no_chunk_that_pixels_do_not_need_makes_a_png_broken(name: str, place: str):
    data, at = FILES["palette PNG"], 33 if place == "before the pixels" else -12
    found = decode_whole(data[:at] + ODD_CHUNKS[name] + data[at:])
    np.testing.assert_array_equal(found, decode_whole(data))


def test_scans_of_a_thumbnail_do_not_count():
    thumbnail = b"Exif\0\0" + b"\xff\xda\0\2" * 100
    segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    data = FILES["progressive JPEG"]
    assert decode(data[:2] + segment + data[2:], SIZE).shape == (SIZE, SIZE, 3)


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("filter", FILTERS)
def test_every_defect_has_its_cause(name: str, filter: Filter):
    data, cause = BROKEN[name]
    began = time.monotonic()
    with pytest.raises(BrokenImage) as caught:
        decode(data, SIZE, filter=filter)
    assert caught.value.cause == cause
    assert time.monotonic() - began < 5


ODD = {
    "grey": encoded(scene().convert("L"), "JPEG"),
    "grey and transparent": encoded(scene().convert("LA"), "PNG"),
    "of two levels": encoded(scene().convert("1"), "PNG"),
    "of 16 bits": encoded(Image.fromarray(np.arange(40 * 56, dtype=np.uint16).reshape(40, 56) * 29), "PNG"),
    "with damaged metadata": FILES["turned JPEG"].replace(b"Exif\0\0MM\0", b"Exif\0\0MM\1"),
    "of 1 x 1 in JPEG": encoded(scene(1, 1), "JPEG"),
    "of 1 x 1 in GIF": encoded(scene(1, 1), "GIF"),
    "of 1 x 5000": encoded(scene(1, 5000), "JPEG"),
    "of 5000 x 1": encoded(scene(5000, 1), "WEBP"),
    **{f"in {name}": data for name, data in FILES.items()},
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("filter", FILTERS)
def test_unusual_images_are_decoded_without_warnings(name: str, filter: Filter):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = decode(ODD[name], SIZE, filter=filter)
        crop = Training(Preprocessing(filter=filter), InceptionCrop()).apply(ODD[name], SIZE, np.random.default_rng(0))
    for pixels in (whole, crop, Preprocessing("crop", 0.875, filter).apply(ODD[name], SIZE)):
        assert (pixels.shape, pixels.dtype) == ((SIZE, SIZE, 3), np.uint8)
    # and much like what Pillow makes of it
    image = Image.open(io.BytesIO(ODD[name]))
    if "turned" not in name and "palette" not in name and "16" not in name:
        expected = np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)).astype(int)
        assert np.abs(whole - expected).mean() < 14


@pytest.mark.parametrize("filter", FILTERS)
def test_a_rotated_image_is_cropped_after_it_was_turned_upright(filter: Filter):
    upright = np.zeros((64, 32, 3), np.uint8)
    upright[:32] = 255
    turned = encoded(Image.fromarray(np.ascontiguousarray(np.rot90(upright))), "JPEG", quality=100, exif=EXIF)
    pixels = decode(turned, 8, lambda height, width: (0.0, 0.0, width / 1.0, height / 2), filter)
    assert pixels[1:7, 1:7].min() > 240


def exif_of(turn: int, order: str = ">", fields: int = 0) -> bytes:
    """EXIF with an orientation behind other fields, which all point to the same bytes."""
    entries = [struct.pack(f"{order}HHII", number, 1, 2**18, 8) for number in range(fields)]
    entries.append(struct.pack(f"{order}HHIHH", 0x0112, 3, 1, turn, 0))
    start = {">": b"MM\0*", "<": b"II*\0"}[order] + struct.pack(f"{order}IH", 8, len(entries))
    return b"Exif\0\0" + start + b"".join(entries) + bytes(4)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("turn", range(10))
def test_orientations_are_applied_as_in_pillow(turn: int, order: str, format: str):
    data = encoded(scene(), format, exif=exif_of(turn, order), **({"lossless": True} if format == "WEBP" else {}))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    found = decode_whole(data).astype(int)
    assert found.shape == (expected.height, expected.width, 3)
    assert np.abs(found - np.asarray(expected)).max() <= (3 if format == "JPEG" else 0)


def test_without_exif_the_orientation_comes_from_xmp():
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="6"/>')
    assert decode_whole(encoded(scene(40, 56), "PNG", pnginfo=text)).shape == (56, 40, 3)


def test_metadata_fields_that_share_megabytes_are_not_read():
    data = png(8, 8, zlib.compress(bytes(200)), chunk(b"eXIf", exif_of(6, fields=50_000)))
    began = time.monotonic()
    assert decode(data, SIZE).shape == (SIZE, SIZE, 3)
    assert time.monotonic() - began < 2


def test_too_little_memory_for_an_image_masks_it_and_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise MemoryError

    for name in ("JPEG", "PNG"):
        place = (decoding._Jpeg, "decode") if name == "JPEG" else (decoding, "upright_rgb")
        monkeypatch.setattr(*place, refuse)
        for read in (lambda name=name: decode(FILES[name], SIZE), lambda name=name: decode_whole(FILES[name])):
            with pytest.raises(BrokenImage, match="too large for the memory"):
                read()
