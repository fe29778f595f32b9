"""``lit-het evaluate``, and the commands for single evaluations such as ``lit-het zero-shot``."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het import distributed
from lit_het.calibrations import Calibrated
from lit_het.configs import experiment
from lit_het.console import message
from lit_het.errors import UserError
from lit_het.eval.evaluation import Evaluation, cell, opened_evaluations, write_record
from lit_het.eval.report.tables import Table, plain_table
from lit_het.eval.report.writing import print_results
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.eval.suite import EvaluationConfig
from lit_het.files import write_atomically
from lit_het.models.averaging import means_over
from lit_het.models.calibration.seen_images import seen
from lit_het.models.experts import with_experts
from lit_het.models.opening import Run, open_run
from lit_het.models.sizes import AS_TRAINED, Sizes, with_sizes
from lit_het.paths import require_different
from lit_het.training.directory import load_config
from lit_het.weights.native import checksums

# Fields in which the members of a deep ensemble differ.
_SEEDS = {"run_dir", "seed", "data.seed", "pretrained.run"}


def evaluate(
    checkpoints: Sequence[Path],
    configs: Sequence[EvaluationConfig],
    *,
    pretrained: Path | None = None,
    output: Path | None = None,
    calibrated: Calibrated = True,
    reference: Path | None = None,
    experts: Sequence[str] = (),
    sizes: Sizes = AS_TRAINED,
) -> list[Evaluation]:
    """Evaluates a run, prints a table, and saves the results in the run's folder, for reports.

    Several few-shot evaluations with the same fit are followed by their means. The results of experts that are used in
    another way than in training, or of other sizes of patches or images, are not saved: they are of another model, for
    which no temperatures were fitted.

    Args:
        checkpoints: directory of the run, or of each member of an ensemble.
        configs: the evaluations.
        pretrained: current path of the run with the locked parameters, if it was moved.
        output: JSON file for the metrics.
        calibrated: whether to apply the fitted temperatures of ``lit-het calibrate``, if there are any; or a prior.
        reference: directory of a run whose saved few-shot accuracies are the reference of the weighted mean.
        experts: fields of the image tower's experts with other values, see `lit_het.models.experts.with_experts`.
        sizes: of patches and images, see `lit_het.models.sizes.with_sizes`.
    """
    changed = "experts" if experts else "sizes" if sizes != AS_TRAINED else ""
    if changed and not isinstance(calibrated, bool):
        raise UserError(f"--prior is of the model as trained, which other {changed} change; leave one of them out")
    _check_request(checkpoints, configs, output, changed)
    means = means_over(configs, reference)
    opened = [with_sizes(with_experts(open_run(one, pretrained), experts), sizes) for one in checkpoints]
    run, sets = opened[0], opened[0].sets()
    _check_finished(opened)
    _check_no_copies(opened)
    models = [one.model(calibrated=False if changed else calibrated) for one in opened]
    evaluations = opened_evaluations(configs, sets, *models)
    for config in configs:
        if config.classes_are_captions:
            _report_seen(run, sets.open(dataclasses.replace(config.data, labelled=False)), pretrained)
    found: list[Evaluation] = []

    def keep(evaluation: Evaluation, settings: Mapping[str, Any]) -> None:
        found.append(evaluation)
        is_main = distributed.is_main_process()
        if is_main:  # all processes have the same results
            shown, notes = table(evaluation)
            print_results(shown, *notes)
        if not changed:
            write_record(evaluation, run.run_dir, run.step, settings)
        if output is not None and is_main:  # after each evaluation, in case a later one fails
            metrics = {name: value for evaluation in found for name, value in evaluation.metrics().items()}
            write_atomically(output, json.dumps(metrics, indent=2) + "\n")

    members = {"checkpoints": [f"{one.run_dir} at step {one.step}" for one in opened]} if len(opened) > 1 else {}
    for config, evaluation in evaluations(*models):
        keep(evaluation, experiment.to_dict(config) | members)
    for mean, settings in means(found):
        keep(mean, settings)
    if changed:
        flag = "--experts" if experts else "other sizes"
        message(
            f"not saved in the run: with {flag} it is another model, without the temperatures of lit-het calibrate; "
            "--output FILE writes its metrics"
        )
    else:
        message(f"saved in {run.run_dir}; lit-het report {run.run_dir} writes a page")
    return found


def _check_request(
    checkpoints: Sequence[Path], configs: Sequence[EvaluationConfig], output: Path | None, changed: str
) -> None:
    """Checks what needs no model; ``changed`` is what differs from training, or empty."""
    titles = [(type(config), config.data.name) for config in configs]
    for title in titles:
        if titles.count(title) > 1:
            raise UserError(f"two data sets are called {title[1]}; give each a different name with --data NAME=FOLDER")
    check_output(output)
    for config in configs if changed else ():
        if config.data.embeddings is not None:
            raise UserError(f"the embeddings of {config.data.name} are of other {changed}; leave out --embeddings")
    if len(checkpoints) > 1 and not all(config.takes_several_models for config in configs):
        raise UserError("several checkpoints are members of an ensemble; other evaluations take one --checkpoint")
    check_members(checkpoints)


def _report_seen(run: Run, opened: OpenSet, pretrained: Path | None) -> None:
    """Warns if the images of captions as classes were trained on."""
    if found := seen(run.run_dir, opened.loader, pretrained):
        message(
            f"{found.model} was trained on images of {found.shard}: figures of {opened.config.name} are not held out; "
            "--portion takes those that training held out"
        )


def check_output(output: Path | None) -> None:
    """Raises a `UserError` if a file for metrics cannot be written where it is wanted."""
    if output is not None and (output.is_dir() or not output.resolve().parent.is_dir()):
        raise UserError(f"--output {output} must be a file in an existing folder; create the folder, or name a file")


def check_members(checkpoints: Sequence[Path]) -> None:
    """Checks, before any of them is opened, that runs can form an ensemble."""
    require_different(checkpoints)
    configs = [load_config(checkpoint) for checkpoint in checkpoints]
    first = configs[0]
    for checkpoint, other in zip(checkpoints, configs, strict=True):
        pair = f"{checkpoint} and {checkpoints[0]}"
        if (other.data.image_size, other.data.preprocessing) != (first.data.image_size, first.data.preprocessing):
            raise UserError(
                f"{pair} preprocess images differently and cannot form an ensemble; evaluate them one by one"
            )
        classes = [config.task.num_classes for config in (other, first)]
        if None not in classes and len({*classes}) == 2:
            raise UserError(
                f"{pair} are classifiers of {classes[0]} and of {classes[1]} classes and cannot form an ensemble; "
                "evaluate them one by one"
            )


def _check_no_copies(runs: Sequence[Run]) -> None:
    """Checks that no run is another one in a second folder, which would be counted as a second member."""
    if len(runs) < 2:
        return
    models = [(run.config.task, checksums.digest(run.params)) for run in runs]
    for number, model in enumerate(models):
        if model in models[:number]:
            original = runs[models.index(model)].run_dir
            raise UserError(
                f"{runs[number].run_dir} is a copy of {original}: its parameters are the same; leave it out"
            )


def _check_finished(runs: Sequence[Run]) -> None:
    """Checks that runs which differ in their seeds alone were trained equally long."""
    for run in runs[1:]:
        behind, ahead = sorted((run, runs[0]), key=lambda one: one.step)
        differing = experiment.differences(run.config, runs[0].config)
        if behind.step < ahead.step and differing.keys() <= _SEEDS:
            raise UserError(
                f"{behind.run_dir} is at step {behind.step} and {ahead.run_dir} at step {ahead.step}; finish its "
                "training with --resume, or leave it out"
            )


def table(evaluation: Evaluation) -> tuple[Table, list[str]]:
    """Returns the metrics of an evaluation with standard errors, one column per part, and notes.

    With many parts the table is transposed, without errors.
    """
    figures, parts = {}, {}
    for path in evaluation.figures:
        part, _, figure = path.rpartition("/")
        figures[figure], parts[part] = None, None
    title = f"{evaluation.kind.replace('_', '-')} {evaluation.name}"

    def cells(places: Iterable[tuple[str, str]], *, with_error: bool) -> list[str]:
        paths = (f"{part}/{figure}".removeprefix("/") for part, figure in places)
        return [cell(evaluation, path, with_error=with_error) for path in paths]

    # A table may have many rows but only few columns, which then leave no space for errors.
    if len(parts) >= len(figures):
        rows = [(part, *cells(((part, figure) for figure in figures), with_error=False)) for part in parts]
        notes = ["standard errors: see the run's folder or lit-het report"] if evaluation.errors else []
        return plain_table(title, tuple(figures), rows), [*notes, *filter(None, [evaluation.calibrated])]
    chance = {figure: f"{value:.4f}" for figure, value in evaluation.chance.items()}
    rows = [
        (figure, *cells(((part, figure) for part in parts), with_error=True), chance.get(figure, ""))
        for figure in figures
    ]
    columns = (*(part or "value" for part in parts), "chance")
    notes = []
    if any(evaluation.chance.get(path.rpartition("/")[2], level) != level for path, level in evaluation.chance.items()):
        notes = [f"chance is that of {evaluation.name}: other sets have other numbers of classes, see lit-het report"]
    return plain_table(title, columns, rows), [*notes, *filter(None, [evaluation.calibrated])]


def evaluate_suite(
    checkpoints: Sequence[Path],
    config: Path | None,
    *,
    pretrained: Path | None = None,
    output: Path | None = None,
    calibrated: Calibrated = True,
    experts: Sequence[str] = (),
    sizes: Sizes = AS_TRAINED,
) -> list[Evaluation]:
    """Runs the evaluations of a file's ``get_evaluations()``, or of the run's own configuration."""
    configs = load_config(checkpoints[0]).evaluations if config is None else experiment.load_evaluations(config)
    if not configs:
        raise UserError(
            f"the configuration of {checkpoints[0]} lists no evaluations; name a file of them with --config"
        )
    how: Any = {"pretrained": pretrained, "output": output, "calibrated": calibrated}
    return evaluate(checkpoints, configs, experts=experts, sizes=sizes, **how)
