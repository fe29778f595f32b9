"""Samples that a table of suspects leaves out of training, or weights less."""

import contextlib
import csv
import dataclasses
import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_het.data_pipelines.data_config import LoaderConfig, WeightedShards
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.data_pipelines.shards.suspects import Suspects
from lit_het.errors import UserError
from lit_het.files import write_columns
from tests.data_pipelines import test_embeddings as embeddings
from tests.refusals import assert_refused

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


def loader(shards: Path, suspects: Suspects | None, batch_size: int = 1, **changes) -> Loader:
    fields: Any = {"labels": ClassIndex(), "threads": 0, "seed": 5, "suspects": suspects, **changes}
    return Loader(LoaderConfig((str(shards),), 8, batch_size, **fields))


def labels(batches, count: int) -> list[int]:
    with contextlib.closing(batches):
        return [int(batch.label[0]) for batch in itertools.islice(batches, count)]


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
    found = Suspects(tmp_path / "hundred.csv", 0.07).read()
    (keys,) = found.suspects.values()
    assert list(found.counts.values()) == [100]
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


def test_suspects_with_a_weight_are_read_in_the_order_of_all_samples(shards, tmp_path):
    suspects = Suspects(table(tmp_path / "scores.csv", shards), 6 / 23, weight=0.25)
    found: Any = loader(shards, suspects, 8)
    plain: Any = loader(shards, None, 8)
    assert found.num_samples == 23
    for start in (0, 24):
        whole = next(plain.batches(start))
        assert whole.weight is None
        expected = np.where(np.isin(whole.label, SUSPECT), 0.25, 1).astype(np.float32)
        for processes in (1, 2):
            parts = [next(found.batches(start, number, processes)) for number in range(processes)]
            assert np.concatenate([part.label for part in parts]).tolist() == whole.label.tolist()
            np.testing.assert_array_equal(np.concatenate([part.weight for part in parts]), expected)
    *_, last = found.epoch(8)
    assert last.weight.tolist() == [1, 1, 1, 0.25, 1, 1, 0.25, 1], "samples 16 to 22 and a padded row"
    in_portion = found.with_portion(Portion(50, 100))
    assert next(in_portion.epoch(8)).weight.tolist() == [0.25, 1, 1, 1, 1, 1, 1, 1], "samples 11 to 18"
    assert len({loader(shards, s).digest for s in (None, suspects, dataclasses.replace(suspects, fraction=0.1))}) == 3


def test_weights_are_those_of_the_own_shards_of_a_mixture_and_of_stored_embeddings(shards, make_shards, tmp_path):
    other = make_shards(tmp_path / "other")
    suspects = Suspects(table(tmp_path / "scores.csv", shards), 6 / 23, weight=0.25)
    batches: Any = loader(shards, suspects, 8, mixture=(WeightedShards((str(other),)),)).batches()
    weights = Counter()
    for batch in itertools.islice(batches, 23):  # 92 rows of each set
        weights.update(zip(batch.label.ravel().tolist(), batch.weight.tolist(), strict=True))
    assert {weights[number, 0.25] for number in SUSPECT} == {4}
    assert {weights[number, 1.0] for number in range(23)} == {4, 8}
    embeddings.write(tmp_path / "e", shards)
    batch = next(embeddings.loader(shards, tmp_path / "e", suspects=suspects).batches())
    is_suspect = np.isin(embeddings.numbers_of(batch), SUSPECT)
    assert batch.image is None
    np.testing.assert_array_equal(batch.weight, np.where(is_suspect, 0.25, 1).astype(np.float32))


