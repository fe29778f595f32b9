"""Models and sets that cannot be evaluated are rejected before any image is read."""

import dataclasses
from typing import NoReturn

import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.eval import suite
from lit_het.types import ImageFeatures
from tests.eval.fake_model import FakeModel, with_text
from tests.refusals import assert_refused

NAMES = ("zero", "one", "two")


def refuse(*_: object) -> NoReturn:
    raise AssertionError("an image was read")


UNREAD = ImageFeatures(refuse, num_members=1, num_shards=1, tower="a tower")


@pytest.fixture
def digits(write_set):
    """Three classes, of which the last has no image; corrupted copies and captions."""
    members = [{"cls": number % 2, "txt": NAMES[number % 2]} for number in range(6)]
    for part in ("digits/train", "digits/corrupted/fog/1"):
        directory, _, split = part.partition("/")
        write_set(directory, members, NAMES, split=split)
    return write_set("digits", members, NAMES)


@pytest.fixture
def encoder(make_encoder) -> FakeModel:
    return dataclasses.replace(make_encoder(np.eye(3), NAMES), features=UNREAD)


def classifier(num_classes: int, num_members: int = 1) -> FakeModel:
    return FakeModel(
        features=dataclasses.replace(UNREAD, num_members=num_members), logits=refuse, num_classes=num_classes
    )


@pytest.fixture
def by_names(digits, sets):
    """All evaluators that choose between class names."""
    detection = suite.OutOfDistributionConfig(digits, far=(f"{digits.directory}/train",))
    configs = (suite.ZeroShotConfig(digits), suite.ShiftConfig(digits), detection, suite.EnsembleConfig(digits))
    return [config.build(sets) for config in configs]


def test_a_classifier_of_other_classes(by_names):
    for evaluator in by_names:
        with pytest.raises(UserError, match=r"the classifier has 4 classes and there are 3 candidates"):
            evaluator.check(classifier(4, num_members=2))
        with pytest.raises(UserError, match="or take the words of captions as labels with --caption-words"):
            evaluator.check(dataclasses.replace(classifier(4, num_members=2), has_class_probabilities=True))
        assert_refused("has no head", evaluator.check, classifier(0, num_members=2))
        evaluator.check(classifier(3, num_members=2))


def test_a_text_tower_without_tokenizer(by_names, digits, sets, encoder):
    def no_tokenizer(captions: list[str]) -> np.ndarray:
        raise UserError("no tokenizer")

    without = with_text(encoder, tokenize=no_tokenizer)
    for evaluator in (*by_names, suite.RetrievalConfig(digits).build(sets)):
        assert_refused("no tokenizer", evaluator.check, without)


def test_a_classifier_for_retrieval_whose_image_tower_suits_few_shot_and_the_linear_probe(digits, sets, encoder):
    evaluator = suite.RetrievalConfig(digits).build(sets)
    evaluator.check(encoder)
    assert_refused("retrieval needs an image-text model", evaluator.check, classifier(3))
    for config in (suite.FewShotConfig(digits), suite.LinearProbeConfig(digits)):
        config.build(sets).check(classifier(0))


def test_an_ensemble_of_one(digits, sets, encoder):
    alone, noisy = suite.EnsembleConfig(digits).build(sets), suite.EnsembleConfig(digits, samples=3).build(sets)
    for models in ([encoder], [classifier(3)]):
        assert_refused("there is only one member", alone.check, *models)
        alone.check(*models, *models)
        noisy.check(dataclasses.replace(models[0], has_noise=True))
        assert_refused("there is only one member", noisy.check, *models)


def test_an_odd_number_of_samples_of_a_head_that_draws_pairs(digits, sets, encoder):
    paired = dataclasses.replace(encoder, antithetic=True, has_noise=True)
    detection = suite.OutOfDistributionConfig(digits, far=(f"{digits.directory}/train",))
    for config in (suite.ZeroShotConfig(digits), suite.ShiftConfig(digits), detection, suite.EnsembleConfig(digits)):
        odd, even = (dataclasses.replace(config, samples=samples).build(sets) for samples in (3, 4))
        assert_refused("3 noise samples are odd", odd.check, paired)
        even.check(paired)
        odd.check(dataclasses.replace(paired, antithetic=None))


@pytest.mark.parametrize("of", [suite.ZeroShotConfig, suite.ShiftConfig, suite.EnsembleConfig])
def test_images_of_a_class_that_is_not_a_candidate(digits, sets, tmp_path, of, capsys):
    """Only names that stand among the candidates once, as many as there are, need no look at the labels."""
    path = tmp_path / "names.txt"
    for candidates, num_read in (("two\none\nzero\nsix\n", 0), ("one\nzero\n", 1)):
        path.write_text(candidates)
        of(digits, names=suite.ClassNamesConfig(candidates=path)).build(sets)
        assert capsys.readouterr().err.count("reading .cls of digits: 6/6") == num_read
    path.write_text("one\ntwo\n")
    with pytest.raises(UserError, match=r"'zero' has images but is not among the 2 candidates; add it to --cand"):
        of(digits, names=suite.ClassNamesConfig(candidates=path)).build(sets)
    path.write_text("one\nzero\none\n")
    with pytest.raises(UserError, match="'one' is repeated among the candidates"):
        of(digits, names=suite.ClassNamesConfig(candidates=path)).build(sets)


def test_unreadable_labels_are_ignored_when_checking_candidates(write_set, sets, tmp_path):
    data = write_set("digits", [{"cls": 0}, {"cls": "second"}, {"cls": 7}], NAMES)
    (tmp_path / "names.txt").write_text("zero\n")
    suite.ZeroShotConfig(data, suite.ClassNamesConfig(candidates=tmp_path / "names.txt")).build(sets)
    assert sets.open(data).labels().tolist() == [0]


def test_several_labels_of_other_names(digits, tmp_path):
    data = dataclasses.replace(digits, multi_label=True)
    with pytest.raises(UserError, match="with several labels per image, --candidates need --classes FILE"):
        suite.ZeroShotConfig(data, suite.ClassNamesConfig(candidates=tmp_path / "names.txt"))
