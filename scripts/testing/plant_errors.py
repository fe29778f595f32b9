"""Plants the deliberate errors of ``tests/deliberate_errors.toml``, one at a time, and tells which of them tests catch.

    python -m scripts.testing.plant_errors [--only N ...] [--short] [--whole] [--jobs 2]

The checkout is never changed: each error is planted in a copy of its files, in a temporary folder, where its tests run.
It is caught if a test fails, or cannot be set up. Exit code 1: one is missed; 2: the data do not fit the tree.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = Path("tests", "deliberate_errors.toml")
# Seconds after which tests that hang are ended, and have caught nothing.
LIMIT = 3600
PYTEST = ("-m", "pytest", "-q", "-x", "-rfE", "--no-header", "-p", "no:cacheprovider")
PASSED, FAILED, NOTHING_SELECTED = 0, 1, 5
# Of a test: the line of a file that cannot be imported has no "::".
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", re.MULTILINE)


class Unsuitable(Exception):
    """The data or the flags do not fit the tree."""


@dataclasses.dataclass(frozen=True)
class DeliberateError:
    """A line of a file, what it is changed to, the files of tests of which one should fail then, and what breaks."""

    file: str
    line: str
    error: str
    tests: list[str]
    why: str

    def planted(self, text: str) -> str:
        """Returns the text of the file with the error in it; raises `Unsuitable` where the line is not there once."""
        lines = text.split("\n")
        places = [number for number, line in enumerate(lines) if line.strip() == self.line]
        if len(places) != 1 or self.error == self.line:
            raise Unsuitable(f"{self.file} has {len(places)} lines {self.line!r}; take one that is there once")
        lines[places[0]] = lines[places[0]].replace(self.line, self.error)
        return "\n".join(lines)


def read_errors() -> dict[int, DeliberateError]:
    """Returns the errors by their numbers, from 1; raises `Unsuitable` unless each fits the tree."""
    try:
        tables = tomllib.loads((ROOT / DATA).read_text())["error"]
        errors = {number: DeliberateError(**table) for number, table in enumerate(tables, 1)}
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise Unsuitable(f"{DATA} cannot be read ({error})") from error
    for number, error in errors.items():
        if missing := [name for name in (error.file, *error.tests) if not (ROOT / name).is_file()]:
            raise Unsuitable(f"error {number}: {missing[0]} is missing")
        error.planted((ROOT / error.file).read_text())
    return errors


def copied(folder: Path) -> Path:
    """Copies the checkout's files to a folder, which shares the checkout's cache of compiled programs."""
    listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.split("\0"):
        if name and os.path.lexists(ROOT / name):  # files that were deleted are listed too
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (ROOT / ".pytest_cache").mkdir(exist_ok=True)
    (folder / ".pytest_cache").symlink_to(ROOT / ".pytest_cache")
    # The project may be installed from the checkout.
    imported = python(folder, "-c", "import lit_het; print(lit_het.__file__)").stdout.strip()
    if not Path(imported).resolve().is_relative_to(folder.resolve()):
        raise Unsuitable(f"{sys.executable} imports {imported} in place of the copy in {folder}")
    return folder


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter in a copy of the tree."""
    command, environment = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)


def caught_by(error: DeliberateError, folder: Path, tests: Sequence[str]) -> str:
    """Returns the first test that fails with an error in a copy, or ""; raises `Unsuitable` if pytest cannot run."""
    path = folder / error.file
    text = path.read_text()
    path.write_text(error.planted(text))
    try:
        done = python(folder, *PYTEST, *tests)
    except subprocess.TimeoutExpired:
        return ""
    finally:
        path.write_text(text)
    if done.returncode == FAILED and (failure := FAILURE.search(done.stdout)):
        return failure[1]
    if done.returncode in (PASSED, NOTHING_SELECTED):
        return ""
    lines = (done.stdout + done.stderr).strip().split("\n")
    reason = next((line for line in lines if line.startswith("ERROR ")), lines[-1])
    raise Unsuitable(f"no test ran, and pytest ended with {done.returncode} ({reason})")


def plant(errors: Mapping[int, DeliberateError], options: argparse.Namespace, folder: Path) -> int:
    """Plants errors in as many copies as there are jobs; prints a line for each, and returns the exit code."""
    flags = ["-m", "not slow"] if options.short else []
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for number in range(options.jobs):
        copies.put(copied(folder / str(number)))

    def tried(error: DeliberateError) -> tuple[int, str]:
        copy, began = copies.get(), time.monotonic()
        try:
            found = caught_by(error, copy, [*flags, *error.tests])
            if not found and options.whole:
                found = caught_by(error, copy, [*flags, "tests"])
            code, shown = (0, f"caught by {found}") if found else (1, f"MISSED: {error.why}")
        except Unsuitable as fault:
            code, shown = 2, f"FAULT OF THE DATA: {fault}"
        copies.put(copy)
        return code, f"{error.file}  {shown}  {time.monotonic() - began:.0f} s"

    codes: list[int] = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for number, (code, shown) in zip(errors, pool.map(tried, errors.values()), strict=True):
            codes.append(code)
            print(f"{number:>2}  {shown}", flush=True)
    print(f"{codes.count(0)} of {len(codes)} deliberate errors are caught")
    return max(codes)


def main() -> int:
    """Tries the chosen errors; wrong data and flags are one line, with exit code 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of errors, from 1; default: all")
    parser.add_argument("--short", action="store_true", help="leave out tests that are marked slow")
    parser.add_argument("--whole", action="store_true", help="run all tests for errors that the named files miss")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="copies that work side by side (%(default)s)")
    options = parser.parse_args()
    try:
        errors = read_errors()
        chosen = list(dict.fromkeys(options.only or errors))
        if options.jobs < 1 or not errors.keys() >= set(chosen):
            raise Unsuitable(f"--jobs must be at least 1, and the numbers of --only from 1 to {len(errors)}")
        with tempfile.TemporaryDirectory() as folder:
            return plant({number: errors[number] for number in chosen}, options, Path(folder))
    except Unsuitable as error:
        print(f"plant_errors: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
