"""Samples with several captions: which of them training draws, and which evaluation takes."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from lit_het.data_pipelines.data_config import LoaderConfig, Streaming
from lit_het.data_pipelines.images.augment import StreamRandom
from lit_het.data_pipelines.images.transforms import InceptionCrop
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.data_pipelines.shards.stream import Stream
from lit_het.data_pipelines.texts.captions import CaptionUnit, captions_in, member_of
from tests.data_pipelines.conftest import IMAGE_SIZE, NUM_SAMPLES, take

# Each sample has five captions, "3 0" to "3 4"; the tokens are the numbers of the sample and its caption.
LINES = {f"s{i}": {"txt": "".join(f" {i} {j}\r\n\n" for j in range(5))} for i in range(NUM_SAMPLES)}
LISTS = {f"s{i}": {"json": {"all": [*(f"{i} {j}" for j in range(5)), " "]}} for i in range(NUM_SAMPLES)}


def number_tokens(captions):
    return np.array([[int(number) for number in (caption or "0 0").split()] for caption in captions], np.int32)


def first_token(captions):
    return np.array([[ord(caption[0]), len(caption.split())] for caption in captions], np.int32)


@pytest.fixture(scope="module")
def config(tmp_path_factory, make_shards):
    shards = make_shards(tmp_path_factory.mktemp("lines"), **LINES)
    return LoaderConfig(shards=(str(shards),), image_size=IMAGE_SIZE, batch_size=NUM_SAMPLES, threads=0, seed=5)


def test_the_member_of_a_place_is_its_part_before_the_field():
    assert [member_of(place) for place in ("txt", "json/caption", "json/a/b")] == ["txt", "json", "json"]


def drawn(config, count, *place):
    """The pairs (sample, caption) of ``count`` batches."""
    reader = Stream if config.stream else Loader
    return np.concatenate([batch.text for batch in take(reader(config, number_tokens), count, *place)])


@pytest.mark.slow
def test_each_epoch_draws_one_caption_of_every_sample_by_its_position(config):
    found = drawn(config, 100)
    for position in (0, 1, 40, 2000):
        expected = StreamRandom(5).at(position, 1).integers(5)
        assert found[position, 1] == expected
    epochs = found.reshape(100, NUM_SAMPLES, 2)
    assert all(sorted(epoch[:, 0]) == list(range(NUM_SAMPLES)) for epoch in epochs)
    counts = collections.Counter(map(tuple, found.tolist()))
    assert len(counts) == 5 * NUM_SAMPLES
    # 100 draws of one in five: 20 on average, with a deviation of 4
    assert 3 < min(counts.values()) <= max(counts.values()) < 39


def test_a_resumed_run_on_three_hosts_draws_the_same_captions(config):
    config = dataclasses.replace(config, batch_size=12)
    whole = drawn(config, 6)
    parts = [drawn(config, 3, 36, host, 3).reshape(3, 4, 2) for host in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1).reshape(-1, 2), whole[36:])


def test_the_draws_depend_on_the_seed_and_not_on_crops(config):
    np.testing.assert_array_equal(drawn(dataclasses.replace(config, crop=InceptionCrop(0.5)), 2), drawn(config, 2))
    order = [dict(drawn(dataclasses.replace(config, seed=seed), 1).tolist()) for seed in (5, 6)]
    assert order[0] != order[1]


def test_evaluation_takes_the_first_caption(config):
    (batch,) = Loader(config, number_tokens).epoch()
    assert np.asarray(batch.text).tolist() == [[i, 0] for i in range(NUM_SAMPLES)]


def test_lists_in_json_are_drawn_like_lines(config, make_shards, tmp_path):
    lists = dataclasses.replace(config, shards=(str(make_shards(tmp_path, **LISTS)),), captions="json/all")
    np.testing.assert_array_equal(drawn(lists, 3), drawn(config, 3))


def test_a_stream_draws_too(config):
    assert set(drawn(dataclasses.replace(config, stream=Streaming(8)), 10)[:, 1].tolist()) == set(range(5))


def test_a_text_may_be_one_caption_of_many_lines(config):
    batch = next(Loader(dataclasses.replace(config, caption_unit="text"), first_token).epoch())
    assert set(np.asarray(batch.text)[:, 1].tolist()) == {10}


@pytest.mark.parametrize(
    ("text", "place", "unit", "expected"),
    [
        ("one line", "txt", "line", ["one line"]),
        ("  a\r\n\n b ", "txt", "line", ["a", "b"]),
        ("  a\n b ", "txt", "text", ["  a\n b "]),
        (json.dumps({"t": "a\nb"}), "json/t", "line", ["a\nb"]),
        (json.dumps({"t": ["a", "", "b"]}), "json/t", "line", ["a", "b"]),
    ],
)
def test_the_unit_says_what_a_caption_is(text: str, place: str, unit: CaptionUnit, expected: list[str]):
    assert captions_in(text, place, unit) == expected


@pytest.mark.parametrize(
    ("text", "place", "unit", "cause"),
    [
        (" \n\n", "txt", "line", "empty caption"),
        (" \n\n", "txt", "text", "empty caption"),
        (json.dumps({"t": []}), "json/t", "line", "empty caption"),
        (json.dumps({"t": ["a", 3]}), "json/t", "line", "not text, but of type int"),
        (json.dumps({"t": ["a"]}), "json/t", "text", "not text, but of type list"),
        ('{"t": ["a", "\\ud83d"]}', "json/t", "line", r"nothing in \.json/t"),
        ("{}", "json/t", "line", r"nothing in \.json/t"),
    ],
)
def test_a_member_without_captions_is_named(text: str, place: str, unit: CaptionUnit, cause: str):
    with pytest.raises(Unreadable, match=cause):
        captions_in(text, place, unit)
