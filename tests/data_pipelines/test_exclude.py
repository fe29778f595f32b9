"""Samples that the tables of ``data.exclude`` leave out of training."""

import dataclasses
import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_het.data_pipelines.data_config import LoaderConfig, Streaming, WeightedShards
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.data_pipelines.shards.stream import Stream
from lit_het.data_pipelines.shards.suspects import Suspects
from lit_het.files import write_columns
from tests.data_pipelines import test_suspects as suspects
from tests.data_pipelines.conftest import NUM_SAMPLES, number_tokens
from tests.data_pipelines.test_suspects import labels
from tests.refusals import assert_refused


def table(path: Path, shards: Path, *numbers: int) -> Path:
    """Writes a table that leaves out the samples of these numbers, in two shards of ten samples and one of three."""
    names = [str(shards / f"shard-{number // 10:06d}.tar") for number in numbers]
    write_columns(path, {"reason": ["test"] * len(numbers), "shard": names, "key": [f"s{n}" for n in numbers]})
    return path


def config(shards: Path, *tables: Path, batch_size: int = 1, **changes) -> LoaderConfig:
    fields = LoaderConfig((str(shards),), 8, batch_size, labels=ClassIndex(), threads=0, seed=5, exclude=tables)
    return dataclasses.replace(fields, **changes)


def epoch(loader: Loader) -> list[int]:
    return labels(loader.epoch(), loader.num_samples)


@pytest.mark.parametrize("changes", [{}, {"shuffle": False}, {"window": 1}, {"window": 2}])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_every_epoch_has_all_samples_but_those_of_all_tables(shards, tmp_path, changes, ending):
    pytest.importorskip("pyarrow")
    first, second = table(tmp_path / f"a.{ending}", shards, 3, 22), table(tmp_path / f"b.{ending}", shards, 11, 3)
    loader = Loader(config(shards, first, second, **changes))
    left = sorted(set(range(NUM_SAMPLES)) - {3, 11, 22})
    assert epoch(loader) == left
    for number in range(2):
        assert sorted(labels(loader.batches(number * len(left)), len(left))) == left


def test_tables_leave_samples_out_beside_suspects_and_portions(shards, tmp_path):
    exclude, scores = table(tmp_path / "a.csv", shards, 4, 12, 3), suspects.table(tmp_path / "scores.csv", shards)
    ranked = Suspects(scores, 2 / NUM_SAMPLES)  # samples 3 and 10
    for portion in (Portion(0, 50), Portion(50, 100), Portion(50, by="sample"), Portion(0, 50, by="key")):
        whole = set(epoch(Loader(config(shards, portion=portion))))
        assert set(epoch(Loader(config(shards, exclude, portion=portion)))) == whole - {4, 12, 3}
        assert set(epoch(Loader(config(shards, exclude, portion=portion, suspects=ranked)))) == whole - {4, 12, 3, 10}
    weighted = dataclasses.replace(ranked, weight=0.25)
    loader = Loader(config(shards, exclude, suspects=weighted, shuffle=False, batch_size=20))
    batch: Any = next(loader.batches())
    assert sorted(batch.label.tolist()) == sorted(set(range(NUM_SAMPLES)) - {4, 12, 3})
    np.testing.assert_array_equal(batch.weight, np.where(batch.label == 10, np.float32(0.25), 1))


def test_a_table_of_any_data_set_of_a_mixture_counts(shards, make_shards, tmp_path):
    other = make_shards(tmp_path / "other")
    both = WeightedShards((str(other),)), WeightedShards((str(shards),))
    loader = Loader(config(shards, table(tmp_path / "a.csv", other, 0, 1), mixture=both))
    assert len(loader.numbers) == 3 * NUM_SAMPLES - 2
    counts = Counter(labels(loader.batches(), 3 * 21 * NUM_SAMPLES))
    assert counts[0] == counts[1] == 2 * 21, "once in each epoch of the two other sets"
    assert {counts[number] for number in range(2, NUM_SAMPLES)} == {2 * 21 + NUM_SAMPLES}
    again = Loader(config(shards, table(tmp_path / "b.csv", shards, 0), mixture=both))
    assert len(again.numbers) == 3 * NUM_SAMPLES - 2, "of both data sets that hold the shard"


