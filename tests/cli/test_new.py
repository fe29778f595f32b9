"""`lit-het new`: from a tower and shards to a trained, calibrated model that classifies."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from lit_het.configs.experiment import load_module_config
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.runs.saved_calibration import read_calibration
from lit_het.training.metric_log import read_metrics
from tests import tiny
from tests.cli.conftest import printed, refusal, run_command


@pytest.mark.slow
def test_a_new_project_is_trained_calibrated_and_classifies(capsys, upstream, tmp_path):
    project, pairs = tmp_path / "mine", tiny.write_data(tmp_path / "pairs", num_samples=1000) / "train"
    run_command("new", project, "--tower", upstream, "--data", pairs)
    assert f"lit-het train --config {project}/config.py" in capsys.readouterr().err
    assert sorted(path.name for path in project.glob("*.*")) == ["config.py", "tokenizer.model"]
    text = (project / "config.py").read_text()
    assert max(map(len, text.splitlines())) <= 120
    assert 35 <= len(text.partition("def get_config")[2].splitlines()) <= 45
    config = load_module_config(project / "config.py")
    assert config.task.loss == SoftmaxLoss()
    assert str(config.calibration) == "87%:100% by key" == str(config.evaluations[0].data.portion)

    flags = ("--length", "3 steps", "--data.batch-size", "16", "--cadence.log-steps", "1")
    tower = {"depth": 1, "width": 64, "mlp-width": 64, "compute-type": "float32"}
    small = [part for name, value in tower.items() for part in (f"--task.text-tower.encoder.{name}", value)]
    run_command("train", "--config", project / "config.py", *flags, *small)
    names = {name for record in read_metrics(project / "run" / "metrics.jsonl") for name in record}
    assert "retrieval/held_out/image_to_text_recall1" in names
    assert read_calibration(project / "run", 3) is not None

    Image.fromarray(np.zeros((40, 30, 3), np.uint8)).save(tmp_path / "black.png")
    command = ("classify", tmp_path / "black.png", "--checkpoint", project / "run", "--labels", "red bar,blue square")
    (found,) = printed(capsys, *command, "--json")
    assert {label["label"] for label in found["labels"]} == {"red bar", "blue square"}
    assert "already exists" in refusal(capsys, "new", project, "--tower", upstream, "--data", pairs)


def test_weights_are_imported_and_the_tokenizer_of_their_run_is_taken(trained_lit, tmp_path, monkeypatch):
    # Everything fits: a step takes seconds to trace.
    monkeypatch.setattr("lit_het.apps.project.Step", lambda *_: SimpleNamespace(memory=dict))
    data = tiny.write_data(tmp_path / "few", num_samples=8)
    exported, folder = tmp_path / "lit.npz", tmp_path / "huggingface"
    run = trained_lit.run_dir
    run_command("export", "--checkpoint", run, "--to", "npz", "--output", exported)
    run_command("export", "--checkpoint", run, "--to", "huggingface", "--output", folder)
    size = ("--image-size", str(trained_lit.task.image_tower.image_size))
    towers = (
        ("weights", exported, size),
        ("image tower", f"{exported}:img", size),
        ("dual encoder with another text tower", folder, ()),
        ("run", run, ()),
    )
    for name, tower, flags in towers:
        project = tmp_path / name
        run_command("new", project, "--tower", tower, "--data", data / "train", *flags)
        config = load_module_config(project / "config.py")
        assert config.task.image_tower.embedding_size == trained_lit.task.image_tower.embedding_size
        assert (project / "tower").is_dir() == (name != "run")
        own = (trained_lit.run_dir if name == "run" else project) / "tokenizer.model"
        assert config.tokenizer is not None
        assert config.tokenizer.model == own
        assert config.calibration is None, "8 pairs are too few to hold some out"


def test_what_cannot_start_is_one_line_and_leaves_nothing(capsys, upstream, data, tmp_path):
    shards, project = data / "train", tmp_path / "mine"
    for arguments, expected in (
        (("--tower", tmp_path / "none", "--data", shards), "none does not exist"),
        (("--tower", upstream, "--data", tmp_path / "none"), "no tar file matches"),
        (("--tower", upstream, "--data", shards, "--captions", "json/text"), "no sample has an image and a .json"),
        (("--tower", shards, "--data", shards), "unknown format"),
    ):
        assert expected in refusal(capsys, "new", project, *arguments)
    assert list(tmp_path.iterdir()) == []
