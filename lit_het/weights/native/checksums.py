"""Checksums of arrays that do not depend on how the arrays are sharded over devices and hosts.

Each element is hashed, together with its index in the whole array, to two 32-bit numbers. The checksum is the two sums
of these hashes modulo 2^32. Addition is commutative: every device sums the hashes of its shard, every process adds the
sums of its devices, and a single exchange adds those of all processes. For a fixed index each hash is a bijection of
the element's bits. A change of exactly one element, in any of its bits, therefore always changes both sums.
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

# NumPy sums arrays of at most this many elements: compiling a program for each shape would take longer.
_MAX_NUMPY_ELEMENTS = 2**16
# Odd, so that multiplying by them modulo 2^32 is a bijection.
_FIRST, _SECOND = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)

DIGEST_KEY = "sha256"
"""The key under which `encode_info` stores the SHA-256."""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Type, shape and checksum of an array.

    Attributes:
        dtype: NumPy's name of the type.
        shape: sizes of the axes.
        checksum: 16 hexadecimal digits, or empty if unknown.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: str = ""


def fingerprints(tree: Any) -> dict[str, Fingerprint]:
    """Returns path → fingerprint of every array.

    Args:
        tree: of arrays with at most 32 bits per element. If arrays are sharded over processes, all processes must call
            this.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    # All programs are dispatched before the first result is awaited. This is safe only because they contain no
    # collectives: two programs that start in different orders on two devices would wait for each other forever.
    pending = [_dispatch_sums(leaf) for _, leaf in leaves]
    local = np.array([_local_sum(sums) for sums in pending], np.uint32).reshape(1, -1, 2)
    pairs = distributed.gather_rows(local).sum(axis=0, dtype=np.uint32).astype(">u4")
    return {
        path_string(path): dataclasses.replace(spec(leaf), checksum=pair.tobytes().hex())
        for (path, leaf), pair in zip(leaves, pairs, strict=True)
    }


