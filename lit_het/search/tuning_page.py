"""The tables and the page of a search: trials from the best on, and the metric over trials and over every field."""

import itertools
import math
from collections.abc import Sequence

from lit_het.eval.report import figures
from lit_het.eval.report.figures import Line
from lit_het.eval.report.page import Html, Section, facts, render_page, side_by_side
from lit_het.eval.report.tables import NO_FIGURE, plain_table
from lit_het.files import write_atomically
from lit_het.search import grid
from lit_het.search.grid import Axis
from lit_het.search.space import Field, Range, Search, Trial

# Rows of the table that are printed.
_PRINTED = 10
_MOST_TICKS = 10


def write_table(search: Search, order: Sequence[Trial]) -> None:
    """Writes ``table.md`` of the trials, the best first, and prints its first rows."""
    cells = [(str(trial.number), *_cells(search, trial)) for trial in order]
    grid.write_table(search.output, ("trial", *_titles(search)), cells, _note(search), printed=_PRINTED)


def write_page(search: Search, trials: Sequence[Trial]) -> None:
    """Writes ``page.html`` of the trials, given by number."""
    order = search.ranked(trials)
    rows = ((f"trial {trial.number}", *_cells(search, trial)) for trial in order)
    sections = [Section("Trials", (plain_table("", _titles(search), rows).html(),), _note(search))]
    finished = [trial for trial in trials if trial.state == "finished"]
    verdict = "no trial is finished"
    if finished:
        plots = [_over_field(field, finished, search.metric) for field in search.fields]
        sections = [
            Section("Progress", (_progress(search, finished),)),
            Section("Fields", (side_by_side(*plots),), "Each point is a trial; the other fields differ too."),
            *sections,
        ]
        setting = ", ".join(f"{field} = {value}" for field, value in order[0].setting.items())
        verdict = f"{search.metric} is {order[0].value:.4g} with {setting}"
    states = [trial.state for trial in trials]
    counts = {state: states.count(state) for state in ("finished", "given up", "failed", "running") if state in states}
    header = facts({"metric": search.metric, "method": search.method, "trials": len(trials), **counts})
    write_atomically(search.output / "page.html", render_page("Search", sections, verdict, header))


def _titles(search: Search) -> tuple[str, ...]:
    return (*(field.field for field in search.fields), search.metric, *search.shown, "state")


def _cells(search: Search, trial: Trial) -> tuple[str, ...]:
    values = (trial.value, *(trial.figures.get(name, math.nan) for name in search.shown))
    return (
        *(trial.setting[field.field] for field in search.fields),
        *(f"{value:.4g}" if math.isfinite(value) else NO_FIGURE for value in values),
        f"{trial.state} {trial.note}" if trial.state == "given up" else trial.state,
    )


def _note(search: Search) -> str:
    return (
        f"Best first, {'lower' if search.minimizes else 'higher'} is better. The images of this metric chose the "
        "setting, so its value is too good: report other images, over several seeds."
    )


def _progress(search: Search, finished: Sequence[Trial]) -> Html:
    numbers, values = [trial.number for trial in finished], [trial.value for trial in finished]
    best = list(itertools.accumulate(values, min if search.minimizes else max))
    lines = {"trials": Line(numbers, values, colour=0, joined=False), "best so far": Line(numbers, best, colour=1)}
    step = math.ceil((numbers[-1] + 1) / _MOST_TICKS)
    ticks = {float(number): str(number) for number in range(0, numbers[-1] + 1, step)}
    return figures.plot(f"{search.metric} over trials", lines, "trial", search.metric, ticks=ticks)


def _over_field(field: Field, finished: Sequence[Trial], metric: str) -> Html:
    settings, ticks = [trial.setting[field.field] for trial in finished], None
    if isinstance(field, Axis):
        places = [field.values.index(setting) for setting in settings]
        ticks = {float(place): value for place, value in enumerate(field.values)}
    elif field.logarithmic:
        places, ticks = [math.log10(float(setting)) for setting in settings], _logarithmic_ticks(field)
    else:
        places = [float(setting) for setting in settings]
    line = Line(places, [trial.value for trial in finished], joined=False)
    return figures.plot(field.field, {"trials": line}, field.field, metric, ticks=ticks)


def _logarithmic_ticks(field: Range) -> dict[float, str]:
    """Returns the powers of ten in a range, or its ends if there are fewer than two."""
    powers = range(math.ceil(math.log10(field.low)), math.floor(math.log10(field.high)) + 1)
    values = [10.0**power for power in powers] if len(powers) > 1 else [field.low, field.high]
    return {math.log10(value): f"{value:g}" for value in values}
