"""Trials of `scripts.testing.soak` other than kills: a full disk, few file descriptors, and two starts of one run."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from lit_het.errors import TRY_AGAIN
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.weights.native.folders import COMPLETE, entries
from scripts.testing.soak_runs import Results, Runs, differences

_DISK = "24m"
_FEW_DESCRIPTORS = 256


def full_disk(runs: Runs, expected: Results) -> list[str]:
    """Fills the disk after the first save: the run must end with `TRY_AGAIN`, and lose nothing once there is space.

    If mounting is not allowed, the size of files is limited to 20 kB instead.
    """
    wrong = []
    with _small_disk(runs.directory / "disk") as disk:
        run_dir = (disk or runs.directory) / "full"
        runs.forget("full")
        (process,) = runs.start("full", 1, run_dir=run_dir, shell="" if disk else "trap '' XFSZ; ulimit -f 20 &&")
        if disk:
            while not (run_dir / "checkpoints" / "5").exists() and process.poll() is None:
                time.sleep(0.01)
            with contextlib.suppress(OSError), (disk / "junk").open("wb", buffering=0) as junk:
                while True:
                    junk.write(bytes(2**16))
        if process.wait() != TRY_AGAIN:
            wrong.append(f"ends with {process.returncode}: {runs.messages('full')}")
        if left := [entry.path.name for entry in entries(run_dir / "checkpoints") if entry.state != COMPLETE]:
            wrong.append(f"leaves {left}")
        if disk:
            (process,) = runs.start("full", 1, run_dir=run_dir)  # the disk is still full: it must end in the same way
            if process.wait() != TRY_AGAIN or "Traceback" in runs.messages("full"):
                wrong.append(f"started again, ends with {process.returncode}: {runs.messages('full')}")
            (disk / "junk").unlink()
        wrong += _resumed(runs, "full", run_dir, expected)
    return wrong


def few_descriptors(runs: Runs, _: Results) -> list[str]:
    """Saves more often than the limit of open files."""
    cadence, length = Cadence(log_steps=1, save_steps=1), Duration(_FEW_DESCRIPTORS)
    runs.forget("few")
    shell = f"ulimit -n {_FEW_DESCRIPTORS} &&"
    (process,) = runs.start("few", 1, shell=shell, cadence=cadence, length=length, evaluations=())
    if process.wait() or "could not be saved" in runs.messages("few"):
        return [f"ends with {process.returncode}: {runs.messages('few')}"]
    return []


def two_starts(runs: Runs, expected: Results) -> list[str]:
    """Starts a run twice at once in one directory: one must train, the other must end with a one-line error."""
    wrong = []
    runs.forget("twice")
    processes = [process for _ in range(2) for process in runs.start("twice", 1)]
    codes = sorted(process.wait() for process in processes)
    refusals = [line for line in runs.messages("twice").splitlines() if "is in use" in line or "already holds" in line]
    if codes not in ([0, 1], [0, TRY_AGAIN]) or len(refusals) != 1 or "Traceback" in runs.messages("twice"):
        wrong.append(f"end with {codes}: {runs.messages('twice')}")
    return wrong + _compared(runs, "twice", runs.directory / "twice", expected)


ALL = (full_disk, few_descriptors, two_starts)


def _resumed(runs: Runs, run: str, run_dir: Path, expected: Results) -> list[str]:
    (process,) = runs.start(run, 1, run_dir=run_dir)
    if process.wait():
        return [f"resumed, ends with {process.returncode}: {runs.messages(run)}"]
    return _compared(runs, run, run_dir, expected)


def _compared(runs: Runs, run: str, run_dir: Path, expected: Results) -> list[str]:
    return differences(runs.results(run, run_dir), expected)


@contextlib.contextmanager
def _small_disk(place: Path) -> Iterator[Path | None]:
    """Yields a small disk, or None if mounting is not allowed."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(place)]
    try:
        is_mounted = subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.SubprocessError):
        is_mounted = False
    try:
        yield place if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", str(place)], check=True, timeout=10)
