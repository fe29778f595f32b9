"""``lit-het report`` and ``lit-het compare``: pages and tables of runs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lit_het.console import message
from lit_het.errors import UserError
from lit_het.eval.evaluation import evaluations_folder
from lit_het.eval.few_shot_settings import SettingsGroup, settings_groups
from lit_het.eval.report import exports, few_shot
from lit_het.eval.report.page import Section, render_page
from lit_het.eval.report.runs import (
    Opening,
    comparison_section,
    configuration_section,
    header,
    opening_of,
    runs_section,
    training_section,
)
from lit_het.eval.report.sections import evaluation_sections
from lit_het.eval.report.welch import welch_tables
from lit_het.eval.report.writing import print_results, write_files
from lit_het.eval.run_comparison import RunComparison, compare_runs, titles_of
from lit_het.eval.saved_runs import SavedRun, by_setting, read_runs

_COMPARISONS: Mapping[str, Callable[[RunComparison], str]] = {
    ".md": exports.comparison_markdown,
    ".csv": exports.comparison_csv,
    ".json": exports.comparison_json,
}
_OVER_SETTINGS: Mapping[str, Callable[[Mapping[str, SettingsGroup]], str]] = {
    ".md": few_shot.settings_markdown,
    ".csv": few_shot.settings_csv,
    ".json": few_shot.settings_json,
}


def report(
    directories: Sequence[Path],
    output: Path | None = None,
    first: Sequence[Section] = (),
    opening: Opening | None = None,
) -> Path:
    """Writes a page on runs from the files in their folders, and the same figures as JSON, CSV and Markdown.

    Args:
        directories: of the runs.
        output: path of the page; by default ``report.html`` in the folder of a single run, or in the working directory.
        first: further sections, shown first.
        opening: what stands above all sections; by default the main results.

    Returns:
        The path of the page.
    """
    if output is None:
        output = (directories[0] if len(directories) == 1 else Path()) / "report.html"
    if output.suffix != ".html" or output.stem == "config":
        raise UserError(f"--output {output}: name a file that ends in .html, and not config.html beside a run's own")
    runs = read_runs(directories)
    settings = by_setting(runs)
    comparison, remark = _comparison(settings)
    # One run of each setting is drawn: those that differ only in their seeds look alike.
    drawn = [members[0] for members in settings]
    try:
        opening = opening or opening_of(runs, comparison, remark)
        sections = [
            *first,
            runs_section(runs),
            None if comparison is None else comparison_section(runs, comparison),
            *evaluation_sections(runs, drawn),
            training_section(runs),
            configuration_section(runs),
        ]
    except (ArithmeticError, LookupError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        # Files may come from others: arrays may be missing, and numbers impossible to draw.
        problem = f"{type(error).__name__}: {str(error)[:200]}"
        places = ", ".join(str(evaluations_folder(run.directory)) for run in runs)[:500]
        raise UserError(f"{places}: contain values that lit-het does not write ({problem}); evaluate again") from error
    summary = " ".join(opening.sentences)
    shown = [section for section in sections if section is not None]
    page = render_page(opening.title, shown, opening.sentences[0], header(runs, opening))
    write_files(
        {
            output: page,
            output.with_suffix(".json"): exports.report_json(runs, comparison, summary),
            output.with_suffix(".csv"): exports.report_csv(runs),
            output.with_suffix(".md"): exports.report_markdown(runs, comparison, opening.title, summary),
        }
    )
    message(f"{output} and {output.stem}.json, .csv and .md beside it")
    return output


def compare(directories: Sequence[Path], against: Sequence[Path], output: Path | None = None) -> RunComparison:
    """Prints Welch's test of every metric that all runs have, and writes it to ``output`` if given.

    Args:
        directories: the first group of runs.
        against: the second.
        output: a file .md, .csv or .json.
    """
    _check_output(output)
    runs = read_runs([*directories, *against])
    comparison = compare_runs(runs[: len(directories)], runs[len(directories) :])
    tables = (dataclasses.replace(table, caption=title) for title, table in welch_tables(comparison).items())
    groups = zip(comparison.titles, (comparison.one, comparison.other), strict=True)
    members = (f"{title}: {', '.join(names)}" for title, names in groups)
    print_results(*tables, *members, comparison.verdict, *comparison.remarks)
    if output is not None:
        write_files({output: _COMPARISONS[output.suffix](comparison)})
    return comparison


def compare_few_shot(
    directories: Sequence[Path], against: Sequence[Path] = (), output: Path | None = None
) -> dict[str, SettingsGroup]:
    """Prints the mean of few-shot accuracies over sets and settings, and writes it to ``output`` if given.

    Args:
        directories: runs of any settings; those that differ only in their seeds are one setting.
        against: runs of another method, as a second row; may be empty.
        output: a file .md, .csv or .json.

    Returns:
        The groups by their titles.
    """
    _check_output(output)
    runs = read_runs([*directories, *against])
    parts = [part for part in (runs[: len(directories)], runs[len(directories) :]) if part]
    names = [[run.name for run in part] for part in parts]
    titles = titles_of(*names) if len(names) == 2 else ("all runs",)
    groups = dict(zip(titles, settings_groups(parts), strict=True))
    print_results(
        few_shot.settings_table(groups), *(f"{title}: {', '.join(one.runs)}" for title, one in groups.items())
    )
    if output is not None:
        write_files({output: _OVER_SETTINGS[output.suffix](groups)})
    return groups


def _check_output(output: Path | None) -> None:
    if output is not None and output.suffix not in _COMPARISONS:
        raise UserError(f"--output {output}: its name must end in {', '.join(_COMPARISONS)}")


def _comparison(settings: Sequence[Sequence[SavedRun]]) -> tuple[RunComparison | None, str]:
    """Returns the comparison of two settings with several seeds each, or why they cannot be compared."""
    if len(settings) != 2 or min(map(len, settings)) < 2:
        return None, ""
    if not all(run.records for members in settings for run in members):
        return None, ""
    try:
        return compare_runs(*settings), ""
    except UserError as error:
        return None, f"The two groups of runs are not compared: {error}."
