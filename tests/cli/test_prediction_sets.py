"""The prediction sets of `lit-het classify` in calibrated runs, and for which labels they promise a coverage."""

import json

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import lit_het
from lit_het.apps.demo.model import DemoModel, open_model
from lit_het.eval.metrics.conformal import prediction_sets, read_conformal
from lit_het.models.candidates import candidates
from tests.cli.conftest import printed
from tests.cli.test_calibrate import predictions
from tests.cli.tiny_decoder import NAMES


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "red.png"
    Image.new("RGB", (40, 30), (255, 0, 0)).save(path)
    return path


@pytest.fixture(scope="module")
def model(once_calibrated):
    return lit_het.load(once_calibrated)


def shown(capsys, found):
    """Returns what the command prints of a result."""
    capsys.readouterr()
    found.drawing(10).print(Console())
    return " ".join(capsys.readouterr().out.split())


def test_prediction_sets_cover_the_images_that_they_were_fitted_on(once_calibrated, held_out, image, capsys):
    thresholds = read_conformal(once_calibrated / "calibration.json")
    applied = predictions(once_calibrated, held_out, 0, is_calibrated=True)
    sets = prediction_sets(applied.log_probabilities, thresholds.at(0.9))
    assert 0.9 <= sets[np.arange(160), applied.labels].mean() < 0.95
    command = ("classify", image, "--checkpoint", once_calibrated, "--labels", ",".join(NAMES), "--coverage", "0.9")
    (found,) = printed(capsys, *command, "--json")
    by_probability = [label["label"] for label in found["labels"]]
    assert found["prediction_set"] == by_probability[: len(found["prediction_set"])] != []
    assert found["coverage"] == 0.9


@pytest.mark.parametrize(
    ("labels", "prompts", "is_covered"),
    [
        (NAMES[::-1], None, True),
        ([*NAMES[:-1], "a cat"], None, False),  # as many
        (NAMES[:-1], None, False),
        ([*NAMES, NAMES[0].upper()], None, False),  # equal tokens
        (NAMES, "photo", False),
        (NAMES, "photos", False),
    ],
    ids=["another order", "one other", "one less", "one twice", "a prompt", "several prompts"],
)
def test_coverage_is_promised_for_the_captions_of_the_calibration_alone(
    capsys, model, image, labels, prompts, is_covered
):
    text = shown(capsys, model.classify(image, labels, prompts=prompts, coverage=0.9))
    assert ("prediction set of 90 % coverage: " in text) == is_covered
    assert ("No coverage is promised: the run was calibrated among other labels" in text) == (not is_covered)


def test_the_demo_shows_the_set_of_classify(model, once_calibrated, image, capsys):
    demo = open_model(once_calibrated, None)
    assert isinstance(demo, DemoModel)
    _, features = demo.see(image.read_bytes(), "red.png")
    *_, told = demo.answer(features, "\n".join(NAMES), "bare", 16, 0)
    assert told.startswith("prediction set of 90 % coverage: ")
    by_classify = shown(capsys, model.classify(image, NAMES, coverage=0.9))
    assert all(remark in by_classify for remark in told.split("; "))
    *_, among_others = demo.answer(features, "a cat\na dog", "bare", 16, 0)
    assert "No coverage is promised" in among_others


def test_a_calibration_of_an_earlier_version_promises_no_coverage(model, calibrated):
    path = calibrated / "calibration.json"
    saved = json.loads(path.read_text())
    del saved["conformal"]["candidates"]
    path.write_text(json.dumps(saved))
    found = candidates(model._model, calibrated, NAMES, None, 0.9)
    assert found.threshold is not None
    assert found.coverage is None
