"""The evaluators of corrupted copies and of out-of-distribution images, on shards."""

import dataclasses
from pathlib import Path

import fsspec
import numpy as np
import pytest
from scipy import special
from sklearn.metrics import roc_auc_score

from lit_het.errors import UserError
from lit_het.eval.suite import ClassNamesConfig, OutOfDistributionConfig, ShiftConfig, ZeroShotConfig
from tests.refusals import assert_refused

NAMES = ("zero", "one", "two")


def test_every_corruption_severity_and_mean_has_figures(write_set, sets, make_encoder):
    """Images 0, 1, 2; the model is right on those below 2, and copies hold fewer of them.

    Saturation, which ImageNet-C has for validation, is in no mean.
    """
    clean = write_set("digits", [{"cls": 0}, {"cls": 1}, {"cls": 0}], NAMES)
    copies = {
        "fog/1": (0, 1, 2),
        "fog/2": (1, 1, 0),
        "noise/1": (1, 0, 0),
        "noise/2": (2, 2, 0),
        "saturate/1": (0, 1, 2),
    }
    for part, labels in copies.items():
        write_set("digits/corrupted", [{"cls": label} for label in labels], split=part)
    encoder = make_encoder(np.eye(3), NAMES)
    found = ShiftConfig(clean).build(sets)(encoder)
    top1 = {part.removesuffix("/top1"): value for part, value in found.figures.items() if part.endswith("/top1")}
    assert top1 == {
        "clean": pytest.approx(2 / 3),
        "fog/1": 1,
        "fog/2": pytest.approx(1 / 3),
        "noise/1": 0,
        "noise/2": 0,
        "saturate/1": 1,
        "severity_1": pytest.approx(1 / 2),
        "severity_2": pytest.approx(1 / 6),
        "corrupted": pytest.approx(1 / 3),
    }
    drawing = found.draw()
    assert drawing.texts["parts"] == ("clean", *copies)
    assert drawing.arrays["table"].shape == (6, 5)
    assert found.errors["fog/1/top1"] == 0


def test_severities_and_images_that_copies_lack_are_named(write_set, sets, capsys):
    clean = write_set("digits", [{"cls": 0}, {"cls": 1}], NAMES)
    for part, count in {"fog/1": 2, "fog/2": 1, "noise/1": 2}.items():
        write_set("digits/corrupted", [{"cls": 0}] * count, split=part)
    ShiftConfig(clean).build(sets)
    said = capsys.readouterr().err
    assert "digits: means lack copies that there are of other severities: noise/2\n" in said
    assert "digits: holds 2 images, and these copies other numbers: fog/2 (1)\n" in said


def test_halves_are_calibrated_by_each_other_and_copies_by_the_mean_temperature(write_set, sets, make_encoder):
    labels = [0, 1, 2, 0, 1, 2, 2, 0]
    clean = write_set("digits", [{"cls": label} for label in labels], NAMES)
    write_set("digits/corrupted", [{"cls": label} for label in labels[::-1]], split="fog/1")
    encoder = make_encoder(np.random.default_rng(0).normal(size=(8, 3)) + 0.5 * np.eye(3)[labels], NAMES, 1.0)
    zero_shot = ZeroShotConfig(clean).build(sets)(encoder).figures
    found = ShiftConfig(clean).build(sets)
    figures = found(encoder).figures
    for figure in ("nll", "ece"):
        assert figures[f"clean/calibrated_{figure}"] == pytest.approx(zero_shot[f"calibrated/{figure}"])
    predictor = found.recognition.predictor(encoder)
    fog = found.recognition.predict(predictor, found.copies["fog/1"].features(encoder.features))
    log_p = special.log_softmax(fog.log_probabilities / zero_shot["calibrated/temperature_factor"], axis=1)
    nll = -log_p[np.arange(8), labels[::-1]].mean()
    assert figures["fog/1/calibrated_nll"] == pytest.approx(nll, rel=1e-5)


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_sets_and_their_copies_are_read_from_urls(write_set, sets, make_encoder, tmp_path, scheme):
    clean = write_set("digits", [{"cls": 0}, {"cls": 1}, {"cls": 0}], NAMES)
    for part, labels in {"fog/1": (0, 1, 2), "fog/2": (1, 1, 0)}.items():
        for place in ("copies", "digits/corrupted"):
            write_set(place, [{"cls": label} for label in labels], NAMES, split=part)
    encoder = make_encoder(np.eye(3), NAMES)
    expected = ShiftConfig(clean).build(sets)(encoder)
    store = fsspec.filesystem("memory")
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        store.pipe_file(str(path), path.read_bytes())
    here, there = str(tmp_path), f"{scheme}://{tmp_path}"
    try:
        for place, corrupted in (
            (there, None),
            (there, f"{there}/copies/"),
            (there, f"{here}/copies"),
            (here, f"{there}/copies"),
        ):
            data = dataclasses.replace(clean, directory=f"{place}/digits")
            assert ShiftConfig(data, corrupted).build(sets)(encoder).figures == expected.figures
    finally:
        store.rm(here, recursive=True)


