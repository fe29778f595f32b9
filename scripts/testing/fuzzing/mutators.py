"""Changes of bytes: those of their structure first, so that what comes out passes a reader's first checks.

Formats that hold others (archives, headers of JSON, packed messages) change one part, whatever it is, and are packed
again with sizes and checksums repaired.
"""

from collections.abc import Callable, Sequence

from scripts.testing.fuzzing import containers, structures, trees
from scripts.testing.fuzzing.numbers import Change, Random, number_bytes

# Of the changes of bytes whose structure is known: with one in two inputs, nearly all.
_STRUCTURED = (0.5, 0.98)
_DEPTH = 4  # of files in files


def changed(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """Returns bytes with one to four changes; ``others`` are of the same format."""
    made, count, structured = content, random.choice((1, 1, 1, 2, 2, 4)), random.choice(_STRUCTURED)
    for _ in range(10):  # a change may leave all as it was, or undo another
        for _ in range(count):
            made = _change(made, others, random, structured)[: containers.MOST_BYTES]
        if made != content:
            break
    return made


def _change(content: bytes, others: Sequence[bytes], random: Random, structured: float, depth: int = 0) -> bytes:
    def part(inner: bytes) -> bytes:
        return _change(inner, (), random, structured, depth + 1)

    changes = [change for is_of, change in STRUCTURES if is_of(content)][:1] if depth < _DEPTH else []
    if changes and random.random() < structured:
        try:
            return changes[0](content, part, random)
        except structures.UNSTRUCTURED:
            pass  # an earlier change has damaged the structure: what is left are bytes
    others = [other for other in others if other]
    if others and random.random() < 0.1:
        return _splice(content, random.choice(others), random)
    return random.choice(_OF_BYTES)(content, random)


def _place(content: bytes, random: Random) -> int:
    return random.randrange(len(content) + 1)


def _flip(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 4, 32))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _overwrite(content: bytes, random: Random) -> bytes:
    place, number = _place(content, random), number_bytes(random)
    return content[:place] + number + content[place + len(number) :]


def _truncate(content: bytes, random: Random) -> bytes:
    return content[: _place(content, random)]


def _block(content: bytes, random: Random) -> tuple[int, int]:
    start = _place(content, random)
    return start, min(len(content), start + random.choice((1, 2, 4, 16, 64, 512, 4096)))


def _delete(content: bytes, random: Random) -> bytes:
    start, stop = _block(content, random)
    return content[:start] + content[stop:]


def _duplicate(content: bytes, random: Random) -> bytes:
    start, stop = _block(content, random)
    place = _place(content, random)
    return content[:place] + content[start:stop] * random.choice((1, 1, 8)) + content[place:]


def _insert(content: bytes, random: Random) -> bytes:
    place, size = _place(content, random), random.choice((1, 4, 64, 1024))
    filling = random.choice((b"\0" * size, b"\xff" * size, random.randbytes(size), number_bytes(random)))
    return content[:place] + filling + content[place:]


def _shuffle(content: bytes, random: Random) -> bytes:
    start, stop = _block(content, random)
    block = list(content[start:stop])
    random.shuffle(block)
    return content[:start] + bytes(block) + content[stop:]


def _splice(content: bytes, other: bytes, random: Random) -> bytes:
    return content[: _place(content, random)] + other[_place(other, random) :]


_OF_BYTES = (_flip, _flip, _overwrite, _overwrite, _truncate, _delete, _duplicate, _insert, _shuffle)

STRUCTURES: tuple[tuple[Callable[[bytes], bool], Change], ...] = (
    (lambda content: content[257:262] == b"ustar", containers.tar),
    (lambda content: content.startswith(b"PK\3\4"), containers.zip_archive),
    (lambda content: content.startswith(b"\x1f\x8b"), containers.gzipped),
    (lambda content: content.startswith(b"\x93NUMPY"), structures.npy),
    (lambda content: content.startswith(b"\x89PNG"), structures.png),
    (lambda content: content.startswith(b"\xff\xd8\xff"), structures.jpeg),
    (lambda content: content[:1] in (b"{", b"["), trees.json_text),
    (lambda content: content[8:9] == b"{", structures.safetensors),
    (lambda content: content.startswith(b"PAR1"), structures.parquet),
    (lambda content: content[:1] == b"\x80" and content[-1:] == b".", structures.pickled),
    (lambda content: b"\x80" < content[:1] < b"\xe0", trees.msgpacked),
    (lambda content: content[:1] in (b"\n", b"\x12", b"\x08"), structures.protobuf),
    (structures.is_text, structures.text),
)
"""Which bytes are of a structure, and what changes it, given the change of a part of it."""
