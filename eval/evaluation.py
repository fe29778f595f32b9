"""Results of evaluators: metrics for logs and tables, arrays for plots, saved in the run's folder."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_het import distributed, untrusted
from lit_het.errors import UserError
from lit_het.eval.metrics.significance import Estimate
from lit_het.files import completed, write_atomically
from lit_het.types import EvaluatedModel
from lit_het.untrusted import Malformed

if TYPE_CHECKING:
    from lit_het.eval.sets.open_sets import Sets
    from lit_het.eval.suite import EvaluationConfig

MAX_DRAWING_BYTES = 2**29
"""The largest size of an evaluation's arrays, in bytes; larger files are rejected."""

CALIBRATED = "calibrated"
"""The setting of a `Record` that says how its probabilities were calibrated; missing where they are as trained."""

FIGURES_OF_TRAINING = (
    *("top1", "nll", "ece", "calibrated/temperature_factor", "mean_average_precision"),
    *("image_to_text_recall1", "text_to_image_recall1", "10_shot"),
    *("pq", "cider", "log_perplexity", "vqa_accuracy", "exact_match", "anls"),
)
"""The figures of evaluations during training that reports draw as curves."""

# The number of figures in a line.
_IN_LINE = 3
# Larger integers in a file are rejected.
_LARGEST = 2**63


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The data of an evaluation that reports draw.

    Attributes:
        arrays: by name.
        texts: lists of strings that arrays index, by name.
    """

    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    texts: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of one evaluator on one set.

    Attributes:
        kind: the evaluator, such as ``zero_shot``.
        name: the set.
        figures: metrics by name, such as ``top1``; metrics of parts are paths, such as ``fog/3/top1``.
        errors: standard errors, for the metrics that have one.
        chance: values of a uniform guess, for the metrics that have one.
        draw: returns the data that reports draw. It reads images again, and is called only where a report may follow.
        calibrated: how the probabilities were calibrated by ``lit-het calibrate``, in words; empty as trained.
    """

    kind: str
    name: str
    figures: Mapping[str, float]
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    chance: Mapping[str, float] = dataclasses.field(default_factory=dict)
    draw: Callable[[], Drawing] = Drawing
    calibrated: str = ""

    def __post_init__(self) -> None:
        # The mean of what is negated, such as log-likelihoods, may be -0.0.
        object.__setattr__(self, "figures", {name: value or abs(value) for name, value in self.figures.items()})

    def metrics(self) -> dict[str, float]:
        """Returns the metrics under their names in logs, ``<kind>/<name>/<figure>``."""
        return {f"{self.kind}/{self.name}/{figure}": value for figure, value in self.figures.items()}


@dataclasses.dataclass(frozen=True)
class Record:
    """A saved evaluation.

    Attributes:
        kind, name, figures, errors, chance: as in `Evaluation`.
        step: the number of optimizer updates of the checkpoint.
        settings: fields of the evaluator's configuration.
        drawing: the data that reports draw.
    """

    kind: str
    name: str
    figures: Mapping[str, float]
    errors: Mapping[str, float]
    chance: Mapping[str, float]
    step: int
    settings: Mapping[str, Any]
    drawing: Drawing

    def estimate(self, figure: str) -> Estimate:
        """Returns a figure with its standard error; NaN for what is missing."""
        return Estimate(self.figures.get(figure, math.nan), self.errors.get(figure, math.nan))


def opened_evaluations(
    configs: Sequence["EvaluationConfig"], sets: "Sets", *models: EvaluatedModel
) -> Callable[..., Iterator[tuple["EvaluationConfig", Evaluation]]]:
    """Opens evaluations, and checks all before any reads images; returns the loop over them.

    Args:
        configs: the evaluations.
        sets: that the models read.
        models: one, or the members of an ensemble; the loop is called with these, or later ones of the same kind.
    """
    evaluators: list[Any] = [config.build(sets) for config in configs]
    for evaluator in evaluators:
        evaluator.check(*models)

    def evaluate(*models: EvaluatedModel) -> Iterator[tuple["EvaluationConfig", Evaluation]]:
        for config, evaluator in zip(configs, evaluators, strict=True):
            yield config, evaluator(*models)

    return evaluate


def of_part(part: str, figures: Mapping[str, float]) -> dict[str, float]:
    """Returns the figures of a part under their paths; those of the part without a name keep their names."""
    return {f"{part}/{name}" if part else name: value for name, value in figures.items()}


