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

from lit_het import parameters, untrusted
from lit_het.apps import grid
from lit_het.apps.quickstart import write_data
from lit_het.configs import quickstart_lit_deterministic, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.data_pipelines.storage import read_lines
from lit_het.data_pipelines.tokenizers import Tokenizer
from lit_het.durations import Duration
from lit_het.errors import UserError
from lit_het.eval.significance import estimate, holm, welch
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.temperature import LogTemperature
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.runs.opening import open_run
from lit_het.runs.training import train_unless_done
from lit_het.types import Params
from scripts.noise import pairs as noise
from scripts.noise.pairs import PairSet
from scripts.noise.training import NUM_EVAL_SAMPLES, Trained, auroc, figures, train

VALIDATION = "STIXGeneralItalic"
"""Settings are chosen on this typeface, and reported on the typeface that the seed holds out."""
HELD_OUT = ("DejaVuSerif-Italic", "DejaVuSansMono-Oblique", "STIXGeneralBol", "DejaVuSerif-Bold", "DejaVuSans-Oblique")

SMALL = CovarianceConfig(num_factors=4, form="full", initial_noise_norm=0.1)
PAPER = CovarianceConfig(num_factors=15, form="full", initial_noise_norm=0.1, learning_rate_factor=1.0)
HEADS: Mapping[str, Mapping[str, Any]] = {
    "DET": {"head": DeterministicContrastiveConfig()},
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
    "sigmoid DET": {"head": DeterministicContrastiveConfig(initial_bias=-10.0), "loss": SigmoidLoss()},
    "sigmoid S16": {"head": HetXLContrastiveConfig(SMALL, num_samples=16, initial_bias=-10.0), "loss": SigmoidLoss()},
    "sigmoid probit": {
        "head": HetXLContrastiveConfig(SMALL, num_samples=0, initial_bias=-10.0),
        "loss": SigmoidLoss(likelihood="probit"),
    },
}


@dataclasses.dataclass(frozen=True)
class Data:
    """The pairs of one seed, on one list of names.

    Attributes:
        train, validation, held_out, unseen: training pairs, and pairs of the validation typeface, of the held-out
            typeface and of held-out names.
        known: indices of the names in training.
        locked: parameters of the image tower.
        tokenizer: of the captions.
    """

    train: PairSet
    validation: PairSet
    held_out: PairSet
    unseen: PairSet
    known: np.ndarray
    locked: Params
    tokenizer: Tokenizer


def prepare(output: Path, seed: int) -> Data:
    """Returns the pairs of a seed; draws the characters, trains the tower and computes the features if needed."""
    root = output / f"seed{seed}"
    glyphs = dataclasses.replace(quickstart_upstream.glyphs(seed), held_out_typeface=HELD_OUT[seed % len(HELD_OUT)])
    write_data(root / "data", glyphs)
    upstream = quickstart_upstream.get_config(root)
    num_words = len(read_lines(str(root / "data" / "words.txt")))
    task = dataclasses.replace(upstream.task, num_classes=num_words)
    train_unless_done(dataclasses.replace(upstream, task=task, seed=seed))
    run = open_run(root / "upstream")
    model, images = run.model(), run.config.data
    found = {
        name: noise.read_pairs(
            [str(root / "data" / name)],
            model.features,
            images.preprocessing,
            images.image_size,
            root / f"{name}.npz",
        )
        for name in ("train", "held_out_typeface", "held_out_characters")
    }
    names = tuple(sorted({name for one in found.values() for name in one.names}))
    found = {name: noise.with_names(one, names) for name, one in found.items()}
    is_validation = found["train"].column("typeface") == VALIDATION
    training = found["train"].take(~is_validation)
    config = quickstart_lit_deterministic.get_config(root)
    assert config.tokenizer is not None
    known = np.unique(training.captions)
    validation = found["train"].take(is_validation)
    return Data(
        train=training,
        validation=validation.take(np.isin(validation.captions, known)),
        held_out=found["held_out_typeface"].take(np.isin(found["held_out_typeface"].captions, known)),
        unseen=found["held_out_characters"].take(found["held_out_characters"].column("typeface") != VALIDATION),
        known=known,
        locked=parameters.partition(run.params, ("image_tower/.*",))[0],
        tokenizer=config.tokenizer.build(),
    )