@pytest.mark.parametrize("place", ["digits/corrupted", "digits/corrupted/fog"])
def test_copies_with_other_class_names_are_rejected(write_set, sets, tmp_path, place):
    clean = write_set("digits", [{"cls": 0}], NAMES)
    write_set("digits/corrupted", [{"cls": 0}], split="fog/1")
    names = tmp_path / place / "classnames.txt"
    names.write_text("zero\none\ntwo\n")
    assert list(ShiftConfig(clean).build(sets).copies) == ["fog/1"]
    names.write_text("one\nzero\ntwo\n")
    with pytest.raises(UserError, match=rf"{place}/classnames.txt differs from .*digits/classnames.txt: .*--corrupted"):
        ShiftConfig(clean).build(sets)


def test_a_set_without_corrupted_copies_is_refused_and_one_without_a_fitting_temperature_reported(
    write_set, sets, make_encoder, capsys
):
    clean = ShiftConfig(write_set("digits", [{"cls": 0}, {"cls": 1}], NAMES))
    assert_refused(r"no shards in .*corrupted/<corruption>/<severity>; lit-het data corrupt", clean.build, sets)
    write_set("digits/corrupted", [{"cls": 0}], split="fog/1")
    clean.build(sets)(make_encoder(np.eye(3), NAMES))
    assert capsys.readouterr().err.count("digits: no temperature fits") == 1


@pytest.fixture
def two_sets(write_set):
    """Eight images of two classes, and eight out-of-distribution images without labels or names."""
    inside = write_set("known", [{"cls": number % 2} for number in range(8)], NAMES[:2])
    write_set("known", [{"cls": number % 2} for number in range(8)], NAMES[:2], split="train")
    outside = write_set("other", [{"txt": "?"} for _ in range(8)])
    return inside, f"{outside.directory}/test"


