"""Orders of the samples in the endless training stream: pure functions of (seed, position), in constant memory.

No array of a shuffled epoch is stored, so a stream of a billion samples starts and resumes immediately.
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

# A mixture repeats its pattern of sources after this many samples.
_CYCLE = 10_000
# Up to this size NumPy permutes samples: permutations of grain 0.2.18 are far from uniform for few samples. For sixteen
# samples, about 1 in 300 is the identity.
_SMALL = 1024


@runtime_checkable
class Order(Protocol):
    """An endless stream of sample indices."""

    def __getitem__(self, position: int) -> int:
        """Returns the sample at a position."""
        ...


@dataclasses.dataclass(frozen=True)
class Sequential:
    """The samples in shard order, repeated."""

    num_samples: int

    def __getitem__(self, position: int) -> int:
        return position % self.num_samples


@dataclasses.dataclass(frozen=True)
class Chosen:
    """An order of some of the samples: the index ``i`` stands for ``samples[i]``."""

    order: Order
    samples: Sequence[int]

    def __getitem__(self, position: int) -> int:
        return self.samples[self.order[position]]


class Shuffled:
    """Each epoch is a new permutation of all samples."""

    def __init__(self, num_samples: int, seed: int):
        self._num_samples = num_samples
        # grain 0.2.18 adds the epoch's number to the seed. Hashing keeps adjacent seeds from sharing permutations.
        self._order = grain.MapDataset.range(num_samples).shuffle(_hashed(seed)).repeat()
        self._small = functools.lru_cache(maxsize=4)(lambda epoch: _small_permutation(num_samples, seed, epoch))

    def __getitem__(self, position: int) -> int:
        if self._num_samples > _SMALL:
            return cast(int, self._order[position])
        epoch, place = divmod(position, self._num_samples)
        return self._small(epoch)[place]


class WindowShuffled:
    """Each epoch permutes the shards, and then the samples within windows of consecutive shards.

    Neighbours in the stream come from few shards: for stores with slow random access, and for indexes that do not fit
    into memory.

    Args:
        counts: samples of each shard.
        window: number of shards in a window.
        seed: of every permutation.
    """

    def __init__(self, counts: Sequence[int], window: int, seed: int):
        self._counts = np.asarray(counts, np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._counts)])
        self._window, self._seed = window, seed
        # Rows of one batch lie in one or two windows, but threads may be an epoch apart: the caches hold a few.
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
        """Returns the permuted shards, and the positions in the epoch where windows and shards start."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._counts))
        shard_starts = [0, *itertools.accumulate(self._counts[order].tolist())]
        window_starts = [*shard_starts[: -1 : self._window], shard_starts[-1]]
        # Empty windows are dropped: they would start at the same position as the next one.
        return order.tolist(), sorted(set(window_starts)), shard_starts

    def _make_permutation(self, epoch: int, window: int, size: int) -> Order | list[int]:
        if size <= _SMALL:
            # NumPy ignores trailing zeros of a seed: with 0 it would equal the permutation of the shards.
            return _small_permutation(size, self._seed, epoch, window + 1)
        return cast(Order, grain.MapDataset.range(size).shuffle(_hashed(self._seed, epoch, window)))


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """One order for the last few positions of every group, and another for the rest (`lit_het.tasks.held_out`).

    Attributes:
        order: for the rest.
        held_out: for the last positions.
        size: positions of a group.
        count: how many of them are the last ones.
    """

    order: Order
    held_out: Order
    size: int
    count: int

    def __getitem__(self, position: int) -> int:
        number, place = divmod(position, self.size)
        rest = self.size - self.count
        if place < rest:
            return self.order[number * rest + place]
        return self.held_out[number * self.count + place - rest]


class Mixed:
    """Interleaves several streams in fixed proportions; each stream is consumed in its own order.

    Args:
        orders: of each data set, over indices of all samples.
        weights: shares of the samples, not normalised.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float]):
        self._orders = tuple(orders)
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
        # The place in a source is a function of the position alone: a resumed run needs no counters of its sources.
        source = int(self._source[slot])
        place = cycle * int(self._in_cycle[source]) + int(self._before[slot, source])
        return self._orders[source][place]


def _proportional(weights: np.ndarray) -> np.ndarray:
    """Returns a cycle of sources: each slot takes the source that lags most behind its share."""
    shares = weights / weights.sum()
    given, cycle = np.zeros(len(weights)), np.empty(_CYCLE, np.int64)
    for slot in range(_CYCLE):
        # Deterministic and evenly spread: a random choice would leave streaks without one of the sources.
        cycle[slot] = int(np.argmax(shares * (slot + 1) - given))
        given[cycle[slot]] += 1
    return cycle


def _small_permutation(size: int, *seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(size).tolist()


def _hashed(*seed: int) -> int:
    return int(np.random.SeedSequence(seed).generate_state(1)[0])
