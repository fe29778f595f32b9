"""Samples that a table of suspects leaves out of training."""

import csv
import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_het.data_pipelines.data_config import LoaderConfig, WeightedShards
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.data_pipelines.loader import Loader
from lit_het.data_pipelines.portions import Portion, without
from lit_het.data_pipelines.suspects import Suspects
from lit_het.errors import UserError

# Two shards of ten samples and one of three; labels number the samples.
SUSPECT = (3, 10, 11, 22, 0, 19)


def table(path: Path, shards: Path, numbers=SUSPECT, columns=("shard", "key", "loss")) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        # The worst first, and then all others.
        for number in [*numbers, *(n for n in range(23) if n not in numbers)]:
            writer.writerow([shards / f"shard-{number // 10:06d}.tar", f"s{number}", 1.0])
    return path


def loader(shards: Path, suspects: Suspects | None, **changes) -> Loader:
    return Loader(
        LoaderConfig((str(shards),), 8, 1, labels=ClassIndex(), threads=0, seed=5, suspects=suspects, **changes)
    )


def labels(batches, count: int) -> list[int]:
    with_labels = itertools.islice(batches, count)
    found = [int(batch.label[0]) for batch in with_labels]
    batches.close()
    return found


@pytest.mark.parametrize("changes", [{}, {"shuffle": False}, {"window": 1}, {"window": 2}])
def test_every_epoch_has_all_samples_but_the_suspects(shards, tmp_path, changes):
    suspects = Suspects(table(tmp_path / "scores.csv", shards), fraction=6 / 23)
    left = sorted(set(range(23)) - set(SUSPECT))
    found = loader(shards, suspects, **changes)
    assert found.num_samples == len(left)
    for epoch in range(2):
        assert sorted(labels(found.batches(epoch * len(left)), len(left))) == left
    assert labels(found.epoch(), len(left)) == left


def test_only_the_first_rows_of_the_table_are_left_out(shards, tmp_path):
    suspects = Suspects(table(tmp_path / "scores.csv", shards), fraction=0.05)  # 1.15 rows, rounded up
    assert sorted(set(range(23)) - set(labels(loader(shards, suspects).epoch(), 21))) == [3, 10]


def test_a_fraction_is_exact_and_digests_tell_what_is_left_out(shards, tmp_path):
    rows = "".join(f"{shards / 'shard-000000.tar'},s{number % 10}\n" for number in range(100))
    (tmp_path / "hundred.csv").write_text(f"shard,key\n{rows}")
    (keys,) = Suspects(tmp_path / "hundred.csv", 0.07).read().values()
    assert len(keys) == 7  # 0.07 * 100 is more than 7 as a float
    path = table(tmp_path / "scores.csv", shards)
    digests = {loader(shards, suspects).digest for suspects in (None, Suspects(path, 0.1), Suspects(path, 0.2))}
    assert len(digests) == 3
    assert loader(shards, Suspects(path, 0.1)).digest in digests


def test_suspects_outside_the_portion_change_nothing(shards, tmp_path):
    suspects = Suspects(table(tmp_path / "scores.csv", shards), fraction=6 / 23)
    found = loader(shards, suspects, portion=Portion(50, 100))  # samples 11 to 22
    assert labels(found.epoch(), 9) == [12, 13, 14, 15, 16, 17, 18, 20, 21]


def test_in_a_mixture_only_the_own_shards_have_suspects(shards, make_shards, tmp_path):
    other = make_shards(tmp_path / "other")
    suspects = Suspects(table(tmp_path / "scores.csv", shards), fraction=6 / 23)
    found = loader(shards, suspects, mixture=(WeightedShards((str(other),)),))
    counts = Counter(labels(found.batches(), 2 * 17 * 23))
    assert {counts[number] for number in SUSPECT} == {17}, "once in each epoch of the other set"
    assert {counts[number] for number in range(23) if number not in SUSPECT} == {17 + 23}


@given(st.integers(0, 30), st.integers(0, 30), st.sets(st.integers(0, 30)))
def test_ranges_without_samples_hold_all_others(start, length, left_out):
    samples = range(start, start + length)
    ranges = without(samples, sorted(left_out))
    assert list(itertools.chain(*ranges)) == [sample for sample in samples if sample not in left_out]
    assert all(ranges)


def test_a_parquet_table_is_read_as_a_csv(shards, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {"shard": [str(shards / "shard-000000.tar")] * 2, "key": ["s4", "s5"]}
    parquet.write_table(arrow.table(rows), tmp_path / "scores.parquet")
    assert Suspects(tmp_path / "scores.parquet", 0.5).read() == {rows["shard"][0]: {"s4"}}


def test_problems_of_the_table_are_one_line(shards, tmp_path):
    def refuse(path: Path, match: str) -> None:
        with pytest.raises(UserError, match=match):
            loader(shards, Suspects(path, 0.5))

    refuse(tmp_path / "none.csv", "none.csv cannot be read .*; write it with lit-het data score")
    refuse(table(tmp_path / "a.csv", shards, columns=("file", "key", "loss")), "a.csv has no column 'shard'")
    refuse(table(tmp_path / "b.csv", Path("/elsewhere")), "b.csv names /elsewhere/shard-000000.tar, which is not a tr")
    keys = table(tmp_path / "c.csv", shards)
    keys.write_text(keys.read_text().replace(",s3,", ",unknown,"))
    refuse(keys, "1 of 12 samples that .*c.csv names are not in the shards; score them again")
    empty = tmp_path / "d.csv"
    empty.write_text("shard,key\n")
    refuse(empty, "d.csv has rows without a shard and a key")
    empty.write_text("shard,key\nx.tar\n")
    refuse(empty, "d.csv has rows without a shard and a key")
    first = table(tmp_path / "e.csv", shards, numbers=range(12))
    with pytest.raises(UserError, match=r"all samples are suspects; lower suspects\.fraction"):
        loader(shards, Suspects(first, 0.5), portion=Portion(0, 20))
    with pytest.raises(UserError, match=r"fraction = 5\.0 must be between 0 and 1; 0\.05 leaves out 5 %"):
        Suspects(keys, 5.0)
