"""`lit-het classify` on finished runs."""

import dataclasses
import io
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from lit_het.calibrations import Calibration, FittedTemperature
from lit_het.cli.main import main
from lit_het.eval.metrics.conformal import ConformalThresholds
from lit_het.models.calibration.saved import calibration_path, write_calibration
from lit_het.models.opening import open_run
from lit_het.training.directory import checkpoint_dir
from lit_het.weights.native.saving import Checkpoints
from tests.cli.conftest import last_line, refusal
from tests.cli.tiny_decoder import NAMES


@pytest.fixture
def images(tmp_path):
    """A red and a blue image."""
    paths = [tmp_path / f"{name}.png" for name in ("red", "blue")]
    for path, colour in zip(paths, ((255, 0, 0), (0, 0, 255)), strict=True):
        Image.new("RGB", (40, 30), colour).save(path)
    return paths


def classified(capsys, *arguments):
    """Runs the command, which must succeed, and returns what it prints."""
    assert main(["classify", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_table_for_each_image_shows_probabilities_bands_and_noise(capsys, trained_lit, images):
    shown = classified(capsys, *images, "--checkpoint", trained_lit.run_dir, "--labels", ", ".join(NAMES), "--top", 3)
    for image in images:
        assert image.name in shown.replace("\n", "")
    assert shown.count("noise norm ") == 2
    assert shown.count("and 5 other labels with") == 2
    assert "5–95 %" in shown
    assert "of 32 noise samples" in shown
    assert "fits" not in shown, "a softmax gives no label a probability of its own"


def test_json_is_equal_for_an_image_alone_and_with_another(capsys, trained_lit, images, tmp_path):
    (tmp_path / "labels.txt").write_text("\n".join(NAMES))
    arguments = ("--checkpoint", trained_lit.run_dir, "--labels", tmp_path / "labels.txt", "--samples", 8, "--json")
    both = json.loads(classified(capsys, *images, *arguments))
    (alone,) = json.loads(classified(capsys, images[1], *arguments))
    assert [found["image"] for found in both] == [str(path) for path in images]
    assert {found["label"] for found in alone["labels"]} == set(NAMES)
    assert {found["pair_probability"] for found in alone["labels"]} == {None}, "of a softmax"
    assert alone["samples"] == 8
    for mine, beside in zip(alone["labels"], both[1]["labels"], strict=True):
        assert mine["label"] == beside["label"]
        for figure in ("probability", "noisy_mean", "noisy_5_percent", "noisy_95_percent"):
            assert mine[figure] == pytest.approx(beside[figure], rel=1e-4)
        assert mine["noisy_5_percent"] <= mine["noisy_mean"] <= mine["noisy_95_percent"]
    assert sum(found["probability"] for found in alone["labels"]) == pytest.approx(1, rel=1e-5)


def test_other_seeds_draw_other_noise_and_the_same_seed_the_same(capsys, trained_lit, images):
    def drawn(seed: int) -> list[float]:
        arguments = ("--checkpoint", trained_lit.run_dir, "--labels", ",".join(NAMES), "--seed", seed, "--json")
        (found,) = json.loads(classified(capsys, images[0], *arguments))
        return [label["noisy_mean"] for label in found["labels"]]

    first = drawn(0)
    assert first == drawn(0)
    assert first != drawn(1)


@pytest.mark.slow
def test_a_sigmoid_gives_each_label_a_probability_of_its_own(capsys, sigmoid_lit, images):
    arguments = ("--checkpoint", sigmoid_lit, "--labels")
    (found,) = json.loads(classified(capsys, images[0], *arguments, ",".join(NAMES), "--json"))
    # Logits, from their sigmoids without the bias, have the softmax of the other column.
    pair, softmax = (np.array([one[name] for one in found["labels"]]) for name in ("pair_probability", "probability"))
    logits = np.log(pair / (1 - pair))
    np.testing.assert_allclose(np.exp(logits) / np.exp(logits).sum(), softmax, rtol=1e-4)
    head = open_run(sigmoid_lit).params["head"]
    bias, tau = float(head["bias"]), float(np.exp(head["temperature"]["log_temperature"]))
    assert np.abs((logits - bias) * tau).max() <= 1  # cosines
    (fewer,) = json.loads(classified(capsys, images[0], *arguments, ",".join(NAMES[:2]), "--json"))
    by_name = {one["label"]: one["pair_probability"] for one in found["labels"]}
    for one in fewer["labels"]:  # other labels do not matter
        assert one["pair_probability"] == pytest.approx(by_name[one["label"]], rel=1e-5)
    assert "fits" in classified(capsys, images[0], *arguments, ",".join(NAMES))


def test_an_image_comes_from_standard_input(capsys, monkeypatch, trained_lit, images):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(images[0].read_bytes())))
    arguments = ("--checkpoint", trained_lit.run_dir, "--labels", ",".join(NAMES), "--samples", 0, "--json")
    piped, read = json.loads(classified(capsys, "-", images[0], *arguments))
    assert piped["labels"] == read["labels"]
    assert piped["labels"][0]["noisy_mean"] is None


