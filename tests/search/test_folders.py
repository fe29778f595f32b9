"""Folders that an earlier version left when it was interrupted: the engine goes on with them, byte for byte.

``folders`` holds what it wrote when it was not: a grid, a search and a sweep of two runs, trained by a stub.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_het.configs import glyph_classifier
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.search import grid, grid_runs, tuning
from lit_het.search.grid import Axis
from lit_het.search.shape import sweeps
from lit_het.search.space import Search

FOLDERS = Path(__file__).parent / "folders"
NLL, RATE = "supervised/held_out/nll", "schedule.learning-rate"
EVALUATION = ZeroShotConfig(ImageSet("held_out", "elsewhere", split="."))
CONFIG = dataclasses.replace(glyph_classifier.get_config(), evaluations=(EVALUATION,))


def write_grid(output: Path) -> None:
    planned = grid.plan(CONFIG, [Axis(RATE, ("0.001", "0.01"))], [3], output)
    grid.run(planned, output, (NLL,))
    grid.table(planned, output, NLL, ["train/loss"])


def write_search(output: Path) -> None:
    tuning.tune(Search(CONFIG, (Axis(RATE, ("0.001", "0.01")),), NLL, output, method="grid"), 2)


def write_sweep(output: Path) -> None:
    sweeps.sweep("grid", CONFIG, output, [NLL], centre={}, vary={"width": [32, 64]}, lengths=["500 steps"])


@pytest.mark.parametrize(
    ("write", "second"), [(write_grid, "*0.01_*"), (write_search, "*1_seed0*"), (write_sweep, "*64*")]
)
def test_an_interrupted_folder_of_an_earlier_version_is_continued(
    write: Callable[[Path], None], second: str, tmp_path, monkeypatch
):
    name, trained = write.__name__.removeprefix("write_"), []

    def train(config, **_):
        trained.append(config.run_dir.name)
        write_metrics(config)

    stub(monkeypatch, train)
    monkeypatch.chdir(tmp_path)  # paths are relative, and so the same
    shutil.copytree(FOLDERS / name, name)
    [lost] = Path(name, "results").glob(second)
    lost.unlink()
    for table in ("table.md", "table.json", "trials.json"):
        Path(name, table).unlink(missing_ok=True)
    write(Path(name))
    assert trained == [lost.stem]
    found, expected = contents(Path(name)), contents(FOLDERS / name)
    assert found.keys() == expected.keys()
    for file, content in expected.items():
        assert of_then(found[file], content) == content, file


def of_then(now: Any, before: Any) -> Any:
    """Returns JSON without the fields of configurations that the earlier version had not."""
    if not isinstance(now, dict) or "config" not in now or not isinstance(before, dict):
        return now
    return now | {"config": {field: now["config"][field] for field in before["config"]}}


def stub(monkeypatch: pytest.MonkeyPatch, train: Callable[..., None]) -> None:
    """Takes the place of training, and of what is traced."""
    monkeypatch.setattr(grid_runs, "train_unless_done", train)
    monkeypatch.setattr(grid_runs, "abstract_params", lambda _: {})
    monkeypatch.setattr(sweeps, "_gflop_per_step", lambda config: 0.5 * config.task.image_tower.encoder.width)


def write_metrics(config) -> None:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    # Which run is best does not depend on the order.
    loss = config.schedule.learning_rate * config.task.image_tower.encoder.width
    (config.run_dir / "metrics.jsonl").write_text(json.dumps({"step": 4, "train/loss": loss, NLL: 2 * loss}) + "\n")


def contents(folder: Path) -> dict[str, Any]:
    """Returns the files of a folder without locks and pages, and without the time that a run took."""
    files = (path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".md"))
    texts = {path: re.sub(r'"seconds": [^,]+', '"seconds": 0', path.read_text()) for path in files}
    return {
        str(path.relative_to(folder)): json.loads(text) if path.suffix == ".json" else text
        for path, text in texts.items()
    }
