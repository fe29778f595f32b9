"""Captions in several places with weights, and their languages."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from lit_het.apps.tokenizer import read_captions
from lit_het.data_pipelines.data_config import LoaderConfig, Streaming
from lit_het.data_pipelines.embeddings import describe_captions
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.storage import TRANSIENT_CAUSES, Unreadable
from lit_het.data_pipelines.shards.stream import Stream
from lit_het.data_pipelines.texts.captions_config import Language, TextPlace, member_of, weights_of
from lit_het.errors import UserError
from tests.data_pipelines.conftest import IMAGE_SIZE, NUM_SAMPLES, take

# A text "3 20" is the caption of sample 3 in the first place; those in the second begin with 30, and are two.
SAMPLES = {
    f"s{i}": {"json": {"caption": f"{i} 20", "alt": [f"{i} 30", f"{i} 31"]}, "txt": f"{i} 40"} for i in range(24)
}
SAMPLES["s1"]["json"] = {"caption": "1 20"}
SAMPLES["s2"]["json"] = {"alt": ["2 30", "", "2 31"], "caption": " "}
BOTH = "json/caption=0.75,json/alt=0.25"


def number_tokens(captions):
    return np.array([[int(number) for number in (caption or "0 0").split()] for caption in captions], np.int32)


@pytest.fixture(scope="module")
def config(tmp_path_factory, make_shards):
    shards = make_shards(tmp_path_factory.mktemp("places"), **SAMPLES)
    config = LoaderConfig((str(shards),), image_size=IMAGE_SIZE, batch_size=NUM_SAMPLES, threads=0, seed=5)
    return dataclasses.replace(config, captions=BOTH)


def drawn(config, count, *place):
    """The pairs (sample, caption) of ``count`` batches."""
    reader = Stream if config.stream else Loader
    return np.concatenate([batch.text for batch in take(reader(config, number_tokens), count, *place)])


def test_places_have_weights_and_one_alone_needs_none():
    assert weights_of("txt") == {"txt": 1.0}
    assert weights_of(BOTH) == {"json/caption": 0.75, "json/alt": 0.25}
    assert weights_of("txt,json/a=3") == {"txt": 1.0, "json/a": 3.0}
    assert TextPlace(BOTH).members == ("json",)
    assert TextPlace("txt,json/a").member is None


@pytest.mark.parametrize(
    "places", ["", "txt,", "txt=0", "txt=-1", "txt=nan", "txt=inf", "txt=x", "txt,txt=2", "txt*3,json/a*1"]
)
def test_places_that_are_none_are_refused(places):
    with pytest.raises(UserError, match="must be a place, or several with weights above 0"):
        LoaderConfig(("x",), captions=places)


def test_where_one_place_is_read_several_are_refused():
    with pytest.raises(UserError, match="are several places of captions, and one is read here; name one"):
        member_of(BOTH)
    for place in ("json/questions", "json/caption", "cls/data/pets"):
        with pytest.raises(UserError, match=f"'{place}=1': a place alone has no weight; name it as '{place}'"):
            TextPlace(f"{place}=1")
    with pytest.raises(UserError, match="questions are read alone; name one place"):
        TextPlace("json/questions,txt")


def test_places_are_drawn_by_weight_among_those_that_a_sample_has(config):
    epochs = 150
    counts = collections.Counter(map(tuple, drawn(config, epochs).tolist()))
    assert counts[1, 20] == epochs  # a sample with one place alone
    assert counts[2, 30] + counts[2, 31] == epochs
    assert counts[2, 20] == 0
    others = [i for i in range(NUM_SAMPLES) if i not in (1, 2)]
    shares = [sum(counts[i, text] for i in others) / epochs / len(others) for text in (20, 30, 31)]
    # Of 3300 draws the standard deviation is at most 0.8 %.
    np.testing.assert_allclose(shares, [0.75, 0.125, 0.125], atol=0.03)


def test_the_draws_are_functions_of_seed_and_position_on_any_number_of_hosts(config):
    config = dataclasses.replace(config, batch_size=12)
    whole = drawn(config, 6)
    np.testing.assert_array_equal(drawn(config, 6), whole)
    parts = [drawn(config, 3, 36, host, 3).reshape(3, 4, 2) for host in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1).reshape(-1, 2), whole[36:])
    assert not np.array_equal(drawn(dataclasses.replace(config, seed=6), 6), whole)
    assert set(drawn(dataclasses.replace(config, stream=Streaming(8)), 10)[:, 1].tolist()) == {20, 30, 31}


def test_evaluation_takes_the_first_place_that_a_sample_has(config):
    (batch,) = Loader(config, number_tokens).epoch()
    assert np.asarray(batch.text)[:, 1].tolist() == [20, 20, 30, *[20] * (NUM_SAMPLES - 3)]


def test_places_in_several_members_are_read_and_samples_without_any_are_faults(make_shards, tmp_path):
    changed = {"s4": {"json": {"caption": "4 20"}, "txt": " "}, "s5": {"json": {}, "txt": "5 40"}}
    folder = make_shards(tmp_path, **{**SAMPLES, **changed, "s6": {"json": {}, "txt": "\n"}})
    found = LoaderConfig((str(folder),), image_size=IMAGE_SIZE, batch_size=NUM_SAMPLES, threads=0, max_bad_fraction=0.5)
    loader = Loader(dataclasses.replace(found, captions="txt=9,json/caption"), number_tokens)
    (batch,) = loader.epoch()
    assert np.asarray(batch.text)[[3, 4, 5, 6], 1].tolist() == [40, 20, 40, 0]
    assert np.flatnonzero(~batch.valid).tolist() == [6]
    assert loader.faults.causes == {"empty caption": 1}


def test_a_failure_of_a_store_is_no_missing_place():
    for cause in TRANSIENT_CAUSES:
        lost = Unreadable(cause, "the store is away")
        with pytest.raises(Unreadable, match="the store is away"):
            TextPlace("txt,json/caption").read({"txt": lost, "json": b'{"caption": "a"}'})


def test_a_tokenizer_is_trained_on_all_places(config):
    texts = read_captions(config.shards, [BOTH, "txt"])
    assert {text.split()[1] for text in texts} == {"20", "30", "31", "40"}
    # One place lacks the second, with two captions, and one the first.
    assert len(texts) == 4 * NUM_SAMPLES - 2 - 1


LANGUAGES = {f"s{i}": {"json": {"caption": f"{i} 20", "lang": ("en", "de", None)[i % 3]}} for i in range(24)}
LANGUAGES["s4"] = {"json": {"caption": ["4 20", "4 21"], "lang": ["de", "en"]}}
LANGUAGES["s7"] = {"json": {"caption": " ", "lang": "de"}}


@pytest.fixture(scope="module")
def of_languages(tmp_path_factory, make_shards):
    shards = make_shards(tmp_path_factory.mktemp("languages"), **LANGUAGES)
    return LoaderConfig(
        (str(shards),), image_size=IMAGE_SIZE, batch_size=4, threads=0, captions="json/caption", max_bad_fraction=0.5
    )


def test_other_languages_are_no_part_of_the_order(of_languages):
    plain = Loader(of_languages, number_tokens)
    config = dataclasses.replace(of_languages, language=Language("json/lang", only=("en", "fr")))
    loader = Loader(config, number_tokens)
    expected = sorted([*range(0, NUM_SAMPLES, 3), 4, 7])  # 7 has a broken caption, which stays a fault
    assert [int(loader.index.key(sample)[1:]) for sample in loader.numbers] == expected
    assert loader.digest != plain.digest
    found = np.concatenate([batch.text[batch.valid] for batch in take(loader, 20)])
    assert set(map(tuple, found.tolist())) == {(i, 21 if i == 4 else 20) for i in expected if i != 7}
    assert loader.faults.causes.keys() == {"empty caption"}
    second = dataclasses.replace(of_languages, shards=(f"{of_languages.shards[0]}/shard-000001.tar",))
    french = dataclasses.replace(second, language=Language("json/lang", only=("fr",)))
    with pytest.raises(UserError, match=r"no sample has a caption in fr; change data\.language\.only"):
        Loader(french, number_tokens)


def test_a_tag_stands_before_captions_whose_language_is_known():
    place = TextPlace("json/caption", language=Language("json/lang", tag="<{language}> "))
    texts = [
        [text.text for text in place.read({"json": content})]
        for content in (
            b'{"caption": ["a cat", "eine Katze"], "lang": ["en", "de"]}',
            b'{"caption": ["a cat", "un chat"], "lang": "en"}',
            b'{"caption": "a cat"}',
            b'{"caption": "a cat", "lang": null}',
        )
    ]
    assert texts == [["<en> a cat", "<de> eine Katze"], ["<en> a cat", "<en> un chat"], ["a cat"], ["a cat"]]


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({"a": ["1", " ", "2"], "lang": ["en", "de", "fr"]}, ["<en> 1", "<fr> 2"]),
        ({"a": ["1", " ", "2"], "lang": ["en", "fr"]}, ["<en> 1", "<fr> 2"]),
        ({"a": "1", "b": "2", "lang": ["en", "fr"]}, ["<en> 1", "<fr> 2"]),
        ({"a": "1", "lang": ["en", "fr"]}, ["<en> 1"]),
        ({"b": "2", "lang": ["en", "fr"]}, ["<fr> 2"]),
        ({"a": None, "b": ["2", "3"], "lang": [None, "fr", "en"]}, ["<fr> 2", "<en> 3"]),
        ({"a": ["", ""], "b": "2", "lang": ["en", "en", "fr"]}, ["<fr> 2"]),
        ({"b": "2", "lang": ["fr"]}, ["<fr> 2"]),
        ({"b": ["2", ""], "lang": "fr"}, ["<fr> 2"]),
    ],
    ids=str,
)
def test_each_caption_has_its_language_where_others_are_blank_or_lacking(sample, expected):
    place = TextPlace("json/a,json/b", language=Language("json/lang", tag="<{language}> "))
    assert [text.text for text in place.read({"json": json.dumps(sample).encode()})] == expected


def test_languages_of_lines_are_those_of_written_ones_or_of_all():
    place = TextPlace("txt", language=Language("json/lang", tag="<{language}> "))
    for languages in (b'["en", "fr"]', b'["en", "de", "fr"]'):
        texts = place.read({"txt": b"1\n\n2\n", "json": b'{"lang": ' + languages + b"}"})
        assert [text.text for text in texts] == ["<en> 1", "<fr> 2"]


@pytest.mark.parametrize("languages", [b'["en"]', b"3", b'{"a": 1}', b'["en", 3]'])
def test_languages_that_do_not_fit_the_captions_are_a_fault(languages):
    place = TextPlace("json/caption", language=Language("json/lang"))
    with pytest.raises(Unreadable, match="not the languages"):
        place.read({"json": b'{"caption": ["a", "b"], "lang": ' + languages + b"}"})


def test_a_language_in_a_member_of_its_own_is_read():
    place = TextPlace("txt", language=Language("lang", only=("de",)))
    assert place.members == ("txt", "lang")
    assert [text.text for text in place.read({"txt": b"Katze", "lang": b"de\n"})] == ["Katze"]
    with pytest.raises(Unreadable, match="en instead of de"):
        place.read({"txt": b"cat", "lang": b"en"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"language": Language(only=("en",)), "stream": Streaming()}, "a `stream` reads all languages"),
        ({"language": Language(), "captions": "json/questions", "prompt": "{question}"}, "not of questions"),
    ],
)
def test_what_languages_do_not_fit_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        LoaderConfig(("x",), **change)
    with pytest.raises(UserError, match=r"'<en> ' has no \{language\}"):
        Language(tag="<en> ")


def test_stored_texts_know_the_places_and_languages_but_not_the_weights():
    assert describe_captions(TextPlace(BOTH)) == describe_captions(TextPlace("json/caption,json/alt"))
    assert describe_captions(TextPlace("txt")) == {"captions": "txt", "caption_unit": "line"}
    language = Language("json/lang", only=("en",), tag="{language}: ")
    assert describe_captions(TextPlace("json/a", language=language))["language"]["only"] == ["en"]
    with pytest.raises(UserError, match="captions in one member, not in txt and json"):
        TextPlace("txt,json/a").only_member()
