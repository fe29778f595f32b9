"""Changes of single files: what their fields say, with lengths and checksums repaired."""

import ast
import binascii
import pickle
import pickletools
import struct
import zipfile
import zlib

import msgpack

from scripts.testing.fuzzing import trees
from scripts.testing.fuzzing.numbers import NUMBERS, Part, Random, many, number_bytes

UNSTRUCTURED = (ArithmeticError, AttributeError, EOFError, LookupError, OSError, RecursionError, SyntaxError, TypeError)
UNSTRUCTURED += (ValueError, struct.error, pickle.UnpicklingError, msgpack.UnpackException, zipfile.BadZipFile)
UNSTRUCTURED += (NotImplementedError, RuntimeError, zlib.error)
"""What changes of bytes raise that are of no structure, or not any more."""

_SHAPES = (
    *("()", "(0,)", "(-1,)", "(2**40,)", "(4294967296, 4294967296)", "(0, 4611686018427387904)", "[8]", "8", "(8.0,)"),
    *("(1,)" * 40, "(" + "1," * 70 + ")", "(True,)", "None", "(" * 3000, "'x'", "(8" + "0" * 5000 + ",)", "(8,)", "(8"),
)
_DTYPES = (
    *("'|O'", "'<f4'", "'V0'", "'|b1'", "'<U1000000000'", "'<M8[s]'", "[('a', '<f4')]", "[]", "None", "'<f2'", "'S0'"),
    *("('<f4', (3000000000,))", "[('a', '|O')]", "'<c16'", "'>i8'", "'|V2'", "{'names': 3}", "'f4, (2)f4'"),
)
_FIELDS = ("1", "{}", "[[]]", "b''", "-" * 2000 + "1")
_PNG_CHUNKS = (
    *(b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"acTL", b"fcTL"),
    *(b"fdAT", b"tRNS", b"PLTE", b"eXIf", b"gAMA", b"IEND"),
)
_FRAMES = (0xC0, 0xC1, 0xC2)
_MARKERS = (*_FRAMES, 0xC4, 0xC9, 0xCA, 0xDB, 0xDD, 0xE0, 0xE1, 0xE2, 0xEE, 0xFE)
_GLOBALS = (b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cos\nsystem\n", b"cnumpy.core.multiarray\n_reconstruct\n")
_INSTRUCTIONS = (
    *(b"B\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 7 + b"\x7f", b"r\xff\xff\xff\x7f", b"I1000000000\n", *_GLOBALS),
    *(b"R", b"b", b"(", b"t", b"N", b"}", b"]", b"0", b"2", b"(" * 5000),
)


def npy(content: bytes, part: Part, random: Random) -> bytes:
    """Changes what the header of a NumPy array says."""
    wide = content[6] > 1
    start = 12 if wide else 10
    size = struct.unpack_from("<I" if wide else "<H", content, 8)[0]
    fields = ast.literal_eval(content[start : start + size].decode("latin1"))
    texts = {name: repr(value) for name, value in fields.items()}
    match random.randrange(6):
        case 0 | 1:
            number = random.choice(NUMBERS)
            texts["shape"] = random.choice((*_SHAPES, repr((number,)), repr((number, 0))))
        case 2 | 3:
            texts["descr"] = random.choice(_DTYPES)
        case 4:
            texts["fortran_order"] = random.choice(("True", "1", "None", "'x'"))
        case 5:
            texts[random.choice(("shape", "descr", "extra"))] = random.choice(_FIELDS)
    if random.random() < 0.1:
        del texts[random.choice(list(texts))]
    text = "{" + ", ".join(f"'{name}': {value}" for name, value in texts.items()) + ", }\n"
    version = random.choice((1, 1, 2, 3, content[6]))
    length = random.choice((len(text),) * 9 + NUMBERS)
    form = "<H" if version == 1 else "<I"
    packed = struct.pack(form, length % 256 ** struct.calcsize(form))
    return b"\x93NUMPY" + bytes((version, 0)) + packed + text.encode() + content[start + size :]


def png(content: bytes, part: Part, random: Random) -> bytes:
    """Changes the dimensions, a chunk, or the order of chunks of a PNG."""
    chunks, place = [], 8
    while place + 8 <= len(content):
        size = int.from_bytes(content[place : place + 4])
        chunks.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + size]))
        place += 12 + size
    number = random.randrange(len(chunks))
    kind, held = chunks[number]
    match random.randrange(6):
        case 0 | 1:
            sizes = struct.pack(">II", *(random.choice((*NUMBERS, 5000, 8192)) % 2**32 for _ in range(2)))
            rest = random.choice((held[8:], bytes(random.choice((0, 1, 2, 3, 4, 6, 8, 16, 255)) for _ in range(5))))
            chunks[0] = chunks[0][0], random.choice((sizes + chunks[0][1][8:], chunks[0][1][:8] + rest[:5]))
        case 2:
            chunks[number] = kind, part(held)
        case 3:
            held = b"a\0\0" + random.choice((zlib.compress(bytes(random.choice((10, 10**6)))), held))
            chunks.insert(random.randrange(len(chunks)), (random.choice(_PNG_CHUNKS), held))
        case 4:
            chunks.insert(number, (random.choice((kind, random.choice(_PNG_CHUNKS))), held))
        case 5:
            del chunks[number]
    packed = (struct.pack(">I", len(held)) + kind + held + _crc(kind + held) for kind, held in chunks)
    return content[:8] + b"".join(packed)


def _crc(content: bytes) -> bytes:
    return struct.pack(">I", binascii.crc32(content))


