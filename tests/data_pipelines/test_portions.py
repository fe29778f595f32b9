"""Portions of a data set are exact, disjoint and complete, on any number of hosts."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_het.data_pipelines.data_config import LoaderConfig, Streaming, WeightedShards
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.portions import ALL, Concatenated, Marked, Portion
from lit_het.data_pipelines.shards.writing import write_tar
from tests.data_pipelines.conftest import NUM_SAMPLES, take
from tests.refusals import assert_refused


def labels(batches):
    return np.concatenate([np.asarray(batch.label)[np.asarray(batch.valid)] for batch in batches]).tolist()


def drawn(loader, count, *place):
    return labels(take(loader, count, *place))


def loader(shards: Path, portion: Portion, **changes) -> Loader:
    config = LoaderConfig((str(shards),), 8, 4, ClassIndex(), portion, threads=0, seed=3)
    return Loader(dataclasses.replace(config, **changes))


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    cuts=st.lists(st.integers(1, 999), max_size=5, unique=True),
)
def test_adjacent_portions_are_disjoint_and_complete(counts, cuts):
    bounds = [0, *(cut / 10 for cut in sorted(cuts)), 100]
    portions = [Portion(start, end) for start, end in itertools.pairwise(bounds)]
    total = sum(counts)
    assert [number for portion in portions for number in portion.sample_range(total)] == list(range(total))
    for portion in portions:
        assert Portion.parse(str(portion)) == portion
        assert sum(portion.counts_per_shard(counts)) == len(portion.sample_range(total))
        assert abs(len(portion.sample_range(total)) - total * (portion.end - portion.start) / 100) < 1
    by_shard = zip(*(portion.counts_per_shard(counts) for portion in portions), strict=True)
    assert [sum(parts) for parts in by_shard] == counts


def test_portions_overlap_where_they_have_samples_in_common():
    assert Portion(0, 50).overlaps(Portion(49))
    assert ALL.overlaps(Portion(98))
    assert not Portion(0, 98).overlaps(Portion(98))
    assert not Portion(98).overlaps(Portion(0, 98))


def test_a_tenth_of_a_percent_is_exact_where_floats_are_not():
    assert Portion(0, 0.7).sample_range(1000) == range(7)  # 0.7 * 1000 / 100 is less in floating point
    assert Portion(98).sample_range(1_281_167) == range(1_255_543, 1_281_167)


@pytest.mark.parametrize(
    ("text", "portion"),
    [
        (":98%", Portion(0, 98)),
        ("98%:", Portion(98)),
        ("0.5%:2%", Portion(0.5, 2)),
        (":", ALL),
        ("98%: by key", Portion(98, by="key")),
        ("98%: by sample", Portion(98, by="sample")),
        ("98%: by name", Portion(98, by="name")),
    ],
)
def test_a_portion_is_written_as_a_start_and_an_end_in_percent(text, portion):
    assert Portion.parse(text) == portion


@pytest.mark.parametrize("text", ["98", "98%", "a%:b%", "1.2.3%:", "-1%:"])
def test_text_that_is_not_a_portion_is_refused(text):
    with pytest.raises(ValueError, match=r"not a portion; write a start and an end|could not convert"):
        Portion.parse(text)


@pytest.mark.parametrize("changes", [{}, {"shuffle": False}, {"window": 1}], ids=["shuffled", "in turn", "windows"])
def test_training_and_minival_together_see_each_sample_once_per_epoch(shards, changes):
    parts = [loader(shards, portion, batch_size=1, **changes) for portion in (Portion(0, 80), Portion(80))]
    train, minival = (drawn(part, part.num_samples) for part in parts)
    again = drawn(parts[0], 18, 18)
    assert sorted(train) == sorted(again) == list(range(18))
    assert sorted(minival) == list(range(18, NUM_SAMPLES))
    assert [labels(part.epoch()) for part in parts] == [list(range(18)), list(range(18, NUM_SAMPLES))]
    assert changes or again != train


def test_a_portion_resumes_anywhere_and_is_the_same_on_any_number_of_hosts(shards):
    part = loader(shards, Portion(10, 60))
    whole = drawn(part, 10)
    assert drawn(part, 5, 20) == whole[20:]
    halves = [drawn(part, 10, 0, process, 2) for process in range(2)]
    rows = [np.reshape(half, (10, 2)) for half in halves]
    assert np.concatenate(rows, axis=1).ravel().tolist() == whole
    assert labels([part.read([0, 1])]) == [2, 3]


HELD_OUT = {
    "sample": ["006", "008", "010", "012", "013"],
    "key": ["001", "004", "008", "010", "011"],
    "caption": ["000", "001", "002", "003", "004"],
    "name": ["000", "001", "002", "003", "008"],
}
SORTED = [(f"{number:03}", f"{kind} {number // 4}") for number, kind in enumerate(["cat"] * 150 + ["dog"] * 150)]


@pytest.fixture
def sorted_shards(tmp_path):
    """Three shards of samples that are sorted by kind; four neighbours share a caption."""
    for shard in range(3):
        some = SORTED[shard * 100 : (shard + 1) * 100]
        # Images are indexed, and never decoded.
        write_tar(tmp_path / f"{shard}.tar", [{"__key__": key, "jpg": b"x", "txt": caption} for key, caption in some])
    return tmp_path


@pytest.mark.parametrize("rule", ["sample", "key", "caption", "name"])
@pytest.mark.parametrize("changes", [{}, {"shuffle": False}, {"window": 1}], ids=["shuffled", "in turn", "windows"])
def test_a_hash_splits_sorted_samples_evenly_and_completely(sorted_shards, rule, changes):
    whole = Loader(LoaderConfig((str(sorted_shards),), 8, 4, portion=Portion(0, 50, rule), threads=0, **changes))
    parts = [whole.with_portion(Portion(*bounds, rule)) for bounds in ((0, 50), (50, 100))]
    first, second = ([SORTED[number] for number in part.numbers] for part in parts)
    assert sorted(first + second) == SORTED
    for part in (first, second):
        assert 40 < sum(caption.startswith("cat") for _, caption in part) < 110
    shared = {caption for _, caption in first} & {caption for _, caption in second}
    assert bool(shared) == (rule != "caption")
    drawn = [key for _, key in parts[0].sources(range(len(first)))]
    assert sorted(drawn) == sorted(key for key, _ in first)
    # The rule of saved runs: another one would train on what they held out.
    assert [key for key, _ in SORTED if key not in drawn][:5] == HELD_OUT[rule]


def test_by_name_half_of_what_is_held_out_are_all_samples_of_some_captions(tmp_path):
    captions = [f"name {number // 20}" for number in range(4_000)]
    write_tar(
        tmp_path / "0.tar",
        [{"__key__": f"{number:04}", "jpg": b"x", "txt": caption} for number, caption in enumerate(captions)],
    )
    config = LoaderConfig((str(tmp_path),), 8, 4, portion=Portion(80, by="name"), threads=0)
    held_out, trained = Loader(config), Loader(dataclasses.replace(config, portion=Portion(0, 80, "name")))
    in_training = {captions[number] for number in trained.numbers}
    new = [number for number in held_out.numbers if captions[number] not in in_training]
    assert len(new) == 20 * len({captions[number] for number in new})
    # A caption is held out with probability 1 - sqrt(0.8) = 10.6 %, and a sample of another one: 21 ± 4 and 378 ± 20.
    assert (len(new) // 20, len(held_out.numbers) - len(new)) == (17, 384)
    assert len(held_out.numbers) + len(trained.numbers) == 4_000


def test_every_data_set_of_a_mixture_has_its_own_portion(shards):
    more = WeightedShards((str(shards / "shard-000002.tar"),), 0.5, Portion(50))  # of 20, 21 and 22 the last two
    part = loader(shards, Portion(0, 20), mixture=(more,))
    assert part.num_samples == 4 + 2
    seen = drawn(part, 30)
    assert (sorted(set(seen)), seen.count(21) + seen.count(22)) == ([0, 1, 2, 3, 21, 22], 40)
    assert labels(part.epoch()) == [0, 1, 2, 3, 21, 22]


def test_portions_out_of_order_without_samples_or_of_a_stream_are_refused(shards):
    for bounds in ((50, 50), (60, 40), (0, 101)):
        assert_refused("must be from 0 to 100 and in order", Portion, *bounds)
    assert_refused(r"0%:1% of 23 samples is empty; take a larger portion", loader, shards, Portion(0, 1))
    assert_refused("a `stream` has no `portion`", LoaderConfig, ("a.tar",), portion=Portion(0, 50), stream=Streaming())


@given(
    ranges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3),
    start=st.integers(0, 40),
    length=st.integers(0, 20),
)
def test_marks_are_those_of_all_parts(ranges, start, length):
    own, first = [], 0
    for gap, count in ranges:  # in order and apart, as those of several data sets
        own.append(range(first + gap, first + gap + count))
        first += gap + count
    # Of every other part each number but the first.
    parts = [Marked(one.start, np.arange(len(one)) > 0) if number % 2 else one for number, one in enumerate(own)]
    held = [i for number, one in enumerate(own) for i in one if i > one.start or not number % 2]
    assert list(Concatenated(parts)) == held
    numbers = range(start, start + length)
    assert Concatenated(parts).marks(numbers).tolist() == [i in held for i in numbers]


@pytest.mark.parametrize("count", [0, 1, 2**14, 2**14 + 1, 40_000])
def test_marked_integers_are_found_in_any_block(count):
    marks = np.random.default_rng(count).random(count) < 0.9
    expected = (np.flatnonzero(marks) + 3).tolist()
    found = Marked(3, marks)
    assert len(found) == len(expected)
    for place in {*range(-len(expected), len(expected), 997), *range(-1, 1)[: len(expected)]}:
        assert found[place] == expected[place]
    with pytest.raises(IndexError):
        found[len(found)]
