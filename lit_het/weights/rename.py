"""Translates the names and layouts of other programs to ours.

Ordered rules map every array of the source to a parameter. An array without a rule and a parameter without an array are
errors. Rules write the parameters of a block under its number, as in ``encoder/blocks/7/mlp/up/kernel``. `load` then
stacks the blocks: blocks with experts in one stack, blocks without experts in another. Arrays that are already stacked
have ``*`` in place of the number: ``encoder/blocks/*/...``.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import einops
import ml_dtypes
import numpy as np

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.sharding import place_on_devices
from lit_het.types import Params
from lit_het.weights.sources import Arrays

# An error lists at most this many names.
_MAX_LISTED = 8
# With more missing blocks the numbers are taken for damage, before a model of that depth is built.
_MAX_MISSING_BLOCKS = 1000


@dataclasses.dataclass(frozen=True)
class Rule:
    r"""Maps one kind of array to a parameter.

    Attributes:
        pattern: regular expression that the whole name of the array must match.
        target: path of the parameter, with ``\1`` for groups of the pattern; None leaves the array out on purpose.
        transform: converts the array, in float32, to our layout.
    """

    pattern: str
    target: str | None
    transform: Callable[[np.ndarray], np.ndarray] = lambda array: array


@dataclasses.dataclass(frozen=True)
class ParameterSource:
    """How one parameter, or one block of it, is computed from the arrays of the source.

    Attributes:
        target: path of the parameter.
        array_names: names of the arrays that it is computed from.
        combine: maps these arrays, in float32, to the parameter.
    """

    target: str
    array_names: tuple[str, ...]
    combine: Callable[..., np.ndarray]


def translate(arrays: Arrays, rules: Sequence[Rule], explicit: Sequence[ParameterSource] = ()) -> list[ParameterSource]:
    """Returns a parameter source for every array.

    Args:
        arrays: the opened source.
        rules: the first rule that matches a name applies.
        explicit: parameter sources that no rule can express. The rules skip the arrays that these name.
    """
    assigned = {name for source in explicit for name in source.array_names}
    translated, unknown = list(explicit), []
    for name in arrays:
        if name in assigned:
            continue
        # The first rule wins, so that a special case can stand before the general one.
        match = next(((rule, found) for rule in rules if (found := re.fullmatch(rule.pattern, name))), None)
        if match is None:
            unknown.append(name)
        elif match[0].target is not None:
            translated.append(ParameterSource(match[1].expand(match[0].target), (name,), match[0].transform))
    if unknown:
        raise UserError(f"unknown arrays: {_listed(unknown)}; does --from point to a supported model?")
    return translated


def depth_of(numbers: Iterable[str]) -> int:
    """Returns the number of blocks, given the block numbers in the names of arrays."""
    found = {int(number) for number in numbers}
    depth = 1 + max(found)
    if depth > _MAX_MISSING_BLOCKS + len(found):
        raise UserError(f"arrays of block {depth - 1}, but of {len(found)} blocks in all; is the file complete?")
    return depth


def load(
    arrays: Arrays,
    sources: Sequence[ParameterSource],
    shapes: Params,
    shardings: Params | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Params:
    """Returns the parameters in float32.

    Args:
        arrays: the opened source.
        sources: from `translate`.
        shapes: the parameter tree of the model, with shapes as leaves.
        shardings: the sharding of each array, a tree like ``shapes``. None for one device.
        advance: called with the size of each parameter after it was read.
    """
    wanted: Mapping[str, Any] = parameters.flatten(shapes)
    placements = parameters.flatten(shardings) if shardings is not None else {}
    grouped = _group_by_parameter(sources)
    missing, extra = sorted(wanted.keys() - grouped.keys()), sorted(grouped.keys() - wanted.keys())
    for path in sorted(wanted.keys() & grouped.keys()):
        numbers = {index for index, _ in grouped[path] if index is not None}
        if numbers:
            blocks = set(range(wanted[path].shape[0]))
            missing += [path.replace("blocks/", f"blocks/{number}/") for number in sorted(blocks - numbers)]
            extra += [path.replace("blocks/", f"blocks/{number}/") for number in sorted(numbers - blocks)]
    if missing or extra:
        parts = [f"no array for {_listed(missing)}"] * bool(missing)
        parts += [f"no parameter for {_listed(extra)}"] * bool(extra)
        raise UserError(f"the source does not fit the model: {'; '.join(parts)}")
    loaded = {}
    # Largest first: each array exists twice while it is copied to the devices, and memory is emptiest at the start.
    for path in sorted(wanted, key=lambda path: -np.prod(wanted[path].shape)):
        array = _read(arrays, path, grouped[path], tuple(wanted[path].shape))
        loaded[path] = place_on_devices(array, placements.get(path))
        advance(loaded[path].size)
    return parameters.unflatten(loaded)


def _group_by_parameter(
    sources: Sequence[ParameterSource],
) -> dict[str, list[tuple[int | None, ParameterSource]]]:
    """Returns path → sources of every parameter, each with its index in the stack of blocks, or None outside blocks."""
    block = re.compile(r"(.*encoder/)blocks/(\d+)/(.*)")
    matches = [block.fullmatch(source.target) for source in sources]
    with_experts = {match.group(1, 2) for match in matches if match and match[3].startswith("mixture/")}
    numbers: dict[tuple[str, bool], set[int]] = {}
    for match in filter(None, matches):
        numbers.setdefault((match[1], match.group(1, 2) in with_experts), set()).add(int(match[2]))
    grouped: dict[str, list[tuple[int | None, ParameterSource]]] = {}
    for source, match in zip(sources, matches, strict=True):
        if match is None:
            grouped.setdefault(source.target.replace("/*/", "/"), []).append((None, source))
            continue
        has_experts = match.group(1, 2) in with_experts
        path = f"{match[1]}{'expert_blocks' if has_experts else 'blocks'}/{match[3]}"
        # Experts split the blocks into two stacks, in which a block's index is its rank. Without experts the index is
        # the block's number, so that a missing block leaves a gap, which `load` reports.
        number = int(match[2])
        has_two_stacks = (match[1], True) in numbers
        index = sorted(numbers[match[1], has_experts]).index(number) if has_two_stacks else number
        grouped.setdefault(path, []).append((index, source))
    return grouped


def _read(
    arrays: Arrays, path: str, sources: Sequence[tuple[int | None, ParameterSource]], shape: tuple[int, ...]
) -> np.ndarray:
    """Returns one parameter, stacked from its blocks."""
    if sources[0][0] is None:
        if len(sources) > 1:
            raise UserError(f"{path} has several sources: {_listed([s.array_names[0] for _, s in sources])}")
        return _combined(arrays, path, sources[0][1], shape)
    stacked: np.ndarray | None = None
    for index, source in sources:
        block = _combined(arrays, path, source, shape[1:])
        # Allocated only after one block has the model's shape: a wrong configuration must not exhaust the memory.
        stacked = np.empty(shape, np.float32) if stacked is None else stacked
        # Read block by block into the stack: at most one block exists twice.
        stacked[index] = block
    assert stacked is not None
    return stacked


def _combined(arrays: Arrays, path: str, source: ParameterSource, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a parameter, or one block of it, in the shape of the model."""
    origin = ", ".join(f"{name} {arrays[name].shape}" for name in source.array_names)
    read = [_as_float32(name, arrays[name].read()) for name in source.array_names]
    try:
        array = np.asarray(source.combine(*read), np.float32)
    except (ValueError, IndexError, einops.EinopsError) as error:
        raise UserError(f"{origin} cannot become the model's {path} {shape}: its axes differ") from error
    if array.shape != shape:
        raise UserError(f"{origin} becomes {array.shape}, but the model's {path} is {shape}")
    return array


def _as_float32(name: str, array: np.ndarray) -> np.ndarray:
    """Returns an array in float32. Converting first keeps later sums and products from being rounded to bfloat16."""
    if not (np.issubdtype(array.dtype, np.floating) or array.dtype.kind in "iu" or array.dtype == ml_dtypes.bfloat16):
        raise UserError(f"{name} holds {array.dtype}, not real numbers")
    return array.astype(np.float32, copy=False)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
