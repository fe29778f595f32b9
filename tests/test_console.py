"""Progress: what is visible on terminals of 80 and 60 columns, and in files."""

import contextlib
import io
import os
import re

import numpy as np
import pytest
from rich.console import Console

from lit_het import console
from lit_het.console import Bar, console_of_results, message

FIGURES = r"\d+/20000 steps, [\d.]+/s, [\d:]+ left, loss 2.345"


@pytest.fixture
def steps(monkeypatch):
    """Yields numbers of steps, each of which takes 100 ms or as many seconds as given."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])

    def count(last, seconds=0.1):
        for step in range(1, last + 1):
            now[0] = step * seconds
            yield step

    return count


def rendered(bar, width):
    """The line of a terminal with this many columns; the bar itself reads as ``=``."""
    terminal = io.StringIO()
    Console(file=terminal, force_terminal=True, width=width, color_system=None).print(bar, end="")
    (line,) = terminal.getvalue().splitlines()
    assert len(line) <= width
    return re.sub("[━╸╺]+", "=", line)


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("name", ["mine", "lit_so400m_het_xl_rank32_temperature_learned_seed1"])
def test_loss_rate_and_time_left_are_visible_after_every_step(name, width, steps):
    bar = Bar(name, 20_000, "steps")
    for step in steps(400):
        bar.advance(1, "loss 2.345" if step % 150 == 2 else "")
        if step >= 2:
            assert re.search(FIGURES, rendered(bar, width)), rendered(bar, width)


def test_a_long_name_is_shortened_first_and_then_the_bar(steps):
    bar = Bar("lit_so400m_het_xl_rank32_seed1", 20_000, "steps", start=9_998)
    for _ in steps(2):
        bar.advance(1, "loss 2.345")
    shape = rf"(\S*) (=?) ?{FIGURES}\s*"
    found = [re.fullmatch(shape, rendered(bar, width)) for width in (120, 80, 60)]
    expected = [("lit_so400m_het_xl_rank32_seed1", "="), ("lit_so400m_het_xl_…", "="), ("lit_so4…", "")]
    assert [line and line.groups() for line in found] == expected
    assert rendered(bar, 20) == "10000/20000 steps, …"


def test_a_name_is_not_markup_and_has_no_control_characters():
    assert rendered(Bar("[red]run\x1b[2J", 2, "steps"), 80).startswith("[red]run\\x1b[2J ")


def test_an_ended_bar_says_how_long_it_took(steps):
    bar = Bar("mine", 40_000, "steps")
    for _ in steps(40_000):
        bar.advance(1)
    assert rendered(bar, 80).rstrip().endswith("40000/40000 steps, 10.0/s, in 1:06:40")


def test_lines_of_a_file_come_quickly_at_first_then_rarely_and_each_has_loss_and_time_left(steps, capsys):
    day = 24 * 60 * 60
    with Bar("mine", day, "steps") as bar:
        for step in steps(day, seconds=1):
            bar.advance(1, "loss 2.345" if step % 50 == 2 else "")
    lines = capsys.readouterr().err.splitlines()
    found = [re.fullmatch(r"mine: (\d+)/86400 steps, 1.0/s, .*, loss 2.345", line) for line in lines]
    seconds = np.diff([0, *(int(line[1]) for line in found if line)])
    assert 300 < len(lines) == len(seconds) < 330
    assert (seconds[:9] == 11).all()
    assert (seconds[9:-1] >= seconds[8:-2]).all()
    assert seconds[-2] == 301
    assert lines[-1] == "mine: 86400/86400 steps, 1.0/s, in 24:00:00, loss 2.345"


def test_the_last_line_is_not_repeated(steps, capsys):
    with Bar("mine", 2, "shards") as bar:
        for _ in steps(2):
            bar.advance(1)
        bar._print_line()
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("total", "expected"), [(9_999_999, "0/9999999 bytes"), (12_345_678, "0/12.3M bytes"), (3 * 10**12, "0/3.0T bytes")]
)
def test_millions_have_few_digits(total, expected):
    assert expected in rendered(Bar("writing", total, "bytes"), 80)


def test_messages_stand_above_the_bar_and_a_paused_bar_leaves_nothing(monkeypatch):
    reader, writer = os.openpty()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(writer, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", terminal)
        with Bar("mine", 3, "steps") as bar:
            bar.advance(1, "loss 0.500")
            with bar.paused():
                message("top1 0.250")
            bar.advance(2)
            message("saved")
    first, second, last = screen(b"".join(received(reader)).decode())
    assert (first, second) == ("lit-het: top1 0.250", "lit-het: saved")
    assert re.fullmatch(r"mine ━+ 3/3 steps, [\d.]+/s, in 0:00, loss 0.500", last)


@pytest.mark.parametrize(("columns", "width"), [("70", 70), ("300", 300), ("0", 120), ("", 120), ("wide", 120)])
def test_tables_of_files_are_as_wide_as_columns_says_and_else_as_the_command_wants(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.__stdout__", io.StringIO())  # no terminal
    assert console_of_results(120).width == width


def received(descriptor):
    """Yields what was written to the other end of a terminal, which is closed."""
    with contextlib.suppress(OSError), os.fdopen(descriptor, "rb", buffering=0) as file:
        while part := file.read(2**12):
            yield part


def screen(output):
    """The lines of a terminal after this output: text, line feeds, erased lines and cursors moved up."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r\n|[\r\n]|[^\x1b\r\n]+", output):
        if part in ("\r\n", "\n"):
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif re.fullmatch(r"\x1b\[2K", part):
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[1?A", part):
            row -= 1
        elif not part.startswith(("\x1b", "\r")):
            lines[row] += part
    return [line.rstrip() for line in lines if line]
