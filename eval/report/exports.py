"""The figures of a report as JSON, CSV and Markdown."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lit_het.eval.report.naming import title_of_kind
from lit_het.eval.report.sections import keys_of, measured_by
from lit_het.eval.report.tables import evaluation_table, in_markdown
from lit_het.eval.report.welch import welch_table
from lit_het.eval.run_comparison import RunComparison, json_of, rows_of
from lit_het.eval.saved_runs import SavedRun
from lit_het.files import cell_of


def report_json(runs: Sequence[SavedRun], comparison: RunComparison | None, verdict: str) -> str:
    """Returns all figures of all runs, and their comparison if given; values that are not finite are null."""
    content: dict[str, Any] = {
        "verdict": verdict,
        "runs": [
            {
                "name": run.name,
                "directory": str(run.directory),
                "evaluations": [
                    {
                        "kind": record.kind,
                        "name": record.name,
                        "step": record.step,
                        "settings": record.settings,
                        "figures": _finite(record.figures),
                        "errors": _finite(record.errors),
                        "chance": _finite(record.chance),
                    }
                    for record in run.records.values()
                ],
            }
            for run in runs
        ],
    }
    if comparison is not None:
        content["comparison"] = json_of(comparison)
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def report_csv(runs: Sequence[SavedRun]) -> str:
    """Returns a line for every figure of every run; missing errors and chance levels are empty."""
    lines = [
        {
            "run": run.name,
            "kind": record.kind,
            "set": record.name,
            "figure": figure,
            "value": value,
            "error": record.errors.get(figure, ""),
            "chance": record.chance.get(figure, ""),
            "step": record.step,
        }
        for run in runs
        for record in run.records.values()
        for figure, value in record.figures.items()
    ]
    return csv_text(("run", "kind", "set", "figure", "value", "error", "chance", "step"), lines)


def report_markdown(runs: Sequence[SavedRun], comparison: RunComparison | None, title: str, verdict: str) -> str:
    """Returns the tables of the page."""
    parts = [f"# {in_markdown(title)}\n", f"{in_markdown(verdict)}\n"]
    for key in keys_of(runs):
        parts += [f"## {title_of_kind(key[0])}\n", evaluation_table(measured_by(runs, key)).markdown()]
    if comparison is not None:
        parts += ["## Comparison\n", welch_table(comparison).markdown()]
    return "\n".join(parts)


def comparison_json(comparison: RunComparison) -> str:
    """Returns a comparison in full precision."""
    return json.dumps(json_of(comparison), indent=1, ensure_ascii=False) + "\n"


def comparison_csv(comparison: RunComparison) -> str:
    """Returns a line for every compared figure, in full precision; missing numbers are empty."""
    rows = [{name: _or_empty(value) for name, value in row.items()} for row in rows_of(comparison)]
    return csv_text(tuple(rows[0]), rows)


def comparison_markdown(comparison: RunComparison) -> str:
    """Returns the table of the terminal, with its verdict and remarks."""
    groups = zip(comparison.titles, (comparison.one, comparison.other), strict=True)
    members = "; ".join(f"{title}: {', '.join(names)}" for title, names in groups)
    notes = (comparison.verdict, *comparison.remarks, "Bold: significant after Holm's correction.", f"{members}.")
    return "\n".join([welch_table(comparison).markdown(), *(f"{in_markdown(sentence)}\n" for sentence in notes)])


def csv_text(fields: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table as CSV, with a heading."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: cell_of(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _or_empty(value: Any) -> Any:
    return "" if isinstance(value, float) and math.isnan(value) else value
