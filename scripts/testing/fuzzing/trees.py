"""Changes of values within values: JSON and MessagePack."""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack

from scripts.testing.fuzzing.numbers import NUMBERS, Part, Random

_MANY = 3000  # places that are looked at
_MARK = "@raw@"
# JSON that no value of Python stands for.
_RAW = ("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 100_000, '{"a":' * 3000, "[" * 900 + "]" * 900, '"\\ud800"', "")
# Of MessagePack: lists, maps and bytes of 4 billion, lists in lists, and a code that means nothing.
_RAW_PACKED = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000, b"\xc6\x7f\xff\xff\xff", b"\xc1")
_EXTENSIONS = (1, 4, 5, 6, 8, 42)


def json_text(content: bytes, part: Part, random: Random) -> bytes:
    """Changes a value, a key or the nesting of JSON, or of one line of JSON lines."""
    lines = content.split(b"\n")
    try:
        whole, before, after = [json.loads(content)], b"", b""
    except ValueError:
        number = random.randrange(len(lines))
        whole = [json.loads(lines[number])]
        before, after = (b"".join(line + b"\n" for line in some) for some in (lines[:number], lines[number + 1 :]))
        after = b"\n" + after[:-1]
    if isinstance(whole[0], dict) and "sha256" in whole[0] and random.random() < 0.8:
        return before + _resealed(whole[0], part, random) + after
    _change(whole, random, [*_values(random), 10**30, "é" * 3000, {"a": 1}], _other)
    text = json.dumps(whole[0], ensure_ascii=random.random() < 0.8).replace(f'"{_MARK}"', random.choice(_RAW))
    if random.random() < 0.03:
        text = re.sub(r'("[^"]*"): ', r"\1: 1, \1: ", text, count=1)  # a key twice
    return before + text.encode("utf-8", "surrogatepass") + after


def _resealed(item: dict[str, Any], part: Part, random: Random) -> bytes:
    """Changes the info of a step, or a run's manifest, and gives it the checksum of what it has become."""
    ((name, held),) = ((name, held) for name, held in item.items() if name != "sha256")
    text = part((held if isinstance(held, str) else json.dumps(held)).encode()).decode("utf-8", "replace")
    if isinstance(held, str):
        return json.dumps({name: text, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()
    changed = json.loads(text)
    seal = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
    return (json.dumps({"sha256": seal, name: changed}, indent=1) + "\n").encode()


def msgpacked(content: bytes, part: Part, random: Random) -> bytes:
    """Changes a value of MessagePack; what extensions hold is MessagePack too."""
    errors = "surrogateescape"
    whole = [msgpack.unpackb(content, strict_map_key=False, unicode_errors=errors, max_bin_len=2**31 - 1)]

    def other(held: Any, random: Random) -> Any:
        if isinstance(held, msgpack.ExtType):
            return msgpack.ExtType(random.choice((held.code,) * 9 + _EXTENSIONS), part(held.data))
        return part(held) if isinstance(held, bytes) else _other(held, random)

    _change(whole, random, [*_values(random), b"", b"x"], other)
    packed = msgpack.packb(whole[0], unicode_errors=errors) or b""
    return packed.replace(msgpack.packb(_MARK) or b"", random.choice(_RAW_PACKED))


def _values(random: Random) -> list[Any]:
    number = random.choice(NUMBERS)
    plain: list[Any] = [
        None,
        True,
        False,
        number,
        -min(number, 2**63),
        0.5,
        -1,
        1e308,
        "",
        "x",
        "\0",
        "\n",
        str(number),
    ]
    return [*plain, [], {}, [[]], [number], [None] * 3, ["x"], {"type": "X"}, "../../x", _MARK]


def _change(whole: list[Any], random: Random, values: Sequence[Any], other: Callable[[Any, Random], Any]) -> None:
    """Changes one place of nested lists and dicts; ``other`` returns another value of the same kind."""
    places = list(_places(whole))
    holder, key = random.choice(places)
    is_small = len(places) < _MANY // 3
    match random.randrange(12):
        case 0 if holder is not whole:
            del holder[key]
        case 1 | 2 if is_small:
            other_holder, other_key = random.choice(places)
            holder[key] = copy.deepcopy(other_holder[other_key])
        case 3 if isinstance(holder, dict):
            holder[random.choice((f"{key}x", "", "type", "a/b"))] = holder.pop(key)
        case 4 if isinstance(holder, list):
            holder[key:key] = [holder[key]] * random.choice((1, 2, 1000 if is_small else 2))
        case 5:
            for _ in range(random.choice((1, 1, 2, 500))):
                holder[key] = [holder[key]] if random.random() < 0.5 else {"a": holder[key]}
        case 6 | 7 | 8 | 9:
            holder[key] = other(holder[key], random)
        case _:
            holder[key] = random.choice(values)


def _places(whole: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields holders and keys of values, outer ones first."""
    waiting: list[Any] = [whole]
    count = 0
    while waiting and count < _MANY:
        holder = waiting.pop(0)
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            count += 1
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])


def _other(held: Any, random: Random) -> Any:
    """Returns another value of the same type."""
    number = random.choice(NUMBERS)
    match held:
        case bool():
            return not held
        case int():
            return random.choice((held + 1, held - 1, 2 * held, -held, 0, number, -min(number, 2**63)))
        case float():
            return random.choice((-held, 0.0, 1e308, 1e-308, float("nan"), float("inf"), held * 10))
        case str():
            return random.choice((held.upper(), held[:-1], held * 2, held + "/x", f"{held}\n", "", str(number), "é"))
        case list():
            return random.choice((held[:-1], held + held, held[::-1], held * 100 if len(held) < 50 else []))
        case dict():
            return dict(random.sample(list(held.items()), len(held) // 2))
        case _:
            return number
