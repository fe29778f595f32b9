"""The evaluators of retrieval and of ensembles, on shards."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from lit_het.calibrations import Calibration, FittedTemperature
from lit_het.eval.metrics.diversity import information_of_members
from lit_het.eval.metrics.ensembles import score_ensemble
from lit_het.eval.metrics.multi_label import ensemble_figures
from lit_het.eval.predictions import Predictor, member_blocks
from lit_het.eval.suite import ClassNamesConfig, EnsembleConfig, RetrievalConfig, ZeroShotConfig
from tests.eval.fake_model import FakeModel
from tests.refusals import assert_refused

CAPTIONS = ("a cat", "my cat", "a dog", "two owls", "an owl")


@pytest.fixture
def images(write_set):
    """A cat with two captions, a dog with one, owls with two."""
    texts = ["a cat\nmy cat\n", "a dog", "\ntwo owls\n an owl \n"]
    members = [{"txt": text, "json": {"captions": text.split("\n")[:1] or [""]}} for text in texts]
    return dataclasses.replace(write_set("pets", members), labelled=False)


@pytest.fixture
def encoder(make_encoder):
    """The dog's caption lies nearer to the cat; everything else is right."""
    vectors = np.array([[1, 0, 0], [0.9, 0.1, 0], [0.8, 0.6, 0], [0, 0, 1], [0, 0.1, 0.9]])
    return make_encoder(np.eye(3), dict(zip(CAPTIONS, vectors, strict=True)))


def test_any_caption_of_an_image_counts_as_a_hit(images, sets, encoder):
    found = RetrievalConfig(images).build(sets)(encoder)
    figures = found.metrics()
    assert figures["retrieval/pets/image_to_text_recall1"] == 1
    assert figures["retrieval/pets/text_to_image_recall1"] == pytest.approx(4 / 5)
    assert figures["retrieval/pets/text_to_image_recall5"] == 1
    # The dog's caption is one of five, and one of three images.
    assert found.errors["text_to_image_recall1"] == pytest.approx(np.sqrt(3 / 2 * (0.4**2 + 0.8**2 + 0.4**2)) / 5)
    assert found.errors["image_to_text_recall1"] == 0
    assert found.chance["text_to_image_recall1"] == pytest.approx(1 / 3)
    assert found.chance["image_to_text_recall1"] == pytest.approx((2 / 5 + 1 / 5 + 2 / 5) / 3)


def test_the_drawing_pairs_images_with_their_captions(images, sets, encoder):
    drawing = RetrievalConfig(images).build(sets)(encoder).draw()
    arrays, texts = drawing.arrays, drawing.texts
    best = np.array(texts["best_captions"]).reshape(3, 5)
    assert best[:, 0].tolist() == ["a cat", "a dog", "two owls"]
    assert arrays["caption_is_right"][:, 0].all()
    first = arrays["image"][arrays["found"][:, 0], 0, 0, 0]
    expected = {"a cat": 0, "my cat": 0, "a dog": 0, "two owls": 2, "an owl": 2}
    assert dict(zip(texts["queries"], first.tolist(), strict=True)) == expected
    assert arrays["image_is_right"][:, 0].tolist() == [True, True, False, True, True]


def test_captions_are_read_from_json(write_set, sets, encoder):
    members = [{"json": json.dumps({"captions": list(captions)}).encode()} for captions in (CAPTIONS[:2], CAPTIONS[2:])]
    data = dataclasses.replace(write_set("json", members), labelled=False)
    evaluator = RetrievalConfig(data, captions="json/captions").build(sets)
    assert evaluator.captions == (CAPTIONS[:2], CAPTIONS[2:])


@pytest.mark.parametrize(
    ("members", "captions", "message"),
    [
        ([{"txt": "a cat"}, {"txt": "\n"}], "txt", r"s0000001\.txt: empty caption"),
        ([{"txt": "a cat"}, {"cls": 0}], "txt", r"s0000001\.txt: missing member"),
        ([{"json": {"caption": 3}}], "json/caption", r"s0000000\.json: "),
        ([{"json": b"{"}], "json/caption", r"s0000000\.json: "),
    ],
)
def test_an_image_without_captions_is_named(write_set, sets, members, captions, message):
    data = dataclasses.replace(write_set("bad", members), labelled=False)
    assert_refused(message, RetrievalConfig(data, captions=captions).build, sets)


@pytest.mark.parametrize("bad", [{"cls": 0}, {"txt": " \n"}, {"txt": b"\xff"}])
def test_images_without_captions_are_left_out_as_far_as_is_allowed(write_set, sets, encoder, bad, capsys):
    texts = ["a cat\nmy cat\n", bad, "two owls\nan owl\n"]
    members = [text if isinstance(text, dict) else {"txt": text} for text in texts]
    data = dataclasses.replace(write_set("some", members), labelled=False, max_bad_fraction=0.34)
    found = RetrievalConfig(data).build(sets)(encoder)
    assert found.chance["text_to_image_recall1"] == pytest.approx(1 / 2)
    assert found.figures["image_to_text_recall1"] == 1
    assert "some: 1 sample left out, the first is" in capsys.readouterr().err
    fewer = dataclasses.replace(data, max_bad_fraction=0.3)
    assert_refused(r"s0000001\.txt", RetrievalConfig(fewer).build, sets)


