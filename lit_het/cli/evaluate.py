"""``lit-het zero-shot`` and its siblings, one for each kind of evaluation, and ``lit-het evaluate`` for many."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs import experiment
from data_pipelines import storage
from data_pipelines.shards import expand
from eval.evaluation import Evaluation, write_record
from eval.prompts import CLASS_NAMES_FILE
from eval.sets import ImageSet, Sets
from eval.suite import EVALUATIONS, EvaluationConfig
from lit_het.cli import runs
from lit_het.cli.flags import with_flags
from lit_het.errors import UserError
from lit_het.training.logging import say


def evaluate_sets(
    kind: str,
    checkpoint: Path,
    data: Sequence[str],
    flags: Sequence[str],
    *,
    pretrained: Path | None = None,
    output: Path | None = None,
) -> list[Evaluation]:
    """Runs one kind of evaluation on several sets.

    Args:
        kind: a key of `eval.suite.EVALUATIONS`.
        checkpoint: directory of the run.
        data: ``NAME=FOLDER`` or ``FOLDER`` each, see `parse_set`.
        flags: fields of the evaluation's configuration.
        pretrained: where the run with the locked parameters lies now, if it has moved.
        output: a JSON file to write the figures to.

    Raises:
        UserError: the run or a set cannot be read, or a flag is wrong.
    """
    like = with_flags(EVALUATIONS[kind](ImageSet("", "")), flags, f"lit-het {kind}", flat=True)
    configs = [dataclasses.replace(like, data=parse_set(argument, like.data)) for argument in data]
    return evaluate(checkpoint, configs, pretrained=pretrained, output=output)


def evaluate(
    checkpoint: Path,
    configs: Sequence[EvaluationConfig],
    *,
    pretrained: Path | None = None,
    output: Path | None = None,
) -> list[Evaluation]:
    """Evaluates a run, prints a table, and keeps what was found in the run's folder, for reports.

    Arguments and errors are those of `evaluate_sets`.
    """
    titles = [(type(config), config.data.name) for config in configs]
    for title in titles:
        if titles.count(title) > 1:
            raise UserError(f"two sets are called {title[1]}; give each a name of its own with --data NAME=FOLDER")
    if output is not None and not output.resolve().parent.is_dir():
        raise UserError(f"no folder {output.parent} to write {output.name} to; make it first")
    run = runs.open_run(checkpoint, pretrained)
    trained_on = run.config.data
    sets = Sets(trained_on.image_size, trained_on.preprocessing, lambda: run.tower)
    evaluators = [config.build(sets) for config in configs]
    model = run.model()
    found = []
    for config, evaluator in zip(configs, evaluators, strict=True):
        found.append(evaluator(model))
        Console().print(table(found[-1]))
        write_record(found[-1], checkpoint, run.step, experiment.to_dict(config))
    if output is not None:
        metrics = {name: value for evaluation in found for name, value in evaluation.metrics().items()}
        output.write_text(json.dumps(metrics, indent=2) + "\n")
    say(f"kept in {checkpoint}; lit-het report {checkpoint} draws it")
    return found


def parse_set(argument: str, like: ImageSet) -> ImageSet:
    """Returns the set that a ``--data`` argument names, with the other fields of ``like``.

    The folder holds ``classnames.txt`` and either shards or a folder ``like.split`` of them; or it holds shards and the
    folder above it ``classnames.txt``.

    Raises:
        UserError: there is no such folder, or no class names.
    """
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).is_dir():
        name, path = "", argument
    folder = path.rstrip("/")
    parent, _, last = folder.rpartition("/")
    if not storage.is_remote(folder) and not Path(folder).is_dir():
        raise UserError(f"no folder {folder}; --data takes folders with classnames.txt and shards")
    if storage.exists(f"{folder}/{CLASS_NAMES_FILE}"):
        directory, split = folder, "." if _has_shards(folder) else like.split
    elif storage.exists(f"{parent or '.'}/{CLASS_NAMES_FILE}"):
        directory, split = parent or ".", last
    else:
        raise UserError(f"no classnames.txt in {folder} or above it; write one with a class name a line")
    return dataclasses.replace(like, name=name or last, directory=directory, split=split)


def _has_shards(folder: str) -> bool:
    try:
        return bool(expand(folder))
    except UserError:
        return False


def table(evaluation: Evaluation) -> Table:
    """Returns the figures of an evaluation, each with its standard error where it has one."""
    shown = Table(title=Text(f"{evaluation.kind.replace('_', '-')} {evaluation.name}"), title_justify="left")
    shown.add_column("figure")
    shown.add_column("value", justify="right")
    shown.add_column("±", justify="right")
    shown.add_column("chance", justify="right")
    for figure, value in evaluation.figures.items():
        error, chance = evaluation.errors.get(figure), evaluation.chance.get(figure)
        shown.add_row(Text(figure), *("" if x is None or math.isnan(x) else f"{x:.4f}" for x in (value, error, chance)))
    return shown


def evaluate_suite(
    checkpoint: Path, config: Path | None, *, pretrained: Path | None = None, output: Path | None = None
) -> list[Evaluation]:
    """Runs the evaluations that a file's ``get_evaluations()`` returns, or those of the run's own configuration.

    Raises:
        UserError: there are none; otherwise as `evaluate_sets`.
    """
    if config is None:
        configs = experiment.load(runs.config_path(checkpoint)).evaluations
    else:
        configs = experiment.load_evaluations(config)
    if not configs:
        raise UserError(f"the configuration of {checkpoint} lists no evaluations; name a file of some with --config")
    return evaluate(checkpoint, configs, pretrained=pretrained, output=output)
