"""What an evaluator finds: figures for logs and tables, arrays for pictures, kept in the run's folder."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lit_het.errors import UserError
from lit_het.files import completed, write_atomically
from lit_het.types import EvaluatedModel


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What one evaluator finds on one set.

    Attributes:
        kind: the evaluator, such as ``zero_shot``.
        name: the set.
        figures: by name, such as ``top1``; figures of parts are paths, such as ``fog/3/top1``.
        errors: standard errors of those figures that have one.
        arrays: what reports draw, by name.
        texts: names that arrays index, by name.
    """

    kind: str
    name: str
    figures: Mapping[str, float]
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    texts: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Returns the figures as logs name them, ``<kind>/<name>/<figure>``."""
        return {f"{self.kind}/{self.name}/{figure}": value for figure, value in self.figures.items()}


@runtime_checkable
class Evaluator(Protocol):
    """Measures a model; built by its configuration, which has opened all files before."""

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Measures the model.

        Raises:
            UserError: the model is of a kind that cannot be measured so, or the set cannot be read.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Record:
    """An evaluation as it is kept.

    Attributes:
        evaluation: what was found.
        step: optimizer updates of the checkpoint.
        settings: fields of the evaluator's configuration.
    """

    evaluation: Evaluation
    step: int
    settings: Mapping[str, Any]


def evaluations_folder(run_dir: Path) -> Path:
    """Returns where a run keeps its evaluations."""
    return run_dir / "evaluations"


def write_record(record: Record, run_dir: Path, title: str) -> Path:
    """Writes ``evaluations/<title>.json`` and ``.npz`` into a run's folder, in place of an earlier one.

    Returns:
        The JSON file.
    """
    folder = evaluations_folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    found = record.evaluation
    content = {
        "kind": found.kind,
        "name": found.name,
        "step": record.step,
        "figures": dict(found.figures),
        "standard_errors": dict(found.errors),
        "settings": dict(record.settings),
        "texts": {name: list(texts) for name, texts in found.texts.items()},
    }
    path = folder / f"{title}.json"
    with completed(path.with_suffix(".npz")) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **found.arrays)
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def read_records(run_dir: Path) -> dict[str, Record]:
    """Returns the evaluations of a run by title, in alphabetical order.

    Raises:
        UserError: a file cannot be read.
    """
    return {path.stem: _read(path) for path in sorted(evaluations_folder(run_dir).glob("*.json"))}


def _read(path: Path) -> Record:
    try:
        content = json.loads(path.read_text("utf-8"))
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
            arrays = dict(file)
        found = Evaluation(
            kind=content["kind"],
            name=content["name"],
            figures=content["figures"],
            errors=content["standard_errors"],
            arrays=arrays,
            texts=content["texts"],
        )
        return Record(found, content["step"], content["settings"])
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is no evaluation ({reason}); delete it, and evaluate again") from error
