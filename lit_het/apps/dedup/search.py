"""All pairs of similar embeddings: an exact search by blocks on the devices, in the memory of a few blocks.

The similarity of two embeddings is their cosine. A block of rows lies on the devices, split over these, and blocks of
columns follow one another. Of each row the devices return only its greatest similarity to a column with a larger
number, so that every pair is compared once; the few rows that may reach the floor are looked at again.

Accelerators multiply 16-bit numbers. Rounding ``x`` to ``x (1 + δ)``, ``|δ| <= u``, changes the inner product of two
unit vectors by at most ``2 u + u²`` (Cauchy-Schwarz). Pairs within this margin of the floor are computed again in
float64, so that none is missed and all similarities are exact.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int

from lit_het import sharding
from lit_het.sharding import num_batch_shards

COLUMNS = 8192
"""Columns of a block."""

# Rows whose similarities to a block of columns are in memory at a time: on a CPU they stay in its cache.
TILES = {"cpu": 512}
TILE = 2048
TYPES = {"cpu": "float32", "tpu": "bfloat16"}
# Rows that are looked at again, and pairs that are computed again, at a time.
_FEW, _AGAIN, _PAIRS = 64, 1024, 2**13
_AHEAD = 2

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Read = Callable[[range], np.ndarray]
"""Reads the embeddings of consecutive samples ``[n d]``; NaN where there is none."""


class Pairs(NamedTuple):
    """Pairs of similar samples.

    Attributes:
        first, second: numbers of the samples; the first is smaller.
        similarity: their cosine.
    """

    first: Int[np.ndarray, " p"]
    second: Int[np.ndarray, " p"]
    similarity: Float32[np.ndarray, " p"]

    @staticmethod
    def joined(parts: Iterable["Pairs"]) -> "Pairs":
        """Returns the pairs of all parts."""
        none = Pairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
        return Pairs(*map(np.concatenate, zip(none, *parts, strict=True)))

    def where(self, chosen: np.ndarray) -> "Pairs":
        """Returns some of the pairs, by their indices or a mask."""
        return Pairs(self.first[chosen], self.second[chosen], self.similarity[chosen])


class _Columns(NamedTuple):
    """Consecutive embeddings.

    Attributes:
        start: number of the first.
        values: the embeddings; zero where they are missing or copies, and beyond the last.
        copies: pairs of a row of the search and an exact copy in ``values``.
        on_device: the values.
        greatest: of each row, to one of the columns.
    """

    start: int
    values: np.ndarray
    copies: Pairs
    on_device: jax.Array
    greatest: jax.Array


class BlockSearch:
    """Searches a block of rows and all samples after them for similar pairs.

    Exact copies are not paired one by one: those in a block of columns are paired with its first one only. So a million
    copies of one image are not 10^12 pairs, and the groups of similar samples are those of all pairs. A block has
    samples of one set only, so that what is similar to an evaluation set is found beside a copy of it too.

    Args:
        read: the embeddings.
        rows: consecutive samples, whose embeddings fit on the devices.
        floor: the smallest similarity of a pair, above 0.
        mesh: the devices, which split the rows.
    """

    def __init__(self, read: Read, rows: range, floor: float, mesh: Mesh):
        platform = mesh.devices.flat[0].platform
        self._read, self._rows, self._floor, self._mesh = read, rows, floor, mesh
        self._kind, self._tile = TYPES.get(platform, "float16"), TILES.get(platform, TILE)
        # Half of eps is u; the rest is what sums of products are rounded by.
        self._least = floor - 2.1 * float(ml_dtypes.finfo(self._kind).eps) / 2 - 1e-4
        self._values = _finite(read(rows))
        padded = _padded(self._values, -(-len(rows) // (size := self._tile * num_batch_shards(mesh))) * size)
        with jax.set_mesh(mesh):
            where = sharding.batch_sharding(mesh)
            self._placed = jax.device_put((padded, np.arange(len(padded), dtype=np.int32)), where)

    def pairs(self, num_train: int, count: int, advance: Callable[[int], None]) -> Iterator[Pairs]:
        """Yields all pairs of a row and a sample after it whose cosine is at least the floor.

        Args:
            num_train: samples to train on, before those of evaluation sets.
            count: of all samples.
            advance: called with the number of pairs that were compared.
        """
        sets = range(self._rows.start, num_train), range(num_train, count)
        blocks = (some[start : start + COLUMNS] for some in sets for start in range(0, len(some), COLUMNS))
        running: _Columns | None = None
        for samples, (values, copies) in _ahead(lambda some: (some, _without_copies(self._read(some))), blocks):
            # The next block is given to the devices before this one is waited for, so that they are never idle.
            begun = self._begin(samples, values, copies)
            if running is not None:
                yield from self._finish(running)
                advance(len(self._rows) * len(running.values))
            running = begun
        if running is not None:
            yield from self._finish(running)
            advance(len(self._rows) * len(running.values))

    def _begin(self, samples: range, values: np.ndarray, copies: np.ndarray) -> _Columns:
        """Gives a block of columns to the devices, with the places of copies and what they are copies of."""
        first, second = samples.start + copies
        own = (first >= self._rows.start) & (first < self._rows.stop)
        pairs = Pairs(first[own], second[own], np.ones(own.sum(), np.float32))
        with jax.set_mesh(self._mesh):
            on_device = jax.device_put(_padded(values, COLUMNS), sharding.replicated(self._mesh))
            offset = min(samples.start - self._rows.start, 2**30)
            greatest = _greatest(*self._placed, on_device, offset, self._tile, self._kind)
        return _Columns(samples.start, values, pairs, on_device, greatest)

    def _finish(self, columns: _Columns) -> Iterator[Pairs]:
        """Looks again at the rows that may be similar to a column."""
        yield columns.copies
        greatest = np.asarray(columns.greatest).reshape(-1)[: len(self._rows)]
        again = np.flatnonzero(greatest >= self._least)
        for start in range(0, len(again), _AGAIN):
            some = again[start : start + _AGAIN]
            with jax.set_mesh(self._mesh):
                # Of two sizes, so that JAX compiles twice.
                chosen = np.resize(some, _AGAIN if len(some) > _FEW else _FEW)
                similarity = _similarities(self._placed[0], chosen, columns.on_device, self._kind)
            near = np.asarray(similarity)[: len(some), : len(columns.values)] >= self._least
            rows, places = np.nonzero(near)
            yield self._computed_again(columns, some[rows], places)

    def _computed_again(self, columns: _Columns, rows: np.ndarray, places: np.ndarray) -> Pairs:
        """Returns the pairs that reach the floor, given the places of rows and columns."""
        is_after = places + columns.start > rows + self._rows.start
        rows, places = rows[is_after], places[is_after]
        similarity = np.zeros(len(rows), np.float32)
        for start in range(0, len(rows), _PAIRS):
            some = slice(start, start + _PAIRS)
            # In float64, in which the similarity of copies is 1 when it is rounded.
            one, other = self._values[rows[some]].astype(np.float64), columns.values[places[some]].astype(np.float64)
            norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
            similarity[some] = np.einsum("nd,nd->n", one, other) / norms
        return Pairs(rows + self._rows.start, places + columns.start, similarity).where(similarity >= self._floor)


@functools.partial(jax.jit, static_argnames=("tile", "kind"))
def _greatest(
    rows: Float[Array, "r d"],
    numbers: Int[Array, " r"],
    columns: Float[Array, "c d"],
    offset: Int[Array, ""] | int,
    tile: int,
    kind: str,
) -> Float[Array, "shards r"]:
    """Returns of each row the greatest similarity to a column after it.

    Args:
        rows: embeddings.
        numbers: of the rows.
        columns: embeddings.
        offset: the number of the first column, where that of the first row is 0.
        tile: rows that are compared at a time.
        kind: the type of the products.
    """
    columns = _normalized(columns).astype(kind)
    of_columns = offset + jnp.arange(len(columns))

    def of_tile(rows: Array, numbers: Array) -> Array:
        similarity = _products(_normalized(rows).astype(kind), columns)
        return jnp.max(jnp.where(of_columns[None] > numbers[:, None], similarity, -1), axis=1)

    def of_device(rows: tuple[Array, Array], columns: Array, axes: tuple[str, ...]) -> Array:
        tiles = jax.tree.map(lambda x: x.reshape(-1, tile, *x.shape[1:]), rows)
        return jax.lax.map(lambda rows: of_tile(*rows), tiles).reshape(-1)

    return sharding.map_shards(of_device, (rows, numbers), columns)


@functools.partial(jax.jit, static_argnames="kind")
def _similarities(
    rows: Float[Array, "r d"], chosen: Int[Array, " n"], columns: Float[Array, "c d"], kind: str
) -> Float[Array, "n c"]:
    return _products(_normalized(rows[chosen]).astype(kind), _normalized(columns).astype(kind))


def _products(rows: Float[Array, "r d"], columns: Float[Array, "c d"]) -> Float[Array, "r c"]:
    return jnp.einsum("rd,cd->rc", rows, columns, preferred_element_type=jnp.float32, precision="highest")


def _normalized(x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=1, keepdims=True), 1e-30))


def _finite(values: np.ndarray) -> np.ndarray:
    """Returns embeddings, those of broken images as zeros, which are similar to none."""
    return np.where(np.isfinite(values).all(axis=1, keepdims=True), values, values.dtype.type(0))


def _without_copies(values: np.ndarray) -> tuple[np.ndarray, Int[np.ndarray, "2 copies"]]:
    """Returns embeddings, copies of an earlier one as zeros, and the places of the earlier ones and the copies."""
    values = np.ascontiguousarray(_finite(values))
    content = values.view(np.dtype((np.void, values.shape[1] * values.itemsize))).ravel()
    _, first, same = np.unique(content, return_index=True, return_inverse=True)
    copies = np.flatnonzero((first[same] < np.arange(len(values))) & values.any(axis=1))
    values[copies] = 0
    return values, np.stack([first[same][copies], copies])


def _padded(values: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([values, np.zeros((count - len(values), values.shape[1]), values.dtype)])


def _ahead(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Yields the results in order; the next ones are made in threads meanwhile."""
    waiting: collections.deque[Future[_Result]] = collections.deque()
    with ThreadPoolExecutor(_AHEAD) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