def test_a_parquet_table_is_read_as_a_csv(shards, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {"shard": [str(shards / "shard-000000.tar")] * 2, "key": ["s4", "s5"]}
    parquet.write_table(arrow.table(rows), tmp_path / "scores.parquet")
    assert Suspects(tmp_path / "scores.parquet", 0.5).read() == ({rows["shard"][0]: {"s4"}}, {rows["shard"][0]: 2})


def test_problems_of_the_table_are_one_line(shards, tmp_path):
    table(tmp_path / "columns.csv", shards, columns=("file", "key", "loss"))
    table(tmp_path / "shards.csv", Path("/elsewhere"))
    keys = table(tmp_path / "keys.csv", shards)
    keys.write_text(keys.read_text().replace(",s3,", ",unknown,"))
    (tmp_path / "empty.csv").write_text("shard,key\n")
    (tmp_path / "short.csv").write_text("shard,key\nx.tar\n")
    for name, problem in (
        ("none", " cannot be read .*; write it with lit-het data score"),
        ("columns", " has no column 'shard'"),
        ("shards", " names /elsewhere/shard-000000.tar, which is not a tr"),
        ("keys", " names are not in the shards; score them again"),
        ("empty", " has no rows; write it with lit-het data score"),
        ("short", " is cut short in line 2; write it again with lit-het data score"),
    ):
        assert_refused(f"{name}.csv{problem}", loader, shards, Suspects(tmp_path / f"{name}.csv", 0.5))
    assert_refused("^1 of 12 samples that ", loader, shards, Suspects(keys, 0.5))
    first = table(tmp_path / "first.csv", shards, numbers=range(12))
    with pytest.raises(UserError, match=r"all samples are left out; lower suspects\.fraction"):
        loader(shards, Suspects(first, 0.5), portion=Portion(0, 20))
    assert_refused(r"fraction = 5\.0 must be between 0 and 1; 0\.05 takes 5 %", Suspects, keys, 5.0)
    for weight in (1.0, -0.1, float("nan")):
        assert_refused(
            f"Suspects: weight = {weight} must be below 1 and at least 0, which leav", Suspects, keys, 0.5, weight
        )


def test_a_table_that_was_cut_short_is_one_line(shards, tmp_path):
    path = table(tmp_path / "scores.csv", shards)
    content = path.read_bytes()
    for cut, problem in (
        (content[: content.rindex(b",1.0")], r"is cut short in line 24; write it again"),
        (content[: content.rindex(b",s")], r"is cut short in line 24; write it again"),
        (content[: content.rindex(str(shards).encode())], r"has 22 rows for 23 samples: it was cut short, or"),
        (b"".join(content.splitlines(keepends=True)[:7]), r"has 6 rows for 23 samples: it was cut short, or"),
    ):
        path.write_bytes(cut)
        assert_refused(problem, loader, shards, Suspects(path, 0.05))


def test_images_that_cannot_be_read_have_no_row(shards, tmp_path):
    path = table(tmp_path / "scores.csv", shards)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert loader(shards, Suspects(path, 0.05), max_bad_fraction=0.1).num_samples == 21
    assert_refused("has 22 rows for 23 samples", loader, shards, Suspects(path, 0.05), max_bad_fraction=0.01)


def test_a_table_with_long_captions_and_texts_like_formulas_is_read_as_it_was_written(tmp_path):
    keys = ["=1+1", "-3", "'=x", "'plain", "@a", "+b", "\tc"]
    columns = {"shard": ["a.tar"] * 7, "key": keys, "caption": ["=SUM(A1)", "x" * 1_000_000, *[""] * 5]}
    for path in (tmp_path / "scores.csv", tmp_path / "scores.parquet"):
        write_columns(path, columns)
        assert Suspects(path, 0.99).read().suspects == {"a.tar": frozenset(keys)}
    with (tmp_path / "scores.csv").open(newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t"))]


@pytest.mark.parametrize("name", ["scores.csv", "scores.parquet"])
def test_a_table_that_is_a_pipe_or_too_long_is_refused(tmp_path, name, monkeypatch):
    os.mkfifo(tmp_path / name)
    assert_refused("cannot be read .*not a regular file", Suspects(tmp_path / name).read)
    monkeypatch.setattr("lit_het.data_pipelines.shards.sample_tables.MAX_ROWS", 2)
    write_columns(tmp_path / "long.parquet", {"shard": ["a"] * 3, "key": ["b"] * 3})
    assert_refused("has more than 2 rows; write it as .csv", Suspects(tmp_path / "long.parquet").read)