def test_a_classifier_predicts_its_own_class_names(capsys, upstream, images, data):
    words = data / "train" / "words.txt"
    (found,) = json.loads(classified(capsys, images[0], "--checkpoint", upstream, "--labels", words, "--json"))
    assert {label["label"] for label in found["labels"]} == set(words.read_text().split())
    for label in found["labels"]:
        assert label["noisy_5_percent"] <= label["noisy_95_percent"]
    assert found["labels"][0]["noisy_5_percent"] < found["labels"][0]["noisy_95_percent"]


def test_noise_is_compared_with_the_sets_of_the_run(capsys, trained_lit, images):
    folder = trained_lit.run_dir / "evaluations"
    folder.mkdir()
    step = trained_lit.length.amount
    content = {key: {} for key in ("figures", "errors", "chance", "settings", "texts")}
    record = json.dumps({"kind": "zero_shot", "name": "shapes", "step": step, **content})
    (folder / "zero_shot_shapes.json").write_text(record)
    np.savez(folder / "zero_shot_shapes.npz", noise_norm=np.zeros(3))
    shown = classified(capsys, images[0], "--checkpoint", trained_lit.run_dir, "--labels", ",".join(NAMES))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert "100% of the 3 images of shapes have less" in shown


@pytest.fixture
def thresholds(trained_lit):
    """Writes thresholds, fitted among ten labels, for coverages of 50 and 90 %, and removes them after the test."""
    run_dir = trained_lit.run_dir
    with Checkpoints(checkpoint_dir(run_dir), read_only=True) as checkpoints:
        step = checkpoints.newest_step()
    calibration = Calibration(("shards",), "0%:100%", "", 100, 10, 0, FittedTemperature(1.0, 0.1, 1.0, 1.0))

    def write(*probabilities: float, step: int = step) -> None:
        found = ConformalThresholds((0.5, 0.9), tuple(map(math.log, probabilities)), num_examples=100, num_classes=10)
        write_calibration(run_dir, step, calibration, found)

    yield write
    calibration_path(run_dir).unlink(missing_ok=True)


def test_a_prediction_set_has_the_labels_above_the_threshold_of_its_coverage(capsys, trained_lit, images, thresholds):
    arguments = (images[0], "--checkpoint", trained_lit.run_dir, "--labels", ",".join(NAMES), "--samples", 0)
    (found,) = json.loads(classified(capsys, *arguments, "--json"))
    assert found["prediction_set"] is None
    by_probability = [label["label"] for label in found["labels"]]
    first, third = found["labels"][0]["probability"], found["labels"][2]["probability"]
    thresholds(first * 0.999, third * 0.999)
    for coverage, size in ((0.5, 1), (0.9, 3), (0.6, 3)):
        (found,) = json.loads(classified(capsys, *arguments, "--json", "--coverage", coverage))
        assert found["prediction_set"] == by_probability[:size]
    shown = " ".join(classified(capsys, *arguments, "--coverage", 0.9, "--top", 2).split())
    assert f"prediction set: {', '.join(by_probability[:2])} and 1 more. No coverage is promised" in shown


