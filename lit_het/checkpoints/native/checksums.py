"""A checksum for each array of a tree, the same however its parts are spread over devices and hosts.

Every element gives two 32-bit numbers, of its bits and its place in the whole array, and the checksum is the sums of
these modulo 2^32. Sums have no order, so that every device adds up its own part, every process those of its devices,
and one exchange all of them. For a given place each number is a bijection of the bits: an array of which one element
has changed, in whatever bits, never has the same sums.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from lit_het import distributed, sharding, untrusted
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

# NumPy sums arrays of up to so many elements: compiling for each shape would take longer.
_SMALL = 2**16
# Odd: products with them are bijections too.
_FIRST, _SECOND = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)

# Where `sealed` keeps the SHA-256.
SEAL = "sha256"


@dataclasses.dataclass(frozen=True)
class Mark:
    """What tells an array apart: its type, its shape, and the checksum as hexadecimal digits."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str = ""


def marks(tree: Any) -> dict[str, Mark]:
    """Returns path → mark of every array.

    Args:
        tree: of arrays with at most 32 bits an element; where processes share them, all must ask.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    # All are under way before the first is waited for. Programs that wait for other devices could not be: two of them
    # that each began on one device would wait for ever.
    under_way = [_begin_sums(leaf) for _, leaf in leaves]
    here = np.array([_of_this_process(sums) for sums in under_way], np.uint32).reshape(1, -1, 2)
    pairs = distributed.rows_of_all(here).sum(axis=0, dtype=np.uint32).astype(">u4")
    return {
        name_of(path): dataclasses.replace(form(leaf), checksum=pair.tobytes().hex())
        for (path, leaf), pair in zip(leaves, pairs, strict=True)
    }


def digest(tree: Any) -> str:
    """Returns a SHA-256 of the marks of all arrays: paths, types, shapes and checksums.

    Args:
        tree: as for `marks`.
    """
    found = {path: dataclasses.astuple(mark) for path, mark in marks(tree).items()}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def forms(tree: Any) -> dict[str, Mark]:
    """Returns path → mark of every array or shape, without checksums."""
    return {name_of(path): form(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def form(array: Any) -> Mark:
    """Returns the mark of an array or shape without its checksum."""
    return Mark(np.dtype(array.dtype).name, tuple(array.shape))


def sealed(info: Mapping[str, Any], arrays: Mapping[str, Mark]) -> dict[str, str]:
    """Returns facts and marks as text that can be checked."""
    text = json.dumps({**info, "arrays": {path: dataclasses.astuple(mark) for path, mark in arrays.items()}})
    return {SEAL: hashlib.sha256(text.encode()).hexdigest(), "json": text}


def unsealed(item: Any) -> tuple[dict[str, Any], dict[str, Mark]] | None:
    """Inverts `sealed`; None where the text has changed, or is none of ours."""
    try:
        if hashlib.sha256(item["json"].encode()).hexdigest() != item[SEAL]:
            return None
        info = untrusted.parse_json(item["json"])
        arrays = info.pop("arrays").items()
        if any(np.dtype(dtype).name != dtype or min(shape, default=0) < 0 for _, (dtype, shape, _) in arrays):
            return None
        return info, {path: Mark(dtype, tuple(shape), digits) for path, (dtype, shape, digits) in arrays}
    except (Malformed, AttributeError, KeyError, TypeError, ValueError):
        return None  # anybody can make a seal


def check_fit(saved: Mapping[str, Mark], wanted: Mapping[str, Mark], directory: Path) -> None:
    """Refuses a checkpoint whose arrays have other paths, shapes or types than the `forms` of a model.

    Raises:
        UserError: they have.
    """
    differing = sorted(
        path
        for path in saved.keys() | wanted.keys()
        if path not in saved or path not in wanted or dataclasses.replace(saved[path], checksum="") != wanted[path]
    )
    if differing:
        path = differing[0]
        theirs, ours = saved.get(path), wanted.get(path)
        of_type = theirs is not None and ours is not None and theirs.shape == ours.shape
        pick = (lambda mark: mark.dtype) if of_type else (lambda mark: mark.shape)
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise UserError(
            f"the configuration contradicts the checkpoint in {directory}: {path} is "
            f"{'missing' if theirs is None else pick(theirs)} in the checkpoint and "
            f"{'absent' if ours is None else pick(ours)} in the model{more}; "
            "use the configuration that it was trained with"
        )


def name_of(path: Any) -> str:
    """Returns a path of `jax.tree_util` as ``a/b/0/c``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _begin_sums(array: Any) -> Any:
    """Returns both sums of each part, ``[parts, 2]``, which may still be under way."""
    is_whole = not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated
    if is_whole and array.size <= _SMALL:
        elements = np.asarray(array).reshape(-1)
        numbers = _numbers(elements, np.arange(elements.size, dtype=np.uint32))
        return np.stack([number.sum(dtype=np.uint32) for number in numbers])[None]
    if isinstance(array, jax.Array) and isinstance(array.sharding, NamedSharding):
        return _for_each_part(array.sharding)(array)
    return _of_whole(array)


def _of_this_process(sums: Any) -> np.ndarray:
    """Returns what this process adds: of parts that several devices hold, the first device's is taken."""
    if isinstance(sums, jax.Array) and not sums.is_fully_addressable:
        parts = [shard.data for shard in sums.addressable_shards if shard.replica_id == 0]
    else:
        parts = [sums] if jax.process_index() == 0 else []
    return sum((np.asarray(part).sum(axis=0, dtype=np.uint32) for part in parts), np.zeros(2, np.uint32))


@jax.jit
def _of_whole(array: jax.Array) -> jax.Array:
    return _sums_of_part(array, [0] * array.ndim, array.shape)[None]


@functools.cache
def _for_each_part(where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(sharding.for_each_part(_sums_of_part, where))


def _sums_of_part(part: jax.Array, starts: Any, shape: Any) -> jax.Array:
    """Returns both sums over a part that begins at ``starts`` of an array of some shape."""
    places = jnp.zeros(part.shape, jnp.uint32)
    for axis, start in enumerate(starts):
        here = jax.lax.broadcasted_iota(jnp.uint32, part.shape, axis) + jnp.uint32(start)
        places += here * np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
    zero = np.uint32(0)
    # One pass for both.
    sums = jax.lax.reduce(
        _numbers(part, places),
        (zero, zero),
        lambda one, other: (one[0] + other[0], one[1] + other[1]),
        range(part.ndim),
    )
    return jnp.stack(sums)


def _numbers(elements: Any, places: Any) -> tuple[Any, Any]:
    """Returns both numbers of each element."""
    bits = elements.view(f"uint{8 * elements.dtype.itemsize}").astype(np.uint32)
    return _mixed(bits ^ (places * _FIRST)), _mixed(bits + places * _SECOND)


def _mixed(x: Any) -> Any:
    """Returns a permutation of all 32-bit numbers: shifts and odd factors that mix well (Wellons' hash prospector)."""
    x = x ^ (x >> 16)
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