NAMES = ("zero", "one", "two")


@pytest.fixture
def labelled(write_set):
    return write_set("digits", [{"cls": number % 3} for number in range(7)], NAMES)


NOISE = np.random.default_rng(0).normal(size=(7, 5, 3))


@pytest.fixture
def make_model(make_encoder, unit_vectors):
    """Makes models of seven images and three names."""
    return lambda seed=0, **options: make_encoder(unit_vectors(7, 3, seed), NAMES, **options)


def members_of(sets, data, *models: FakeModel, samples: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns log-probabilities of the members of all models, and labels."""
    features = sets.open(data).features(models[0].features)
    blocks = [member_blocks(Predictor(model, 3, np.eye(3), samples), features) for model in models]
    members = [np.concatenate([members for members, _ in of_model]) for of_model in blocks]
    return np.concatenate(members, axis=1), features.labels


def test_noise_samples_are_members_of_an_ensemble(labelled, sets, make_model):
    encoder = make_model(noise=NOISE)
    found = EnsembleConfig(labelled, samples=5).build(sets)(encoder)
    expected, errors = score_ensemble(*members_of(sets, labelled, encoder, samples=5)).figures()
    assert found.figures == pytest.approx(expected)
    assert found.errors == pytest.approx(errors)
    assert found.figures["joint_nll"] < found.figures["individual_nll"]
    assert not [name for name in found.figures if name.startswith("member_")], "one noise sample is like another"
    parts = found.figures["mean_entropy"] + found.figures["mutual_information"]
    assert found.figures["total_entropy"] == pytest.approx(parts)
    arrays = found.draw().arrays
    assert arrays["size"].tolist() == [1, 2, 3, 4, 5]
    assert arrays["size/nll"][[0, -1]] == pytest.approx([expected["individual_nll"], expected["joint_nll"]])


def test_members_with_noise_have_an_information_without_it(labelled, sets, make_model):
    encoder = dataclasses.replace(make_model(noise=NOISE), text_members=2)
    found = EnsembleConfig(labelled, samples=2).build(sets)(encoder)
    log_probabilities, _ = members_of(sets, labelled, encoder, samples=2)
    information = information_of_members(log_probabilities, 2)
    assert found.figures["mutual_information_of_members"] == pytest.approx(information.mean())
    assert found.errors["mutual_information_of_members"] == pytest.approx(information.std(ddof=1) / np.sqrt(7))
    assert 0 < information.mean() < found.figures["mutual_information"]
    alone = EnsembleConfig(labelled, samples=2).build(sets)(make_model(noise=NOISE))
    assert "mutual_information_of_members" not in alone.figures


def test_several_models_form_an_ensemble_and_a_single_model_does_not(labelled, sets, make_model, capsys):
    models = [make_model(seed, temperature=0.2) for seed in (0, 1, 2)]
    evaluator = EnsembleConfig(labelled, ClassNamesConfig("bare")).build(sets)
    found = evaluator(*models)
    expected, errors = score_ensemble(*members_of(sets, labelled, *models)).figures(each_member=True)
    assert found.figures == pytest.approx(expected)
    assert found.errors == pytest.approx(errors)
    for number, model in enumerate(models):
        alone = ZeroShotConfig(labelled, ClassNamesConfig("bare")).build(sets)(model)
        for name in ("top1", "nll", "brier", "ece"):
            assert found.figures[f"member_{number + 1}/{name}"] == pytest.approx(alone.figures[name], rel=1e-5)
            assert found.errors[f"member_{number + 1}/{name}"] == pytest.approx(alone.errors[name], rel=1e-5)
    assert "predict the same" not in capsys.readouterr().err
    many = evaluator(*models * 4)
    assert "models 1 and 4 predict the same of every image, as copies of one run do" in capsys.readouterr().err
    assert not [name for name in many.figures if name.startswith("member_")]
    assert_refused("there is only one member", evaluator, models[0])


def calibrated(model, noiseless: float, monte_carlo: float | None = None):
    quiet = FittedTemperature(noiseless, 0.1, 1.0, 0.9)
    noisy = None if monte_carlo is None else dataclasses.replace(quiet, temperature=monte_carlo)
    return dataclasses.replace(model, calibration=Calibration(("x",), "", "", 7, 3, 5, quiet, noisy))


def test_the_temperature_of_a_model_scales_the_mean_over_its_members(labelled, sets, make_model):
    raw = make_model(noise=NOISE)
    model = calibrated(raw, 1.0, 3.0)
    before, found = (EnsembleConfig(labelled, samples=5).build(sets)(one).figures for one in (raw, model))
    # The ensemble of samples is the prediction that zero-shot reports as `noisy`.
    pooled = ZeroShotConfig(labelled, samples=5).build(sets)(model).figures
    for name in ("nll", "brier", "top1", "ece"):
        assert found[f"joint_{name}"] == pytest.approx(pooled[f"noisy/{name}"], rel=1e-5)
        assert found[f"individual_{name}"] == pytest.approx(before[f"individual_{name}"])
    assert found["joint_nll"] != pytest.approx(before["joint_nll"], rel=0.01)


def test_separate_models_are_calibrated_before_their_mean(labelled, sets, make_model, unit_vectors):
    temperatures = (0.5, 4.0)
    models = [calibrated(make_model(seed, temperature=0.2), value) for seed, value in enumerate(temperatures)]
    found = EnsembleConfig(labelled, ClassNamesConfig("bare")).build(sets)(*models).figures
    total = np.zeros((7, 3))
    for number, (model, temperature) in enumerate(zip(models, temperatures, strict=True)):
        total += special.softmax(unit_vectors(7, 3, number) / 0.2 / temperature, axis=1) / 2
        alone = ZeroShotConfig(labelled, ClassNamesConfig("bare")).build(sets)(model).figures
        assert found[f"member_{number + 1}/nll"] == pytest.approx(alone["nll"], rel=1e-5)
    assert found["joint_nll"] == pytest.approx(-np.log(total[np.arange(7), np.arange(7) % 3]).mean(), rel=1e-5)


def test_models_count_in_an_ensemble_by_their_members(labelled, sets, make_model):
    models = [make_model(noise=NOISE[:, :count]) for count in (5, 2)]
    members, labels = members_of(sets, labelled, *models, samples=5)
    assert members.shape[1] == 5 + 2
    expected = score_ensemble(members, labels).figures()[0]
    assert EnsembleConfig(labelled, samples=5).build(sets)(*models).figures == pytest.approx(expected, rel=1e-5)


def test_weights_of_models_replace_their_numbers_of_members(labelled, sets, make_model, unit_vectors):
    models = [make_model(seed, temperature=0.2) for seed in (0, 1)]
    config = EnsembleConfig(labelled, ClassNamesConfig("bare"))
    weighted = dataclasses.replace(config, weights=(3, 1)).build(sets)
    found, equal = weighted(*models).figures, config.build(sets)(*models).figures
    first, second = (special.softmax(unit_vectors(7, 3, seed) / 0.2, axis=1) for seed in (0, 1))
    true = (0.75 * first + 0.25 * second)[np.arange(7), np.arange(7) % 3]
    assert found["joint_nll"] == pytest.approx(-np.log(true).mean(), rel=1e-5)
    for name in ("individual_nll", "kl"):
        assert found[name] == equal[name], "of single members, each of which counts once"
    assert_refused("there are 1 model and 2 --weights; give one each", weighted, models[0])
    assert_refused(r"weights = \(3, 0\) must be whole numbers of at least 1", EnsembleConfig, labelled, weights=(3, 0))


@pytest.fixture
def captioned(write_set):
    """Seven images whose labels are the words of captions."""
    texts = ("red", "green bar", "red bar", "bar", "green", "red green bar", "green")
    data = write_set("words", [{"txt": text} for text in texts])
    Path(data.directory, "words.txt").write_text("red\ngreen\nbar\n")
    targets = np.array([[word in text for word in ("red", "green", "bar")] for text in texts], float)
    return dataclasses.replace(data, caption_words=True), targets


def test_members_predict_several_labels_an_image(captioned, sets, make_encoder, unit_vectors):
    data, targets = captioned
    models = [
        make_encoder(unit_vectors(7, 3, seed), ("red", "green", "bar"), 0.2, NOISE[:, :count])
        for seed, count in ((0, 5), (1, 2))
    ]
    models = [dataclasses.replace(model, has_class_probabilities=True) for model in models]
    for samples, by_model in ((5, NOISE), (0, np.zeros((7, 1, 3)))):
        found = EnsembleConfig(data, samples=samples).build(sets)(*models)
        each = [unit_vectors(7, 3, seed)[:, None] + by_model[:, :count] for seed, count in ((0, 5), (1, 2))]
        logits = np.concatenate(each, axis=1) / 0.2
        members = np.stack([special.log_expit(logits), special.log_expit(-logits)], axis=2)
        expected, errors = ensemble_figures(members, targets, each_member=not samples)
        assert found.figures == pytest.approx(expected, rel=1e-4)
        assert found.errors == pytest.approx(errors, rel=1e-4, abs=1e-6)
        assert found.kind == "deep_ensemble"
    message = "several labels per image: an ensemble needs a probability of every class"
    without = dataclasses.replace(models[0], has_class_probabilities=False)
    assert_refused(message, EnsembleConfig(data).build(sets).check, without, without)


def test_progress_is_shown(images, labelled, sets, encoder, make_model, capsys):
    RetrievalConfig(images).build(sets)(encoder)
    for config in (EnsembleConfig(labelled, samples=2), ZeroShotConfig(labelled)):
        config.build(sets)(make_model(noise=NOISE))
    said = capsys.readouterr().err
    for step in ("reading .txt of pets: 3/3 samples", "scoring digits: 7/7 images", "scoring digits: 2/2 predictions"):
        assert step in said
