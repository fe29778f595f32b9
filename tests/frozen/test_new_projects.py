"""Projects that an earlier ``lit-het new`` wrote are trained by this version."""

import json
import shutil
from pathlib import Path

import pytest

from lit_het.cli.main import main
from tests import tiny
from tests.frozen import kept_runs

PROJECTS = Path(__file__).parent / "new_projects"
SMALL = {"width": 16, "depth": 1, "mlp-width": 16, "num-heads": 2, "compute-type": "float32"}
SIZES = {"length": "2 steps", "data.batch-size": 16, "cadence.log-steps": 1}
# The tower that a project trains, and its evaluation.
TRAINED = {"first_tower": ("image-tower", "supervised/held_out/top1")}
TRAINED |= {"image_text": ("text-tower", "retrieval/held_out/image_to_text_recall1")}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_project_is_trained_and_evaluated(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept_runs.unpack(tmp_path, "classifier")
    tiny.write_data(Path("pairs"), num_samples=1000)
    project = Path(shutil.copytree(PROJECTS / name, name))
    shutil.copy("shapes/tokenizer.model", project)
    config = project / "config.py"
    config.write_text(config.read_text().replace('"/data/', f'"{tmp_path}/'))
    tower, metric = TRAINED[name]
    flags = SIZES | {f"task.{tower}.encoder.{field}": value for field, value in SMALL.items()}
    given = [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    assert main(["train", "--config", str(config), *given]) == 0
    metrics = [json.loads(line) for line in Path(name, "run/metrics.jsonl").read_text().splitlines()]
    assert sum("train/loss" in step for step in metrics) == 2
    assert any(metric in step for step in metrics)
