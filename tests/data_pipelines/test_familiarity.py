"""Which names captions have: a table of their words."""

import collections
import dataclasses
import itertools
import math
import random

import numpy as np
import pytest

from lit_het.data_pipelines.texts.familiarity import MAX_BYTES, MAX_ORDER, Familiarity, words_of
from lit_het.errors import UserError

SENTENCES = (
    "A dog runs along the beach at sunset.",
    "Two dogs playing in the snow!",
    "the Golden Gate Bridge in San Francisco, seen from a boat",
    "Golden retriever puppy on a red sofa",
    "Ein Hund läuft über die Straße",
)


def table(captions, **most) -> Familiarity:
    return Familiarity.of(captions, "digest", **most)


def slowly(captions, name):
    """How often the n-grams of a name are in captions, by counting tuples of words; its rarest one."""
    counts = collections.Counter()
    for caption in captions:
        words = words_of(caption)
        for order in range(1, MAX_ORDER + 1):
            counts.update(tuple(words[start : start + order]) for start in range(len(words) - order + 1))
    words = words_of(name)
    order = min(len(words), MAX_ORDER)
    return min(counts[tuple(words[start : start + order])] for start in range(len(words) - order + 1))


def test_natural_sentences_have_the_names_whose_words_follow_one_another():
    found = table(SENTENCES)
    names = ["dog", "golden gate bridge", "a golden retriever", "San Francisco", "STRASSE", "beach at sunset"]
    assert found.knows(names).all()
    others = ["cat", "golden bridge", "retriever golden", "snow dog", "gate bridge in San Jose", "...", ""]
    assert not found.knows(others).any()


def test_a_name_of_more_than_four_words_needs_all_that_follow_one_another_in_fours():
    found = table(["one two three four five", "two three four five six"])
    assert found.knows(["one two three four five six", "two three four five six"]).all()
    assert not found.knows(["one two three four six"]).any()


def test_a_whole_caption_is_known_and_no_part_of_it():
    found = table(SENTENCES)
    assert found.knows([sentence.upper() for sentence in SENTENCES], "caption").all()
    assert not found.knows(["dog", "golden gate bridge", "snow the in playing dogs two"], "caption").any()


def test_counts_are_those_of_tuples_of_words():
    draw = random.Random(0)
    captions = [" ".join(draw.choices("abcdef", k=draw.randint(1, 7))) for _ in range(300)]
    found = table(captions)
    names = [
        " ".join(words)
        for length in range(1, 6)
        for words in itertools.islice(itertools.product("abcdefg", repeat=length), 0, None, 97)
    ]
    expected = [slowly(captions, name) for name in names]
    assert 0 in expected
    assert found.log_counts(names, "words").tolist() == [math.floor(math.log2(n)) if n else -1 for n in expected]
    whole = [tuple(words_of(caption)) for caption in captions]
    repeated = collections.Counter(whole)
    assert found.log_counts(captions, "caption").tolist() == [math.floor(math.log2(repeated[one])) for one in whole]


def test_a_table_that_is_too_large_loses_the_rarest_of_the_longest_and_says_so():
    draw = random.Random(0)
    captions = [" ".join(draw.choices("abcdefghijkl", k=8)) for _ in range(500)]
    whole, small = table(captions), table(captions, most=2_500)
    assert len(small.keys) <= 2_500 < len(whole.keys)
    assert "without" not in str(whole)
    assert "the words of 500 training captions, without" in str(small)
    assert f"runs of 4 words in fewer than {small.least[4]}; of other names 1 in" in str(small)
    assert small.least[0] == 1
    assert small.knows(captions, "caption").all()
    # What is left is what was counted.
    assert set(small.keys.tolist()) < set(whole.keys.tolist())
    assert small.knows(list("abcdefghijkl")).all()


def test_few_of_a_hundred_thousand_other_names_are_taken_for_known():
    found = table([f"word{number} thing{number}" for number in range(50_000)])
    others = [f"word{number} thing{number + 1}" for number in range(50_000)]
    # 32 bits: one of 2^32 / 200,000 entries = 21,000.
    assert found.knows(others).sum() <= 12


def test_a_table_is_read_as_it_was_written(tmp_path):
    found = table(SENTENCES)
    found.save(tmp_path / "familiarity.npz")
    again = Familiarity.load(tmp_path / "familiarity.npz")
    assert again is not None
    for field in dataclasses.fields(found):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(found, field.name))
    assert Familiarity.load(tmp_path / "none.npz") is None


def test_the_largest_table_has_64_megabytes(tmp_path):
    full = Familiarity(
        np.arange(MAX_BYTES // 5 - 1024, dtype=np.uint32),
        np.zeros(MAX_BYTES // 5 - 1024, np.uint8),
        np.ones(MAX_ORDER + 1, int),
        1,
        False,
        "digest",
    )
    full.save(tmp_path / "familiarity.npz")
    assert (tmp_path / "familiarity.npz").stat().st_size <= MAX_BYTES
    assert Familiarity.load(tmp_path / "familiarity.npz") is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": np.array([2, 1], np.uint32)}, "its keys are not in order"),
        ({"keys": np.array([1.0, 2.0])}, "its keys and counts do not fit"),
        ({"counts": np.zeros(3, np.uint8)}, "its keys and counts do not fit"),
        ({"least": np.zeros(2, int)}, "its least counts have another form"),
        ({"num_captions": np.zeros(2, int)}, ""),
    ],
)
def test_a_broken_table_is_one_line(tmp_path, changes, reason):
    path = tmp_path / "familiarity.npz"
    fields = {
        **dataclasses.asdict(table(SENTENCES)),
        "keys": np.array([1, 2], np.uint32),
        "counts": np.zeros(2, np.uint8),
    }
    np.savez(path, **{**fields, **changes})
    with pytest.raises(UserError, match=f"is not a table of words .*{reason}.*; delete it, and calibrate again"):
        Familiarity.load(path)


def test_a_file_that_is_no_table_is_one_line(tmp_path):
    (tmp_path / "familiarity.npz").write_bytes(b"no zip file")
    with pytest.raises(UserError, match="is not a table of words"):
        Familiarity.load(tmp_path / "familiarity.npz")
