"""``lit-het zero-shot`` and its siblings, one for each kind of evaluation, and ``lit-het evaluate`` for many."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_het import distributed
from lit_het.runs.flags import with_flags
from lit_het.configs import experiment
from lit_het.console import say
from lit_het.errors import UserError
from lit_het.eval.evaluation import Evaluation, write_record
from lit_het.eval.evaluators.ensemble import EnsembleConfig
from lit_het.eval.sets import ImageSet, Sets, parse_set
from lit_het.eval.suite import EVALUATIONS, EvaluationConfig
from lit_het.files import write_atomically
from lit_het.runs.directory import load_config
from lit_het.runs.opening import open_run


def evaluate_sets(
    kind: str,
    checkpoints: Sequence[Path],
    data: Sequence[str],
    flags: Sequence[str],
    *,
    pretrained: Path | None = None,
    output: Path | None = None,
) -> list[Evaluation]:
    """Runs one kind of evaluation on several sets.

    Args:
        kind: a key of `lit_het.eval.suite.EVALUATIONS`.
        checkpoints: directory of the run; those of the members of an ensemble.
        data: ``NAME=FOLDER`` or ``FOLDER`` each, see `parse_set`.
        flags: fields of the evaluation's configuration.
        pretrained: where the run with the locked parameters lies now, if it has moved.
        output: a JSON file to write the figures to.

    Raises:
        UserError: the run or a set cannot be read, or a flag is wrong.
    """
    like = with_flags(
        EVALUATIONS[kind](ImageSet("", "", labelled=kind != "retrieval")), flags, f"lit-het {kind}", flat=True
    )
    configs = [dataclasses.replace(like, data=parse_set(argument, like.data)) for argument in data]
    return evaluate(checkpoints, configs, pretrained=pretrained, output=output)


def evaluate(
    checkpoints: Sequence[Path],
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
    if output is not None and (output.is_dir() or not output.resolve().parent.is_dir()):
        raise UserError(f"--output {output} is no file in a folder that there is; make the folder, or name a file")
    if len(checkpoints) > 1 and not all(isinstance(config, EnsembleConfig) for config in configs):
        raise UserError("several checkpoints are members of an ensemble; for other evaluations give one --checkpoint")
    opened = [open_run(checkpoint, pretrained) for checkpoint in checkpoints]
    run = opened[0]
    sets = Sets(run.config.data.image_size, run.config.data.preprocessing, lambda: run.tower)
    for other in opened[1:]:
        if (other.config.data.image_size, other.config.data.preprocessing) != (sets.image_size, sets.preprocessing):
            raise UserError(f"{other.run_dir} sees images otherwise than {run.run_dir}: they are no ensemble")
    evaluators = [config.build(sets) for config in configs]
    models = [one.model() for one in opened]
    for evaluator in evaluators:  # before the first reads images
        evaluator.check(*models)
    found, console = [], Console()
    if not console.is_terminal:
        console.width = 120
    for config, evaluator in zip(configs, evaluators, strict=True):
        found.append(evaluator(*models))
        if not distributed.is_first():
            continue  # all processes found the same, the first one tells it
        console.print(table(found[-1]))
        settings = experiment.to_dict(config)
        if len(opened) > 1:
            settings["checkpoints"] = [f"{one.run_dir} at step {one.step}" for one in opened]
        write_record(found[-1], run.run_dir, run.step, settings)
        if output is not None:  # anew after each, should a later one fail
            metrics = {name: value for evaluation in found for name, value in evaluation.metrics().items()}
            write_atomically(output, json.dumps(metrics, indent=2) + "\n")
    say(f"kept in {run.run_dir}; lit-het report {run.run_dir} draws it")
    return found


def table(evaluation: Evaluation) -> Table:
    """Returns the figures of an evaluation, those of each part in a column of its own, with their standard errors.

    Many parts stand below each other, without errors.
    """
    rows, parts = {}, {}
    for path in evaluation.figures:
        part, _, figure = path.rpartition("/")
        rows[figure], parts[part] = None, None
    # The longer way is down.
    turned = len(parts) >= len(rows)
    # Many columns leave no room for errors.
    caption = "standard errors: in the run's folder, and in lit-het report" if turned and evaluation.errors else None
    title = Text(f"{evaluation.kind.replace('_', '-')} {evaluation.name}")
    shown = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    shown.add_column("part" if turned else "figure", overflow="fold")
    for column in rows if turned else parts:
        shown.add_column(Text(column or "value"), justify="right")
    if not turned:
        shown.add_column("chance", justify="right")
    for row in parts if turned else rows:
        paths = [f"{row}/{column}" if turned else f"{column}/{row}" for column in (rows if turned else parts)]
        cells = [_cell(evaluation, path.removeprefix("/"), with_error=not turned) for path in paths]
        chance = [] if turned else [f"{evaluation.chance[row]:.4f}" if row in evaluation.chance else ""]
        shown.add_row(Text(row), *cells, *chance)
    return shown


def _cell(evaluation: Evaluation, path: str, *, with_error: bool) -> str:
    if path not in evaluation.figures:
        return ""
    error = evaluation.errors.get(path, math.nan) if with_error else math.nan
    return f"{evaluation.figures[path]:.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def evaluate_suite(
    checkpoints: Sequence[Path], config: Path | None, *, pretrained: Path | None = None, output: Path | None = None
) -> list[Evaluation]:
    """Runs the evaluations that a file's ``get_evaluations()`` returns, or those of the run's own configuration.

    Raises:
        UserError: there are none; otherwise as `evaluate_sets`.
    """
    configs = load_config(checkpoints[0]).evaluations if config is None else experiment.load_evaluations(config)
    if not configs:
        raise UserError(
            f"the configuration of {checkpoints[0]} lists no evaluations; name a file of some with --config"
        )
    return evaluate(checkpoints, configs, pretrained=pretrained, output=output)
