"""The table of few-shot accuracies over sets and settings, as HET-XL Table 22, and its rows in files."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from lit_het.errors import pluralize
from lit_het.eval.few_shot_settings import SettingsGroup
from lit_het.eval.report.exports import csv_text
from lit_het.eval.report.naming import FigureStyle
from lit_het.eval.report.tables import Cell, Row, Table

_STYLE = FigureStyle("", "{:.2%}", higher_is_better=True)


def settings_table(groups: Mapping[str, SettingsGroup]) -> Table:
    """Returns the means of groups by their titles, with both standard errors."""
    first = next(iter(groups.values()))
    rows = []
    for error, of in (("over_settings", "upstream settings"), ("over_sets", "sets")):
        rows.append(Row(f"± standard error over {of}"))
        for title, group in groups.items():
            means = group.means.values()
            cells = tuple(Cell(_STYLE.shown(mean.mean, getattr(mean, error))) for mean in means)
            rows.append(Row(f"{title}, {pluralize(group.num_settings, 'setting')}", cells))
    caption = f"Mean few-shot accuracy over {pluralize(len(first.sets), 'set')} and all settings"
    return Table(caption, tuple(f"{shots}-shot" for shots in first.means), tuple(rows))


def settings_markdown(groups: Mapping[str, SettingsGroup]) -> str:
    """Returns the table of the terminal."""
    return f"{settings_table(groups).markdown()}\n"


def settings_csv(groups: Mapping[str, SettingsGroup]) -> str:
    """Returns a line for each group and number of shots, in full precision; missing errors are empty."""
    lines = [{name: "" if value is None else value for name, value in row.items()} for row in _rows(groups)]
    return csv_text(tuple(lines[0]), lines)


def settings_json(groups: Mapping[str, SettingsGroup]) -> str:
    """Returns the groups in full precision; missing errors are null."""
    content = {
        "sets": next(iter(groups.values())).sets,
        "runs": {title: group.runs for title, group in groups.items()},
        "means": list(_rows(groups)),
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _rows(groups: Mapping[str, SettingsGroup]) -> Iterable[dict[str, Any]]:
    for title, group in groups.items():
        for shots, mean in group.means.items():
            errors = {"error_over_settings": mean.over_settings, "error_over_sets": mean.over_sets}
            yield {
                "group": title,
                "settings": group.num_settings,
                "shots": shots,
                "mean": mean.mean,
                **{name: error if math.isfinite(error) else None for name, error in errors.items()},
            }
