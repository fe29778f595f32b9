"""Which sample stands where in the endless stream: pure functions of (seed, position), computed in constant memory.

No array of a shuffled epoch exists anywhere, so that the order of a billion samples costs nothing to begin or resume.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

import grain
import numpy as np

from lit_het.errors import UserError

# In this many samples every data set of a mixture has its share, to one sample.
_CYCLE = 10_000
# grain's permutations of few samples are far from even: in 1 of 500, sixteen of them stay as they are.
_FEW = 1024


@runtime_checkable
class Order(Protocol):
    """An endless stream of samples."""

    def __getitem__(self, position: int) -> int:
        """Returns the sample at a position."""
        ...


@dataclasses.dataclass(frozen=True)
class InTurn:
    """Samples as they lie in the shards, again and again."""

    num_samples: int

    def __getitem__(self, position: int) -> int:
        return position % self.num_samples


@dataclasses.dataclass(frozen=True)
class Shifted:
    """Another order, of samples whose numbers begin with ``first``."""

    order: Order
    first: int

    def __getitem__(self, position: int) -> int:
        return self.first + self.order[position]


class Shuffled:
    """Every epoch is a permutation of its own of all samples."""

    def __init__(self, num_samples: int, seed: int):
        self._num_samples = num_samples
        # grain numbers the epochs' seeds upwards: neighbouring seeds would share orders if they were not hashed
        self._order = grain.MapDataset.range(num_samples).shuffle(_hashed(seed)).repeat()
        self._few = functools.lru_cache(maxsize=4)(lambda epoch: _permutation_of_few(num_samples, seed, epoch))

    def __getitem__(self, position: int) -> int:
        if self._num_samples > _FEW:
            return cast(int, self._order[position])
        epoch, place = divmod(position, self._num_samples)
        return self._few(epoch)[place]


class WindowShuffled:
    """Every epoch takes the shards in an order of its own, some at a time, and permutes the samples of these.

    For stores where reads far apart are slow, and indexes that are too large for memory: neighbours in the stream come
    from few shards.

    Args:
        counts: samples of each shard.
        window: shards that are open together.
        seed: of every permutation.
    """

    def __init__(self, counts: Sequence[int], window: int, seed: int):
        self._counts = np.asarray(counts, np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._counts)])
        self._window, self._seed = window, seed
        # Rows of one batch lie in one or two windows; threads may be an epoch apart.
        self._epoch = functools.lru_cache(maxsize=4)(self._make_epoch)
        self._permutation = functools.lru_cache(maxsize=64)(self._make_permutation)

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, int(self._starts[-1]))
        shards, window_starts, shard_starts = self._epoch(epoch)
        window = bisect.bisect_right(window_starts, place) - 1
        size = window_starts[window + 1] - window_starts[window]
        place = window_starts[window] + self._permutation(epoch, window, size)[place - window_starts[window]]
        number = bisect.bisect_right(shard_starts, place) - 1
        return int(self._starts[shards[number]]) + place - shard_starts[number]

    def _make_epoch(self, epoch: int) -> tuple[list[int], list[int], list[int]]:
        """Returns the shards in their order, and where windows and shards begin in the epoch."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._counts))
        shard_starts = [0, *itertools.accumulate(self._counts[order].tolist())]
        window_starts = [*shard_starts[: -1 : self._window], shard_starts[-1]]
        # Windows without samples would share their beginnings with the next.
        return order.tolist(), sorted(set(window_starts)), shard_starts

    def _make_permutation(self, epoch: int, window: int, size: int) -> Order | list[int]:
        if size <= _FEW:
            return _permutation_of_few(size, self._seed, epoch, window + 1)  # with a 0 it would be that of the shards
        return cast(Order, grain.MapDataset.range(size).shuffle(_hashed(self._seed, epoch, window)))


class Mixed:
    """Several streams in fixed proportions; each goes on where it was, whatever the others do.

    Args:
        orders: of each data set, over its own samples.
        weights: shares of the samples, to be normalised.
        starts: number of the first sample of each data set among all.

    Raises:
        UserError: a share is so small that none of the samples would be of its data set.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float], starts: Sequence[int]):
        self._orders, self._starts = tuple(orders), tuple(starts)
        self._source = _proportional(np.asarray(weights, float))
        one_hot = self._source[:, None] == np.arange(len(orders))[None]
        self._before = np.cumsum(one_hot, axis=0) - one_hot
        self._in_cycle = one_hot.sum(axis=0)
        if not self._in_cycle.all():
            weight = weights[int(np.argmin(self._in_cycle))]
            raise UserError(
                f"mixture: a data set of weight {weight:g} among {sum(weights):g} has none of {_CYCLE:,} samples;"
                " raise its weight or leave it out"
            )

    def __getitem__(self, position: int) -> int:
        cycle, slot = divmod(position, len(self._source))
        source = int(self._source[slot])
        place = cycle * int(self._in_cycle[source]) + int(self._before[slot, source])
        return self._starts[source] + self._orders[source][place]


def _proportional(weights: np.ndarray) -> np.ndarray:
    """Returns a cycle of sources, each spread evenly: the one that lags most behind its share is next."""
    shares = weights / weights.sum()
    given, cycle = np.zeros(len(weights)), np.empty(_CYCLE, np.int64)
    for slot in range(_CYCLE):
        cycle[slot] = int(np.argmax(shares * (slot + 1) - given))
        given[cycle[slot]] += 1
    return cycle


def _permutation_of_few(size: int, *seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(size).tolist()


def _hashed(*seed: int) -> int:
    return int(np.random.SeedSequence(seed).generate_state(1)[0])