def line(evaluation: Evaluation) -> str:
    """Returns a few figures of an evaluation in one line, with standard errors."""
    known = [figure for figure in FIGURES_OF_TRAINING if figure in evaluation.figures]
    figures = ", ".join(
        f"{figure} {cell(evaluation, figure)}" for figure in (known or [*evaluation.figures])[:_IN_LINE]
    )
    return f"{evaluation.kind.replace('_', '-')} {evaluation.name}: {figures}"


def cell(evaluation: Evaluation, path: str, *, with_error: bool = True) -> str:
    """Returns a figure with four decimals and its standard error; empty if the evaluation lacks it."""
    if path not in evaluation.figures:
        return ""
    error = evaluation.errors.get(path, math.nan) if with_error else math.nan
    return f"{evaluation.figures[path]:z.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def evaluations_folder(run_dir: Path) -> Path:
    """Returns the folder of a run's evaluations."""
    return run_dir / "evaluations"


def write_record(evaluation: Evaluation, run_dir: Path, step: int, settings: Mapping[str, Any]) -> Path:
    """Writes ``evaluations/<kind>_<name>.json`` and ``.npz`` into a run's folder, and replaces earlier ones.

    All processes must call it, as they draw together; the main process writes.

    Returns:
        The path of the JSON file.
    """
    # The configuration may be an untrusted JSON file: a slash in the name would lead out of the folder.
    if "/" in evaluation.name or not evaluation.name.isprintable():
        raise UserError(f"the set {evaluation.name!r} cannot be part of a file name; give it another name")
    drawing = evaluation.draw()
    content = {
        "kind": evaluation.kind,
        "name": evaluation.name,
        "figures": dict(evaluation.figures),
        # JSON has no NaN; a missing error reads as unknown.
        "errors": {name: error for name, error in evaluation.errors.items() if math.isfinite(error)},
        "chance": dict(evaluation.chance),
        "step": step,
        "settings": {**settings, CALIBRATED: evaluation.calibrated} if evaluation.calibrated else dict(settings),
        "texts": {name: list(texts) for name, texts in drawing.texts.items()},
    }
    arrays: dict[str, Any] = dict(drawing.arrays)
    folder = evaluations_folder(run_dir)
    path = folder / f"{evaluation.kind}_{evaluation.name}.json"
    if not distributed.is_main_process():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with completed(path.with_suffix(".npz")) as partial:
            with partial.open("wb") as file:
                np.savez_compressed(file, **arrays)
            # Old figures must never be paired with new arrays, so the old JSON file is removed first.
            path.unlink(missing_ok=True)
        write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from error
    return path


def read_records(run_dir: Path) -> list[Record]:
    """Returns the evaluations of a run in alphabetical order."""
    return [_read(path) for path in sorted(evaluations_folder(run_dir).glob("*.json"))]


def _read(path: Path) -> Record:
    try:
        content = untrusted.read_json_object(path)
        _check_types(content)
        content["drawing"] = Drawing(_arrays(path.with_suffix(".npz")), content.pop("texts"))
        return Record(**content)
    except (OSError, Malformed, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} is not a valid evaluation ({reason}); delete it, and evaluate again") from error


def _arrays(path: Path) -> dict[str, np.ndarray]:
    headers = untrusted.read_npz_headers(path)
    # Sizes are summed over all arrays before one of them is read.
    if sum(header.nbytes for header in headers.values()) > MAX_DRAWING_BYTES:
        raise Malformed(f"{path.name} has more than {MAX_DRAWING_BYTES:,} bytes of arrays")
    return {name: untrusted.read_npz_array(path, name) for name in headers}


def _check_types(content: Mapping[str, Any]) -> None:
    """Checks that JSON has the structure that `write_record` writes; raises `TypeError` or `KeyError`."""
    for field, kind in (("kind", str), ("name", str), ("step", int), ("settings", dict)):
        if not isinstance(content[field], kind):
            raise TypeError(f"{field} is not of type {kind.__name__}")
    if not 0 <= content["step"] < _LARGEST:
        raise TypeError("step is not a valid number of steps")
    for field, kind in (("figures", int | float), ("errors", int | float), ("chance", int | float), ("texts", list)):
        if not isinstance(content[field], dict):
            raise TypeError(f"{field} is not of type dict")
        for name, value in content[field].items():
            is_too_large = type(value) is int and abs(value) > _LARGEST
            has_non_strings = isinstance(value, list) and not all(isinstance(one, str) for one in value)
            if not isinstance(value, kind) or is_too_large or has_non_strings:
                raise TypeError(f"{field}: {name[:100]} is {value!r:.100}")
