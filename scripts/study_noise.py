"""Compares heads and losses on image-text pairs with label noise, over seeds (docs/noise.md).

    python -m scripts.study_noise --output runs/noise --seeds 0 1 2 3 4

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
from lit_het.search import grid
from lit_het.training.durations import Duration
from scripts.noise import pairs as noise
from scripts.noise import sources
from scripts.noise.classifiers import FeatureClassifierConfig
from scripts.noise.paired import cells_of
from scripts.noise.pairs import PairSet
from scripts.noise.rivals import AmplitudeConfig, InputTemperatureConfig, SmoothedSoftmaxLoss
from scripts.noise.sources import Data
from scripts.noise.training import NUM_EVAL_SAMPLES, Trained, auroc, figures, train

SMALL = CovarianceConfig(num_factors=4, form="full", initial_noise_norm=0.1)
PAPER = CovarianceConfig(num_factors=15, form="full", initial_noise_norm=0.1, learning_rate_factor=1.0)


def _classifier(norm: float, learning_rate_factor: float | None = None, antithetic: bool | None = None) -> HetXLConfig:
    covariance = CovarianceConfig(
        num_factors=8, form="efficient", initial_noise_norm=norm, learning_rate_factor=learning_rate_factor
    )
    return HetXLConfig(covariance, sampling=SamplingConfig(num_samples=16, antithetic=antithetic))


HEADS: Mapping[str, Mapping[str, Any]] = {
    "DET": {"head": DeterministicContrastiveConfig()},
    **{
        f"smoothing {share}": {"head": DeterministicContrastiveConfig(), "loss": SmoothedSoftmaxLoss(share)}
        for share in (0.05, 0.1, 0.2)
    },
    **{
        f"S16 smoothing {share}": {
            "head": HetXLContrastiveConfig(SMALL, num_samples=16),
            "loss": SmoothedSoftmaxLoss(share),
        }
        for share in (0.05, 0.1, 0.2)
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


def run(options: argparse.Namespace) -> None:
    """Trains all runs that are not finished, and writes the tables."""
    cells: list[tuple[str, float]] = []
    cells += [("none", 0.0)] if 0.0 in options.levels and not options.noise_column else []
    cells += [(options.noise_column, 1.0)] if options.noise_column else []
    cells += [cell for cell in itertools.product(options.noise, options.levels) if cell[1]]
    jobs = [(seed, cell, head) for seed in options.seeds for cell in cells for head in options.heads]
    data = functools.lru_cache(maxsize=1)(lambda seed: prepare(options, seed))
    _check_data(options)
    if not options.table:
        with Bar("study", len(jobs), "runs") as bar:
            for seed, (kind, level), head in jobs:
                path = options.output / "results" / f"{kind}_{level:g}_{head.replace(' ', '_')}_seed{seed}.json"
                settings = {**_settings(options), "configuration": repr(HEADS[head])}
                if path.exists():
                    _check_settings(path, settings)
                else:
                    with bar.paused():
                        found = _one(data(seed), head, kind, level, seed, options)
                    noise.write_json(path, {"settings": settings, "figures": found})
                bar.advance(1)
    write_tables(options, cells)


def _one(data: Data, head: str, kind: str, level: float, seed: int, options: argparse.Namespace) -> dict[str, float]:
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


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("data", "steps", "temperature", "temperature_factor")}


def _check_data(options: argparse.Namespace) -> None:
    """Checks that an output folder, which also holds features, is of the same data."""
    path = options.output / "data.json"
    names = ("data", "fonts", "run", "shards", "evaluation_shards", "noise_column")
    wanted = {name: json.loads(json.dumps(getattr(options, name), default=str)) for name in names}
    if not path.exists():
        noise.write_json(path, wanted)
    elif (found := untrusted.read_json(path)) != wanted:
        raise UserError(f"{path} says that the folder is of {found}, not {wanted}; give another --output")


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    found = untrusted.read_json(path)["settings"]
    # Results of earlier versions have no configuration.
    if {**settings, **found} != settings:
        raise UserError(f"{path} was measured with {found}, not {settings}; give another --output")


def write_tables(options: argparse.Namespace, cells: Sequence[tuple[str, float]]) -> None:
    """Writes ``table.md``: a table for each kind and level of noise, with a row per figure and a column per head.

    A cell is the mean over seeds with its standard error, and in parentheses the mean difference from the first head,
    seed by seed: seeds differ in names, typeface and tower much more than heads do. A star marks a significant
    difference: a paired t-test, and ``W`` Welch's test, both with Holm's correction over the heads of a row, at 5 %.
    """
    parts = []
    for kind, level in cells:
        by_head = {head: _results(options.output, kind, level, head) for head in options.heads}
        by_head = {head: results for head, results in by_head.items() if results}
        if not by_head:
            continue
        columns = [f"{head} ({len(results)})" for head, results in by_head.items()]
        lines = [f"| {kind} {level:.0%} | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
        for figure in options.show:
            values = {
                head: {seed: value for seed, one in results.items() if (value := _value(one, figure)) is not None}
                for head, results in by_head.items()
            }
            if any(values.values()):
                lines.append(f"| {figure} | {' | '.join(cells_of(values))} |")
        parts.append("\n".join(lines))
    text = "\n\n".join(parts) + "\n"
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "table.md").write_text(text)
    print(text)


def _value(figures: Mapping[str, float], name: str) -> float | None:
    """Returns a figure; heads without noise predict by samples as they do without."""
    return figures.get(name, figures.get(name.replace("/sampled/", "/mean/")))


def _results(output: Path, kind: str, level: float, head: str) -> dict[int, dict[str, float]]:
    """Returns the figures of the finished runs by seed."""
    stem = f"{kind}_{level:g}_{head.replace(' ', '_')}_seed"
    paths = (output / "results").glob(f"{stem}*.json")
    return {int(path.stem.removeprefix(stem)): json.loads(path.read_text())["figures"] for path in sorted(paths)}


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
    """Runs the study; user errors are printed as one line, with exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path("runs/noise"), metavar="DIR")
    parser.add_argument("--data", choices=("characters", "icons", "shards"), default="characters")
    parser.add_argument("--fonts", type=Path, metavar="DIR", help="icons: unpacked fonts, see scripts/noise/icons.py")
    parser.add_argument("--run", type=Path, metavar="RUN", help="shards: an image-text run with the towers to take")
    parser.add_argument("--shards", nargs="+", default=[], metavar="SHARDS", help="shards: training pairs")
    parser.add_argument("--evaluation-shards", nargs="+", default=[], metavar="SHARDS", help="shards: other pairs")
    parser.add_argument("--noise-column", default="", metavar="NAME", help="JSON column of 0 and 1: wrong captions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--noise", nargs="*", choices=list(noise.NOISES), default=None, help="whose captions")
    parser.add_argument("--levels", type=float, nargs="+", default=[0.0, 0.2, 0.4], help="replaced captions")
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS), metavar="HEAD")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--temperature", type=float, default=LogTemperature().initial, help="the initial τ")
    parser.add_argument("--temperature-factor", type=float, default=LogTemperature().learning_rate_factor)
    parser.add_argument("--show", nargs="+", default=SHOWN, metavar="FIGURE", help="figures of the table")
    parser.add_argument("--table", action="store_true", help="only write the tables of the finished runs")
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
    return grid.run_main("study_noise", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
