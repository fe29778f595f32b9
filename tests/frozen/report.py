"""Figures and files of a small report: two heads with two seeds each, trained and evaluated by their commands."""

import contextlib
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

from lit_het.cli.main import main as lit_het
from tests import conftest, tiny
from tests.frozen import files, steps
from tests.frozen.figures import rounded

# Cases of `steps`, trained until their figures are no matter of chance.
_HEADS = {
    "plain": "--config softmax_ring.json --task.loss.form gather --task.locked image_tower/.*",
    "het_xl": "--config het_xl_delta.json --task.head.num-samples 4 --task.loss.likelihood samples",
}
_LONGER = "--length 60 --schedule.learning-rate 0.1 --cadence.log-steps 20 --cadence.save-steps 60"
_RUNS = [f"{head}/member_{seed}" for head in _HEADS for seed in (0, 1)]
_SET = "--data shapes=held_out/train --split ."
_EVALUATIONS = (
    f"zero-shot {_SET} --samples 4",
    f"retrieval {_SET}",
    f"few-shot {_SET} --train-split ../../data/train --shots 1 2 --seeds 0 1 --l2 1.0",
)
_IN_WORDS = ("verdict", "remarks", "untested")
# Names in these folders of a run, below so many parts of their paths, are the matter of other libraries.
_DEPTHS = {"checkpoints": 2, "tensorboard": 1}


def recorded() -> dict[str, Any]:
    """Returns what `figures` does, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), conftest.one_device():
        return figures()


def figures() -> dict[str, Any]:
    """Trains, calibrates, evaluates and reports in the working directory; returns all figures and names of files."""
    steps.write({name: case["config"] for name, case in files.read("steps").items()})
    tiny.write_data(Path("held_out"), num_samples=120, seed=1, every_wrong=7)
    for head, flags in _HEADS.items():
        _run(f"train {flags} {_LONGER} --run-dir {head} --members 2")
    for run in _RUNS:
        _run(f"calibrate {run} --data held_out/train --samples 4")
        for evaluation in _EVALUATIONS:
            _run(f"{evaluation} --checkpoint {run} --output {run}/{evaluation.split()[0]}.json")
    _run(f"report {' '.join(_RUNS)} --output report/report.html")
    run = Path(_RUNS[-1])
    with Path("report/report.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == str(run)]
    return rounded(
        {
            "files of a run": _names(run),
            "files of a report": _names(Path("report")),
            "calibration": json.loads((run / "calibration.json").read_text()),
            "evaluations": [json.loads((run / f"{one.split()[0]}.json").read_text()) for one in _EVALUATIONS],
            "report.csv": [[_number(cell) for cell in row.values()] for row in ({key: key for key in rows[0]}, *rows)],
            "report.json": _without_words(json.loads(Path("report/report.json").read_text())),
        }
    )


def _run(command: str) -> None:
    assert lit_het(command.split()) == 0, command


def _names(folder: Path) -> list[str]:
    paths = [path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file()]
    return sorted({"/".join(parts[: _DEPTHS.get(parts[0])]) for parts in paths})


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _without_words(value: Any) -> Any:
    """Returns a value of JSON that only says where it has sentences: their wording may change."""
    if isinstance(value, list):
        return [_without_words(entry) for entry in value]
    if isinstance(value, dict):
        return {key: bool(entry) if key in _IN_WORDS else _without_words(entry) for key, entry in value.items()}
    return value
