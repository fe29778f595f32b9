"""What a run tells: JSON lines and TensorBoard on disk, a progress bar or plain lines on the screen."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lit_het import distributed, untrusted
from lit_het.errors import UserError
from lit_het.files import write_atomically

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
        print(f"lit-het: {line}", file=sys.stderr, flush=True)


class MetricLog:
    """Writes scalars to ``metrics.jsonl`` and to TensorBoard files in a run's directory.

    A resumed run drops the records of steps that its checkpoint does not cover: each step stands there once. Of several
    processes only the first writes.
    """

    def __init__(self, directory: Path, *, first_step: int = 0):
        self.path = directory / "metrics.jsonl"
        self._file: TextIO | None = None
        if not distributed.is_first():
            return
        from tensorboardX import SummaryWriter  # takes a second, which who only reads metrics need not wait

        kept = [record for record in read_metrics(self.path) if record["step"] <= first_step]
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self.path.open("a")
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one record; ``step`` counts the optimizer updates done."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            if math.isfinite(value):  # of others TensorBoard draws nothing, and warns
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes both."""
        if self._file is None:
            return
        self._file.close()
        self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a ``metrics.jsonl``; a last line cut short by a kill is left out.

    Raises:
        UserError: the file cannot be read, or a line is no record.
    """
    if not path.exists():
        return []
    try:
        # Whatever follows the last line feed was never completed.
        lines = path.read_text("utf-8").split("\n")[:-1]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON lines ({' '.join(str(error).split())})") from error
    return [_record(line, f"{path}: line {number}") for number, line in enumerate(lines, 1)]


def _record(line: str, place: str) -> dict[str, Any]:
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
