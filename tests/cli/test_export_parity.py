"""An exported run in the zero-shot pipeline of transformers: the probabilities of `lit-het classify`."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
from PIL import Image

from lit_het.cli.main import main
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.runs.training import train
from tests import tiny

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
# Within the six tokens of these runs: the pipeline of a softmax cuts no text.
NAMES = [f"{colour} bar" for colour in tiny.COLOURS]


@pytest.fixture
def images(tmp_path):
    """Images of the model's size, so that nothing depends on resizing."""
    paths = []
    for number, colour in enumerate(((255, 0, 0), (0, 0, 255), (90, 160, 90))):
        pixels = np.random.default_rng(number).integers(0, 60, (32, 32, 3), np.uint8)
        pixels[8:24, 14:18] = colour
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels).save(paths[-1])
    return [str(path) for path in paths]


def by_classify(capsys, run_dir, images, figure):
    """Returns the figure of every image and label."""
    labels = ("--labels", ",".join(NAMES), "--samples", "0", "--json")
    capsys.readouterr()
    assert main(["classify", *images, "--checkpoint", str(run_dir), *labels]) == 0
    answers = json.loads(capsys.readouterr().out)
    return [{found["label"]: found[figure] for found in answer["labels"]} for answer in answers]


def by_pipeline(folder, images):
    pipeline = transformers.pipeline("zero-shot-image-classification", model=str(folder), device="cpu")
    answers = pipeline(images, candidate_labels=NAMES, hypothesis_template="{}")
    return [{found["label"]: found["score"] for found in answer} for answer in answers]


def assert_equal(ours, theirs):
    table, other = (np.array([[answer[name] for name in NAMES] for answer in side]) for side in (ours, theirs))
    np.testing.assert_allclose(other, table, rtol=0, atol=1e-5)
    assert np.ptp(table, axis=1).min() > 1e-3  # labels differ
    np.testing.assert_array_equal(np.argsort(other), np.argsort(table))


def test_a_calibrated_softmax_has_equal_probabilities(capsys, calibrated, images, tmp_path):
    folder = tmp_path / "folder"
    assert main(["export", "--checkpoint", str(calibrated), "--to", "huggingface", "--output", str(folder)]) == 0
    assert_equal(by_classify(capsys, calibrated, images, "probability"), by_pipeline(folder, images))


def test_a_sigmoid_has_the_equal_probability_of_each_label(capsys, lit_config, images, tmp_path):
    head = DeterministicContrastiveConfig(initial_bias=-1.0)
    train(dataclasses.replace(lit_config, task=dataclasses.replace(lit_config.task, head=head, loss=SigmoidLoss())))
    run_dir, folder = lit_config.run_dir, tmp_path / "folder"
    assert main(["export", "--checkpoint", str(run_dir), "--to", "huggingface", "--output", str(folder)]) == 0
    assert_equal(by_classify(capsys, run_dir, images, "pair_probability"), by_pipeline(folder, images))