def test_detection_of_out_of_distribution_images_agrees_with_scikit_learn(two_sets, sets, make_encoder):
    """Both sets hold the same images, so that every AUROC is one half."""
    inside, outside = two_sets
    logits = np.random.default_rng(0).normal(size=(8, 2))
    encoder = make_encoder(logits, NAMES[:2], temperature=0.5)
    found = OutOfDistributionConfig(inside, near=(f"odd={outside}",), far=(outside,)).build(sets)(encoder)
    figures = found.figures
    # The same images inside and outside cannot be distinguished.
    for score in ("max_probability", "entropy", "energy", "noise_norm"):
        for place in ("near/odd", "far/other"):
            assert figures[f"{place}/{score}/auroc"] == 0.5
    assert set(found.errors) == set(figures)
    assert 0 < found.errors["near/odd/entropy/auroc"] < 0.5
    arrays = found.draw().arrays
    p = special.softmax(logits / 0.5, axis=1)
    np.testing.assert_allclose(arrays["inside/entropy"], -(p * np.log(p)).sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(arrays["inside/energy"], -np.log(np.exp(logits / 0.5).sum(axis=1)), rtol=1e-5)
    np.testing.assert_array_equal(arrays["inside/noise_norm"], np.arange(8))


def test_a_model_that_is_unsure_of_out_of_distribution_images_scores_high(two_sets, sets, make_encoder):
    inside, outside = two_sets
    # The embeddings of out-of-distribution images lie between those of both class names.
    vectors = np.concatenate([np.eye(2)[np.zeros(8, int)], np.full((8, 2), 0.5)])
    unsure = make_encoder(vectors, NAMES[:2], has_noise_norm=False)
    opened = sets.open
    seen = []

    class Watched(type(sets)):
        def open(self, config):
            found = opened(config)
            if not config.labelled:
                features = found.features

                def shifted(tower):
                    of_set = features(tower)
                    seen.append(config.name)
                    return dataclasses.replace(of_set, values=of_set.values + 8)

                found.features = shifted
            return found

    watched = Watched(sets.image_size, sets.preprocessing, lambda: "a tower")
    found = OutOfDistributionConfig(inside, far=(outside,), train_split="train").build(watched)(unsure)
    assert seen == ["far/other"]
    assert found.figures["far/other/max_probability/auroc"] == 1
    assert found.figures["far/other/max_probability/fpr95"] == 0
    assert not [name for name in found.figures if "noise_norm" in name], "no noise, no score"
    arrays = found.draw().arrays
    scores = np.concatenate([arrays["inside/mahalanobis"], arrays["far/other/mahalanobis"]])
    expected = roc_auc_score(np.repeat([0, 1], 8), scores)
    assert found.figures["far/other/mahalanobis/auroc"] == pytest.approx(expected)


def test_sets_out_of_distribution_must_be_named_once_each(two_sets, sets):
    inside, outside = two_sets
    assert_refused(r"--near NAME=DIR or --far NAME=DIR", OutOfDistributionConfig(inside).build, sets)
    with pytest.raises(UserError, match="two sets have the name near/other"):
        OutOfDistributionConfig(inside, near=(outside, outside)).build(sets)


def test_the_allowed_share_of_broken_images_holds_for_out_of_distribution_sets(two_sets, sets, make_encoder, write_set):
    inside, _ = two_sets
    broken = write_set("broken", [{"png": b"no image"}, *({"txt": "?"} for _ in range(7))])
    encoder = make_encoder(np.eye(8)[:, :2], NAMES[:2])
    config = OutOfDistributionConfig(inside, far=(f"{broken.directory}/test",))
    allowed = dataclasses.replace(config, data=dataclasses.replace(inside, max_bad_fraction=0.2))
    assert len(allowed.build(sets)(encoder).draw().arrays["far/broken/entropy"]) == 7
    assert_refused("1 bad of 8 samples", config.build(sets), encoder)


def test_out_of_distribution_detection_accepts_other_candidates(two_sets, sets, make_encoder, tmp_path):
    inside, outside = two_sets
    (tmp_path / "names.txt").write_text("zero\none\ntwo\n")
    encoder = make_encoder(np.eye(3)[np.arange(8) % 3], NAMES)
    names = ClassNamesConfig(candidates=tmp_path / "names.txt")
    found = OutOfDistributionConfig(inside, near=(outside,), names=names).build(sets)(encoder)
    assert found.figures["near/other/entropy/auroc"] == 0.5


def test_noise_samples_that_disagree_outside_give_mutual_information(write_set, sets, make_encoder):
    """Both samples of images 0 to 3 choose the first class; those of images 4 to 7 a class each: ln 2 nats."""
    inside = write_set("known", [{"cls": 0} for _ in range(4)], NAMES[:2])
    outside = write_set("other", [{"txt": "?"} for _ in range(8)])
    noise = np.tile([[1.0, 0.0], [1.0, 0.0]], (8, 1, 1))
    noise[4:, 1] = [0.0, 1.0]
    model = make_encoder(np.zeros((8, 2)), NAMES[:2], temperature=0.01, noise=noise)
    at = f"{outside.directory}/test"
    found = OutOfDistributionConfig(inside, far=(at,), samples=2).build(sets)(model)
    arrays = found.draw().arrays
    np.testing.assert_allclose(arrays["inside/mutual_information"], 0, atol=1e-6)
    np.testing.assert_allclose(arrays["far/other/mutual_information"], np.repeat([0, np.log(2)], 4), atol=1e-6)
    # Images 4 to 7 are above all of the inside, images 0 to 3 tie with them.
    assert found.figures["far/other/mutual_information/auroc"] == pytest.approx((1 + 0.5) / 2)
    without = OutOfDistributionConfig(inside, far=(at,)).build(sets)(model)
    assert not [name for name in without.figures if "mutual_information" in name], "one prediction cannot disagree"
