"""Changes of archives: of a header with its checksum repaired, of a member, or of the list of members."""

import functools
import gzip
import io
import struct
import warnings
import zipfile
import zlib

from scripts.testing.fuzzing.numbers import NUMBERS, Part, Random

BOMB_BYTES = 1_100_000_000
"""What a bomb of some 1.1 MB unpacks to: more than a reader may take."""

MOST_BYTES = 2**24
"""That are unpacked to be changed."""

_BLOCK = 512
_BOMBS = 0.01  # of the changes of what may be compressed; each takes seconds
# Offset and size of the fields of a tar header, all but its checksum.
_FIELDS = (
    *((0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (124, 12), (124, 12), (136, 12), (156, 1), (157, 100)),
    *((257, 8), (265, 32), (329, 8), (345, 155), (386, 12), (482, 1), (483, 12)),
)
_TYPES = b"\x000123456789gxLKSDVMNXA\xff"
_PAX = ("path", "size", "linkpath", "mtime", "uid", "hdrcharset", "charset", "comment", "atime", "SCHILY.xattr.a")
_PAX += ("GNU.sparse.map", "GNU.sparse.size", "GNU.sparse.realsize", "GNU.sparse.name", "GNU.sparse.major")
_PAX += ("GNU.sparse.minor", "GNU.sparse.numblocks", "GNU.sparse.offset", "GNU.sparse.numbytes")


def tar(content: bytes, part: Part, random: Random) -> bytes:
    """Changes a tar archive."""
    members = _entries(content)
    number = random.randrange(len(members)) if members else 0
    header, held = members[number] if members else (_header("a.txt", 0, b"0"), b"")
    match random.randrange(7):
        case 0 | 1:
            members[number : number + 1] = [(_changed_header(header, random), held)]
        case 2:
            held = part(held)
            members[number : number + 1] = [(_with_field(header, 124, b"%011o\0" % len(held)), held)]
        case 3:
            members[number:number] = [_pax(random)]
        case 4:
            long = random.choice((b"x" * 5000, b"a/" * 3000 + b"b.jpg", b"", b"\xff\xfe.jpg\0", b"../../x.jpg\0"))
            members[number:number] = [(_header("././@LongLink", len(long), random.choice((b"L", b"K"))), long)]
        case 5:
            members.insert(random.randrange(len(members) + 1), (header, held))
        case 6:
            random.shuffle(members)
    packed = b"".join(header + held + bytes(-len(held) % _BLOCK) for header, held in members)
    return packed + bytes(random.choice((2, 2, 2, 1, 0)) * _BLOCK)


def _entries(content: bytes) -> list[tuple[bytes, bytes]]:
    """Returns headers of a tar and what they hold; sizes that are not octal numbers count as 0."""
    entries, place = [], 0
    while len(header := content[place : place + _BLOCK]) == _BLOCK and any(header):
        digits = header[124:136].strip(b"\0 ")
        size = int(digits, 8) if digits and not digits.strip(b"01234567") else 0
        held = content[place + _BLOCK : place + _BLOCK + size]
        entries.append((header, held))
        place += _BLOCK + len(held) + -len(held) % _BLOCK
    return entries


def _with_field(header: bytes, start: int, value: bytes) -> bytes:
    """Returns a header with another field, and the checksum of what it is then."""
    header = header[:start] + value + header[start + len(value) :]
    total = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    return header[:148] + b"%06o\0 " % total + header[156:]


def _changed_header(header: bytes, random: Random) -> bytes:
    start, size = random.choice(_FIELDS)
    if size == 1:
        value = bytes([random.choice(_TYPES)])
    else:
        number = random.choice(NUMBERS)
        octal = b"%o" % (number % 8 ** (size - 1))
        # A first byte of 0x80 or 0xff says that the others are a number in two's complement.
        base_256 = random.choice((b"\x80", b"\xff")) + (number % 256 ** (size - 1)).to_bytes(size - 1, "big")
        value = random.choice((octal.rjust(size - 1, b"0") + b"\0", base_256, random.randbytes(size), b"-1", b" \0"))
    return _with_field(header, start, value[:size].ljust(size, b"\0"))


def _header(name: str, size: int, kind: bytes) -> bytes:
    header = bytearray(_BLOCK)
    header[: len(name)] = name.encode()
    header[100:136] = b"0000644\0000000000\0000000000\0" + b"%011o\0" % size
    header[257:265] = b"ustar\x0000"
    return _with_field(bytes(header), 156, kind)


def _pax(random: Random) -> tuple[bytes, bytes]:
    records = b""
    for _ in range(random.choice((1, 1, 2, 5))):
        number = str(random.choice(NUMBERS))
        values = (number, "0,1", f"0,{number},{number},1", "1", "0", "nan", "1e999", "x.jpg", "", "BINARY", "\x00", "é")
        record = f" {random.choice(_PAX)}={random.choice(values)}\n".encode()
        length = len(record) + 2 if len(record) < 97 else len(record) + 3
        records += str(random.choice((length, length, length, length, 0, -1, 10**12, 3))).encode() + record
    return _header("pax", len(records), random.choice((b"x", b"g", b"X"))), records


def zip_archive(content: bytes, part: Part, random: Random) -> bytes:
    """Changes a zip archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
            raise ValueError("a bomb")
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    number = random.randrange(len(members)) if members else 0
    name, held = members[number] if members else ("a.npy", b"")
    match random.randrange(8):
        case 0:
            other = random.choice(members)[1] if members else b""
            names = (name, "", "a", "../a.npy", "params/a/b.npy", "x" * 3000, name + ".npy", name.removesuffix(".npy"))
            members[number : number + 1] = [(random.choice(names), other)]
        case 1:
            del members[number : number + 1]
        case 2:
            count = random.choice((1, 3, 300 if len(held) < 4096 else 1))
            members += [(f"{name}{copy}", held) for copy in range(count)]
        case 3 if random.random() < 8 * _BOMBS:
            return _packed([*members[:number], *members[number + 1 :]], random, bomb=(name, held))
        case _:
            members[number : number + 1] = [(name, part(held))]
    packed = _packed(members, random)
    return _other_sizes(packed, random) if random.random() < 0.1 else packed


def _packed(members: list[tuple[str, bytes]], random: Random, bomb: tuple[str, bytes] | None = None) -> bytes:
    file = io.BytesIO()
    warnings.simplefilter("ignore", UserWarning)  # of two members with one name
    with zipfile.ZipFile(file, "w", random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)), compresslevel=1) as out:
        for name, held in members:
            out.writestr(zipfile.ZipInfo(name), held, out.compression)
    return file.getvalue() if bomb is None else _with_bomb(file.getvalue(), *bomb)


def _with_bomb(packed: bytes, name: str, held: bytes) -> bytes:
    """Adds a member that begins as another, followed by zeros without end, and fits its array's header."""
    start = held[:128]
    if held.startswith(b"\x93NUMPY\1\0"):
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({BOMB_BYTES // 4},), }}".ljust(117) + "\n"
        start = b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode()
    data = _deflated_zeros(start)
    size, name_bytes = len(start) + BOMB_BYTES, name.encode()
    fields = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, 0, len(data), size, len(name_bytes), 0)
    end = packed.rindex(b"PK\5\6")
    count, directory_size, directory = struct.unpack("<HII", packed[end + 10 : end + 20])
    local = b"PK\3\4" + fields + name_bytes
    listed = b"PK\1\2\24\0" + fields + struct.pack("<HHHII", 0, 0, 0, 0, directory) + name_bytes
    entries = packed[directory : directory + directory_size] + listed
    place = directory + len(local) + len(data)
    tail = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count + 1, count + 1, len(entries), place, 0)
    return packed[:directory] + local + data + entries + tail


@functools.cache
def _zeros() -> tuple[bytes, int]:
    """Returns a deflated block of zeros that may be repeated, and how many there are."""
    count = 2**22
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(bytes(count)) + packer.flush(zlib.Z_FULL_FLUSH), count


def _deflated_zeros(start: bytes) -> bytes:
    """Deflates some bytes and `BOMB_BYTES` zeros, roughly."""
    block, count = _zeros()
    packer, last = zlib.compressobj(9, zlib.DEFLATED, -15), zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + block * (BOMB_BYTES // count) + last.compress(bytes(BOMB_BYTES % count)) + last.flush()


def _other_sizes(packed: bytes, random: Random) -> bytes:
    """Lets the directory of an archive declare another size, method or place of a member."""
    places = [place for place in range(len(packed) - 46) if packed.startswith(b"PK\1\2", place)]
    place = random.choice(places) + random.choice((8, 10, 20, 24, 24, 42)) if places else 0
    return packed[:place] + struct.pack("<I", random.choice(NUMBERS) % 2**32) + packed[place + 4 :]


def gzipped(content: bytes, part: Part, random: Random) -> bytes:
    """Changes what is gzipped."""
    held = zlib.decompressobj(31).decompress(content, MOST_BYTES)
    if random.random() < _BOMBS:
        return b"\x1f\x8b\x08\0\0\0\0\0\0\3" + _deflated_zeros(held) + bytes(8)
    return gzip.compress(part(held), 1, mtime=0)
