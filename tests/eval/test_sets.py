"""Sets on the same shards share their features, whatever their names."""

import dataclasses

import fsspec
import numpy as np
import pytest

from lit_het.data_pipelines.shards.portions import ALL, Portion
from lit_het.eval.evaluators.retrieval import read_captions
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.folders import parse_set
from lit_het.eval.suite import RetrievalConfig, ZeroShotConfig
from lit_het.types import ImageFeatures
from tests.refusals import assert_refused

NAMES = ("zero", "one", "two")


class Counting:
    """An image tower whose features are the number in each image, and the images that it has seen."""

    def __init__(self, tower: str = "a tower"):
        self.seen = 0
        self.features = ImageFeatures(self._extract, num_members=1, num_shards=1, tower=tower)

    def _extract(self, view: np.ndarray) -> np.ndarray:
        self.seen += len(view)
        return view[:, 0, 0, :1].astype(np.float32)


@pytest.fixture
def digits(write_set):
    return write_set("digits", [{"cls": number % 3, "txt": "?"} for number in range(4)], NAMES)


def test_sets_that_differ_only_in_name_are_read_once(digits, sets):
    tower = Counting()
    for config, captions in ((digits, None), (dataclasses.replace(digits, name="near/digits"), "json/other")):
        assert sets.open(config, captions).features(tower.features).labels.tolist() == [0, 1, 2, 0]
    assert tower.seen == 4


@pytest.mark.parametrize("first", ["labelled", "unlabelled"])
def test_features_read_with_labels_are_reused_without_labels(digits, sets, first):
    tower = Counting()
    like = ImageSet("", "", batch_size=digits.batch_size, labelled=False)
    opened = [sets.open(digits), sets.open(parse_set(f"other={digits.directory}/test", like))]
    found = {one.config.name: one.features(tower.features) for one in (opened if first == "labelled" else opened[::-1])}
    assert tower.seen == 4
    assert found["digits"].labels.tolist() == [0, 1, 2, 0]
    assert found["other"].labels.tolist() == [0, 0, 0, 0]
    np.testing.assert_array_equal(found["digits"].values, found["other"].values)


@pytest.mark.parametrize("unlabelled", [{"txt": "?"}, {"cls": "third"}])
def test_images_without_a_label_are_left_out_only_if_labels_are_read(write_set, sets, unlabelled):
    """A label that is not there leaves its image out of the index, and one that cannot be read makes it invalid."""
    config = write_set("digits", [{"cls": 0}, unlabelled, {"cls": 2}], NAMES)
    config = dataclasses.replace(config, max_bad_fraction=0.5)
    opened = [sets.open(one) for one in (config, dataclasses.replace(config, labelled=False))]
    tower = Counting()
    values = [one.features(tower.features).values[:, 0].tolist() for one in opened]
    assert values == [[0, 2], [0, 1, 2]]


def test_other_towers_batch_sizes_and_images_are_read_again(digits, sets, write_set):
    tower, other = Counting(), Counting("another tower")
    larger = dataclasses.replace(digits, batch_size=2)
    train = write_set("digits", [{"cls": 2}] * 4, split="train")
    for config in (digits, larger, train):
        sets.open(config).features(tower.features)
    sets.open(digits).features(other.features)
    assert (tower.seen, other.seen) == (12, 4)


def test_a_set_is_read_from_a_url(digits, sets, tmp_path):
    store = fsspec.filesystem("memory")
    store.put(f"{tmp_path}/digits", "/test_sets/digits", recursive=True)
    try:
        for place in ("memory://test_sets/digits", "memory://test_sets/digits/test"):
            config = parse_set(place, ImageSet("", "", batch_size=4))
            assert config.name == "digits"
            assert sets.open(config).features(Counting().features).labels.tolist() == [0, 1, 2, 0]
        captions = parse_set("memory://test_sets/digits/test", ImageSet("", "", batch_size=4, labelled=False))
        assert len(sets.open(captions).features(Counting().features).values) == 4
    finally:
        store.rm("/test_sets", recursive=True)


def test_a_portion_has_its_own_labels_texts_and_images(digits, sets):
    tower = Counting()
    minival = sets.open(dataclasses.replace(digits, portion=Portion(50)))
    assert minival.features(tower.features).labels.tolist() == minival.labels().tolist() == [2, 0]
    assert minival.loader.num_samples == 2
    whole = sets.open(digits)
    for ours, theirs in zip(minival.images([0, 1]), whole.images([2, 3]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    unlabelled = sets.open(dataclasses.replace(digits, portion=Portion(50), labelled=False))
    assert unlabelled.texts("txt", str) == ["?", "?"]


def test_a_portion_by_name_goes_by_the_captions_that_an_evaluation_reads(write_set, sets):
    """Half of it are all samples of some captions: without the names, another half of the samples."""
    samples = [{"json": {"name": f"name {number % 5}"}, "txt": f"{number}", "cls": 0} for number in range(40)]
    config = dataclasses.replace(write_set("named", samples, NAMES), labelled=False)

    def names(portion):
        opened = sets.open(dataclasses.replace(config, portion=portion), "json/name")
        return [name for (name,) in read_captions(opened, "json/name")]

    chosen, every = {rule: names(Portion(60, by=rule)) for rule in ("name", "sample")}, names(ALL)
    assert [name for name in chosen["name"] if chosen["name"].count(name) == every.count(name)]
    assert not [name for name in chosen["sample"] if chosen["sample"].count(name) == every.count(name)]
    assert sorted(names(Portion(0, 60, by="name")) + chosen["name"]) == sorted(every)
    part = dataclasses.replace(config, portion=Portion(60, by="name"))
    for evaluation in (ZeroShotConfig(part, captions="json/name"), RetrievalConfig(part, captions="json/name")):
        assert evaluation.build(sets).opened.loader.num_samples == len(chosen["name"])


def test_a_portion_by_captions_needs_an_evaluation_that_reads_them(digits, sets):
    assert_refused(
        "this evaluation reads no captions", sets.open, dataclasses.replace(digits, portion=Portion(by="name"))
    )