def configuration(head: str, options: argparse.Namespace) -> ExperimentConfig:
    """Returns the configuration of a run of the study."""
    base = quickstart_lit_deterministic.get_config(options.output)
    changes = dict(HEADS[head])
    temperature = LogTemperature(options.temperature, options.temperature_factor)
    changes["head"] = dataclasses.replace(changes["head"], temperature=temperature)
    return dataclasses.replace(
        base, task=dataclasses.replace(base.task, **changes), length=Duration(options.steps), run_dir=options.output
    )


def measure(
    trained: Trained, data: Data, kind: str, level: float, seed: int, pairs: PairSet, wrong: np.ndarray
) -> dict[str, float]:
    """Returns the figures of a model: ``<set>/<labels>/<prediction>/<figure>``; ``wrong`` marks replaced captions."""
    found = {f"train/{name}": value for name, value in trained.metrics.items()}
    every = np.arange(len(data.train.names))
    for name, of_set in (("validation", data.validation), ("held_out", data.held_out), ("unseen", data.unseen)):
        # Labels of evaluation sets are replaced as those of training, by draws of their own.
        noisy = noise.inject(of_set, kind, level, data.known, 10_000 + seed)[0] if level else of_set
        for labels, labelled in (("clean", of_set), *((("noisy", noisy),) if level and name != "unseen" else ())):
            for prediction, samples in (("mean", 0), ("sampled", NUM_EVAL_SAMPLES)):
                if samples and not trained.task.has_image_noise:
                    continue
                predictions = trained.predict(labelled, every, samples, seed)
                values = figures(predictions, name)
                found |= {f"{name}/{labels}/{prediction}/{figure}": value for figure, value in values.items()}
                if not samples and labels == "clean" and trained.task.has_image_noise:
                    is_wrong = predictions.predicted != predictions.labels
                    found[f"{name}/auroc_errors"] = auroc(predictions.noise_norm, is_wrong)
    return {**found, **_of_wrong_captions(trained, data, kind, pairs, wrong)} if level else found


def _of_wrong_captions(trained: Trained, data: Data, kind: str, pairs: PairSet, wrong: np.ndarray) -> dict[str, float]:
    """Returns how well the replaced captions are found by the loss, the CLIP score and the noise norm."""
    predictions = trained.predict(pairs, np.arange(len(pairs.names)))
    by = {"loss": -predictions.label_log_p, "clip_score": -trained.similarity(pairs)}
    found = {}
    if trained.task.has_image_noise:
        by["noise_norm"] = predictions.noise_norm
        # Noise is a property of the image: it can only find the images whose captions are unreliable.
        affected, _ = noise.NOISES[kind](data.train, data.known, np.random.default_rng(0))
        found["train/auroc_affected_images"] = auroc(predictions.noise_norm, affected)
    flagged = len(wrong) // 20
    for name, values in by.items():
        found[f"train/auroc_wrong_captions/{name}"] = auroc(values, wrong)
        found[f"train/recall_at_5_percent/{name}"] = float(wrong[np.argsort(-values)[:flagged]].sum() / wrong.sum())
    return found


