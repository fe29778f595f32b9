"""What a run shows, a progress bar or plain lines, and the records that it has written."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lit_het import distributed, untrusted
from lit_het.errors import UserError, printable

# Seconds between two plain lines where there is no terminal to draw a bar on.
PLAIN_INTERVAL = 10.0
_MOST_BYTES_OF_LINE = 2**20
# Larger whole numbers are no figures.
_LARGEST = 2**63


class Bar:
    """A progress bar with rate and time left; plain lines where the output is not a terminal.

    Of several processes only the first shows it.

    Use as a context manager; ``advance(n, note)`` counts ``n`` more units.
    """

    def __init__(self, description: str, total: int, unit: str, *, start: int = 0):
        self.description, self.total, self.unit = description, total, unit
        self._done = self._start = start
        self._last_line = time.monotonic()
        self._began: float | None = None
        self._console = Console(stderr=True, quiet=not distributed.is_first())
        self._bar: Progress | None = None
        if self._console.is_terminal and not self._console.quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(description, total=total, completed=start, rate="", note="")

    def __enter__(self) -> "Bar":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        elif error is None:
            self._print_line("")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the screen to the bars of others."""
        if self._bar:
            self._bar.stop()
        yield
        if self._bar:
            self._bar.start()

    def advance(self, count: int, note: str = "") -> None:
        """Counts ``count`` more units done and shows ``note`` beside the bar."""
        self._done += count
        if self._began is None:
            # The first units wait for compilation: the rate leaves them out.
            self._began, self._start = time.monotonic(), self._done
        if self._bar:
            self._bar.update(self._task, completed=self._done, rate=f"{self._rate():.1f} {self.unit}/s", note=note)
        elif time.monotonic() - self._last_line > PLAIN_INTERVAL:
            self._print_line(note)

    def _rate(self) -> float:
        seconds = 0.0 if self._began is None else time.monotonic() - self._began
        return (self._done - self._start) / max(seconds, 1e-6)

    def _print_line(self, note: str) -> None:
        self._last_line = time.monotonic()
        rate = self._rate()
        left = f", {rate:.1f}/s, {(self.total - self._done) / rate:.0f} s left" if rate else ""
        line = f"{self.description}: {self._done}/{self.total} {self.unit}{left} {note}"
        if not self._console.quiet:
            print(line.rstrip(), file=sys.stderr, flush=True)


def say(line: str, *, by_all: bool = False) -> None:
    """Prints a remark of the program, beside its results; of several processes the first alone, or each its own."""
    if by_all or distributed.is_first():
        print(f"lit-het: {printable(line)}", file=sys.stderr, flush=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a ``metrics.jsonl``; a last line cut short by a kill is left out.

    Raises:
        UserError: the file cannot be read, or a line is no record.
    """
    if not path.exists():
        return []
    records = []
    try:
        with untrusted.open_regular(path) as file:
            while (line := file.readline(_MOST_BYTES_OF_LINE + 2)).endswith(b"\n"):
                records.append(_record(line, f"{path}: line {len(records) + 1}"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read as JSON lines ({error.strerror})") from error
    # Whatever follows the last line feed was never completed.
    if len(line) > _MOST_BYTES_OF_LINE:
        raise UserError(f"{path}: line {len(records) + 1} is too long for a record of a step; delete it")
    return records


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = untrusted.parse_json(line, _MOST_BYTES_OF_LINE)
    except untrusted.Malformed as error:
        raise UserError(f"{place} cannot be read as JSON lines ({error}); delete it") from error
    if not isinstance(record, dict) or type(record.get("step")) is not int or not record["step"] < _LARGEST:
        raise UserError(f"{place} is no record of a step; delete it")
    for name, value in record.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or (type(value) is int and abs(value) > _LARGEST)
        ):
            raise UserError(f"{place}: {name[:100]!r} is {value!r:.50}, no number; delete it")
    return record
