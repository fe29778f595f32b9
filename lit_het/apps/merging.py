"""``lit-het merge``: means of the weights of fine-tuned models, the curve between two of them, and greedy soups."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.errors import UserError, pluralize
from lit_het.eval.evaluation import Evaluation, cell, opened_evaluations
from lit_het.eval.report import figures
from lit_het.eval.report.figures import Line
from lit_het.eval.report.naming import split, style_of
from lit_het.eval.report.page import Html, Section, render_page, side_by_side
from lit_het.eval.report.tables import Table, plain_table
from lit_het.eval.report.writing import print_results, write_benchmark, write_files
from lit_het.eval.suite import EvaluationConfig
from lit_het.models.calibration.seen_images import seen
from lit_het.models.merging import greedy_soup, mean, open_mergeable
from lit_het.models.opening import Run
from lit_het.training.durations import Duration
from lit_het.weights.importing import check_free, write_run

# Figures of a curve, where an evaluation has them.
_SHOWN = ("top1", "nll", "ece", "image_to_text_recall1", "text_to_image_recall1")


def merge(run_dirs: Sequence[Path], shares: Sequence[float] | None, output: Path) -> None:
    """Writes a run whose weights are a mean of those of others.

    Args:
        run_dirs: the runs, which started from the same weights.
        shares: of each run, which sum to 1; None for equal ones.
        output: the run to write.
    """
    check_free(output)
    if shares is None:
        shares = [1 / len(run_dirs)] * len(run_dirs)
    if len(shares) != len(run_dirs) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise UserError(
            f"--weights {' '.join(map(str, shares))} must be one number for each of {pluralize(len(run_dirs), 'run')}, "
            "and sum to 1"
        )
    _write(output, *open_mergeable(run_dirs), shares)


def soup(run_dirs: Sequence[Path], config: EvaluationConfig, by: str | None, output: Path) -> None:
    """Writes a greedy soup: the mean of the runs that make it no worse on a held-out set, tried from the best on.

    Args:
        run_dirs: the runs, which started from the same weights.
        config: the evaluation of the held-out set.
        by: the figure, such as ``nll``; None for the main one of the evaluation.
        output: the run to write.
    """
    check_free(output)
    figure = by or config.main_figure
    if figure is None or (sign := _sign(figure)) is None:
        raise UserError(f"--by {figure} names no figure of which high or low is better: give one, such as --by nll")
    runs, origin = open_mergeable(run_dirs)
    _check_unseen(runs, config)
    evaluated = _Evaluated(runs[0], [config])
    with Bar(f"soups by {figure} of {config.data.name}", 2 * len(runs) - 1, "models") as bar:

        def score(models: Sequence[Run]) -> float:
            found = evaluated(mean([run.params for run in models], [1 / len(models)] * len(models)))[0]
            if figure not in found.figures:
                raise UserError(f"--by {figure} is not one of {', '.join(found.figures)}")
            bar.advance(1)
            return sign * found.figures[figure]

        tries = greedy_soup(runs, score)
    rows = [
        (str(run_dirs[one.number]), f"{sign * one.alone:.4f}", f"{sign * one.score:.4f}", "kept" if one.kept else "")
        for one in tries
    ]
    print_results(plain_table(f"{figure} of {config.data.name}", ("alone", "of the soup with it", ""), rows))
    kept = [one.number for one in tries if one.kept]
    _write(output, [runs[number] for number in kept], origin, [1 / len(kept)] * len(kept))


def curve(run_dirs: Sequence[Path], configs: Sequence[EvaluationConfig], points: int, output: Path) -> None:
    """Writes a page with the figures of the mixtures of two runs on several sets, and the figures as JSON and Markdown.

    Args:
        run_dirs: the start, and what was made of it.
        configs: the evaluations, such as those of new data and of old tasks.
        points: number of mixtures, both runs among them.
        output: file .html.
    """
    if len(run_dirs) != 2:
        raise UserError(f"--curve is between two runs, not {len(run_dirs)}: the start, and what was made of it")
    if output.suffix != ".html":
        raise UserError(f"--curve {output} must be a file that ends in .html")
    runs, _ = open_mergeable(run_dirs)
    evaluated, shares = _Evaluated(runs[0], configs), np.linspace(0, 1, points)
    found: list[list[Evaluation]] = []
    with Bar("mixtures", points, "models") as bar:
        for share in shares.tolist():
            found.append(evaluated(mean([run.params for run in runs], [1 - share, share])))
            bar.advance(1)
    content = [
        {"share": share, **{name: value for one in of_share for name, value in one.metrics().items()}}
        for share, of_share in zip(shares.tolist(), found, strict=True)
    ]
    write_files({output.with_suffix(".json"): json.dumps(content, indent=1) + "\n"})
    names = [run_dir.name or str(run_dir) for run_dir in run_dirs]
    write_benchmark(output, _page(names, shares.tolist(), found), _tables(shares.tolist(), found))


def _check_unseen(runs: Sequence[Run], config: EvaluationConfig) -> None:
    """Checks that no run was trained on the images by which a soup is chosen: the longest trained would win."""
    images = runs[0].sets().open(dataclasses.replace(config.data, labelled=False)).loader
    for run in runs:
        if found := seen(run.run_dir, images):
            raise UserError(
                f"{found.model} was trained on images of {found.shard}, which choose no soup of it; give --data with "
                "others, or --portion with those that training held out"
            )


class _Evaluated:
    """Evaluates models of one form on the same sets."""

    def __init__(self, run: Run, configs: Sequence[EvaluationConfig]):
        self._run = run
        self._evaluations = opened_evaluations(configs, run.sets(), run.model(calibrated=False))

    def __call__(self, params: Any) -> list[Evaluation]:
        model = dataclasses.replace(self._run, params=params).model(calibrated=False)
        return [found for _, found in self._evaluations(model)]


def _write(output: Path, runs: Sequence[Run], origin: str, shares: Sequence[float]) -> None:
    first, sources = runs[0], [str(run.run_dir) for run in runs]
    described = " + ".join(f"{share:.4g} {source}" for share, source in zip(shares, sources, strict=True))
    params = mean([run.params for run in runs], shares)
    write_run(
        output, _config(first.config, output), params, first.tokenizer, described, origin, [run.run_dir for run in runs]
    )
    message(f"{output}: {described}; lit-het calibrate fits its temperature")


def _config(config: ExperimentConfig, output: Path) -> ExperimentConfig:
    """Returns the configuration of a run that holds all of its parameters itself."""
    nothing: dict[str, Any] = {"pretrained": None, "calibration": None, "evaluations": ()}
    return dataclasses.replace(config, run_dir=output, length=Duration(0), **nothing)


def _sign(figure: str) -> int | None:
    """Returns 1 if high values of a figure are better, -1 if low ones are; None if that is not known."""
    is_better_high = style_of(split(figure)[1]).higher_is_better
    return None if is_better_high is None else 1 if is_better_high else -1


def _lines(shares: Sequence[float], found: Sequence[Sequence[Evaluation]], figure: str) -> dict[str, Line]:
    lines = {}
    for number, first in enumerate(found[0]):
        if figure in first.figures:
            of_set = [of_share[number] for of_share in found]
            errors = [one.errors.get(figure, math.nan) for one in of_set]
            values = [one.figures[figure] for one in of_set]
            error = errors if all(map(math.isfinite, errors)) else ()
            lines[first.name] = Line(shares, values, error, colour=len(lines))
    return lines


def _page(names: Sequence[str], shares: Sequence[float], found: Sequence[Sequence[Evaluation]]) -> Html:
    label = f"share of {names[1]}; the rest is {names[0]}"
    plots = [
        figures.plot(style_of(figure).label, lines, label, style_of(figure).label)
        for figure in _SHOWN
        if (lines := _lines(shares, found, figure))
    ]
    note = "Bars: one standard error over images. Temperatures are those of the weights, without calibration."
    sections = [
        Section("Mixtures", (side_by_side(*plots),), note),
        Section("Figures", tuple(table.html() for table in _tables(shares, found))),
    ]
    return render_page(f"{names[0]} to {names[1]}", sections, _verdict(names, shares, found))


def _verdict(names: Sequence[str], shares: Sequence[float], found: Sequence[Sequence[Evaluation]]) -> str:
    """Returns which mixture has the highest mean of the first figure over sets."""
    figure = next((name for name in _SHOWN if all(name in one.figures for one in found[0])), None)
    if figure is None:
        return f"Mixtures of {names[0]} and {names[1]}"
    sign = _sign(figure) or 1
    means = [float(np.mean([one.figures[figure] for one in of_share])) for of_share in found]
    best = int(np.argmax([sign * value for value in means]))
    style, of = style_of(figure), "mean over the sets" if len(found[0]) > 1 else found[0][0].name
    return f"{shares[best]:.0%} of {names[1]} has the best {style.label} ({of}): {style.shown(means[best])}"


def _tables(shares: Sequence[float], found: Sequence[Sequence[Evaluation]]) -> list[Table]:
    return [_table(shares, [of_share[number] for of_share in found]) for number in range(len(found[0]))]


def _table(shares: Sequence[float], of_set: Sequence[Evaluation]) -> Table:
    shown = [figure for figure in _SHOWN if figure in of_set[0].figures]
    rows: Iterator[Any] = (
        (f"{share:.2f}", *(cell(one, figure) for figure in shown)) for share, one in zip(shares, of_set, strict=True)
    )
    return plain_table(f"{of_set[0].kind.replace('_', '-')} {of_set[0].name}, by share", shown, rows)