def run(options: argparse.Namespace) -> None:
    """Trains all runs that are not finished, and writes the tables."""
    cells = [(kind, level) for kind, level in itertools.product(options.noise, options.levels) if level]
    cells = [*((("none", 0.0),) if 0.0 in options.levels else ()), *cells]
    jobs = list(itertools.product(options.seeds, cells, options.heads))
    data = functools.lru_cache(maxsize=1)(lambda seed: prepare(options.output, seed))
    if not options.table:
        with Bar("study", len(jobs), "runs") as bar:
            for seed, (kind, level), head in jobs:
                path = options.output / "results" / f"{kind}_{level:g}_{head.replace(' ', '_')}_seed{seed}.json"
                settings = _settings(options)
                if path.exists():
                    _check_settings(path, settings)
                else:
                    with bar.paused():
                        found = _one(data(seed), head, kind, level, seed, options)
                    noise.write_json(path, {"settings": settings, "figures": found})
                bar.advance(1)
    write_tables(options, cells)


def _one(data: Data, head: str, kind: str, level: float, seed: int, options: argparse.Namespace) -> dict[str, float]:
    kind_of_none = options.noise[0] if kind == "none" else kind
    pairs, wrong = noise.inject(data.train, kind_of_none, level, data.known, seed)
    config, began = configuration(head, options), time.monotonic()
    with Bar(f"{head}, {kind} {level:.0%}, seed {seed}", options.steps, "steps") as bar:
        trained = train(config, data.locked, pairs, data.tokenizer, seed, bar.advance)
    seconds = time.monotonic() - began
    found = {**measure(trained, data, kind_of_none, level, seed, pairs, wrong), "seconds": seconds}
    shown = ("top1", "nll", "fitted_nll", "ece")
    message(", ".join(f"{name} {found[f'held_out/clean/mean/{name}']:.3f}" for name in shown))
    return found


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("steps", "temperature", "temperature_factor")}


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    found = untrusted.read_json(path)["settings"]
    if found != settings:
        raise UserError(f"{path} was measured with {found}, not {settings}; give another --output")


def write_tables(options: argparse.Namespace, cells: Sequence[tuple[str, float]]) -> None:
    """Writes ``table.md``: every figure over seeds, and Welch tests against the first head with Holm's correction."""
    lines = []
    for kind, level in cells:
        by_head = {head: _results(options.output, kind, level, head) for head in options.heads}
        by_head = {head: results for head, results in by_head.items() if results}
        for column in options.show:
            values = {head: [one[column] for one in results if column in one] for head, results in by_head.items()}
            values = {head: found for head, found in values.items() if found}
            if not values:
                continue
            first = next(iter(values))
            p_values = {h: welch(v, values[first]).p_value for h, v in values.items() if h != first and len(v) > 1}
            significant = holm({h: p for h, p in p_values.items() if np.isfinite(p)})
            cells_of = [
                f"{head} {estimate(found).shown(3)}{' *' if head in significant else ''} ({len(found)})"
                for head, found in values.items()
            ]
            lines.append(f"| {kind} {level:.0%} | {column} | {'; '.join(cells_of)} |")
    text = "| noise | figure | mean ± standard error (seeds); * differs from the first, Welch with Holm, 5 % |\n"
    text += "| --- | --- | --- |\n" + "\n".join(lines) + "\n"
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "table.md").write_text(text)
    print(text)


def _results(output: Path, kind: str, level: float, head: str) -> list[dict[str, float]]:
    pattern = f"{kind}_{level:g}_{head.replace(' ', '_')}_seed*.json"
    return [json.loads(path.read_text())["figures"] for path in sorted((output / "results").glob(pattern))]


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
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--noise", nargs="+", choices=list(noise.NOISES), default=["cyrillic", "confusable", "uniform"])
    parser.add_argument("--levels", type=float, nargs="+", default=[0.0, 0.2, 0.4], help="replaced captions")
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS), metavar="HEAD")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--temperature", type=float, default=LogTemperature().initial, help="the initial τ")
    parser.add_argument("--temperature-factor", type=float, default=LogTemperature().learning_rate_factor)
    parser.add_argument("--show", nargs="+", default=SHOWN, metavar="FIGURE", help="figures of the table")
    parser.add_argument("--table", action="store_true", help="only write the tables of the finished runs")
    options = parser.parse_args(arguments)
    return grid.run_main("study_noise", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
