"""Fits temperatures of names that training captions had and of new ones."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het.calibrations import FittedNames, NameCalibration
from lit_het.data_pipelines.texts.familiarity import Familiarity, Rule, rules
from lit_het.eval.metrics.names import NoFit, fit_names, with_offset
from lit_het.models.calibration.split import LEAST_IMAGES

LEAST_NAMES = 100
"""Fewer captions that training had not say too little of others."""


class OneTemperature(Exception):
    """Why seen and new names share a temperature."""


def fit_by_names(
    log_p: Mapping[int, Float[np.ndarray, "n k"]],
    labels: Int[np.ndarray, " n"],
    names: Sequence[Sequence[str]],
    familiarity: Familiarity,
) -> tuple[NameCalibration, Bool[np.ndarray, " n"]]:
    """Returns how predictions of seen and of new names differ, and the images of seen ones.

    Whether training had a caption is known; of the rules for names that are no captions, the one of the highest
    likelihood is taken.

    Args:
        log_p: log-probabilities by the number of noise samples.
        labels: the names of the images.
        names: the captions of each name, which have equal tokens.
        familiarity: of the training captions.

    Raises:
        OneTemperature: with the reason.
    """
    by_rule: dict[Rule, Bool[np.ndarray, " k"]] = {
        rule: np.array([familiarity.knows(several, rule).any() for several in names]) for rule in rules()
    }
    is_seen = by_rule["caption"][labels]
    num_new = len(np.unique(labels[~is_seen]))
    if is_seen.sum() < LEAST_IMAGES:
        raise OneTemperature("nearly all captions differ from those of training, so that seen names cannot be compared")
    if num_new < LEAST_NAMES:
        raise OneTemperature(
            f"{num_new} captions of these images were not in training, fewer than {LEAST_NAMES}; more of them are held "
            "out by a larger --calibration PORTION 'by name'"
        )
    found = list[tuple[float, Rule, dict[int, FittedNames]]]()
    for rule, seen in by_rule.items():
        if min(seen[labels].sum(), (~seen)[labels].sum()) >= LEAST_IMAGES:
            try:
                fitted = {samples: fit_names(values, labels, seen) for samples, values in log_p.items()}
            except NoFit:
                continue
            log_q = with_offset(log_p[0], seen, fitted[0])[np.arange(len(labels)), labels]
            nll = -float(log_q[is_seen].mean() + log_q[~is_seen].mean())
            found.append((nll, rule, fitted))
    if not found:
        raise OneTemperature("no temperature and offset of seen and new names fit")
    _, rule, fitted = min(found, key=lambda one: one[0])
    seen = by_rule[rule][labels]
    num_seen, num_new = (len(np.unique(labels[kind])) for kind in (seen, ~seen))
    noisy = fitted[max(fitted)] if len(fitted) > 1 else None
    return NameCalibration(rule, num_seen, num_new, fitted[0], noisy), seen
