"""Predictions print well, are escaped in notebooks, and become arrays and tables."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from lit_het.eval.answers import Answer, NoiseRank
from lit_het.eval.predictions import Predictor
from lit_het.models.candidates import Candidates
from lit_het.models.results import Classifications, classification
from lit_het.types import ImageFeatures
from tests.eval.fake_model import FakeModel
from tests.refusals import assert_refused

LABELS = ("a <b>cat</b>", "a [red]dog", "a bird")
PROBABILITY = np.array([0.25, 0.7, 0.05], np.float32)


@pytest.fixture
def among():
    fake = FakeModel(ImageFeatures(lambda view: view, 1, 1, ""), lambda features, count, names: features)
    return Candidates(LABELS, Predictor(fake, 3), threshold=np.log(0.2), coverage=0.9)


@pytest.fixture
def found(among):
    samples = np.random.default_rng(0).dirichlet([1, 2, 1], 64).astype(np.float32)
    answer = Answer(PROBABILITY, 0.5, samples.mean(axis=0), samples, PROBABILITY / 2)
    return classification("x & y.png", answer, among, [NoiseRank("pets", 10, 0.3)], None)


@pytest.fixture
def deterministic(among):
    without_set = dataclasses.replace(among, threshold=None, coverage=None)
    return classification("z.png", Answer(PROBABILITY, 0.0), without_set, [], None)


def test_a_prediction_maps_labels_to_probabilities_in_descending_order(found):
    assert dict(found) == pytest.approx({LABELS[1]: 0.7, LABELS[0]: 0.25, LABELS[2]: 0.05})
    assert list(found) == [LABELS[1], LABELS[0], LABELS[2]]
    assert found.label == LABELS[1]
    assert len(found) == 3
    assert "a fish" not in found
    np.testing.assert_array_equal(found.to_numpy(), PROBABILITY)
    assert found.prediction_set == (LABELS[1], LABELS[0])


def test_a_prediction_prints_a_table(found, deterministic):
    lines = repr(found).splitlines()
    assert lines[0].strip() == "x & y.png"
    low, high = found.band[:, 1]
    (row,) = [line for line in lines if "a [red]dog" in line and "70.0%" in line]
    assert f"{low:.1%} – {high:.1%}" in row
    assert f"{found.noisy_mean[1]:.1%}" in row
    assert "prediction set of 90 % coverage: a [red]dog, a <b>cat</b>" in repr(found)
    assert "noise norm 0.500, 30% of the 10 images of pets have less" in repr(found)
    assert "▒ holds 90 % of 64 noise samples" in repr(found)
    assert "–" not in repr(deterministic)
    assert "no noise: the head is deterministic for images" in repr(deterministic)
    assert max(map(len, repr(found).splitlines())) <= 100


@pytest.mark.parametrize("samples", [None, PROBABILITY[None] / 2])
def test_without_two_samples_there_is_a_mean_and_no_band(among, samples):
    answer = Answer(PROBABILITY, 0.5, PROBABILITY / 2, samples)
    one = classification("z.png", answer, among, [], None)
    assert one.band is None
    assert one.num_samples == (0 if samples is None else 1)
    assert one.to_dict()["labels"][0]["noisy_5_percent"] is None
    printed = repr(one)
    (row,) = [line for line in printed.splitlines() if "a [red]dog" in line and "70.0%" in line]
    assert "35.0%" in row
    assert "–" not in printed
    assert "▒ holds" not in printed
    assert ("the mean is a closed form: there are no noise samples" in printed) == (samples is None)


def test_several_predictions_are_a_sequence_and_print_a_row_each(found, deterministic):
    both = Classifications([found, deterministic])
    assert both[0] is found
    assert both[-1] is deterministic
    assert list(both) == [found, deterministic]
    assert isinstance(both[:1], Classifications)
    np.testing.assert_array_equal(both.to_numpy(), np.stack([PROBABILITY, PROBABILITY]))
    assert Classifications([]).to_numpy().shape == (0, 0)
    assert "2 images, 3 labels" in repr(both)
    (row,) = [line for line in repr(both).splitlines() if "x & y.png" in line]
    assert "a [red]dog" in row
    assert "0.500" in row
    assert "1 image, 3 labels" in repr(both[:1])
    assert "and 5 other images" in repr(Classifications([found] * 25))
    assert repr(Classifications([])) == "no images"


def test_notebooks_get_escaped_tables(found):
    for shown in (found._repr_html_(), Classifications([found])._repr_html_()):
        assert "x &amp; y.png" in shown
        assert "<b>" not in shown
        assert shown.count("<table>") == shown.count("</table>") == 1
    assert "a &lt;b&gt;cat&lt;/b&gt;" in found._repr_html_()
    assert found._repr_html_().count("<tr>") == 4


def test_json_holds_every_figure(found, deterministic):
    content = json.loads(json.dumps(found.to_dict()))
    assert content["prediction_set"] == [LABELS[1], LABELS[0]]
    assert content["samples"] == 64
    assert [row["label"] for row in content["labels"]] == list(found)
    assert content["labels"][0]["raw_probability"] == pytest.approx(0.35)
    assert content["labels"][0]["noisy_5_percent"] == pytest.approx(float(found.band[0, 1]))
    assert json.loads(json.dumps(deterministic.to_dict()))["labels"][0]["noisy_mean"] is None


def test_a_pandas_table_has_a_row_for_each_image_and_label_and_without_pandas_an_error_says_how_to_install_it(
    found, deterministic, monkeypatch
):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pandas", None)
        assert_refused("pip install pandas", found.to_pandas)
    pytest.importorskip("pandas")
    table = Classifications([found, deterministic]).to_pandas()
    assert list(table["image"]) == ["x & y.png"] * 3 + ["z.png"] * 3
    first = table.iloc[0]
    assert (first["label"], first["in_prediction_set"], first["noise_norm"]) == (LABELS[1], True, 0.5)
    assert first["probability"] == pytest.approx(0.7)
    assert table["in_prediction_set"].tolist()[:3] == [True, True, False]
    assert len(found.to_pandas()) == 3