def digest(tree: Any) -> str:
    """Returns the SHA-256 of the paths, types, shapes and checksums of all arrays.

    Args:
        tree: as for `fingerprints`.
    """
    found = {path: dataclasses.astuple(fingerprint) for path, fingerprint in fingerprints(tree).items()}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def specs(tree: Any) -> dict[str, Fingerprint]:
    """Returns path → fingerprint, without a checksum, of every array or shape."""
    return {path_string(path): spec(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def spec(array: Any) -> Fingerprint:
    """Returns the fingerprint of an array or shape without a checksum."""
    return Fingerprint(np.dtype(array.dtype).name, tuple(array.shape))


def encode_info(info: Mapping[str, Any], arrays: Mapping[str, Fingerprint]) -> dict[str, str]:
    """Returns a checkpoint's info and fingerprints as JSON text, with the SHA-256 of the text."""
    text = json.dumps({**info, "arrays": {path: dataclasses.astuple(one) for path, one in arrays.items()}})
    return {DIGEST_KEY: hashlib.sha256(text.encode()).hexdigest(), "json": text}


def decode_info(item: Any) -> tuple[dict[str, Any], dict[str, Fingerprint]] | None:
    """Inverts `encode_info`; returns None if the text has changed or has another format."""
    try:
        if hashlib.sha256(item["json"].encode()).hexdigest() != item[DIGEST_KEY]:
            return None
        info = untrusted.parse_json(item["json"])
        arrays = info.pop("arrays").items()
        if any(np.dtype(dtype).name != dtype or min(shape, default=0) < 0 for _, (dtype, shape, _) in arrays):
            return None
        return info, {path: Fingerprint(dtype, tuple(shape), digits) for path, (dtype, shape, digits) in arrays}
    except (Malformed, AttributeError, KeyError, TypeError, ValueError):
        # A matching SHA-256 proves nothing about the format: anyone can compute one.
        return None


def check_fit(
    saved: Mapping[str, Fingerprint],
    wanted: Mapping[str, Fingerprint],
    directory: Path,
    problem: str = "the configuration contradicts the checkpoint",
    way_out: str = "use the configuration that it was trained with",
) -> None:
    """Checks that a checkpoint has the arrays of a model.

    Args:
        saved: fingerprints of the checkpoint's arrays.
        wanted: the model's, from `specs`.
        directory: of the checkpoint, for the error message.
        problem: beginning of the message.
        way_out: end of the message.
    """
    differing = sorted(
        path
        for path in saved.keys() | wanted.keys()
        if path not in saved or path not in wanted or dataclasses.replace(saved[path], checksum="") != wanted[path]
    )
    if differing:
        path = differing[0]
        theirs, ours = saved.get(path), wanted.get(path)
        same_shape = theirs is not None and ours is not None and theirs.shape == ours.shape
        shown = (lambda one: one.dtype) if same_shape else (lambda one: one.shape)
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise UserError(
            f"{problem} in {directory}: {path} is "
            f"{'missing' if theirs is None else shown(theirs)} in the checkpoint and "
            f"{'absent' if ours is None else shown(ours)} in the model{more}; {way_out}"
        )


def path_string(path: Any) -> str:
    """Returns a path of `jax.tree_util` as ``a/b/0/c``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _dispatch_sums(array: Any) -> Any:
    """Starts computing both sums of each shard and returns them, ``[shards, 2]``, without waiting."""
    is_whole = not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated
    if is_whole and array.size <= _MAX_NUMPY_ELEMENTS:
        elements = np.asarray(array).reshape(-1)
        hashes = _hashes(elements, np.arange(elements.size, dtype=np.uint32))
        return np.stack([one.sum(dtype=np.uint32) for one in hashes])[None]
    if isinstance(array, jax.Array) and isinstance(array.sharding, NamedSharding):
        return _sums_per_shard(array.sharding)(array)
    return _sums_of_whole(array)


def _local_sum(sums: Any) -> np.ndarray:
    """Returns this process's share of both sums. Of a replicated shard only the first replica counts."""
    if isinstance(sums, jax.Array) and not sums.is_fully_addressable:
        # Every replica has the same sum; counting them all would make the checksum depend on the mesh.
        shards = [shard.data for shard in sums.addressable_shards if shard.replica_id == 0]
    else:
        shards = [sums] if jax.process_index() == 0 else []
    return sum((np.asarray(shard).sum(axis=0, dtype=np.uint32) for shard in shards), np.zeros(2, np.uint32))


@jax.jit
def _sums_of_whole(array: jax.Array) -> jax.Array:
    return _sums_of_shard(array, [0] * array.ndim, array.shape)[None]


@functools.cache
def _sums_per_shard(layout: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(sharding.map_array_shards(_sums_of_shard, layout))


def _sums_of_shard(shard: jax.Array, starts: Any, shape: Any) -> jax.Array:
    """Returns both sums over the shard that begins at index ``starts`` of an array of the given shape."""
    # Indices in the flattened whole array, modulo 2^32.
    indices = jnp.zeros(shard.shape, jnp.uint32)
    for axis, start in enumerate(starts):
        along_axis = jax.lax.broadcasted_iota(jnp.uint32, shard.shape, axis) + jnp.uint32(start)
        indices += along_axis * np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
    zero = np.uint32(0)
    # A single reduction computes both sums in one pass over the memory.
    sums = jax.lax.reduce(
        _hashes(shard, indices),
        (zero, zero),
        lambda one, other: (one[0] + other[0], one[1] + other[1]),
        range(shard.ndim),
    )
    return jnp.stack(sums)


def _hashes(elements: Any, indices: Any) -> tuple[Any, Any]:
    """Returns both hashes of each element."""
    bits = elements.view(f"uint{8 * elements.dtype.itemsize}").astype(np.uint32)
    # The index enters both hashes, in different ways: exchanged elements change the sums too.
    return _mix(bits ^ (indices * _FIRST)), _mix(bits + indices * _SECOND)


def _mix(x: Any) -> Any:
    """Returns a permutation of the 32-bit numbers, with constants from Wellons' hash prospector."""
    x = x ^ (x >> 16)
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
