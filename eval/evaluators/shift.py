"""Evaluates robustness to corrupted images: accuracy and calibration by severity."""

import dataclasses
import glob
from collections.abc import Mapping

import numpy as np

from lit_het.console import message
from lit_het.data_pipelines.images.corruptions import EXTRA
from lit_het.data_pipelines.labels_config import CLASS_NAMES_FILE
from lit_het.data_pipelines.shards import storage, urls
from lit_het.data_pipelines.shards.writing import matching
from lit_het.data_pipelines.texts.prompts import read_classnames
from lit_het.errors import UserError, pluralize
from lit_het.eval.evaluation import Drawing, Evaluation
from lit_het.eval.metrics import scores
from lit_het.eval.metrics.calibration import scaled
from lit_het.eval.predictions import Predictions
from lit_het.eval.sets.open_sets import OpenSet, Sets
from lit_het.eval.sets.recognition import Recognition
from lit_het.types import EvaluatedModel

FIGURES = ("top1", "nll", "brier", "ece", "ece_equal_mass")
# Calibrated by the temperature that fits the clean set, as in Ovadia et al. 2019. Each half of the clean set is scaled
# by the temperature of the other half, and copies by the geometric mean of both temperatures.
CALIBRATED = ("calibrated_nll", "calibrated_ece")


@dataclasses.dataclass(frozen=True)
class Shift:
    """The evaluator of a `ShiftConfig`; keys of ``copies`` are ``<corruption>/<severity>``."""

    clean: OpenSet
    copies: dict[str, OpenSet]
    recognition: Recognition
    samples: int

    def check(self, model: EvaluatedModel) -> None:
        """Checks a model as `Recognition.check` does."""
        self.recognition.check(model, self.samples)

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns metrics of the clean set and of every copy, and means by severity and over the benchmark's copies."""
        predictor = self.recognition.predictor(model, self.samples)
        by_part, errors, temperature = {}, {}, 1.0
        for part, opened in {"clean": self.clean, **self.copies}.items():
            predictions = self.recognition.predict(predictor, opened.features(model.features))
            found, part_errors = scores.figures(predictions)
            if part == "clean":
                rescaled, temperature = scores.calibrated(predictions, self.clean.config.name)
            else:
                log_p = scaled(predictions.log_probabilities, temperature)
                rescaled = dataclasses.replace(predictions, log_probabilities=log_p)
            by_part[part] = found | _calibrated(rescaled)
            errors |= {f"{part}/{name}": part_errors[name] for name in FIGURES if name in part_errors}
        # Papers report the mean of the 15 corruptions that are not for validation.
        averaged = [part for part in self.copies if part.partition("/")[0] not in EXTRA] or list(self.copies)
        for severity in sorted({part.rpartition("/")[2] for part in averaged}):
            by_part[f"severity_{severity}"] = _mean([by_part[p] for p in averaged if p.endswith(f"/{severity}")])
        by_part["corrupted"] = _mean([by_part[part] for part in averaged])
        figures = {f"{part}/{name}": found[name] for part, found in by_part.items() for name in (*FIGURES, *CALIBRATED)}
        chance = scores.chance(len(self.recognition.class_names))
        table = np.array([[by_part[part][name] for name in FIGURES] for part in ("clean", *self.copies)])
        return Evaluation(
            kind="shift",
            name=self.clean.config.name,
            figures=figures,
            errors=errors,
            chance={f"{part}/{name}": chance[name] for part in by_part for name in FIGURES},
            draw=lambda: Drawing({"table": table}, {"parts": ("clean", *self.copies), "figures": FIGURES}),
            calibrated=str(model.calibration or ""),
        )


def open_copies(folder: str, clean: OpenSet, sets: Sets) -> dict[str, OpenSet]:
    """Opens the corrupted copies of a set, by ``<corruption>/<severity>``."""
    places = _severities(folder)
    if not places:
        raise UserError(f"no shards in {folder}/<corruption>/<severity>; lit-het data corrupt makes them")
    for place in (folder, *dict.fromkeys(map(urls.parent, places.values()))):
        _check_names(place, clean)
    copies = {}
    for part, place in places.items():
        # Copies have the class names of the clean set, even in another folder.
        name, split = f"{clean.config.name} {part}", urls.absolute(place)
        copies[part] = sets.open(dataclasses.replace(clean.config, name=name, split=split, embeddings=None))
    _report_missing(copies, clean)
    return copies


def _report_missing(copies: dict[str, OpenSet], clean: OpenSet) -> None:
    """Says which copies, and images of them, the means are without."""
    corruptions, severities = (dict.fromkeys(part.split("/")[place] for part in copies) for place in (0, 1))
    missing = [f"{name}/{one}" for name in corruptions for one in severities if f"{name}/{one}" not in copies]
    if missing:
        message(f"{clean.config.name}: means lack copies that there are of other severities: {_some(missing)}")
    whole, counts = clean.loader.num_samples, {part: copy.loader.num_samples for part, copy in copies.items()}
    if others := [f"{part} ({count:,})" for part, count in counts.items() if count != whole]:
        message(
            f"{clean.config.name}: holds {pluralize(whole, 'image')}, and these copies other numbers: {_some(others)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)


def _severities(folder: str) -> Mapping[str, str]:
    """Returns the folders of shards two levels below, in order, by ``<corruption>/<severity>``."""
    shards = matching(f"{glob.escape(folder.rstrip('/'))}/*/*/*.tar")
    return {"/".join(place.split("/")[-2:]): place for place in sorted(set(map(urls.parent, shards)))}


def _check_names(place: str, clean: OpenSet) -> None:
    """Checks that copies with their own class names have those of the clean set; most copies have none."""
    if storage.exists(f"{place}/{CLASS_NAMES_FILE}") and read_classnames(place) != clean.class_names:
        raise UserError(
            f"{place}/{CLASS_NAMES_FILE} differs from {clean.config.directory}/{CLASS_NAMES_FILE}: these are not "
            f"copies of {clean.config.name}; give the folder of its copies with --corrupted"
        )


def _mean(figures: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([part[name] for part in figures])) for name in (*FIGURES, *CALIBRATED)}


def _calibrated(rescaled: Predictions) -> dict[str, float]:
    values = 0.0 - float(rescaled.label_log_p.mean()), rescaled.reliability().expected_calibration_error
    return dict(zip(CALIBRATED, values, strict=True))
