"""The search for similar pairs by blocks, and the groups of similar samples, against slow NumPy references."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.apps.dedup import search
from lit_het.apps.dedup.pairs import Found, left_out
from lit_het.apps.dedup.search import BlockSearch, Pairs
from lit_het.sharding import MeshConfig
from tests.refusals import assert_refused

COUNT, TRAIN, FLOOR = 150, 120, 0.9
# In one block of columns; the last is of an evaluation set.
COPIES = (101, 102, 122)


def embeddings(dtype="float16"):
    """Embeddings of which many are near another one, some are copies of the fifth, one is missing and one is zero."""
    random = np.random.default_rng(0)
    values = random.normal(size=(COUNT, 8))
    values[40:80] = values[:40] + 0.35 * random.normal(size=(40, 8))
    values[120:135] = values[60:75] + 0.2 * random.normal(size=(15, 8))
    values *= random.uniform(0.1, 10, size=(COUNT, 1))
    values[list(COPIES)] = values[5]
    values[90], values[91] = np.nan, 0
    return values.astype(dtype)


def reference(values):
    """All pairs whose cosine reaches the floor, with it."""
    values = np.nan_to_num(values.astype(np.float64))
    values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-9)
    cosine = values @ values.T
    return {(i, j): cosine[i, j] for i, j in itertools.combinations(range(len(values)), 2) if cosine[i, j] >= FLOOR}


def found_pairs(values, rows, floor=FLOOR, num_train=TRAIN):
    """The pairs of the search, and how many comparisons it counted."""
    compared, mesh = [], MeshConfig().build(jax.local_devices())
    blocks = BlockSearch(lambda some: values[some.start : some.stop], rows, floor, mesh)
    pairs = Pairs.joined(blocks.pairs(min(num_train, len(values)), len(values), compared.append))
    assert sum(compared) == len(rows) * (len(values) - rows.start)
    return pairs


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(search, "COLUMNS", 32)
    monkeypatch.setattr(search, "TILES", {"cpu": 16})
    monkeypatch.setattr(search, "_FEW", 4)
    monkeypatch.setattr(search, "_AGAIN", 8)
    monkeypatch.setattr(search, "_PAIRS", 5)


@pytest.mark.parametrize(
    ("stored", "products"),
    [
        ("float32", "float32"),
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
        ("float32", "bfloat16"),
    ],
)
def test_blocks_find_the_pairs_of_a_slow_search_in_any_type(stored, products, monkeypatch):
    monkeypatch.setattr(search, "TYPES", {"cpu": products})
    values = embeddings(stored)
    expected = reference(values)
    # Of copies in one block of columns only the first of a set is paired, and with each copy.
    others = {pair: cosine for pair, cosine in expected.items() if not set(pair) & set(COPIES[:2])}
    assert sum(COPIES[2] in pair for pair in others) > 1
    assert len(others) > 30
    for ends in ((0, COUNT), (0, 37, 100, COUNT)):
        pairs = Pairs.joined(found_pairs(values, range(*some)) for some in itertools.pairwise(ends))
        found = dict(zip(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True), pairs.similarity, strict=True))
        assert len(found) == len(pairs.first), "none twice"
        assert found.keys() <= expected.keys()
        assert others.keys() <= found.keys()
        assert {cosine for pair, cosine in found.items() if set(pair) <= {5, *COPIES}} == {np.float32(1)}
        np.testing.assert_allclose(list(found.values()), [expected[pair] for pair in found], atol=2e-7)


@pytest.mark.parametrize("products", ["float16", "bfloat16"])
def test_no_pair_is_missed_where_products_round_it_below_the_floor(products, monkeypatch):
    monkeypatch.setattr(search, "TYPES", {"cpu": products})
    values = embeddings()[6:100]
    pairs = [*reference(values).items()][::4]
    assert len(pairs) > 8
    for pair, cosine in pairs:
        found = found_pairs(values, range(60), cosine - 1e-6)
        assert pair in zip(found.first.tolist(), found.second.tolist(), strict=True)


@pytest.mark.devices
def test_devices_that_share_the_rows_find_the_same():
    assert len(jax.local_devices()) == 8
    values = embeddings()
    together = found_pairs(values, range(100))
    mesh = MeshConfig().build(jax.local_devices()[:1])
    alone = Pairs.joined(
        BlockSearch(lambda some: values[some.start : some.stop], range(100), FLOOR, mesh).pairs(TRAIN, COUNT, print)
    )
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one, other)


def test_many_copies_are_few_pairs():
    values = np.repeat(embeddings("float32")[:2], 400, axis=0)
    pairs = found_pairs(values, range(len(values)), num_train=len(values))
    assert len(pairs.first) < 800 * (2 + 800 / 32), "and not 2 x 400²/2"
    assert left_out(Found.of([pairs], 800), 0.99).sample.tolist() == [*range(1, 400), *range(401, 800)]


def groups(pairs, threshold):
    """The groups of two or more samples, by union-find."""
    parent = {sample: sample for pair in pairs for sample in pair}

    def root(sample):
        while parent[sample] != sample:
            sample = parent[sample]
        return sample

    for (first, second), similarity in pairs.items():
        if similarity >= threshold:
            parent[root(first)] = root(second)
    found = {}
    for sample in parent:
        found.setdefault(root(sample), set()).add(sample)
    return [group for group in found.values() if len(group) > 1]


def as_pairs(found):
    first, second = np.array([*found], int).reshape(-1, 2).T
    return Pairs(first, second, np.array([*found.values()], np.float32))


PAIRS = st.dictionaries(
    st.tuples(st.integers(0, 19), st.integers(0, 25)).filter(lambda pair: pair[0] < pair[1]),
    st.sampled_from([0.9, 0.92, 0.95, 0.99, 1.0]).map(np.float32),
)


@settings(deadline=None)
@given(PAIRS, st.sampled_from([0.9, 0.95, 0.96, 1.0]), st.integers(0, 3))
def test_what_is_left_out_is_that_of_union_find_at_every_threshold(pairs, threshold, cut):
    num_train = 20
    whole = as_pairs(pairs)
    # In parts, as of several blocks and hosts.
    parts = [Found.of([whole.where(whole.first % 4 == number)], num_train) for number in range(cut)]
    parts.append(
        Found.of(
            [
                whole.where((whole.first % 4 >= cut) & (whole.first >= start) & (whole.first < start + 10))
                for start in (0, 10)
            ],
            num_train,
        )
    )
    found = Found.joined(parts, num_train)
    within = {pair: similarity for pair, similarity in pairs.items() if pair[1] < num_train}
    tests = {pair: similarity for pair, similarity in pairs.items() if pair[1] >= num_train}
    assert len(found.forest.first) <= num_train - 1
    in_groups = groups(within, threshold)
    in_test = {first for (first, _), similarity in tests.items() if similarity >= threshold}
    copies = {sample for group in in_groups for sample in sorted(group - in_test)[1:]}
    chosen = left_out(found, threshold)
    assert chosen.sample.tolist() == sorted(copies | in_test)
    assert chosen.largest == max(map(len, in_groups), default=0)
    twins = dict(zip(chosen.sample.tolist(), chosen.twin.tolist(), strict=True))
    for sample, similarity, is_test in zip(twins, chosen.similarity, chosen.is_test, strict=True):
        twin = twins[sample]
        assert (pairs[min(sample, twin), max(sample, twin)], is_test) == (similarity, sample in in_test)
        assert similarity >= np.float32(threshold)
        if is_test:
            best = max(found for (first, _), found in tests.items() if first == sample)
            assert (similarity, twin) == (best, min(t[1] for t, s in tests.items() if t[0] == sample and s == best))
        else:  # by way of its twins the sample that is kept is reached
            way = [sample]
            while way[-1] not in way[:-1] and way[-1] in copies:
                way.append(twins[way[-1]])
            assert way[-1] in in_test or way[-1] not in twins
    nearest = {sample: max(s for pair, s in within.items() if sample in pair) for pair in within for sample in pair}
    assert found.nearest().tolist() == [nearest[sample] for sample in sorted(nearest)]


def test_pairs_are_read_as_they_were_saved(tmp_path):
    found = Found.of([as_pairs({(0, 3): 0.93, (1, 3): 0.95, (2, 7): 0.91})], 5)
    found.save(tmp_path / "pairs.safetensors")
    for one, other in zip(found, Found.load(tmp_path / "pairs.safetensors"), strict=True):
        for left, right in zip(one, other, strict=True):
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
    (tmp_path / "pairs.safetensors").write_bytes(b"\x10")
    assert_refused("pairs.safetensors cannot be read .*; remove it and run", Found.load, tmp_path / "pairs.safetensors")
