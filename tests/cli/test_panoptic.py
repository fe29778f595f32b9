"""Masks are evaluated in training and by a command, and their page is written; other models are refused."""

import dataclasses
import json
import shutil

import numpy as np

from lit_het.cli.main import main
from lit_het.eval.evaluation import read_records
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import PanopticConfig
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from tests.cli.conftest import refusal
from tests.cli.test_segmentation import root, stage_2  # noqa: F401  # pyright: ignore[reportUnusedImport]


def test_training_evaluates_masks_and_a_command_finds_the_same(root, tmp_path, capsys):  # noqa: F811
    config = stage_2(root, tmp_path / "run")
    evaluations = (PanopticConfig(ImageSet("scenes", str(root / "data")), shown=3),)
    train(dataclasses.replace(config, evaluations=evaluations))
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    [record] = read_records(tmp_path / "run")
    assert last["panoptic/scenes/pq"] == record.figures["pq"]
    assert 0 <= record.figures["pq"] <= 1
    assert record.drawing.arrays["image"].shape == (3, 64, 64, 3)
    data = ("--data", f"scenes={root}/data", "--shown", "2", "--batch-size", "3")
    assert main(["panoptic", "--checkpoint", str(tmp_path / "run"), *data, "--output", str(tmp_path / "m.json")]) == 0
    found = json.loads((tmp_path / "m.json").read_text())
    for name, value in record.figures.items():
        np.testing.assert_allclose(found[f"panoptic/scenes/{name}"], value, rtol=1e-6)
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "panoptic quality (PQ)" in page
    assert page.count("<figcaption>prediction</figcaption>") == 2
    assert "panoptic-segmentation" in page


def test_models_of_something_else_and_other_evaluations_are_refused_in_one_line(
    root,  # noqa: F811
    upstream,
    data,
    capsys,
    tmp_path,
):
    scenes = ("--data", f"scenes={root}/data")
    assert "the model predicts no masks" in refusal(capsys, "panoptic", "--checkpoint", upstream, *scenes)
    assert "no image tower" in refusal(capsys, "panoptic", "--checkpoint", root / "oracle", *scenes)
    plain = ("--data", f"plain={data}/train", "--split", ".")
    assert "categories.json" in refusal(capsys, "panoptic", "--checkpoint", root / "panoptic", *plain)
    assert "predicts masks, and no classes of images" in refusal(
        capsys, "zero-shot", "--checkpoint", root / "panoptic", *plain
    )
    shutil.copytree(root / "data" / "test", tmp_path / "other" / "test")
    entries = json.loads((root / "data" / "categories.json").read_text())
    (tmp_path / "other" / "categories.json").write_text(json.dumps([*entries, {**entries[0], "id": 90}]))
    of_others = ("--data", f"other={tmp_path}/other")
    message = "other: has 15 categories, and the model predicts masks of 14"
    assert message in refusal(capsys, "panoptic", "--checkpoint", root / "panoptic", *of_others)