def test_a_stream_leaves_them_out_too(shards, tmp_path):
    exclude = table(tmp_path / "a.csv", shards, *range(10), 12)
    streamed = Stream(config(shards, exclude, stream=Streaming(shuffle_buffer=4)))
    assert set(labels(streamed.batches(), 300)) == set(range(10, NUM_SAMPLES)) - {12}
    others = [Stream(config(shards, *tables, stream=Streaming())) for tables in ((), (exclude,), (exclude, exclude))]
    assert len({other.digest for other in others}) == 2
    everything = table(tmp_path / "all.csv", shards, *range(NUM_SAMPLES))
    nothing = Stream(config(shards, everything, stream=Streaming()))
    assert_refused("data.exclude leaves out all samples; none of 3 shards", next, nothing.batches())
    elsewhere = table(tmp_path / "else.csv", Path("/elsewhere"), 1)
    assert_refused("names /elsewhere/shard", Stream, config(shards, elsewhere, stream=Streaming()))


def test_digests_tell_what_is_left_out_and_not_how_it_is_written(shards, tmp_path):
    tables = {
        "none": (),
        "empty": (table(tmp_path / "empty.csv", shards),),
        "two": (table(tmp_path / "one.csv", shards, 1), table(tmp_path / "two.csv", shards, 2)),
        "both": (table(tmp_path / "both.csv", shards, 2, 1),),
        "one": (tmp_path / "one.csv",),
    }
    digest = {name: Loader(config(shards, *paths)).digest for name, paths in tables.items()}
    assert digest["none"] == digest["empty"] == Loader(config(shards)).index.digest
    assert digest["two"] == digest["both"]
    assert len(set(digest.values())) == 3
    by_score = Suspects(suspects.table(tmp_path / "scores.csv", shards, (1,)), 1 / NUM_SAMPLES)
    assert Loader(config(shards, suspects=by_score)).digest != digest["one"]


def test_relative_names_and_a_table_of_more_shards_than_are_trained_on(shards, tmp_path, monkeypatch):
    monkeypatch.chdir(shards.parent)
    exclude = table(tmp_path / "a.csv", Path(shards.name), 4, 22)
    assert len(Loader(config(Path(os.path.relpath(shards)), exclude)).numbers) == NUM_SAMPLES - 2
    first = config(shards / "shard-000000.tar", exclude, labels=ClassIndex(str(shards / "classnames.txt")))
    assert epoch(Loader(first)) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_a_sample_that_training_cannot_use_may_be_named(make_shards, tmp_path):
    captions = {f"s{number}": {"name.txt": f"word{number}"} for number in range(NUM_SAMPLES) if number != 3}
    shards = make_shards(tmp_path / "d", **captions)
    exclude = table(tmp_path / "a.csv", shards, 3, 4)
    loader = Loader(config(shards, exclude, captions="name.txt", max_bad_fraction=0.1), number_tokens)
    assert epoch(loader) == sorted(set(range(NUM_SAMPLES)) - {3, 4})


def test_problems_of_tables_are_one_line(shards, tmp_path):
    good = table(tmp_path / "good.csv", shards, 3, 4)
    text = good.read_text()
    for name, content, problem in (
        (
            "shards",
            text.replace(str(shards), "/elsewhere"),
            "names /elsewhere/shard-000000.tar and others, but no shar",
        ),
        ("keys", text.replace(",s3", ",s99"), "names s99, which .*shard-000000.tar has not: it changed since; write"),
        ("column", text.replace("key", "name"), "has no column 'key'; take a table of lit-het data dedup"),
        ("short", text[: text.rindex(",s")], "is cut short in line 3; write it again with lit-het data dedup"),
    ):
        path = tmp_path / f"{name}.csv"
        path.write_text(content)
        assert_refused(f"{name}.csv {problem}", Loader, config(shards, good, path))
    assert_refused(
        "none.csv cannot be read .*; write it with lit-het data dedup", Loader, config(shards, Path("none.csv"))
    )
    everything = table(tmp_path / "all.csv", shards, *range(NUM_SAMPLES))
    assert_refused("all samples are left out; .* or name fewer tables in exclude", Loader, config(shards, everything))
    assert_refused("all samples are left out", Loader, config(shards, everything, portion=Portion(0, 50, by="key")))


def test_what_is_left_out_is_said(shards, tmp_path, capsys):
    exclude = table(tmp_path / "a.csv", shards, *itertools.chain(range(5), range(3)))
    Loader(config(shards, exclude))
    assert f"lit-het: 5 of 23 samples are left out by {exclude}\n" in capsys.readouterr().err
