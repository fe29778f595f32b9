"""``lit-het classify``: predictions of a trained model for single images, in the terminal."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_het.data_pipelines import storage
from lit_het.data_pipelines.images import BrokenImage
from lit_het.data_pipelines.storage import reason
from lit_het.errors import UserError, require_at_least
from lit_het.eval.answers import (
    Answer,
    NoiseRank,
    answer,
    features_of,
    label_predictor,
    noise_ranks,
    require_distinct_labels,
    split_labels,
)
from lit_het.eval.conformal import ConformalThresholds, candidates_digest, read_conformal
from lit_het.eval.evaluation import read_records
from lit_het.eval.predictions import samples_of
from lit_het.eval.prompts import BARE_TEMPLATE, FAMILIES, SET_PROMPTS, fill_template, read_prompts
from lit_het.runs.opening import Run, open_run
from lit_het.runs.saved_calibration import calibration_path
from lit_het.tasks.classification import ClassificationTask
from lit_het.types import Calibration, EvaluatedModel

STANDARD_INPUT = "-"
_BAR_WIDTH = 16


@dataclasses.dataclass(frozen=True)
class ClassifyOptions:
    """Options of a classification.

    Attributes:
        labels: separated by commas, or a file with one label per line.
        prompts: a family of `lit_het.eval.prompts.FAMILIES`, or a file; None for the labels without a template.
        samples: S, noise samples per image; 0 for no noise; None for as many as the temperature was fitted for, or 32.
        seed: seed of the noise.
        top: number of labels in a table.
        coverage: the probability that the prediction set of an image contains its label; None for no set.
        calibrated: whether to apply the fitted temperatures of ``lit-het calibrate``, if there are any.

    Raises:
        UserError: a number out of range.
    """

    labels: str
    prompts: str | None = None
    samples: int | None = None
    seed: int = 0
    top: int = 10
    coverage: float | None = None
    calibrated: bool = True

    def __post_init__(self) -> None:
        if self.samples is not None:
            require_at_least(0, self, "samples")
        require_at_least(1, self, "top")
        if self.coverage is not None and not 0 < self.coverage < 1:
            raise UserError(f"--coverage {self.coverage:g} must lie between 0 and 1")


def classify(
    images: Sequence[str],
    checkpoint: Path,
    options: ClassifyOptions,
    *,
    pretrained: Path | None = None,
    as_json: bool = False,
) -> None:
    """Prints a table for each image, or one JSON list for all.

    Args:
        images: paths, addresses, or ``-`` for the standard input.
        checkpoint: directory of the run.
        options: of the classification.
        pretrained: current path of the run with the locked parameters, if it was moved.
        as_json: whether to print JSON.

    Raises:
        UserError: an image, the labels or the prompts cannot be used, the run cannot be opened, or it has no thresholds
            of prediction sets for ``coverage``.
    """
    labels, templates = read_labels(options.labels), read_templates(options.prompts)
    thresholds, threshold = None, None
    if options.coverage is not None:
        thresholds = read_conformal(calibration_path(checkpoint))
        threshold = thresholds.at(options.coverage)
    encoded = [read_image(image) for image in images]
    run = open_run(checkpoint, pretrained)
    if options.prompts is not None and isinstance(run.task, ClassificationTask):
        raise UserError(f"{checkpoint} is a classifier and takes no prompts; leave out --prompts")
    squares = [decode(data, run, image) for image, data in zip(images, encoded, strict=True)]
    model = run.model(calibrated=options.calibrated)
    samples = samples_of(model, options.samples)
    if threshold is not None and model.calibration is None:
        raise UserError(
            "--coverage needs the probabilities that its thresholds were fitted to: leave out --uncalibrated, and run "
            f"lit-het calibrate {checkpoint} again if its calibration is of another step"
        )
    predictor = label_predictor(model, labels, templates)
    answers = [answer(predictor, row, samples, options.seed) for row in features_of(model.features, squares)]
    records = read_records(checkpoint)
    ranks = [noise_ranks(found.noise_norm, records, run.step) for found in answers]
    sets = [None if threshold is None else [labels[i] for i in found.prediction_set(threshold)] for found in answers]
    is_covered = thresholds is not None and are_fitted(thresholds, model, labels, templates)
    coverage = options.coverage if is_covered else None
    rows = list(zip(images, answers, ranks, sets, strict=True))
    if as_json:
        print(json.dumps([_json(*row, labels, coverage) for row in rows], indent=1, ensure_ascii=False))
        return
    for image, found, ranked, inside in rows:
        Console().print(_table(image, found, labels, options.top, model.calibration))
        if inside is not None:
            Console().print(describe_set(inside, coverage, options.top), markup=False, highlight=False)
        Console().print(_noise(found, ranked), "", sep="\n", markup=False, highlight=False)


def are_fitted(
    thresholds: ConformalThresholds, model: EvaluatedModel, labels: Sequence[str], templates: Sequence[str]
) -> bool:
    """Returns whether thresholds were fitted among these candidates, so that the coverage holds for them."""
    if model.text is None:  # it chooses among its own classes
        return len(labels) == thresholds.num_classes
    if len(templates) > 1:  # the mean over several prompts is no caption
        return False
    tokens = model.text.tokenize([fill_template(templates[0], label) for label in labels])
    # Labels of equal tokens share one probability, which the thresholds do not expect.
    is_distinct = len(np.unique(tokens, axis=0)) == len(tokens)
    return is_distinct and candidates_digest(tokens) == thresholds.candidates


def read_labels(labels: str) -> tuple[str, ...]:
    """Reads the argument of ``--labels``.

    Raises:
        UserError: the file cannot be read, or there are not at least two different labels.
    """
    is_file = Path(labels).is_file()
    found = storage.read_lines(labels) if is_file else split_labels(labels)
    try:
        require_distinct_labels(found)
    except UserError as error:
        hint = "" if is_file else " (there is no such file)"
        raise UserError(f"--labels {labels}: {error}{hint}") from error
    return found


def read_templates(prompts: str | None) -> tuple[str, ...]:
    """Reads the argument of ``--prompts``.

    Raises:
        UserError: as `lit_het.eval.prompts.read_prompts`, or it names the prompts of a data set, as there is none.
    """
    if prompts == SET_PROMPTS:
        raise UserError(f"--prompts {SET_PROMPTS}: there is no data set; give a file or one of {', '.join(FAMILIES)}")
    return BARE_TEMPLATE if prompts is None else read_prompts(prompts)


def read_image(image: str) -> bytes:
    """Reads a file, an address or the standard input.

    Raises:
        UserError: it cannot be read.
    """
    if image == STANDARD_INPUT:
        return sys.stdin.buffer.read()
    try:
        return storage.read_whole(image)
    except (OSError, ValueError) as error:
        raise UserError(f"{image}: cannot be read ({reason(error)}); check the path") from error


def decode(data: bytes, run: Run, name: str) -> UInt8[np.ndarray, "size size 3"]:
    """Returns an image, preprocessed for the run's image tower.

    Raises:
        UserError: the bytes are not an image.
    """
    trained_on = run.config.data
    try:
        return trained_on.preprocessing.apply(data, trained_on.image_size)
    except BrokenImage as error:
        where = "the standard input" if name == STANDARD_INPUT else name
        raise UserError(f"{where}: {reason(error)}") from error


def _table(image: str, found: Answer, labels: Sequence[str], top: int, calibration: Calibration | None) -> Table:
    shown = Table(title=Text(image), title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("label", overflow="fold")
    shown.add_column("no noise", justify="right")
    if found.noisy is not None:
        shown.add_column("mean", justify="right")
    if found.band is not None:
        shown.add_column("5–95 %", justify="right", no_wrap=True)
    shown.add_column("0" + f"{found.scale:.0%}".rjust(_BAR_WIDTH - 1), no_wrap=True)
    for place in found.order[:top]:
        band = None if found.band is None else found.band[:, place]
        cells = [f"{found.probability[place]:.1%}"]
        cells += [] if found.noisy is None else [f"{found.noisy[place]:.1%}"]
        cells += [] if band is None else [f"{band[0]:.1%} – {band[1]:.1%}"]
        shown.add_row(Text(labels[place]), *cells, _bar(float(found.probability[place]), band, found.scale))
    rest = found.order[top:]
    others = [f"and {len(rest):,} other labels with {found.probability[rest].sum():.1%}"] if len(rest) else []
    # Text, not str: rich would parse brackets in a path as markup.
    shown.caption = Text("\n".join((*others, str(calibration or "not calibrated"))))
    return shown


def _bar(probability: float, band: np.ndarray | None, scale: float) -> str:
    """Draws a probability as a solid bar and its band shaded; the overlap is darker."""
    low, high = (0, 0) if band is None else band / scale
    starts = np.arange(_BAR_WIDTH) / _BAR_WIDTH
    shaded = (starts < high) & (starts + 1 / _BAR_WIDTH > low)
    filled = starts + 0.5 / _BAR_WIDTH < probability / scale
    signs = np.array([[" ", "▒"], ["█", "▓"]])
    return "".join(signs[filled.astype(int), shaded.astype(int)])


def describe_set(inside: Sequence[str], coverage: float | None, top: int) -> str:
    """Returns a prediction set in one line, with its ``top`` most probable labels."""
    rest = f" and {len(inside) - top:,} more" if len(inside) > top else ""
    shown = f"{', '.join(inside[:top])}{rest}"
    if coverage is None:
        return f"prediction set: {shown}. No coverage is promised: the run was calibrated among other labels"
    return f"prediction set of {100 * coverage:g} % coverage: {shown}"


def _noise(found: Answer, ranks: Sequence[NoiseRank]) -> str:
    """Returns the noise norm of an image and its rank among the images of evaluated sets."""
    if not found.noise_norm:
        return "no noise: the head is deterministic for images"
    lines = [", ".join((f"noise norm {found.noise_norm:.3f}", *map(str, ranks)))]
    if found.samples is not None:
        lines.append(f"▒ holds 90 % of {len(found.samples)} noise samples")
    return "\n".join(lines)


def _json(
    image: str,
    found: Answer,
    ranks: Sequence[NoiseRank],
    inside: Sequence[str] | None,
    labels: Sequence[str],
    coverage: float | None,
) -> dict[str, Any]:
    low, high = (None, None) if found.band is None else found.band

    def at(values: np.ndarray | None, place: int) -> float | None:
        return None if values is None else float(values[place])

    return {
        "image": image,
        "noise_norm": found.noise_norm,
        "noise_above": {rank.name: rank.fraction_below for rank in ranks},
        "samples": 0 if found.samples is None else len(found.samples),
        "prediction_set": inside,
        "coverage": coverage,
        "calibrated": found.raw is not None,
        "labels": [
            {
                "label": labels[place],
                "probability": float(found.probability[place]),
                "raw_probability": float((found.probability if found.raw is None else found.raw)[place]),
                "noisy_mean": at(found.noisy, place),
                "noisy_5_percent": at(low, place),
                "noisy_95_percent": at(high, place),
            }
            for place in found.order
        ],
    }
