"""What commands print: consoles for tables, progress bars and messages."""

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from lit_het import distributed
from lit_het.errors import printable

# Where the output is not a terminal: seconds from one line to the next, at least and at most, and as a share of the
# time that has passed. A day has about 300 lines.
_SHORTEST, _LONGEST, _SHARE = 10.0, 300.0, 0.1
# Columns of a name that is shortened for the bar, then of the bar; below the last the bar is left out.
_NAME, _WIDE_BAR, _NARROW_BAR = 8, 40, 10


class Bar:
    """A progress bar with rate, time left and a note; plain lines where the output is not a terminal.

    Only the main process shows it. Use as a context manager.
    """

    def __init__(self, description: str, total: int, unit: str, *, start: int = 0):
        self.description, self.total, self.unit = printable(description), total, unit
        self._note = ""
        self._done = self._start = start
        self._opened = self._last_line = time.monotonic()
        self._last_reported = -1  # completed units in the last line
        self._began: float | None = None
        # The variable FORCE_COLOR would otherwise make a terminal of every file.
        self._console = Console(
            stderr=True, force_terminal=sys.stderr.isatty(), quiet=not distributed.is_main_process()
        )
        self._live: Live | None = None
        if self._console.is_interactive and not self._console.quiet:
            # Results that are piped into a file must not be shown above the bar instead.
            self._live = Live(self, console=self._console, redirect_stdout=sys.stdout.isatty())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders one line: where it is too long, first the name is shortened, and then the bar."""
        figures = Text(self._figures(), no_wrap=True, overflow="ellipsis")
        room = options.max_width - figures.cell_len - 1
        name = Text(self.description, end=" ")
        name.truncate(min(max(room - _NARROW_BAR - 1, _NAME), room), overflow="ellipsis")
        width = min(room - name.cell_len - 1, _WIDE_BAR)
        if room > 0:
            yield name
        if width >= _NARROW_BAR:
            yield ProgressBar(self.total, self._done, width)
            yield Text(" ", end="")
        yield figures

    def __enter__(self) -> "Bar":
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        elif error is None and self._last_reported != self._done:
            self._print_line()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Hides the bar while another one is shown."""
        if self._live:
            self._live.transient = True
            self._live.stop()
            self._live.transient = False
        yield
        if self._live:
            self._live.start(refresh=True)

    def advance(self, count: int, note: str = "") -> None:
        """Adds ``count`` completed units; shows ``note``, or else the last one, beside the bar."""
        self._done += count
        self._note = note or self._note
        if self._began is None:
            # The first units include compilation, so the rate does not count them.
            self._began, self._start = time.monotonic(), self._done
        if self._live is None:
            now = time.monotonic()
            if now - self._last_line > min(max(_SHORTEST, _SHARE * (now - self._opened)), _LONGEST):
                self._print_line()

    def _figures(self) -> str:
        """Returns the text beside the bar, such as ``1200/20000 steps, 12.3/s, 25:31 left, loss 2.345``."""
        figures = [f"{_short(self._done)}/{_short(self.total)} {self.unit}"]
        now = time.monotonic()
        if self._began is not None and self._done > self._start:
            rate = (self._done - self._start) / max(now - self._began, 1e-6)
            figures.append(f"{_short(rate)}/s")
            if self._done < self.total:
                figures.append(f"{in_minutes((self.total - self._done) / rate)} left")
        if self._done >= self.total:
            figures.append(f"in {in_minutes(now - self._opened)}")
        return ", ".join([*figures, *filter(None, (self._note,))])

    def _print_line(self) -> None:
        self._last_line, self._last_reported = time.monotonic(), self._done
        if not self._console.quiet:
            print(f"{self.description}: {self._figures()}", file=sys.stderr, flush=True)


def _short(number: int | float) -> str:
    """Returns a number in at most seven digits: counts whole, rates with decimals, both in millions where large."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= max(size, 1e7):
            return f"{number / size:.1f}{letter}"
    return str(number) if isinstance(number, int) else f"{number:.{1 if number >= 1 else 2}f}"


def in_minutes(seconds: float) -> str:
    """Returns a time such as 3:05 or 1:00:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def console_of_results(width_of_files: int = 120) -> Console:
    """Returns a console for tables on standard output: as wide as ``COLUMNS`` or the terminal says, or as given."""
    return Console(width=shutil.get_terminal_size((width_of_files, 1)).columns, highlight=False)


def message(line: str, *, on_all_processes: bool = False) -> None:
    """Prints a message to standard error, on the main process only or on every process."""
    if on_all_processes or distributed.is_main_process():
        print(f"lit-het: {printable(line)}", file=sys.stderr, flush=True)
