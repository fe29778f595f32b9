"""From other programs' names and layouts to ours: ordered rules, every array accounted for on both sides.

Rules write a block's parameters under its number, ``encoder/blocks/7/mlp/up/kernel``; `load` stacks the blocks, those
with experts apart from those without. Whole stacks go under ``encoder/blocks/*/...``.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import einops
import jax
import ml_dtypes
import numpy as np

from lit_het import parameters
from lit_het.checkpoints.sources import Arrays
from lit_het.errors import UserError
from lit_het.types import Params

# How many names an error shows of each kind.
_SHOWN = 8
# Blocks that may be missing, so that an error can name them.
_MOST_MISSING = 1000


@dataclasses.dataclass(frozen=True)
class Rule:
    r"""Where one kind of array goes.

    Attributes:
        source: regular expression of its whole name.
        target: its path with ``\1`` for groups, or None to leave it out on purpose.
        transform: brings it, in float32, to our layout.
    """

    source: str
    target: str | None
    transform: Callable[[np.ndarray], np.ndarray] = lambda array: array


@dataclasses.dataclass(frozen=True)
class Piece:
    """A parameter, or one block's part of it: ``combine`` of the arrays, in float32, that ``sources`` name."""

    target: str
    sources: tuple[str, ...]
    combine: Callable[..., np.ndarray]


def translate(arrays: Arrays, rules: Sequence[Rule], pieces: Sequence[Piece] = ()) -> list[Piece]:
    """Returns what every array becomes: ``pieces`` take those that they name, the first matching rule the others.

    Raises:
        UserError: arrays that no rule knows, which it lists.
    """
    taken = {name for piece in pieces for name in piece.sources}
    translated, unknown = list(pieces), []
    for name in arrays:
        if name in taken:
            continue
        match = next(((rule, found) for rule in rules if (found := re.fullmatch(rule.source, name))), None)
        if match is None:
            unknown.append(name)
        elif match[0].target is not None:
            translated.append(Piece(match[1].expand(match[0].target), (name,), match[0].transform))
    if unknown:
        raise UserError(f"arrays of no known meaning: {_listed(unknown)}; is the file what --from says?")
    return translated


def depth_of(numbers: Iterable[str]) -> int:
    """Returns how many blocks there are of the numbers of some.

    Raises:
        UserError: far more than the numbers; a model of so many would be made before they are missed.
    """
    found = {int(number) for number in numbers}
    depth = 1 + max(found)
    if depth > _MOST_MISSING + len(found):
        raise UserError(f"arrays of block {depth - 1}, but of {len(found)} blocks in all; is the file whole?")
    return depth


