"""Results of training with several settings and seeds: one file per run, one table for all."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cattrs
from rich.table import Table
from rich.text import Text

from lit_het import untrusted
from lit_het.errors import UserError
from lit_het.eval.significance import Estimate, estimate
from lit_het.files import write_atomically


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of one finished run.

    Attributes:
        setting: the varied setting, as part of file names.
        title: the varied setting, as shown in tables.
        seed: of initialisation, noise and data order.
        learned: whether τ was learned.
        temperature: τ at the end of training.
        num_parameters: of the model.
        metrics: `lit_het.eval.scores.figures` on the held-out set.
        seconds: training time, compilation included.
        device: the device of the training.
        held_out: the shards of the held-out set.
        config: the configuration, by dotted field names.
    """

    setting: str
    title: str
    seed: int
    learned: bool
    temperature: float
    num_parameters: int
    metrics: dict[str, float]
    seconds: float
    device: str
    held_out: str
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the run in its sweep."""
        return run_name(self.setting, self.seed)


@dataclasses.dataclass(frozen=True)
class Summary:
    """All seeds of one setting.

    Attributes:
        setting, title, learned, num_parameters: as in `RunResult`.
        temperature: τ at the end of training.
        metrics: mean and standard error of each metric.
        seeds: of the runs, ascending.
    """

    setting: str
    title: str
    learned: bool
    num_parameters: int
    temperature: Estimate
    metrics: dict[str, Estimate]
    seeds: tuple[int, ...]


# The legend of a table.
NOTE = "Mean ± standard error over seeds; NLL in nats, lower is better; τ is that of the trained model."


def run_name(setting: str, seed: int) -> str:
    """Returns the name of a run in its sweep."""
    return f"{setting}_seed{seed}"


def write_result(result: RunResult, directory: Path) -> None:
    """Writes ``<setting>_seed<k>.json`` atomically, as a single line."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(
        directory / f"{result.name}.json", json.dumps(dataclasses.asdict(result), ensure_ascii=False) + "\n"
    )


def read_results(directory: Path) -> list[RunResult]:
    """Reads the results of all finished runs, by name.

    Raises:
        UserError: a file cannot be read.
    """
    return [_read(path) for path in sorted(directory.glob("*.json"))]


def summarize(results: Iterable[RunResult], order: Callable[[RunResult], Any]) -> list[Summary]:
    """Returns one summary per setting, sorted by ``order``."""
    members: dict[str, list[RunResult]] = {}
    for result in sorted(results, key=lambda result: (order(result), result.setting, result.seed)):
        members.setdefault(result.setting, []).append(result)
    return [_summarize(runs) for runs in members.values()]


def table(summaries: Sequence[Summary], title: str) -> Table:
    """Returns the table for the terminal."""
    shown = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(_COLUMNS):
        shown.add_column(column, justify="left" if number == 0 else "right")
    for summary in summaries:
        shown.add_row(*(Text(cell) for cell in _cells(summary)))
    return shown


def markdown(summaries: Sequence[Summary]) -> str:
    """Returns the same rows as Markdown, with the legend below."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_cells, summaries)]
    rows = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"{rows}\n{NOTE}\n"


def check_comparable(results: Iterable[RunResult], varied: Callable[[str], bool]) -> None:
    """Checks that runs differ only in fields that ``varied`` accepts.

    Raises:
        UserError: runs differ in another field.
    """
    first: RunResult | None = None
    for result in results:
        first = first or result
        one, other = ({**run.config, "held_out": run.held_out} for run in (first, result))
        differing = differences(one, other, varied)
        if differing:
            field, (before, now) = next(iter(differing.items()))
            raise UserError(
                f"{field} is {before} in {first.name}.json and {now} in {result.name}.json: one table cannot compare "
                "them; give each experiment its own folder with --output"
            )


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], ignored: Callable[[str], bool]
) -> dict[str, tuple[Any, Any]]:
    """Returns fields with different values, with both values; without fields that ``ignored`` accepts."""
    return {
        field: (one.get(field), other.get(field))
        for field in sorted(one.keys() | other.keys())
        if one.get(field) != other.get(field) and not ignored(field)
    }


_COLUMNS = ("setting", "τ", "NLL", "Prec@1", "ECE", "parameters", "seeds")


def _cells(summary: Summary) -> tuple[str, ...]:
    return (
        summary.title,
        summary.temperature.shown(3) if summary.learned else f"{summary.temperature.mean:g}",
        *(summary.metrics[name].shown(3) for name in ("nll", "top1", "ece")),
        f"{summary.num_parameters:,}",
        _shown_seeds(summary.seeds),
    )


def _shown_seeds(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _summarize(runs: Sequence[RunResult]) -> Summary:
    first = runs[0]
    return Summary(
        setting=first.setting,
        title=first.title,
        learned=first.learned,
        num_parameters=first.num_parameters,
        temperature=estimate([run.temperature for run in runs]),
        metrics={name: estimate([run.metrics[name] for run in runs]) for name in first.metrics},
        seeds=tuple(run.seed for run in runs),
    )


def _read(path: Path) -> RunResult:
    try:
        return _CONVERTER.structure(untrusted.read_json(path), RunResult)
    # cattrs passes on any exception of a conversion, such as that of a number from a string.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} is not a result of a run ({reason}); delete it, and the run is repeated") from error


_CONVERTER = cattrs.Converter(forbid_extra_keys=True)
