"""Which samples of the training data are trained on, and which are held out to calibrate the run.

The split is a function of the configuration and the number of samples, and which samples a portion holds is one of
their names, keys, captions or order (`lit_het.data_pipelines.shards.portions`), so that it is the same on all
hosts, after a restart, and where `lit-het calibrate` later checks what the run was trained on.
"""

import math
from fractions import Fraction
from typing import NamedTuple

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.portions import ALL, Portion, Rule
from lit_het.errors import UserError

LEAST_IMAGES, MOST_IMAGES = 100, 10_000
"""Fewer images give a temperature of large error; of more, so many are taken, evenly spread."""

EXPECTED_IMAGES = 130
"""Where a hash chooses so many on average, it chooses fewer than `LEAST_IMAGES` of 4 sets in 1,000."""


class Split(NamedTuple):
    """The samples to train on, those to calibrate on, and why there are none although they were wanted."""

    training: Portion
    calibration: Portion | None
    problem: str = ""


def split(config: ExperimentConfig, num_samples: int) -> Split:
    """Returns the split of ``data.shards`` with so many samples (of a stream or a mixture, any number)."""
    if config.calibration is None:
        return Split(config.data.portion, None)
    if config.calibration != "auto":
        if problem := _problem(config, config.calibration, num_samples):
            raise UserError(f"--calibration {config.calibration}: {problem}; choose others, or --calibration None")
        return Split(_rest(config, config.calibration), config.calibration)
    portion = _two_percent(num_samples, config.calibration_by)
    problem = _problem(config, _two_percent(num_samples, "order"), num_samples)
    if not problem and config.task.calibrated_on == "labels":
        # The last samples of shards that are sorted by class would be all those of some classes.
        problem = "shards may be sorted by class; --calibration PORTION holds samples out"
    if config.data.portion != ALL:
        problem = "--data.portion already leaves samples out; --calibration PORTION calibrates on them"
    return Split(config.data.portion, None, problem) if problem else Split(_rest(config, portion), portion)


def split_samples(config: ExperimentConfig, loader: Loader) -> tuple[Loader, Split]:
    """Returns the loader of what is trained on, and the split, given how many samples a hash really holds out.

    Args:
        config: of the run.
        loader: of ``data.shards``, of any portion.
    """
    num_samples = len(loader.index)
    found = split(config, num_samples)
    training, held_out = loader.with_portion(found.training), found.calibration
    if held_out is None:
        return training, found
    # Where all others are held out no caption is read twice. Suspects count, as a calibration by hand may know none.
    is_rest = config.data.portion == ALL
    count = num_samples - training.num_samples if is_rest else loader.with_portion(held_out).num_samples
    if count >= LEAST_IMAGES:
        return training, found
    problem = f"{held_out} of {num_samples:,} samples are {count}, fewer than {LEAST_IMAGES}"
    if config.calibration != "auto":
        raise UserError(f"--calibration {held_out}: {problem}; choose others, or --calibration None")
    if held_out.by != "sample":
        problem += "; --calibration-by sample holds out others"
    return loader.with_portion(ALL), Split(ALL, None, problem)


def _two_percent(num_samples: int, rule: Rule) -> Portion:
    """Returns the last 2 %, at most `MOST_IMAGES` and by a hash at least `EXPECTED_IMAGES`, exact to 0.000001 %."""
    least = 0 if rule == "order" else min(EXPECTED_IMAGES, num_samples)
    count = min(max(Fraction(num_samples, 50), least), MOST_IMAGES)
    if 50 * count == num_samples:
        return Portion(98, by=rule)
    return Portion(math.ceil((1 - count / num_samples) * 10**8) / 10**6, by=rule)


def _rest(config: ExperimentConfig, held_out: Portion) -> Portion:
    """Returns the portion to train on."""
    if config.data.portion != ALL:
        return config.data.portion
    return Portion(0, held_out.start, held_out.by) if held_out.start else Portion(held_out.end, by=held_out.by)


def _problem(config: ExperimentConfig, portion: Portion, num_samples: int) -> str:
    """Returns why a portion cannot be held out for a temperature, or an empty text."""
    data = config.data
    if config.task.calibrated_on is None:
        return "a decoder is calibrated by hand, with lit-het calibrate"
    if data.stream is not None:
        return "a stream has no portions"
    if data.mixture:
        return "nothing is held out of a mixture"
    if config.task.calibrated_on == "labels" and not (data.labels and data.labels.has_one_class):
        return "a temperature needs images of one label each"
    count = len(portion.sample_range(num_samples))
    if count < LEAST_IMAGES:
        return f"{portion} of {num_samples:,} samples are {count}, fewer than {LEAST_IMAGES}"
    if data.portion != ALL:
        return f"these samples may also be in --data.portion {data.portion}" * portion.overlaps(data.portion)
    if (portion.start > 0) == (portion.end < 100):
        return "of all samples, only the first or the last can be held out"
    return ""