def load(
    arrays: Arrays,
    pieces: Sequence[Piece],
    shapes: Params,
    shardings: Params | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Params:
    """Returns the parameters in float32, read one after the other, largest first.

    Args:
        arrays: the opened source.
        pieces: from `translate`.
        shapes: the tree that the model expects, of shapes.
        shardings: where arrays go, a tree like ``shapes``; each device is given its own part. None for one device.
        advance: told how many more parameters are read.

    Raises:
        UserError: a parameter that no array fills, an array that no parameter takes, or a shape that differs.
    """
    wanted: Mapping[str, Any] = parameters.flatten(shapes)
    places = parameters.flatten(shardings) if shardings is not None else {}
    grouped = _stacked(pieces)
    missing, extra = sorted(wanted.keys() - grouped.keys()), sorted(grouped.keys() - wanted.keys())
    for path in sorted(wanted.keys() & grouped.keys()):
        numbers = {index for index, _ in grouped[path] if index is not None}
        if numbers:
            blocks = set(range(wanted[path].shape[0]))
            missing += [path.replace("blocks/", f"blocks/{number}/") for number in sorted(blocks - numbers)]
            extra += [path.replace("blocks/", f"blocks/{number}/") for number in sorted(numbers - blocks)]
    if missing or extra:
        parts = [f"nothing for {_listed(missing)}"] * bool(missing) + [f"no place for {_listed(extra)}"] * bool(extra)
        raise UserError(f"the source does not fit the model: {'; '.join(parts)}")
    loaded = {}
    # Largest first: later, when most memory is taken, there is no second copy of a large one.
    for path in sorted(wanted, key=lambda path: -np.prod(wanted[path].shape)):
        loaded[path] = placed(_read(arrays, path, grouped[path], tuple(wanted[path].shape)), places.get(path))
        advance(loaded[path].size)
    return parameters.unflatten(loaded)


def placed(array: np.ndarray, sharding: Any) -> jax.Array:
    """Returns an array on its devices, after the copy of the host has been given back."""
    if sharding is None:
        return jax.block_until_ready(jax.device_put(array))
    return jax.block_until_ready(jax.make_array_from_callback(array.shape, sharding, lambda index: array[index]))


def _stacked(pieces: Sequence[Piece]) -> dict[str, list[tuple[int | None, Piece]]]:
    """Returns each parameter's pieces, with their places in a stack of blocks."""
    block = re.compile(r"(.*encoder/)blocks/(\d+)/(.*)")
    found = [block.fullmatch(piece.target) for piece in pieces]
    with_experts = {match.group(1, 2) for match in found if match and match[3].startswith("mixture/")}
    numbers: dict[tuple[str, bool], set[int]] = {}
    for match in filter(None, found):
        numbers.setdefault((match[1], match.group(1, 2) in with_experts), set()).add(int(match[2]))
    grouped: dict[str, list[tuple[int | None, Piece]]] = {}
    for piece, match in zip(pieces, found, strict=True):
        if match is None:
            grouped.setdefault(piece.target.replace("/*/", "/"), []).append((None, piece))
            continue
        has_experts = match.group(1, 2) in with_experts
        path = f"{match[1]}{'expert_blocks' if has_experts else 'blocks'}/{match[3]}"
        # Without experts the number is the place, which tells of a block that is missing.
        places = sorted(numbers[match[1], has_experts]) if (match[1], True) in numbers else range(int(match[2]) + 1)
        index = places.index(int(match[2]))
        grouped.setdefault(path, []).append((index, piece))
    return grouped


def _read(arrays: Arrays, path: str, pieces: Sequence[tuple[int | None, Piece]], shape: tuple[int, ...]) -> np.ndarray:
    """Returns a parameter, stacked from its blocks."""
    if pieces[0][0] is None:
        if len(pieces) > 1:
            raise UserError(f"{path} has several sources: {_listed([p.sources[0] for _, p in pieces])}")
        return _combined(arrays, path, pieces[0][1], shape)
    array: np.ndarray | None = None
    for index, piece in pieces:
        part = _combined(arrays, path, piece, shape[1:])
        # Not before a part has been found to be of its size, which is the model's.
        array = np.empty(shape, np.float32) if array is None else array
        array[index] = part
    assert array is not None
    return array


def _combined(arrays: Arrays, path: str, piece: Piece, shape: tuple[int, ...]) -> np.ndarray:
    sources = ", ".join(f"{name} {arrays[name].shape}" for name in piece.sources)
    read = [_as_float32(name, arrays[name].read()) for name in piece.sources]
    try:
        array = np.asarray(piece.combine(*read), np.float32)
    except (ValueError, IndexError, einops.EinopsError) as error:
        raise UserError(f"{sources} cannot become the model's {path} {shape}: its axes are others") from error
    if array.shape != shape:
        raise UserError(f"{sources} becomes {array.shape}, but the model's {path} is {shape}")
    return array


def _as_float32(name: str, array: np.ndarray) -> np.ndarray:
    """Returns an array before anything is computed with it: sums and products of bfloat16 would be rounded."""
    if not (np.issubdtype(array.dtype, np.floating) or array.dtype.kind in "iu" or array.dtype == ml_dtypes.bfloat16):
        raise UserError(f"{name} holds {array.dtype}, which are no real numbers")
    return array.astype(np.float32, copy=False)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
