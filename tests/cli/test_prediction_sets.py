"""The prediction sets of `lit-het classify` in calibrated runs, and for which labels they promise a coverage."""

import json

import numpy as np
import pytest
from PIL import Image

from lit_het.apps.demo.model import DemoModel, open_model
from lit_het.cli.main import main
from lit_het.eval.conformal import prediction_sets, read_conformal
from tests import tiny
from tests.cli.test_calibrate import predictions

NAMES = [f"{colour} {shape}" for colour in tiny.COLOURS for shape in tiny.SHAPES]


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (40, 30), (255, 0, 0)).save(tmp_path / "red.png")
    return tmp_path / "red.png"


def test_prediction_sets_cover_the_images_that_they_were_fitted_on(once_calibrated, held_out, image, capsys):
    thresholds = read_conformal(once_calibrated / "calibration.json")
    applied = predictions(once_calibrated, held_out, 0, is_calibrated=True)
    sets = prediction_sets(applied.log_probabilities, thresholds.at(0.9))
    assert 0.9 <= sets[np.arange(160), applied.labels].mean() < 0.95
    command = ["classify", image, "--checkpoint", once_calibrated, "--labels", ",".join(NAMES), "--coverage", "0.9"]
    assert main([*map(str, command), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    by_probability = [label["label"] for label in found["labels"]]
    assert found["prediction_set"] == by_probability[: len(found["prediction_set"])] != []
    assert found["coverage"] == 0.9
    assert main(list(map(str, command))) == 0
    assert "prediction set of 90 % coverage: " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("labels", "flags", "is_covered"),
    [
        (NAMES[::-1], (), True),
        ([*NAMES[:-1], "a cat"], (), False),  # as many
        (NAMES[:-1], (), False),
        ([*NAMES, NAMES[0].upper()], (), False),  # equal tokens
        (NAMES, ("--prompts", "photo"), False),
        (NAMES, ("--prompts", "photos"), False),
    ],
    ids=["another order", "one other", "one less", "one twice", "a prompt", "several prompts"],
)
def test_coverage_is_promised_for_the_captions_of_the_calibration_alone(
    capsys, once_calibrated, image, labels, flags, is_covered
):
    command = ["classify", image, "--checkpoint", once_calibrated, "--labels", ",".join(labels), "--coverage", "0.9"]
    assert main([*map(str, command), *flags]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("prediction set of 90 % coverage: " in shown) == is_covered
    assert ("No coverage is promised: the run was calibrated among other labels" in shown) == (not is_covered)


def test_the_demo_shows_the_set_of_classify(once_calibrated, image, capsys):
    model = open_model(once_calibrated, None)
    assert isinstance(model, DemoModel)
    _, features = model.see(image.read_bytes(), "red.png")
    *_, shown = model.answer(features, "\n".join(NAMES), "bare", 16, 0)
    command = ("classify", image, "--checkpoint", once_calibrated, "--labels", ",".join(NAMES), "--coverage", "0.9")
    assert main(list(map(str, command))) == 0
    assert shown.startswith("prediction set of 90 % coverage: ")
    assert shown in " ".join(capsys.readouterr().out.split())
    *_, among_others = model.answer(features, "a cat\na dog", "bare", 16, 0)
    assert "No coverage is promised" in among_others


def test_a_calibration_of_an_earlier_version_promises_no_coverage(capsys, calibrated, image):
    path = calibrated / "calibration.json"
    saved = json.loads(path.read_text())
    del saved["conformal"]["candidates"]
    path.write_text(json.dumps(saved))
    command = ["classify", image, "--checkpoint", calibrated, "--labels", ",".join(NAMES), "--json"]
    assert main([*map(str, command), "--coverage", "0.9"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["prediction_set"]
    assert found["coverage"] is None