@pytest.mark.parametrize(
    ("coverage", "message"),
    [
        ("90", "coverage 90 has no stored threshold: it must be above 0 and at most 0.9"),
        ("0", "coverage 0 has no stored threshold"),
        ("nan", "coverage = nan must be a number"),
        ("0.95", "coverage 0.95 has no stored threshold: it must be above 0 and at most 0.9"),
    ],
)
def test_a_coverage_without_threshold_is_a_one_line_error(
    capsys, trained_lit, images, thresholds, coverage: str, message: str
):
    thresholds(0.5, 0.1)
    arguments = ("--checkpoint", trained_lit.run_dir, "--labels", "a cat,a dog", "--coverage", coverage)
    assert message in refusal(capsys, "classify", images[0], *arguments)


def test_raw_probabilities_and_those_of_another_step_have_no_prediction_sets(capsys, trained_lit, images, thresholds):
    arguments = ("--checkpoint", trained_lit.run_dir, "--labels", "a cat,a dog", "--coverage", 0.9)
    thresholds(0.5, 0.1)
    assert "leave out --uncalibrated" in last_line(capsys, "classify", images[0], *arguments, "--uncalibrated")
    thresholds(0.5, 0.1, step=1)
    assert "if its calibration is of another step" in last_line(capsys, "classify", images[0], *arguments)


@pytest.mark.parametrize(
    ("labels", "flags", "message"),
    [
        ("", (), "no labels"),
        ("a cat", (), "'a cat' is the only label"),
        ("labels.txt", (), "there is no such file"),
        ("a cat,a dog,a cat", (), "'a cat' is repeated"),
        ("{folder}/empty_line.txt", (), "line 2 is empty"),
        ("a cat,a dog", ("--coverage", 0.9), "run lit-het calibrate {run_dir} --data SHARDS first"),
        ("a cat,a dog", ("--samples", "-1"), "samples = -1"),
        ("a cat,a dog", ("--top", "0"), "top = 0"),
        ("a cat,a dog", ("--prompts", "set"), "there is no data set"),
        ("a cat,a dog", ("--prompts", "nowhere.txt"), "neither a file nor one of"),
    ],
)
def test_invalid_labels_and_flags_are_a_one_line_error(capsys, trained_lit, images, tmp_path, labels, flags, message):
    (tmp_path / "empty_line.txt").write_text("a cat\n\na dog\n")
    given = ("--checkpoint", trained_lit.run_dir, "--labels", labels.format(folder=tmp_path), *flags)
    assert message.format(run_dir=trained_lit.run_dir) in refusal(capsys, "classify", images[0], *given)


def test_a_missing_or_invalid_image_is_a_one_line_error(capsys, trained_lit, images, tmp_path):
    (tmp_path / "text.jpg").write_text("no image at all")
    for path in (tmp_path / "nowhere.jpg", tmp_path / "text.jpg", tmp_path):
        arguments = ("--checkpoint", trained_lit.run_dir, "--labels", "a cat,a dog")
        assert str(path) in refusal(capsys, "classify", images[0], path, *arguments)


def test_a_run_without_tokenizer_is_a_one_line_error(capsys, trained_lit, images, monkeypatch):
    without = dataclasses.replace(open_run(trained_lit.run_dir), tokenizer=None)
    monkeypatch.setattr("lit_het.models.model.open_run", lambda *_: without)
    line = refusal(capsys, "classify", images[0], "--checkpoint", trained_lit.run_dir, "--labels", "a cat,a dog")
    assert "has no tokenizer" in line


def test_a_classifier_reads_no_prompts_and_only_its_own_classes(capsys, upstream, images):
    arguments = ("classify", images[0], "--checkpoint", upstream, "--labels", "a cat,a dog")
    assert "takes no prompts; leave them out" in refusal(capsys, *arguments, "--prompts", "photo")
    assert "give the names of its classes" in refusal(capsys, *arguments)