def jpeg(content: bytes, part: Part, random: Random) -> bytes:
    """Changes the dimensions or another segment of a JPEG."""
    segments, place = [], 2
    while content[place] == 0xFF and content[place + 1] != 0xDA:
        size = 2 + int.from_bytes(content[place + 2 : place + 4])
        segments.append(content[place : place + size])
        place += size
    number = random.randrange(len(segments))
    frame = [segment[1] in _FRAMES for segment in segments].index(True)
    match random.randrange(5):
        case 0:
            sizes = struct.pack(">HH", *(random.choice((*NUMBERS, 5000, 8192)) % 2**16 for _ in range(2)))
            segments[frame] = segments[frame][:5] + sizes + segments[frame][9:]
        case 1:
            marker = random.choice(_MARKERS)
            segments[number] = bytes((0xFF, marker)) + segments[number][2:]
        case 2:
            segments.insert(number, random.choice(segments))
        case 3:
            held = part(segments[number][4:])[:65533]
            segments[number] = segments[number][:2] + struct.pack(">H", len(held) + 2) + held
        case 4:
            return content + content[place:] * random.choice((1, 40))
    return content[:2] + b"".join(segments) + content[place:]


def safetensors(content: bytes, part: Part, random: Random) -> bytes:
    """Changes the header of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    header = trees.json_text(content[8 : 8 + size], part, random)
    length = random.choice((len(header),) * 30 + NUMBERS)
    return struct.pack("<Q", length % 2**64) + header + content[8 + size :]


def protobuf(content: bytes, part: Part, random: Random) -> bytes:
    """Changes a field of a protocol buffer."""
    fields = _fields(content)
    number = random.randrange(len(fields))
    tag, wire, value = fields[number]
    if wire == 2:
        inner = _changed_inner(value, part, random)
    elif wire == 0:
        inner = _varint(random.choice((*NUMBERS, -random.choice(NUMBERS))) % 2**64)
    else:
        inner = random.choice((random.randbytes(len(value)), struct.pack("<d", float("nan"))[-len(value) :]))
    match random.randrange(6):
        case 0:
            del fields[number]
        case 1:
            fields[number:number] = [(tag, wire, value)] * random.choice((1, 2, many(value)))
        case _:
            fields[number] = (tag, wire, inner)
    return b"".join(_varint(tag << 3 | wire) + (_varint(len(v)) if wire == 2 else b"") + v for tag, wire, v in fields)


def _changed_inner(value: bytes, part: Part, random: Random) -> bytes:
    try:
        return protobuf(value, part, random)
    except (ValueError, IndexError):
        return part(value)


def _varint(number: int) -> bytes:
    packed = bytearray()
    while number > 127:
        packed.append(number & 127 | 128)
        number >>= 7
    return bytes((*packed, number))


def _fields(content: bytes) -> list[tuple[int, int, bytes]]:
    """Returns tag, wire type and value of the fields of a message."""
    fields, place = [], 0

    def varint() -> int:
        nonlocal place
        start = place
        while content[place] > 127:
            place += 1
        place += 1
        return sum((byte & 127) << 7 * shift for shift, byte in enumerate(content[start:place]))

    while place < len(content):
        key = varint()
        start = place
        if key & 7 == 0:
            varint()
        elif key & 7 == 2:
            size = varint()
            start, place = place, place + size
        elif key & 7 in (1, 5):
            place += 8 if key & 7 == 1 else 4
        else:
            raise ValueError("a group")
        if place > len(content) or not key >> 3:
            raise ValueError("no message")
        fields.append((key >> 3, key & 7, content[start:place]))
    return fields


def pickled(content: bytes, part: Part, random: Random) -> bytes:
    """Changes an instruction of a pickle."""
    places = [place for _, _, place in pickletools.genops(content) if place is not None]
    number = random.randrange(len(places) - 1)
    start, stop = places[number : number + 2]
    match random.randrange(5):
        case 0:
            return content[:start] + content[stop:]
        case 1:
            count = random.choice((1, many(content[start:stop])))
            return content[:start] + content[start:stop] * count + content[start:]
        case 2:
            return content[:start] + number_bytes(random) + content[stop:]
        case 3:
            size = stop - start - 1
            return content[: start + 1] + (random.choice(NUMBERS) % 256**size).to_bytes(size, "little") + content[stop:]
        case _:
            code = random.choice(_INSTRUCTIONS)
            return content[:start] + code + content[start:]


def parquet(content: bytes, part: Part, random: Random) -> bytes:
    """Changes the metadata at the end of a parquet file."""
    size = int.from_bytes(content[-8:-4], "little")
    start = len(content) - 8 - size
    footer = bytearray(content[start:-8])
    for _ in range(random.choice((1, 1, 3))):
        place = random.randrange(len(footer))
        footer[place] = random.choice((0, 1, 0x7F, 0x80, 0xFF, footer[place] ^ 1 << random.randrange(8)))
    return content[:start] + bytes(footer) + content[-8:]


def is_text(content: bytes) -> bool:
    """Whether the first bytes are text of a few lines."""
    return bool(content) and all(byte >= 32 or byte in b"\t\n\r" for byte in content[:64])


def text(content: bytes, part: Part, random: Random) -> bytes:
    """Changes a line of a text."""
    lines = content.split(b"\n")
    number = random.randrange(len(lines))
    others = (b"", b"\0", b" ", b"\xff\xfe", "é\u2028\u0085".encode(), b"x" * 100_000, lines[number] + b"\r", b"9" * 30)
    others += ("٣".encode(), b"-1", b"\xed\xa0\x80", b"\xef\xbb\xbf" + lines[number], random.choice(lines))
    match random.randrange(4):
        case 0:
            del lines[number]
        case 1:
            lines[number:number] = [lines[number]] * random.choice((1, many(lines[number])))
        case _:
            lines[number] = random.choice(others)
    return b"\n".join(lines)
