"""Corrupted copies of a set, and pictures that belong to none of its classes."""

import dataclasses
from pathlib import Path

import fsspec
import numpy as np
import pytest
from scipy import special
from sklearn.metrics import roc_auc_score

from eval.evaluators.out_of_distribution import OutOfDistributionConfig
from eval.evaluators.shift import ShiftConfig
from eval.recognition import NamesConfig
from lit_het.errors import UserError

NAMES = ("zero", "one", "two")
CAPTIONS = dict(zip(NAMES, np.eye(3), strict=True))


def test_every_corruption_and_severity_has_figures_and_so_have_their_means(write_set, sets, make_encoder, capsys):
    """Pictures 0, 1, 2; the model is right on those below 2, and copies hold fewer of them."""
    clean = write_set("digits", [{"cls": 0}, {"cls": 1}, {"cls": 0}], NAMES)
    for part, labels in {"fog/1": (0, 1, 2), "fog/2": (1, 1, 0), "noise/1": (1, 0, 0), "noise/2": (2, 2, 0)}.items():
        write_set("digits/corrupted", [{"cls": label} for label in labels], split=part)
    encoder = make_encoder(np.eye(3), CAPTIONS)
    found = ShiftConfig(clean).build(sets)(encoder)
    top1 = {part.removesuffix("/top1"): value for part, value in found.figures.items() if part.endswith("/top1")}
    assert top1 == {
        "clean": pytest.approx(2 / 3),
        "fog/1": 1,
        "fog/2": pytest.approx(1 / 3),
        "noise/1": 0,
        "noise/2": 0,
        "severity_1": pytest.approx(1 / 2),
        "severity_2": pytest.approx(1 / 6),
        "corrupted": pytest.approx(1 / 3),
    }
    drawing = found.draw()
    assert drawing.texts["parts"] == ("clean", "fog/1", "fog/2", "noise/1", "noise/2")
    assert drawing.arrays["table"].shape == (5, 5)
    assert found.errors["fog/1/top1"] == 0
    assert "no temperature" not in capsys.readouterr().err
    # The temperature is the clean set's for all: what it gains there it need not gain elsewhere.
    assert found.figures["clean/calibrated_nll"] <= found.figures["clean/nll"]


def test_a_clean_set_that_fits_no_temperature_is_remarked_on(write_set, sets, make_encoder, capsys):
    clean = write_set("digits", [{"cls": 0}, {"cls": 1}], NAMES)
    write_set("digits/corrupted", [{"cls": 0}], split="fog/1")
    ShiftConfig(clean).build(sets)(make_encoder(np.eye(3), CAPTIONS))
    assert capsys.readouterr().err.count("digits: no temperature fits") == 1
