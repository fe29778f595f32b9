"""A process that reads mutated files one after the other, and reports the outcome of each."""

import contextlib
import dataclasses
import faulthandler
import fnmatch
import os
import random
import re
import resource
import shutil
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, TypeAlias

from lit_het.errors import UserError
from scripts.testing.fuzzing import mutators
from scripts.testing.fuzzing.readers import Target
from scripts.testing.fuzzing.seeds import Files, read_files, write_files

MEMORY = 2**30
"""Bytes that reading an input may take."""

MOST_CHARACTERS = 4000
"""The maximum length of an error message."""

Verdict: TypeAlias = Literal["accepted", "refused", "crash", "death", "hang", "memory"]
_OURS = re.compile(r"(?:^|/)((?:lit_het|data_pipelines|eval|configs|scripts|tests)/[\w/]+\.py)$")
_FRAME = re.compile(r'^  File "(.*)", line \d+ in (.*)$', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one input.

    Attributes:
        verdict: ``refused`` by an error that the reader's contract names.
        seconds: that it took.
        peak: bytes that memory grew by at most.
        where: exception and innermost frames of the project, the same for all inputs with this defect.
        detail: the message.
    """

    verdict: Verdict
    seconds: float = 0.0
    peak: int = 0
    where: str = ""
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Job:
    """Inputs of one class to be read.

    Attributes:
        name: of the class.
        target: what it is.
        seeds: the folder of its seeds.
        scratch: a folder to work in.
        seed: of the changes.
        start, stop: numbers of inputs.
        seconds: that one input may take.
    """

    name: str
    target: Target
    seeds: Path
    scratch: Path
    seed: int
    start: int
    stop: int
    seconds: float

    @property
    def trace(self) -> Path:
        """Where a process that hangs or dies says in which line."""
        return self.scratch / "trace.txt"


def work(job: Job, connection: Connection) -> None:
    """Reads the inputs of a job; sends the number and outcome of each."""
    _silence()
    seeds = load_seeds(job.seeds)
    with job.trace.open("w+") as trace:
        faulthandler.enable(trace)
        for number in range(job.start, job.stop):
            trace.seek(0)
            trace.truncate()
            faulthandler.dump_traceback_later(job.seconds, exit=True, file=trace)
            # Another folder for every input: what readers remember of a path is not to be found again.
            folder = job.scratch / str(number)
            write_files(folder, make_input(job, seeds, number))
            outcome = judge(job.target, folder)
            faulthandler.cancel_dump_traceback_later()
            shutil.rmtree(folder)
            connection.send((number, outcome))
    connection.close()


def _silence() -> None:
    """Keeps what libraries print from the screen."""
    with open(os.devnull, "wb") as nothing:
        for descriptor in (1, 2):
            os.dup2(nothing.fileno(), descriptor)


def load_seeds(folder: Path) -> list[Files]:
    """Returns the seeds of a class."""
    return [read_files(one) for one in sorted(folder.iterdir(), key=lambda path: int(path.name))]


def make_input(job: Job, seeds: list[Files], number: int) -> Files:
    """Returns an input: the same for the same seed, class and number."""
    chance = random.Random(f"{job.seed} {job.name} {number}")
    files = dict(chance.choice(seeds))
    name = chance.choice([name for name in files if any(fnmatch.fnmatch(name, one) for one in job.target.changed)])
    if number:  # the first is as it should be
        files[name] = mutators.changed(files[name], [other[name] for other in seeds if name in other], chance)
    return files


def judge(target: Target, folder: Path) -> Outcome:
    """Reads an input within limits."""
    before, began = _reset_peak(), time.perf_counter()
    error: BaseException | None = None
    with _limited(MEMORY):
        try:
            target.read(folder)
        except BaseException as raised:  # PanicException of Rust's libraries is no Exception
            error = raised
    seconds, peak = time.perf_counter() - began, max(0, _status("VmHWM") - before)
    if _is_out_of_memory(error) or peak > MEMORY:
        verdict, where = "memory", _where(error)
    elif error is None:
        return Outcome("accepted", seconds, peak)
    elif isinstance(error, (UserError, *target.refusals)):
        if not (lacks := _is_no_line(error)):
            return Outcome("refused", seconds, peak)
        verdict, where = "crash", f"{lacks}: {_where(error)}"
    else:
        verdict, where = "crash", _where(error)
    return Outcome(verdict, seconds, peak, where, str(error)[:300])


def _is_no_line(error: BaseException) -> str:
    """Returns why an error message is not one short line."""
    text = str(error)
    if len(text.splitlines()) > 1:
        return "message of several lines"
    return "message too long" if len(text) > MOST_CHARACTERS else ""


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was refused to a reader, also to one that has made another error of it."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _limited(size: int) -> Iterator[None]:
    """Refuses this process more memory than it has and some bytes."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _reset_peak() -> int:
    """Lets the peak of memory begin from what is taken now, which is returned."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{field}:")[2].split(maxsplit=1)[0])


def _where(error: BaseException | None) -> str:
    if error is None:
        return "no error"
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {_shown((frame.filename, frame.name) for frame in frames)}"


def _shown(frames: Iterable[tuple[str, str]]) -> str:
    """Returns the two innermost frames of the project, of innermost frames first; or without any the innermost."""
    frames = list(frames)
    found = [f"{match[1]}:{name}" for file, name in frames if (match := _OURS.search(file))]
    read = [place for place in found if not place.startswith("scripts/testing/fuzzing/worker")][:2]
    return " < ".join(read) or " < ".join(f"{file}:{name}" for file, name in frames[:1]) or "unknown place"


def where_it_ended(trace: str) -> str:
    """Returns the innermost frames of what faulthandler has written of threads, the one that reads being the last."""
    threads = [_FRAME.findall(part) for part in re.split(r"^(?=Thread |Current thread )", trace, flags=re.MULTILINE)]
    reading = [frames for frames in threads if any(_OURS.search(file) for file, _ in frames)]
    current = re.search(r"^Current thread .*?(?=\n\n|\Z)", trace, re.MULTILINE | re.DOTALL)
    if current and (frames := _FRAME.findall(current[0])):
        return _shown(frames)
    return _shown(reading[-1] if reading else [])
