"""Orders are permutations in constant memory, and pure functions of (seed, position)."""

import collections
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.data_pipelines.shards.order import Chosen, Mixed, Sequential, Shuffled, WindowShuffled
from lit_het.errors import UserError


def epoch(order, number, size):
    return [order[number * size + i] for i in range(size)]


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    window=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    number=st.integers(0, 10**6),
)
def test_every_epoch_of_a_windowed_shuffle_is_a_permutation_from_few_shards_at_a_time(counts, window, seed, number):
    order, size = WindowShuffled(counts, window, seed), sum(counts)
    samples = epoch(order, number, size)
    assert sorted(samples) == list(range(size))
    assert samples == epoch(WindowShuffled(counts, window, seed), number, size)
    shard_of = [shard for shard, count in enumerate(counts) for _ in range(count)]
    # Once a window is left, its shards do not come back.
    visits = [shard for shard, _ in itertools.groupby(shard_of[sample] for sample in samples)]
    last = {shard: place for place, shard in enumerate(visits)}
    open_together = [sum(visits.index(shard) <= place <= last[shard] for shard in last) for place in range(len(visits))]
    assert max(open_together) <= window


def test_windows_differ_from_epoch_to_epoch_and_from_seed_to_seed():
    counts = [20] * 10
    first, second = (epoch(WindowShuffled(counts, 3, 0), number, 200) for number in (0, 1))
    other = epoch(WindowShuffled(counts, 3, 1), 0, 200)
    assert first != second
    assert first != other
    assert first != list(range(200))


@given(size=st.integers(1, 200), seed=st.integers(0, 2**40), number=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_every_epoch_of_a_shuffle_is_a_permutation(size, seed, number):
    assert sorted(epoch(Shuffled(size, seed), number, size)) == list(range(size))


@pytest.mark.parametrize("size", [200, 2000], ids=["a small set", "a set that grain shuffles"])
def test_every_epoch_of_every_seed_of_a_shuffle_has_its_own_order(size):
    orders = {tuple(epoch(Shuffled(size, seed), number, size)) for seed in (0, 1, 2) for number in (0, 1, 2)}
    assert len(orders) == 9


def test_windows_of_equal_size_have_different_permutations():
    order = WindowShuffled([12] * 6, window=1, seed=0)
    samples = [sample % 12 for sample in epoch(order, 0, 72)]
    assert len({tuple(samples[start : start + 12]) for start in range(0, 72, 12)}) == 6


def test_a_billion_samples_start_anywhere_immediately_in_little_memory():
    tracemalloc.start()
    order = Shuffled(10**9, 0)
    samples = {order[7 * 10**11 + i] for i in range(1000)}
    assert len(samples) == 1000
    assert max(samples) > 9 * 10**8
    in_windows = WindowShuffled([10_000] * 100_000, 16, 0)
    assert len({in_windows[7 * 10**11 + i] for i in range(1000)}) == 1000
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()


def test_a_mixture_keeps_its_proportions_and_the_epochs_of_each_set():
    sets = [Sequential(7), Chosen(Shuffled(5, 0), range(7, 12)), Chosen(Sequential(11), range(12, 23))]
    mixed = Mixed(sets, [1.0, 0.5, 0.25])
    for start in (0, 123_456):
        samples = [mixed[start + i] for i in range(700)]
        sources = collections.Counter("first" if s < 7 else "second" if s < 12 else "third" for s in samples)
        assert sources["first"] == pytest.approx(400, abs=2)
        assert sources["second"] == pytest.approx(200, abs=2)
        assert sources["third"] == pytest.approx(100, abs=2)
    of_second = [sample - 7 for sample in (mixed[i] for i in range(700)) if 7 <= sample < 12]
    assert of_second == [Shuffled(5, 0)[i] for i in range(len(of_second))]
    # Also where one cycle ends and the next begins.
    of_first = [sample for sample in (mixed[i] for i in range(9_990, 10_010)) if sample < 7]
    assert all((b - a) % 7 == 1 for a, b in itertools.pairwise(of_first))


def test_permutations_of_a_small_window_are_uniform():
    order = WindowShuffled([16], 1, 0)
    places = np.array([epoch(order, number, 16) for number in range(2000)])
    assert not (places == np.arange(16)[None]).all(axis=1).any()
    counts = np.stack([np.bincount(column, minlength=16) for column in places.T])
    # Each of 256 counts is binomial: 125 expected, deviation 10.8.
    assert np.abs(counts - 125).max() < 60


@pytest.mark.parametrize("weights", [[1.0, 1e-9], [1e-9, 1.0], [1.0, 2.0, 1e-5]])
def test_a_weight_too_small_for_a_single_sample_is_refused(weights):
    with pytest.raises(UserError, match=r"mixture: a data set of weight 1e-0[59] among .* has none of 10,000"):
        Mixed([Sequential(5)] * len(weights), weights)
