"""Changes files of every format that the project reads from others, reads them, and reports what goes wrong.

A reader must take an input, or refuse it with one line: a traceback, a process that dies, 10 seconds and 1 GiB are
failures. Their inputs are saved, to be read again by `--replay FILE`. What is changed, and how, is a function of
(seed, class, number).

    python -m scripts.testing.fuzz [--minutes 20 | --inputs 1000] [--classes image stream] [--seed 0] [--failures DIR]
"""

import argparse
import collections
import dataclasses
import faulthandler
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from lit_het.eval.report.tables import markdown_table
from scripts.testing.fuzzing import worker
from scripts.testing.fuzzing.readers import TARGETS, Target
from scripts.testing.fuzzing.seeds import write_files
from scripts.testing.fuzzing.worker import Job, Outcome

MAX_SAVED = 3
"""Number of inputs that are saved for each defect."""

_PATIENCE = 30.0  # seconds for what a process does beside reading
_BATCH = 200  # cheap inputs that a process reads
_INTERVAL = 10.0  # seconds between two lines of progress
_FAILURES = ("crash", "death", "hang", "memory")


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much is read.

    Attributes:
        inputs: of each class, divided by what one costs; None goes on until the time is over.
        seconds: without ``inputs``, how long to go on.
        limit: seconds that an input may take.
    """

    inputs: int | None
    seconds: float = 0.0
    limit: float = 10.0


@dataclasses.dataclass
class Tally:
    """What became of the inputs of one class."""

    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    planned: int = 0
    spent: float = 0.0
    slowest: float = 0.0
    peak: int = 0


@dataclasses.dataclass
class Defect:
    """What several inputs fail by, in the same place."""

    detail: str
    count: int = 0
    saved: list[Path] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Running:
    """A process at work."""

    job: Job
    process: ForkServerProcess
    number: int
    began: float
    heard: float


class Fuzzer:
    """Lets processes read changed files of several classes.

    Args:
        targets: the classes by name.
        budget: how much is read.
        seed: of all changes.
        scratch: a folder to work in.
        failures: folder for inputs that fail.
        workers: processes at a time.

    Attributes:
        tallies: by class.
        defects: by class, verdict and place.
    """

    def __init__(
        self, targets: Mapping[str, Target], budget: Budget, seed: int, scratch: Path, failures: Path, workers: int = 2
    ):
        self._targets, self._budget, self._seed = targets, budget, seed
        self._scratch, self._failures, self._workers = scratch, failures, workers
        self.tallies = {name: Tally() for name in targets}
        self.defects: dict[tuple[str, str, str], Defect] = {}
        self._left: list[Job] = []  # of processes that ended before their time
        self._running: dict[Connection, Running] = {}
        self._began = self._last_reported = time.monotonic()
        self._context = multiprocessing.get_context("forkserver")
        # A process that dies is replaced in no time by a fork of one that has imported everything.
        self._context.set_forkserver_preload([worker.__name__])

    def run(self) -> None:
        """Reads until the budget is used up."""
        for name, target in self._targets.items():
            for number, files in enumerate(target.seeds()):
                write_files(self._seeds(name) / str(number), files)
        self._began = self._last_reported = time.monotonic()
        while self._start_some() or self._running:
            for connection in wait(list(self._running), timeout=1.0):
                assert isinstance(connection, Connection)
                self._hear(connection)
            for running in self._running.values():
                if time.monotonic() - running.heard > self._budget.limit + _PATIENCE:
                    running.process.kill()  # it did not even end itself
            self._tell()

    def _seeds(self, name: str) -> Path:
        return self._scratch / "seeds" / _in_path(name)

    def _start_some(self) -> bool:
        """Starts processes where there are too few; returns whether it did."""
        started = False
        while len(self._running) < self._workers and (job := self._next_job()):
            job.scratch.mkdir(parents=True)
            ours, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(target=worker.work, args=(job, theirs))
            process.start()
            theirs.close()
            now = time.monotonic()
            self._running[ours] = Running(job, process, job.start, now, now)
            started = True
        return started

    def _next_job(self) -> Job | None:
        if self._left:
            return self._left.pop()
        name = min(self._targets, key=self._progress)
        target, tally = self._targets[name], self.tallies[name]
        stop = tally.planned + max(1, _BATCH // target.cost)
        if self._budget.inputs is not None:
            stop = min(stop, max(1, self._budget.inputs // target.cost))
        elif time.monotonic() - self._began > self._budget.seconds:
            return None
        if stop <= tally.planned:
            return None
        start, tally.planned = tally.planned, stop
        scratch = self._scratch / f"{_in_path(name)}-{start}"
        return Job(name, target, self._seeds(name), scratch, self._seed, start, stop, self._budget.limit)

    def _progress(self, name: str) -> float:
        """How far a class is: in inputs of those that it is to have, or in seconds."""
        tally = self.tallies[name]
        if self._budget.inputs is not None:
            return tally.planned / max(1, self._budget.inputs // self._targets[name].cost)
        # Those at work count too: else one class would have all processes at the beginning.
        return tally.spent + sum(one.job.name == name for one in self._running.values())

    def _hear(self, connection: Connection) -> None:
        """Takes what a process has sent, or its end."""
        running = self._running[connection]
        try:
            number, outcome = connection.recv()
        except EOFError:
            self._end(connection, running)
            return
        running.number, running.heard = number + 1, time.monotonic()
        self._count(running.job, number, outcome)

    def _end(self, connection: Connection, running: Running) -> None:
        running.process.join()
        connection.close()
        del self._running[connection]
        job = running.job
        self.tallies[job.name].spent += time.monotonic() - running.began
        if running.number < job.stop:
            trace = job.trace.read_text() if job.trace.exists() else ""
            is_hang = trace.startswith("Timeout") or time.monotonic() - running.heard > job.seconds + _PATIENCE
            end = f"exit code {running.process.exitcode}"
            place = f"{'no end' if is_hang else end}: {worker.where_it_ended(trace)}"
            outcome = Outcome("hang" if is_hang else "death", job.seconds if is_hang else 0.0, 0, place)
            self._count(job, running.number, outcome)
            if running.number + 1 < job.stop:
                again = job.scratch.with_name(f"{job.scratch.name}-{running.number + 1}")
                self._left.append(dataclasses.replace(job, start=running.number + 1, scratch=again))
        shutil.rmtree(job.scratch)

    def _count(self, job: Job, number: int, outcome: Outcome) -> None:
        tally = self.tallies[job.name]
        tally.counts[outcome.verdict] += 1
        tally.slowest = max(tally.slowest, outcome.seconds)
        tally.peak = max(tally.peak, outcome.peak)
        if outcome.verdict not in _FAILURES:
            return
        defect = self.defects.setdefault((job.name, outcome.verdict, outcome.where), Defect(outcome.detail))
        defect.count += 1
        if len(defect.saved) < MAX_SAVED:
            path = self._failures / f"{_in_path(job.name)}-{outcome.verdict}-{self._seed}-{number}.zip"
            path.parent.mkdir(parents=True, exist_ok=True)
            defect.saved.append(path)
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.comment = job.name.encode()
                for name, content in worker.make_input(job, worker.load_seeds(job.seeds), number).items():
                    archive.writestr(name, content)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._last_reported > _INTERVAL:
            self._last_reported = now
            total = sum(tally.counts.total() for tally in self.tallies.values())
            failed = sum(defect.count for defect in self.defects.values())
            rate = total / (now - self._began)
            print(f"{total:,} inputs, {rate:.0f}/s, {failed} failed by {len(self.defects)} defects", flush=True)

    def report(self) -> str:
        """Returns a table of the classes, and what failed, with the saved inputs."""
        columns = ("accepted", "refused", "crash", "death", "hang", "memory")
        rows = []
        for name, tally in self.tallies.items():
            counts = (f"{count:,}" for count in (tally.counts.total(), *(tally.counts[column] for column in columns)))
            rows.append((name, *counts, f"{tally.slowest:.2f} s", f"{tally.peak / 1e6:.0f} MB"))
        lines = [markdown_table(("class", "inputs", *columns, "slowest", "peak"), rows)]
        for (name, verdict, where), defect in sorted(self.defects.items()):
            lines += [f"\n{name}: {defect.count} x {verdict}: {where}", f"  {defect.detail!r}"]
            lines += [f"  python -m scripts.testing.fuzz --replay {path}" for path in defect.saved]
        return "\n".join(lines)


def _in_path(name: str) -> str:
    return name.replace(" ", "-")


def replay(path: Path, targets: Mapping[str, Target]) -> int:
    """Reads a saved input in this process and prints the outcome."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder) / "input", {name: archive.read(name) for name in archive.namelist()})
        assert sys.__stderr__
        faulthandler.enable(sys.__stderr__)
        faulthandler.dump_traceback_later(Budget.limit, exit=True, file=sys.__stderr__)
        outcome = worker.judge(targets[archive.comment.decode()], Path(folder) / "input")
        faulthandler.cancel_dump_traceback_later()
    print(f"{outcome.verdict}, {outcome.seconds:.2f} s, {outcome.peak / 1e6:.0f} MB: {outcome.where} {outcome.detail}")
    return int(outcome.verdict in _FAILURES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table of classes and one of defects; exit code 1 if there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="that all classes share evenly")
    parser.add_argument("--inputs", type=int, help="of each class, fewer of costly ones; in place of --minutes")
    parser.add_argument("--classes", nargs="+", metavar="CLASS", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=Budget.limit, help="seconds that an input may take")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder for inputs that fail")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="read only this saved input")
    options = parser.parse_args(arguments)
    if options.replay:
        return replay(options.replay, TARGETS)
    unknown = set(options.classes or ()) - set(TARGETS)
    if unknown:
        parser.error(f"unknown classes: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    chosen = {name: target for name, target in TARGETS.items() if name in (options.classes or TARGETS)}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        os.environ["JAX_PLATFORMS"] = "cpu"
        budget = Budget(options.inputs, 60 * options.minutes, options.limit)
        fuzzer = Fuzzer(chosen, budget, options.seed, Path(scratch), options.failures, options.workers)
        fuzzer.run()
    print(fuzzer.report())
    return int(bool(fuzzer.defects))


if __name__ == "__main__":
    sys.exit(main())
