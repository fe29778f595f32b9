"""Compares heads and losses on image-text pairs with label noise, over seeds (docs/noise.md).

    python -m scripts.studies.study_noise --output runs/noise --seeds 0 1 2 3 4

Every seed draws its own characters, held-out typeface and upstream tower; a run trains a text tower and a head on the
tower's features. Finished runs are skipped; ``--table`` only writes the tables.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_het import untrusted
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.errors import UserError
from lit_het.eval.report.tables import markdown_table
from lit_het.heads.classification_config import DeterministicConfig, HetXLConfig
from lit_het.heads.contrastive_config import (
    DeterministicContrastiveConfig,
    GaussianContrastiveConfig,
    HetXLContrastiveConfig,
    ProbVLMContrastiveConfig,
)
from lit_het.heads.noise_config import CovarianceConfig, SamplingConfig
from lit_het.heads.temperature_config import FixedTemperature, LogTemperature
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.training.durations import Duration
from scripts.studies import harness
from scripts.studies.noise import pairs as noise
from scripts.studies.noise import sources
from scripts.studies.noise.classifiers import FeatureClassifierConfig
from scripts.studies.noise.pairs import PairSet
from scripts.studies.noise.rivals import AmplitudeConfig, InputTemperatureConfig, NoiseSmoothedSoftmaxLoss
from scripts.studies.noise.sources import Data
from scripts.studies.noise.training import NUM_EVAL_SAMPLES, Trained, auroc, figures, train
from scripts.studies.rivals.methods import METHODS

SMALL = CovarianceConfig(num_factors=4, form="full", initial_noise_norm=0.1)
PAPER = CovarianceConfig(num_factors=15, form="full", initial_noise_norm=0.1, learning_rate_factor=1.0)


def _classifier(norm: float, learning_rate_factor: float | None = None, antithetic: bool | None = None) -> HetXLConfig:
    covariance = CovarianceConfig(
        num_factors=8, form="efficient", initial_noise_norm=norm, learning_rate_factor=learning_rate_factor
    )
    return HetXLConfig(covariance, sampling=SamplingConfig(num_samples=16, antithetic=antithetic))


def _smoothed(share: float) -> SoftmaxLoss:
    return SoftmaxLoss(duplicates="negatives", label_smoothing=share)


HEADS: Mapping[str, Mapping[str, Any]] = {
    "DET": {"head": DeterministicContrastiveConfig()},
    **{
        f"smoothing {share}": {"head": DeterministicContrastiveConfig(), "loss": _smoothed(share)}
        for share in (0.05, 0.1, 0.2)
    },
    **{
        f"S16 smoothing {share}": {
            "head": HetXLContrastiveConfig(SMALL, num_samples=16),
            "loss": _smoothed(share),
        }
        for share in (0.05, 0.1, 0.2)
    },
    "S16 smoothing by noise": {
        "head": HetXLContrastiveConfig(SMALL, num_samples=16),
        "loss": NoiseSmoothedSoftmaxLoss(0.1),
    },
    "probit smoothing 0.1": {
        "head": HetXLContrastiveConfig(SMALL, num_samples=0),
        "loss": SoftmaxLoss(likelihood="pairwise_probit", duplicates="negatives", label_smoothing=0.1),
    },
    "input temperature": {"head": InputTemperatureConfig()},
    "paper S1": {"head": HetXLContrastiveConfig(PAPER, num_samples=1)},
    "S1": {"head": HetXLContrastiveConfig(SMALL, num_samples=1)},
    "S4": {"head": HetXLContrastiveConfig(SMALL, num_samples=4)},
    "S16": {"head": HetXLContrastiveConfig(SMALL, num_samples=16)},
    "S16 independent": {"head": HetXLContrastiveConfig(SMALL, num_samples=16, antithetic=False)},
    "S16 r15": {"head": HetXLContrastiveConfig(dataclasses.replace(SMALL, num_factors=15), num_samples=16)},
    **{
        name: {"head": HetXLContrastiveConfig(SMALL, num_samples=0), "loss": SoftmaxLoss(likelihood=name)}
        for name in ("delta", "mean_field", "pairwise_probit")
    },
    # Amplitude times direction, in the place of a smaller learning rate; "slow" has both.
    "S16 amplitude": {"head": HetXLContrastiveConfig(AmplitudeConfig(**{**vars(SMALL), "learning_rate_factor": 1.0}))},
    "S16 amplitude slow": {"head": HetXLContrastiveConfig(AmplitudeConfig(**vars(SMALL)))},
    "S16 one rate": {"head": HetXLContrastiveConfig(dataclasses.replace(SMALL, learning_rate_factor=1.0))},
    # The other placements of HET-XL Table 7.
    **{
        f"S16 {name}": {
            "head": HetXLContrastiveConfig(SMALL, normalize_before_noise=before, normalize_after_noise=after)
        }
        for name, before, after in (
            ("after", False, True),
            ("before and after", True, True),
            ("unscaled", False, False),
        )
    },
    **{
        f"{name} fixed temperature": {"head": head, "temperature": FixedTemperature(0.02)}
        for name, head in (("DET", DeterministicContrastiveConfig()), ("S16", HetXLContrastiveConfig(SMALL)))
    },
    # Classifiers of the same features, whose classes are the names.
    "classifier DET": {"classifier": DeterministicConfig()},
    "classifier S16": {"classifier": _classifier(0.1)},
    "classifier S16 norm 1": {"classifier": _classifier(1.0)},
    "classifier S16 one rate": {"classifier": _classifier(1.0, learning_rate_factor=1.0)},
    "classifier S16 independent": {"classifier": _classifier(1.0, learning_rate_factor=1.0, antithetic=False)},
    "sigmoid DET": {"head": DeterministicContrastiveConfig(initial_bias=-10.0), "loss": SigmoidLoss()},
    "sigmoid S16": {"head": HetXLContrastiveConfig(SMALL, num_samples=16, initial_bias=-10.0), "loss": SigmoidLoss()},
    # Gaussian embeddings (PCME++, ProLIP).
    "Gaussian": {"head": GaussianContrastiveConfig()},
    "Gaussian alone": {"head": GaussianContrastiveConfig(bottleneck=0.0, inclusion=0.0)},
    "ProbVLM": {"head": ProbVLMContrastiveConfig()},
    "sigmoid Gaussian": {"head": GaussianContrastiveConfig(initial_bias=-10.0), "loss": SigmoidLoss()},
    "PCME++": {name: getattr(METHODS["sigmoid_pseudo_positives"], name) for name in ("head", "loss")},
    "sigmoid probit": {
        "head": HetXLContrastiveConfig(SMALL, num_samples=0, initial_bias=-10.0),
        "loss": SigmoidLoss(likelihood="probit"),
    },
}


def prepare(options: argparse.Namespace, seed: int) -> Data:
    """Returns the pairs of a seed; draws them, trains the tower and computes the features if needed."""
    root = options.output / f"seed{seed}"
    match options.data:
        case "characters":
            return sources.characters().prepare(root, seed)
        case "icons":
            return sources.icons(options.fonts).prepare(root, seed)
        case "emoji":
            return sources.emoji(options.fonts).prepare(root, seed)
    files = (tuple(options.shards), tuple(options.evaluation_shards))
    return sources.shards(options.run, *files, options.output, options.noise_column)


def configuration(data: Data, head: str, options: argparse.Namespace) -> ExperimentConfig:
    """Returns the configuration of a run of the study."""
    changes = dict(HEADS[head])
    if "classifier" in changes:
        task: Any = FeatureClassifierConfig(changes["classifier"], data.train.features.shape[1], len(data.train.names))
    else:
        learned = LogTemperature(options.temperature, options.temperature_factor)
        temperature = changes.pop("temperature", learned)
        changes["head"] = dataclasses.replace(changes["head"], temperature=temperature)
        task = dataclasses.replace(data.config.task, **changes)
    return dataclasses.replace(data.config, task=task, length=Duration(options.steps), run_dir=options.output)


def measure(
    trained: Trained, data: Data, kind: str, level: float, seed: int, pairs: PairSet, wrong: np.ndarray
) -> dict[str, float]:
    """Returns the figures of a model: ``<set>/<labels>/<prediction>/<figure>``; ``wrong`` marks replaced captions."""
    found = {f"train/{name}": value for name, value in trained.metrics.items()}
    sets = {"validation": data.validation, "held_out": data.held_out, "unseen": data.unseen}
    # A classifier's classes are all names.
    candidates = np.arange(len(data.train.names)) if trained.names is None else data.candidates
    for name, of_set in sets.items():
        # Shards of one's own may have no unseen captions, and classifiers do not know them.
        if not len(of_set.captions) or (name == "unseen" and trained.names is None):
            continue
        labels_of = {"clean": of_set}
        if name != "unseen" and kind in noise.NOISES and noise.affected(of_set, kind, data.known).any():
            # Labels of evaluation sets are replaced as those of training, by draws of their own.
            labels_of["noisy"] = noise.inject(of_set, kind, level, data.known, 10_000 + seed)[0]
        for labels, labelled in labels_of.items():
            for prediction, samples in (("mean", 0), ("sampled", NUM_EVAL_SAMPLES)):
                if samples and not trained.task.has_image_noise:
                    continue
                predictions = trained.predict(labelled, candidates, samples, seed)
                values = figures(predictions, name)
                found |= {f"{name}/{labels}/{prediction}/{figure}": value for figure, value in values.items()}
                if not samples and labels == "clean" and trained.task.has_image_noise:
                    is_wrong = predictions.predicted != predictions.labels
                    found[f"{name}/auroc_errors"] = auroc(predictions.noise_norm, is_wrong)
    return {**found, **_of_wrong_captions(trained, data, kind, pairs, wrong)} if wrong.any() else found


def _of_wrong_captions(trained: Trained, data: Data, kind: str, pairs: PairSet, wrong: np.ndarray) -> dict[str, float]:
    """Returns how well the replaced captions are found by the loss, the CLIP score and the noise norm."""
    predictions = trained.predict(pairs, np.arange(len(pairs.names)))
    by = {"loss": -predictions.label_log_p}
    if trained.names is not None:
        by["clip_score"] = -trained.similarity(pairs)
    found = {}
    if trained.task.has_image_noise:
        by["noise_norm"] = predictions.noise_norm
        if kind in noise.NOISES:
            # Noise is a property of the image: it can only find the images whose captions are unreliable.
            affected = noise.affected(data.train, kind, data.known)
            found["train/auroc_affected_images"] = auroc(predictions.noise_norm, affected)
    flagged = len(wrong) // 20
    for name, values in by.items():
        found[f"train/auroc_wrong_captions/{name}"] = auroc(values, wrong)
        found[f"train/recall_at_5_percent/{name}"] = float(wrong[np.argsort(-values)[:flagged]].sum() / wrong.sum())
    return found


def train_and_measure(
    data: Data, kind: str, level: float, head: str, seed: int, options: argparse.Namespace
) -> dict[str, float]:
    """Returns the figures of a run of the study."""
    if kind == options.noise_column:
        pairs, wrong = data.train, noise.wrong_by_column(data.train, kind)
    elif kind in noise.NOISES:
        pairs, wrong = noise.inject(data.train, kind, level, data.known, seed)
    else:
        pairs, wrong = data.train, np.zeros(len(data.train.captions), bool)
    config, began = configuration(data, head, options), time.monotonic()
    with Bar(f"{head}, {kind} {level:.0%}, seed {seed}", options.steps, "steps") as bar:
        trained = train(config, data.locked, pairs, data.tokenizer, seed, bar.advance)
    seconds = time.monotonic() - began
    found = {**measure(trained, data, kind, level, seed, pairs, wrong), "seconds": seconds}
    shown = ("top1", "nll", "fitted_nll", "ece")
    message(", ".join(f"{name} {found[f'held_out/clean/mean/{name}']:.3f}" for name in shown))
    return found


def check_data(options: argparse.Namespace) -> None:
    """Checks that an output folder, which also holds features, is of the same data."""
    path = options.output / "data.json"
    names = ("data", "fonts", "run", "shards", "evaluation_shards", "noise_column")
    wanted = {name: json.loads(json.dumps(getattr(options, name), default=str)) for name in names}
    if not path.exists():
        harness.write_json(path, wanted)
    elif (found := untrusted.read_json(path)) != wanted:
        raise UserError(f"{path} says that the folder is of {found}, not {wanted}; give another --output")


def study(options: argparse.Namespace) -> None:
    """Trains and measures what is not finished, and writes a table for each kind and level of noise."""
    check_data(options)
    noises = [("none", 0.0)] if 0.0 in options.levels and not options.noise_column else []
    noises += [(options.noise_column, 1.0)] if options.noise_column else []
    noises += [(kind, level) for kind, level in itertools.product(options.noise, options.levels) if level]
    runs = {f"{kind}_{level:g}_{head}": (kind, level, head) for kind, level in noises for head in options.heads}
    settings = {name: getattr(options, name) for name in ("data", "steps", "temperature", "temperature_factor")}
    data = functools.lru_cache(maxsize=1)(lambda seed: prepare(options, seed))
    found = harness.run_cells(
        {name: {**settings, "configuration": repr(HEADS[head])} for name, (*_, head) in runs.items()},
        lambda name, seed: train_and_measure(data(seed), *runs[name], seed, options),
        options,
    )
    tables = []
    for noise_and_level in noises:
        by_head = {
            head: found[name] for name, (*of, head) in runs.items() if (*of,) == noise_and_level and name in found
        }
        if by_head:
            tables.append(table(*noise_and_level, by_head, options.show))
    harness.write_tables(options.output / "table.md", *tables)


def table(kind: str, level: float, by_head: harness.Found, shown: Sequence[str]) -> str:
    """Returns a table with a row for each figure and a column for each head."""
    rows = []
    for figure in shown:
        # Heads without noise predict by samples as they do without.
        means = harness.of_figure(by_head, figure.replace("/sampled/", "/mean/"))
        values = {head: means[head] | of for head, of in harness.of_figure(by_head, figure).items()}
        if any(values.values()):
            rows.append((figure, *harness.cells_of(values)))
    return markdown_table((f"{kind} {level:.0%}", *(f"{head} ({len(of)})" for head, of in by_head.items())), rows)


DEFAULT_NOISE = {
    "characters": ["cyrillic", "confusable", "typeface", "uniform"],
    "icons": ["fill", "uniform"],
    "shards": ["uniform"],
}
SHOWN = [
    f"{name}/{figure}"
    for name in ("held_out/clean/mean", "held_out/clean/sampled", "unseen/clean/mean")
    for figure in ("top1", "nll", "ece", "fitted_nll", "fitted_ece", "temperature_factor")
]
SHOWN += ["held_out/noisy/mean/fitted_nll", "held_out/noisy/sampled/fitted_nll"]
SHOWN += [
    f"train/{figure}/{by}"
    for figure in ("auroc_wrong_captions", "recall_at_5_percent")
    for by in ("loss", "clip_score", "noise_norm")
]
SHOWN += [
    "train/auroc_affected_images",
    "train/image_noise_norm",
    "train/temperature",
    "seconds",
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    parser = harness.study_parser(__doc__, "runs/noise", steps=1500)
    parser.add_argument("--data", choices=("characters", "icons", "shards"), default="characters")
    parser.add_argument(
        "--fonts", type=Path, metavar="DIR", help="icons: unpacked fonts, see scripts/studies/noise/icons.py"
    )
    parser.add_argument("--run", type=Path, metavar="RUN", help="shards: an image-text run with the towers to take")
    parser.add_argument("--shards", nargs="+", default=[], metavar="SHARDS", help="shards: training pairs")
    parser.add_argument("--evaluation-shards", nargs="+", default=[], metavar="SHARDS", help="shards: other pairs")
    parser.add_argument("--noise-column", default="", metavar="NAME", help="JSON column of 0 and 1: wrong captions")
    parser.add_argument("--noise", nargs="*", choices=list(noise.NOISES), default=None, help="whose captions")
    parser.add_argument("--levels", type=float, nargs="+", default=[0.0, 0.2, 0.4], help="replaced captions")
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS), metavar="HEAD")
    parser.add_argument("--temperature", type=float, default=LogTemperature().initial, help="the initial τ")
    parser.add_argument("--temperature-factor", type=float, default=LogTemperature().learning_rate_factor)
    parser.add_argument("--show", nargs="+", default=SHOWN, metavar="FIGURE", help="figures of the table")
    options = parser.parse_args(arguments)
    if options.noise is None:
        options.noise = [] if options.noise_column else DEFAULT_NOISE[options.data]
    needed = {"icons": ("fonts",), "shards": ("run", "shards", "evaluation_shards")}.get(options.data, ())
    if missing := [name for name in needed if not getattr(options, name)]:
        parser.error(f"--data {options.data} needs --{missing[0].replace('_', '-')}")
    if not all(0 <= level <= 1 for level in options.levels):
        parser.error("--levels are fractions of the captions, between 0 and 1")
    if options.noise_column and options.data != "shards":
        parser.error("--noise-column is for --data shards")
    return harness.run_study("study_noise", study, options)


if __name__ == "__main__":
    sys.exit(main())
