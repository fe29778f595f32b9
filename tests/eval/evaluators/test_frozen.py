"""Few-shot classification and the linear probe, on shards."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from lit_het.eval.evaluators import frozen
from lit_het.eval.few_shot import few_shot
from lit_het.eval.fits import FewShotOptions, LinearProbeOptions
from lit_het.eval.linear_probe import LinearProbe, ProbeSetting
from lit_het.eval.suite import FewShotConfig, LinearProbeConfig, OutOfDistributionConfig
from tests.eval.fake_model import FakeModel
from tests.refusals import assert_refused

NAMES = ("low", "high")


@pytest.fixture
def splits(write_set):
    """Images 0 to 11, of which those from 6 on are "high", in both splits."""
    members = [{"cls": int(number >= 6)} for number in range(12)]
    write_set("numbers", members, NAMES, split="train")
    return write_set("numbers", members, NAMES)


@pytest.fixture
def encoder(make_encoder) -> FakeModel:
    """Features are the numbers of the images."""
    return make_encoder(np.eye(12), ("x",))


def test_few_shot_figures_are_those_of_the_fit_to_features(splits, sets, encoder):
    fit = FewShotOptions(shots=(1, 3), seeds=(0, 1, 2))
    found = FewShotConfig(splits, fit=fit).build(sets)(encoder)
    numbers = np.arange(12, dtype=np.float32)[:, None, None]
    expected = few_shot(numbers, np.arange(12) // 6, numbers, np.arange(12) // 6, fit)
    assert found.metrics() == {
        "few_shot/numbers/1_shot": pytest.approx(expected.mean[0]),
        "few_shot/numbers/3_shot": pytest.approx(expected.mean[1]),
    }
    assert found.errors["3_shot"] == pytest.approx(expected.standard_error[1])
    assert found.chance == {"1_shot": 0.5, "3_shot": 0.5}


@pytest.mark.parametrize(
    "config_of", [lambda data: FewShotConfig(data, fit=FewShotOptions(shots=(1,))), LinearProbeConfig]
)
def test_chance_counts_the_classes_with_training_images_and_others_cannot_be_tested(
    write_set, sets, encoder, config_of
):
    names = ("zero", "one", "two", "three")
    write_set("few", [{"cls": number % 2} for number in range(12)], names, split="train")
    data = write_set("few", [{"cls": number % 2} for number in range(12)], names)
    found = config_of(data).build(sets)(encoder)
    assert next(iter(found.chance.values())) == 0.5
    write_set("more", [{"cls": number % 2} for number in range(12)], names, split="train")
    more = write_set("more", [{"cls": number % 4} for number in range(12)], names)
    message = r"label 2 of the test images has no training image \(2 labels without\)"
    assert_refused(message, config_of(more).build(sets), encoder)


def test_members_of_an_ensemble_are_fitted_jointly_or_separately(splits, sets, encoder):
    """Two members see the number and a constant: a joint fit ignores the constant one."""

    def extract(view: np.ndarray) -> np.ndarray:
        number = view[:, 0, 0, :1].astype(np.float32)
        return np.concatenate([number, 10 - number], axis=1)

    features = dataclasses.replace(encoder.features, extract=extract, num_members=2)
    for ensemble in ("joint", "disjoint"):
        fit = FewShotOptions(shots=(5,), seeds=(0,), ensemble=ensemble)
        found = FewShotConfig(splits, fit=fit).build(sets)(dataclasses.replace(encoder, features=features))
        assert found.figures["5_shot"] == 1


def test_classes_with_one_image_each_use_the_middle_of_the_grid_and_report_it(write_set, sets, encoder, capsys):
    write_set("numbers", [{"cls": 0}, {"cls": 1}], NAMES, split="train")
    data = write_set("numbers", [{"cls": 0}, {"cls": 1}], NAMES)
    fit = FewShotOptions(shots=(1,), seeds=(0,), l2=(0.5, 2.0, 1e9))
    found = FewShotConfig(data, fit=fit).build(sets)(encoder)
    fixed = FewShotConfig(data, fit=dataclasses.replace(fit, l2=(2.0,))).build(sets)(encoder)
    assert found.figures == fixed.figures == {"1_shot": 1}
    assert capsys.readouterr().err.count("for the choice of l2: it is 2, the middle of the grid") == 1


def test_a_linear_probe_learns_a_threshold(splits, sets, encoder):
    extract = encoder.features.extract
    centred = dataclasses.replace(encoder.features, extract=lambda view: (np.asarray(extract(view)) - 5.5) / 5)
    fit = LinearProbeOptions(learning_rates=(0.3,), weight_decays=(0.0,), epochs=(60,), minival=0.1, initial_bias=0.0)
    found = LinearProbeConfig(splits, fit=fit).build(sets)(dataclasses.replace(encoder, features=centred))
    assert found.kind == "linear_probe"
    assert found.figures["top1"] == 1
    assert found.figures["best/epochs"] == 60
    assert found.chance["top1"] == 0.5


def test_entries_that_only_a_head_reads_are_left_out(splits, sets, make_encoder, write_set):
    """Of every image the features are its number, which is the embedding, and its square."""
    encoder: FakeModel = make_encoder(np.eye(12), {"low": np.eye(12)[0], "high": np.eye(12)[11]})

    def extract(view: np.ndarray) -> np.ndarray:
        number = view[:, 0, 0, :1].astype(np.float32)
        return np.concatenate([number, 100 - number**2], axis=1)

    features = dataclasses.replace(encoder.features, extract=extract, mean_size=1, tower="another tower")
    outside = write_set("some", [{}] * 5)
    probe = LinearProbeOptions(learning_rates=(0.1,), weight_decays=(0.0,), epochs=(3,), minival=0.1)
    for config in (
        FewShotConfig(splits, fit=FewShotOptions(shots=(1,), seeds=(0, 1))),
        LinearProbeConfig(splits, fit=probe),
        OutOfDistributionConfig(splits, near=(f"{outside.directory}/test",), train_split="train"),
    ):
        evaluator = config.build(sets)
        found = evaluator(dataclasses.replace(encoder, features=features))
        assert found.figures == evaluator(encoder).figures


def test_training_on_the_test_images_is_rejected_for_any_spelling_of_the_folder(splits, sets, tmp_path):
    folder = f"{splits.directory}/test"
    (tmp_path / "elsewhere").symlink_to(folder)
    below = dataclasses.replace(splits, directory=folder, split=".")
    store = dataclasses.replace(splits, directory="memory://sets/numbers")
    for config in (
        FewShotConfig(splits, train_split="test"),
        LinearProbeConfig(splits, train_split="./test/"),
        FewShotConfig(splits, train_split=folder),
        FewShotConfig(splits, train_split=str(tmp_path / "elsewhere")),
        FewShotConfig(below, train_split="../test"),
        FewShotConfig(store, train_split="train/../test"),
        FewShotConfig(store, train_split="memory://sets/numbers/test/"),
    ):
        assert_refused(f"cannot train and test on the same split, {config.data.split}", config.build, sets)


def test_images_with_several_labels_are_refused(splits, sets):
    several = dataclasses.replace(splits, multi_label=True)
    for config in (FewShotConfig(several), LinearProbeConfig(several)):
        assert_refused("several labels", config.build, sets)


def write_others(write_set, directory) -> tuple[str, ...]:
    """Writes a set of the same classes in another order, and one of unions of classes of a larger classifier."""
    turned = write_set("turned", [{"cls": int(number < 6)} for number in range(12)], NAMES[::-1])
    one = write_set("one", [{"cls": 0} for _ in range(12)], ("any",))
    (directory / "one" / "candidates.txt").write_text("low\nhigh\n")
    (directory / "one" / "classes.json").write_text('{"any": ["low", "high"]}')
    return turned.directory, f"all={one.directory}"


def test_a_probe_is_trained_on_random_views_and_tested_on_several_sets_with_the_acceptable_classes(
    splits, sets, encoder, write_set, tmp_path
):
    extract = encoder.features.extract
    centred = dataclasses.replace(encoder.features, extract=lambda view: (np.asarray(extract(view)) - 5.5) / 5)
    fit = LinearProbeOptions((0.3,), (0.0,), (60,), ("random", "whole"), mixup=0.2, minival=0.1, initial_bias=0.0)
    relabels = tmp_path / "real.json"
    relabels.write_text(str([[], *[[0]] * 4, [0, 1], *[[1]] * 5, [0]]))
    others = write_others(write_set, tmp_path)
    found = LinearProbeConfig(splits, fit=fit, relabels=relabels, others=others).build(sets)(
        dataclasses.replace(encoder, features=centred)
    )
    # Of eleven images with an acceptable class, the last has another than its label.
    assert found.figures["relabelled_top1"] == pytest.approx(10 / 11)
    assert found.figures["top1"] == found.figures["turned/top1"] == found.figures["all/top1"] == 1
    assert found.figures["turned/nll"] == pytest.approx(found.figures["nll"])
    assert found.figures["all/nll"] == pytest.approx(0, abs=1e-6)
    assert found.chance["turned/top1"] == 0.5
    assert found.chance["all/top1"] == 1
    assert found.errors["turned/nll"] > 0
    of_crops = {crop: found.figures[f"best/accuracy_{crop}_crop"] for crop in fit.crops}
    assert max(of_crops.values()) == found.figures["best/accuracy"] == of_crops[found.draw().texts["crop"][0]]
    assert "best/crop" not in found.figures


def test_other_sets_need_names_of_their_own_and_single_classes_of_the_training_images(
    splits, sets, write_set, tmp_path
):
    other = write_set("other", [{"cls": 0}], ("low", "middle"))
    twice = write_set("twice", [{"cls": 0}], ("low", "low"))
    of_three = write_set("of_three", [{"cls": 0}], ("any",))
    (tmp_path / "of_three" / "candidates.txt").write_text("low\nhigh\nmiddle\n")
    (tmp_path / "of_three" / "classes.json").write_text('{"any": ["low", "high"]}')
    turned = write_set("turned", [{"cls": 0}], ("any",))
    (tmp_path / "turned" / "candidates.txt").write_text("high\nlow\n")
    (tmp_path / "turned" / "classes.json").write_text('{"any": ["high"]}')
    for place, message in (
        (other.directory, "other: class 'middle' is none of numbers .train.; write candidates.txt and classes.json"),
        (twice.directory, "twice: class 'low' is not a single one of numbers"),
        (
            of_three.directory,
            "'any' is none of numbers .train.; take a candidates.txt of the 2 classes .*, and not of 3",
        ),
        (turned.directory, "turned: its candidates.txt has the classes of numbers .train. in another order"),
        (f"numbers={other.directory}", "two sets have the name numbers; give each its own name"),
        *((f"{name}={splits.directory}", f"{name} is the name of other fig") for name in ("best", "calibrated")),
        (f"member_1={splits.directory}", "member_1 is the name of other figures; give the set of --others another"),
        (f"again={splits.directory}/train", "again: these are the training images of the probe; leave them out"),
    ):
        assert_refused(message, LinearProbeConfig(splits, others=(place,)).build, sets)


def test_a_class_name_that_two_classes_share_is_matched_only_in_equal_lists(splits, sets, write_set, tmp_path):
    names = ("low", "crane", "crane")
    write_set("cranes", [{"cls": number % 3} for number in range(12)], names, split="train")
    cranes = write_set("cranes", [{"cls": number % 3} for number in range(12)], names)
    same = write_set("same", [{"cls": 2}], names)
    [other] = LinearProbeConfig(cranes, others=(same.directory,)).build(sets).others
    assert other.groups == ((0,), (1,), (2,))
    some = write_set("some", [{"cls": 1}], ("low", "crane"))
    message = "some: class 'crane' is not a single one of cranes"
    assert_refused(message, LinearProbeConfig(cranes, others=(some.directory,)).build, sets)


def test_classes_of_other_sets_add_the_probabilities_of_theirs_among_all_that_count(sets, encoder, write_set, tmp_path):
    names = ("a", "b", "c", "d")
    write_set("four", [{"cls": number % 4} for number in range(12)], names, split="train")
    four = write_set("four", [{"cls": number % 4} for number in range(12)], names)
    two = write_set("two", [{"cls": number % 2} for number in range(5)], ("b or d", "c"))
    (tmp_path / "two" / "candidates.txt").write_text("".join(f"{name}\n" for name in names))
    (tmp_path / "two" / "classes.json").write_text('{"b or d": ["d", "b"], "c": 2}')
    [other] = LinearProbeConfig(four, others=(two.directory,)).build(sets).others
    kernel, bias = np.array([[0.3, -0.2, 0.1, 0.5]]), np.array([0.0, 1.0, -0.5, -1.0])
    best = ProbeSetting("whole", 0.1, 0.0, 1, 1.0, 1.0)
    found = other.predictions(LinearProbe(kernel, bias, best, (best,)), encoder)
    # The images are the numbers 0 to 4; "a" counts in neither class.
    odds = np.exp(np.arange(5)[:, None] * kernel + bias)
    expected = np.stack([odds[:, 1] + odds[:, 3], odds[:, 2]], axis=1) / odds[:, 1:].sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(found.log_probabilities), expected, rtol=1e-5)
    np.testing.assert_array_equal(found.labels, np.arange(5) % 2)


def test_images_of_other_sets_have_classes_with_training_images(write_set, sets, encoder, monkeypatch):
    names = ("zero", "one", "two")
    write_set("few", [{"cls": number % 2} for number in range(12)], names, split="train")
    few = write_set("few", [{"cls": number % 2} for number in range(12)], names)
    fine = write_set("fine", [{"cls": 0}, {"cls": 1}], names)
    bad = write_set("bad", [{"cls": 1}, {"cls": 1}], ("one", "two"))
    fit = LinearProbeOptions((0.1,), (0.0,), (1,))
    found = LinearProbeConfig(few, fit=fit, others=(fine.directory, bad.directory)).build(sets)
    monkeypatch.setattr(frozen, "train_linear_probe", None)  # it is refused before the training
    assert_refused("bad: class 'two' has images, but no training image; train on all classes", found, encoder)


def test_crops_of_what_has_none_are_refused_before_images_are_read(splits, sets, encoder):
    probe = LinearProbeConfig(splits, fit=LinearProbeOptions(crops=("whole", "random"))).build(sets)
    probe.check(encoder)
    loader: Any = probe.train.loader
    loader.stored = "embeddings"
    assert_refused("not of stored embeddings; leave out --embeddings", probe.check, encoder)
    dataclasses.replace(probe, fit=LinearProbeOptions()).check(encoder)


def test_a_crop_whose_settings_all_diverge_has_no_accuracy(splits, sets, encoder, monkeypatch):
    def setting(crop, accuracy, loss):
        return ProbeSetting(crop, 0.1, 0.0, 1, accuracy, loss)

    best = setting("whole", 0.5, 2.0)
    grid = (best, setting("whole", np.nan, np.nan), setting("random", 0.9, np.inf))
    probe = LinearProbe(np.ones((1, 2)), np.zeros(2), best, grid)
    monkeypatch.setattr(frozen, "train_linear_probe", lambda *_: probe)
    fit = LinearProbeOptions(crops=("whole", "random"))
    figures = LinearProbeConfig(splits, fit=fit).build(sets)(encoder).figures
    assert figures["best/accuracy_whole_crop"] == 0.5
    assert "best/accuracy_random_crop" not in figures
