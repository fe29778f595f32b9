"""Compares heads and temperatures of one classifier on held-out data: a grid whose axes are the head and τ.

The scripts of docs/temperature.md use it.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het.apps.quickstart.running import write_data
from lit_het.configs import experiment, glyph_classifier, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.labels_config import ClassIndex
from lit_het.data_pipelines.texts.prompts import read_classnames
from lit_het.errors import UserError
from lit_het.eval.evaluators.zero_shot import NOISY
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.files import locked
from lit_het.heads.temperature_config import BoundedTemperature, FixedTemperature
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.search import grid, grid_runs
from lit_het.search.grid import Row
from lit_het.search.grid_runs import Planned, Result
from lit_het.tasks.classification import ClassificationConfig
from lit_het.training.durations import Duration

LEARNED = "learned"
TEMPERATURE = "train/temperature"
_HELD_OUT = "supervised/held_out"
NLL, TOP1, ECE = (f"{_HELD_OUT}/{figure}" for figure in ("nll", "top1", "ece"))
# Fields in which the runs of one table differ.
_VARIED_FIELDS = ("task.head.", "evaluations.0.samples", "seed", "data.seed")


def add_arguments(parser: argparse.ArgumentParser, output: Path) -> None:
    """Adds the common flags of comparisons."""
    parser.add_argument("--held-out", type=Path, required=True, metavar="DIR", help="shards to evaluate on")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of initialisation, noise and data order"
    )
    parser.add_argument("--output", type=Path, default=output, metavar="DIR", help="default: %(default)s")
    bounds = BoundedTemperature()
    parser.add_argument(
        "--learned",
        type=float,
        nargs=2,
        default=[bounds.minimum, bounds.maximum],
        metavar=("MIN", "MAX"),
        help=f"bounds of the learned τ; default: {bounds.minimum:g} {bounds.maximum:g}",
    )
    parser.add_argument("--length", type=Duration.parse, help="default: the configuration's")
    parser.add_argument("--batch-size", type=int, default=128, help="batch size of the evaluation")


def load_classifier(options: argparse.Namespace) -> ExperimentConfig:
    """Returns the classifier of a configuration file, with the evaluation on held-out images.

    Writes the glyph data if the classifier needs them and they are missing.
    """
    config = experiment.load_module_config(options.config)
    if not isinstance(config.task, ClassificationConfig):
        raise UserError(
            f"{options.config} trains an image-text model, but sweeps compare classifiers; "
            "give a --config with a ClassificationConfig, such as glyph_classifier"
        )
    if not isinstance(config.task.loss, SoftmaxCrossEntropy) or not isinstance(config.data.labels, ClassIndex):
        raise UserError(
            f"{options.config} trains with several labels per image, but NLL and Prec@1 need one; "
            "give a --config with SoftmaxCrossEntropy and ClassIndex labels"
        )
    if config.data.shards == glyph_classifier.get_config().data.shards:
        _write_glyphs(glyph_classifier.ROOT / "data")
    if not options.held_out.is_dir():
        raise UserError(f"no folder {options.held_out}; --held-out takes a folder of labelled shards")
    num_classes = len(read_classnames(str(options.held_out)))
    if num_classes != config.task.num_classes:
        raise UserError(
            f"--held-out {options.held_out} has {num_classes} classes, but the classifier has "
            f"{config.task.num_classes}; give images of its classes"
        )
    held_out = ImageSet("held_out", str(options.held_out), split=".", batch_size=options.batch_size)
    length = config.length if options.length is None else options.length
    return dataclasses.replace(config, length=length, evaluations=(ZeroShotConfig(held_out),))


def _write_glyphs(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locked(directory.parent / "data.lock"):  # only one of several processes writes
        if not directory.exists():
            write_data(directory, quickstart_upstream.glyphs())


def plan(
    config: ExperimentConfig,
    heads: Mapping[str, Any],
    taus: Sequence[float],
    bounds: tuple[float, float],
    seeds: Sequence[int],
    output: Path,
) -> list[Planned]:
    """Returns the runs of every head with each fixed τ and with a learned one, ordered by seed.

    Args:
        config: as `load_classifier` returns it.
        heads: configurations of heads by name; the name of a single head may be empty.
        taus: fixed temperatures.
        bounds: of the learned τ.
        seeds: of every setting.
        output: folder of the runs.
    """
    temperatures: dict[str, Any] = {f"{tau:g}": FixedTemperature(tau) for tau in taus}
    temperatures[LEARNED] = BoundedTemperature(*bounds)
    planned, [evaluation] = [], config.evaluations
    for seed in dict.fromkeys(seeds):
        for name, head in heads.items():
            samples = head.sampling.num_eval_samples if head.sampling else 0
            evaluations = (dataclasses.replace(evaluation, samples=samples),)
            for tau, temperature in temperatures.items():
                task = dataclasses.replace(config.task, head=dataclasses.replace(head, temperature=temperature))
                changed = dataclasses.replace(config, task=task, evaluations=evaluations)
                parts = (name, LEARNED if tau == LEARNED else f"tau{tau}")
                setting = {"head": name, "temperature": tau}
                planned.append(grid_runs.plan_run(changed, setting, "_".join(filter(None, parts)), seed, output))
    return planned


def compare(config: ExperimentConfig, planned: Sequence[Planned], heads: Sequence[str], output: Path) -> list[Row]:
    """Trains every unfinished run; prints and saves the table of all finished runs in a folder, and returns its rows.

    Args:
        config: of all runs, apart from heads and seeds.
        planned: the runs.
        heads: names of heads in the order of the table; other heads come last.
        output: folder of the runs.
    """
    grid.run(planned, output, (NLL, TOP1))
    # Those of other commands in the same folder, too.
    found = grid_runs.finished((path.stem for path in sorted((output / "results").glob("*.json"))), output)
    for name, result in found.items():
        grid_runs.check_same(grid_runs.result_path(output, name), result.config, config, _VARIED_FIELDS)

    def order(result: Result) -> tuple[int, bool, float, int]:
        head, tau = result.setting["head"], result.setting["temperature"]
        place = heads.index(head) if head in heads else len(heads)
        return place, tau == LEARNED, 0.0 if tau == LEARNED else float(tau), result.seed

    rows = grid.summarize(sorted(map(with_noise, found.values()), key=order), (TEMPERATURE, NLL, TOP1, ECE))
    note = "Mean ± standard error over seeds; NLL in nats, lower is better; τ is that of the trained model."
    titles = ("setting", "τ", "NLL", "Prec@1", "ECE", "parameters", "seeds")
    grid.write_table(output, titles, [_cells(row) for row in rows], note)
    return rows


def with_noise(result: Result) -> Result:
    """Returns the result with the metrics of the mean over noise samples, if the head has noise."""
    noisy = {f"{_HELD_OUT}/{NOISY}/{name.rpartition('/')[2]}": name for name in (NLL, TOP1, ECE)}
    replaced = {name: result.figures[path] for path, name in noisy.items() if path in result.figures}
    return dataclasses.replace(result, figures=result.figures | replaced)


def _cells(row: Row) -> tuple[str, ...]:
    head, tau = row.setting["head"], row.setting["temperature"]
    return (
        ", ".join(filter(None, (head, "τ learned" if tau == LEARNED else f"τ = {tau}"))),
        row.figures[TEMPERATURE].shown(3) if tau == LEARNED else tau,
        *(row.figures[name].shown(3) for name in (NLL, TOP1, ECE)),
        f"{row.num_parameters:,}",
        grid.shown_seeds(row),
    )
