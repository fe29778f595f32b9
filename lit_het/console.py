"""What commands print beside their results: progress bars and messages."""

import contextlib
import sys
import time
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lit_het import distributed
from lit_het.errors import printable

# Seconds between two progress lines where the output is not a terminal.
PLAIN_INTERVAL = 10.0


class Bar:
    """A progress bar with rate and time left; plain lines where the output is not a terminal.

    Only the main process shows it. Use as a context manager.
    """

    def __init__(self, description: str, total: int, unit: str, *, start: int = 0):
        self.description, self.total, self.unit = description, total, unit
        self._done = self._start = start
        self._last_line = time.monotonic()
        self._began: float | None = None
        self._console = Console(stderr=True, quiet=not distributed.is_main_process())
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
        """Hides the bar while another one is shown."""
        if self._bar:
            self._bar.stop()
        yield
        if self._bar:
            self._bar.start()

    def advance(self, count: int, note: str = "") -> None:
        """Adds ``count`` completed units and shows ``note`` beside the bar."""
        self._done += count
        if self._began is None:
            # The first units include compilation, so the rate does not count them.
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


def message(line: str, *, on_all_processes: bool = False) -> None:
    """Prints a message to standard error, on the main process only or on every process."""
    if on_all_processes or distributed.is_main_process():
        print(f"lit-het: {printable(line)}", file=sys.stderr, flush=True)
