"""The labels that a model chooses among, with the threshold of their prediction sets."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lit_het import arguments
from lit_het.data_pipelines.texts.captions_config import SET_PROMPTS
from lit_het.data_pipelines.texts.prompts import BARE_TEMPLATE, FAMILIES, check_templates, fill_template, read_prompts
from lit_het.errors import UserError
from lit_het.eval.answers import label_predictor
from lit_het.eval.metrics.conformal import ConformalThresholds, candidates_digest, read_conformal
from lit_het.eval.predictions import Predictor
from lit_het.models.calibration.saved import calibration_path
from lit_het.types import EvaluatedModel

_NUM_NEW = 5  # labels that are named


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Labels to choose among.

    Attributes:
        labels: the labels.
        predictor: predicts them.
        threshold: the lowest log-probability in a prediction set, in nats; None if no sets are asked for.
        coverage: the probability that a prediction set has the right label; None where it is not promised.
    """

    labels: tuple[str, ...]
    predictor: Predictor
    threshold: float | None = None
    coverage: float | None = None

    @property
    def new(self) -> tuple[str, ...] | None:
        """The labels that training captions did not have; None if that is unknown."""
        seen = self.predictor.seen
        return None if seen is None else tuple(itertools.compress(self.labels, ~seen))

    @property
    def new_in_words(self) -> str:
        """How many labels training captions did not have, and the first of them; empty for a classifier."""
        if self.predictor.model.text is not None and self.new is None:
            return "which names were in the training captions is not known"
        return ": ".join(filter(None, [self.predictor.new_names, ", ".join((self.new or ())[:_NUM_NEW])]))


def candidates(
    model: EvaluatedModel,
    run_dir: Path,
    labels: Sequence[str],
    prompts: str | Sequence[str] | None = None,
    coverage: float | None = None,
) -> Candidates:
    """Returns the labels with their embeddings, and the threshold of prediction sets from the run's calibration.

    Args:
        model: of the run.
        run_dir: the run.
        labels: two or more; those of a classifier name its classes, in order.
        prompts: see `read_templates`.
        coverage: of prediction sets; None for no sets.
    """
    labels, templates = tuple(arguments.texts(labels, "labels")), read_templates(prompts)
    if prompts is not None and model.text is None:
        raise UserError(f"{run_dir} has no text tower and takes no prompts; leave them out")
    if coverage is None:
        return Candidates(labels, label_predictor(model, labels, templates))
    thresholds = read_conformal(calibration_path(run_dir))
    threshold = thresholds.at(arguments.real(coverage, "coverage"))
    if model.calibration is None:
        raise UserError(
            "a coverage needs the probabilities that its threshold was fitted to: leave out --uncalibrated "
            f"(calibrated=False), and run lit-het calibrate {run_dir} again if its calibration is of another step"
        )
    if model.calibration.prior != "seen":
        raise UserError("a coverage is fitted to images of names that training had: leave out --prior, or --coverage")
    predictor = label_predictor(model, labels, templates)
    is_covered = _are_fitted(thresholds, model, labels, templates)
    return Candidates(labels, predictor, threshold, coverage if is_covered else None)


def read_templates(prompts: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns prompt templates.

    Args:
        prompts: a family of `lit_het.data_pipelines.texts.prompts.FAMILIES`, a file, or templates with ``{c}``; None
            for the labels without a template.
    """
    if prompts is None:
        return BARE_TEMPLATE
    if prompts == SET_PROMPTS:
        raise UserError(f"--prompts {SET_PROMPTS}: there is no data set; give a file or one of {', '.join(FAMILIES)}")
    if isinstance(prompts, str):
        return read_prompts(prompts)
    templates = tuple(arguments.texts(prompts, "prompts"))
    check_templates(templates)
    return templates


def _are_fitted(
    thresholds: ConformalThresholds, model: EvaluatedModel, labels: Sequence[str], templates: Sequence[str]
) -> bool:
    """Returns whether thresholds were fitted among these candidates, so that the coverage holds for them."""
    if model.text is None:  # it chooses among its own classes
        return len(labels) == thresholds.num_classes
    if len(templates) > 1:  # the mean over several prompts is not a caption
        return False
    tokens = model.text.tokenize([fill_template(templates[0], label) for label in labels])
    # Labels of equal tokens share one probability, which the thresholds do not expect.
    is_distinct = len(np.unique(tokens, axis=0)) == len(tokens)
    return is_distinct and candidates_digest(tokens) == thresholds.candidates
