"""Trains one classifier in several settings and with several seeds, and evaluates each on held-out data.

The scripts of docs/temperature.md use it. ``output`` contains ``results/<setting>_seed<k>.json`` for every finished
run, the run directories in ``runs/``, and ``table.md``. Finished runs are skipped, and runs of other processes are left
to them, so that several processes can share one sweep.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from lit_het import parameters
from lit_het.apps.quickstart import write_data
from lit_het.configs import experiment, glyph_classifier
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.data_pipelines.loader import Loader, LoaderConfig
from lit_het.durations import Duration
from lit_het.errors import UserError
from lit_het.eval import scores, sweeps
from lit_het.eval.predictions import SupervisedPredictor, predict
from lit_het.eval.sets import read_features
from lit_het.eval.sweeps import RunResult, Summary
from lit_het.heads.temperature import BoundedTemperature, TemperatureConfig
from lit_het.runs.checks import CHANGEABLE_FIELDS
from lit_het.runs.directory import config_path, load_config
from lit_het.runs.opening import open_run
from lit_het.runs.training import train_unless_done
from lit_het.tasks.classification import ClassificationConfig
from lit_het.training.metric_log import read_metrics
from lit_het.types import Classifier

# Fields in which the runs of one table may differ.
_VARIED_FIELDS = ("task.head.", "seed", "data.seed", *CHANGEABLE_FIELDS)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One variant of a classifier.

    Attributes:
        name: name in file names.
        title: name in tables.
        head: configuration of the head.
    """

    name: str
    title: str
    head: Any

    @property
    def learned(self) -> bool:
        """Whether τ is learned."""
        return isinstance(self.head.temperature, BoundedTemperature)


def with_temperature(head: Any, temperature: TemperatureConfig) -> Any:
    """Returns a head's configuration with another τ."""
    return dataclasses.replace(head, temperature=temperature)


def add_arguments(parser: argparse.ArgumentParser, output: Path) -> None:
    """Adds the common flags of sweeps."""
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


def run_main(name: str, body: Callable[[], None]) -> int:
    """Runs a script; user errors are printed as one line, with exit code 1."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every file that it writes
    try:
        body()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command to continue", file=sys.stderr)
        return 130
    return 0


def load_classifier(path: Path, length: Duration | None) -> ExperimentConfig:
    """Returns the classifier of a configuration file; writes the glyph data if it needs them and they are missing.

    Raises:
        UserError: as `load_module_config`; the file does not describe a classifier with class indices as labels.
    """
    config = experiment.load_module_config(path)
    if not isinstance(config.task, ClassificationConfig):
        raise UserError(
            f"{path} trains an image-text model, but sweeps compare classifiers; "
            "give a --config with a ClassificationConfig, such as configs/glyph_classifier.py"
        )
    if config.task.loss != "softmax" or not isinstance(config.data.labels, ClassIndex):
        raise UserError(
            f"{path} trains with several labels per image, but NLL and Prec@1 need one; "
            "give a --config with the softmax loss and ClassIndex labels"
        )
    if config.data.shards == glyph_classifier.get_config().data.shards:
        _write_glyphs(glyph_classifier.ROOT / "data")
    return config if length is None else dataclasses.replace(config, length=length)


def _write_glyphs(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / "data.lock").open("w") as file:
        # Only one of several processes writes; the others wait. The lock is released when the process ends.
        fcntl.flock(file, fcntl.LOCK_EX)
        if not directory.exists():
            write_data(directory, seed=0)


def sweep(
    config: ExperimentConfig,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    held_out: Path,
    output: Path,
    *,
    batch_size: int,
    order: Callable[[RunResult], Any],
) -> list[Summary]:
    """Trains every unfinished run, prints the table of all finished runs and returns its rows.

    Args:
        config: classifier; its head, seeds and run directory are replaced.
        settings: heads to compare.
        seeds: seeds of every setting.
        held_out: folder of labelled shards to evaluate on.
        output: folder of the sweep.
        batch_size: batch size of the evaluation.
        order: sort key of the rows.

    Raises:
        UserError: the data cannot be read, a run cannot be trained, or ``output`` has runs of another configuration.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; --output takes a folder")
    loader = _held_out_loader(config, held_out, batch_size)
    console = Console(stderr=True)
    todo = [(setting, seed) for seed in seeds for setting in settings]
    for number, (setting, seed) in enumerate(todo, 1):
        name = sweeps.run_name(setting.name, seed)
        note = _run_unless_done(_run_config(config, setting, seed, output), setting, loader, held_out, output)
        console.print(f"run {number} of {len(todo)}, {name}: {note}", highlight=False)
    results = sweeps.read_results(output / "results")
    sweeps.check_comparable(results, lambda field: field.startswith(_VARIED_FIELDS))
    summaries = sweeps.summarize(results, order)
    (output / "table.md").write_text(sweeps.markdown(summaries), "utf-8")
    console = Console()
    console.print(sweeps.table(summaries, f"{loader.num_classes:,} classes, {loader.num_samples:,} held-out images"))
    console.print(sweeps.NOTE, highlight=False, soft_wrap=True)
    missing = {sweeps.run_name(setting.name, seed) for setting, seed in todo} - {result.name for result in results}
    if missing:
        console.print(f"{len(missing)} runs are in progress in other processes; repeat the command for the whole table")
    return summaries


def _held_out_loader(config: ExperimentConfig, held_out: Path, batch_size: int) -> Loader:
    if not held_out.is_dir():
        raise UserError(f"no folder {held_out}; --held-out takes a folder of labelled shards")
    assert isinstance(config.task, ClassificationConfig)
    data = config.data
    loader = LoaderConfig(
        (str(held_out),), data.image_size, batch_size, data.labels, preprocessing=data.preprocessing
    ).build()
    if loader.num_classes != config.task.num_classes:
        raise UserError(
            f"--held-out {held_out} has {loader.num_classes} classes, but the classifier has "
            f"{config.task.num_classes}; give images of its classes"
        )
    return loader


def _run_config(config: ExperimentConfig, setting: Setting, seed: int, output: Path) -> ExperimentConfig:
    return dataclasses.replace(
        config,
        run_dir=output / "runs" / sweeps.run_name(setting.name, seed),
        task=dataclasses.replace(config.task, head=setting.head),
        data=dataclasses.replace(config.data, seed=seed),
        seed=seed,
    )


def _run_unless_done(config: ExperimentConfig, setting: Setting, loader: Loader, held_out: Path, output: Path) -> str:
    """Trains and evaluates a run, writes the result, and returns a note for the console."""
    name = sweeps.run_name(setting.name, config.seed)
    path = output / "results" / f"{name}.json"
    with claim(output / "locks" / name) as claimed:
        if not claimed:
            return "in progress in another process"
        if path.exists():
            [found] = [result for result in sweeps.read_results(path.parent) if result.name == name]
            _check_same(path, found.config, _fields(config))
            _check_same(path, {"held_out": found.held_out}, {"held_out": str(held_out)})
            return "already finished"
        saved = config_path(config.run_dir)
        if saved.exists():
            _check_same(saved, _fields(load_config(config.run_dir)), _fields(config))
        began = time.monotonic()
        try:
            train_unless_done(config)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        seconds = time.monotonic() - began
        run = open_run(config.run_dir)
        model = run.model()
        assert isinstance(model, Classifier)
        with Bar(f"evaluating {name}", loader.num_samples, "images") as bar:
            features = read_features(model.features, loader.epoch(), bar.advance, name)
        metrics, _ = scores.figures(predict(SupervisedPredictor(model, model.num_samples), features))
        result = RunResult(
            setting=setting.name,
            title=setting.title,
            seed=config.seed,
            learned=setting.learned,
            # The learning rate decays to zero, so the mean over the last logged steps equals the last value.
            temperature=read_metrics(config.run_dir / "metrics.jsonl")[-1]["train/temperature"],
            num_parameters=parameters.count(run.params),
            metrics=metrics,
            seconds=seconds,
            device=jax.devices()[0].device_kind,
            held_out=str(held_out),
            config=_fields(config),
        )
        sweeps.write_result(result, path.parent)
        return f"NLL {metrics['nll']:.3f}, Prec@1 {metrics['top1']:.3f}, {seconds:.0f} s"


@contextlib.contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Yields whether this process holds the claim; it is released when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _check_same(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Checks that a file was written with the same configuration."""
    differing = sweeps.differences(found, wanted, lambda field: field.startswith(CHANGEABLE_FIELDS))
    if differing:
        field, (before, now) = next(iter(differing.items()))
        raise UserError(f"{path} was written with {field} = {before}, which is now {now}; give another --output")


def _fields(config: ExperimentConfig) -> dict[str, Any]:
    """Returns the fields of a configuration as values that JSON preserves."""
    return json.loads(json.dumps(experiment.fields(config)))
