"""Kills a small run repeatedly, and compares its results with those of an undisturbed run.

Each start is on one process or on two. A kill is SIGKILL or SIGTERM, of one process or of both, at a random moment;
every process must end with an exit code that launchers handle (`ALLOWED`), and the run is then resumed. At the
end every batch (the keys of its samples by position) and every loss must equal those of the undisturbed run. Further
trials are a full disk, few file descriptors, and two simultaneous starts.

    python -m scripts.testing.soak [--kills 200 | --nightly] [--seed 0] [--directory DIR]

Each start takes about 10 s, most of the time; compiled programs are cached in the folder.
"""

import argparse
import collections
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lit_het.errors import TRY_AGAIN
from lit_het.training.log import read_metrics
from scripts.testing import soak_trials
from scripts.testing.soak_runs import NUM_STEPS, Results, Runs, differences

NIGHTLY_KILLS = 1000
# Seconds within which every process must end after a kill.
LIMIT = 90.0
LONGEST_LIFE = 2.5
# Exit codes after a signal, of processes that received it and of others; 0 if the run had just finished.
ALLOWED = {
    (signal.SIGKILL, "victim"): {-signal.SIGKILL, 0},
    (signal.SIGKILL, "other"): {TRY_AGAIN, 0},
    (signal.SIGTERM, "victim"): {TRY_AGAIN, 0},
    (signal.SIGTERM, "other"): {TRY_AGAIN, 0},
    # Before the signal handler is installed, or before there is anything to save.
    (signal.SIGTERM, "starting"): {TRY_AGAIN, -signal.SIGTERM, 128 + signal.SIGTERM, 0},
}


def main() -> int:
    """Prints a table of the kills, and every lost, repeated or different batch; exit code 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    kills = parser.add_mutually_exclusive_group()
    kills.add_argument("--kills", type=int, default=200)
    kills.add_argument("--nightly", action="store_const", const=NIGHTLY_KILLS, dest="kills", help="1,000 kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and kinds of kills")
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs(options.directory or Path(temporary))
        soak, began = Killer(runs, random.Random(options.seed)), time.monotonic()
        undisturbed = runs.undisturbed()
        print(f"undisturbed: {NUM_STEPS} steps in {time.monotonic() - began:.0f} s", flush=True)
        wrong = soak.kill_and_compare(options.kills, undisturbed)
        print(f"{sum(soak.kills.values())} kills in {(time.monotonic() - began) / 60:.0f} minutes")
        print(f"{'when':10}  {'what':24}  {'kills':>5}  {'all ended after':>15}  exit codes")
        for (when, what), count in sorted(soak.kills.items()):
            slowest, codes = max(soak.seconds[when, what]), " ".join(sorted(soak.codes[when, what]))
            print(f"{when:10}  {what:24}  {count:>5}  {slowest:>13.1f} s  {codes}")
        for trial in soak_trials.ALL:
            found = [f"{trial.__name__}: {line}" for line in trial(runs, undisturbed)]
            print(f"{trial.__name__}: {len(found)} faults", flush=True)
            wrong += found
    print("\n".join(wrong) or "lost: 0, repeated: 0, other batches: 0, other losses: 0, other exit codes: 0")
    return bool(wrong)


class Killer:
    """Kills runs and checks their results."""

    def __init__(self, runs: Runs, generator: random.Random):
        self._runs, self._random = runs, generator
        self.kills: collections.Counter[tuple[str, str]] = collections.Counter()
        self.seconds: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        self.codes: dict[tuple[str, str], set[str]] = collections.defaultdict(set)

    def kill_and_compare(self, kills: int, expected: Results) -> list[str]:
        """Kills runs ``kills`` times; returns one line per fault."""
        wrong: list[str] = []
        for number in range(kills):
            run = f"killed-{number}"
            before = sum(self.kills.values())
            self._runs.forget(run)
            while True:
                processes = self._runs.start(run, self._random.choice((1, 2)))
                done = sum(self.kills.values()) >= kills or not self._kill(run, processes, wrong)
                if not done:
                    continue
                codes = [process.wait() for process in processes]
                if any(codes):
                    return [*wrong, f"{run}: ended with {codes}: {self._runs.messages(run)}"]
                break
            wrong += [f"{run}: {line}" for line in differences(self._runs.results(run), expected)]
            print(f"{run}: {sum(self.kills.values()) - before} kills, {len(wrong)} faults", flush=True)
            if sum(self.kills.values()) >= kills:
                break
        return wrong

    def _kill(self, run: str, processes: list[subprocess.Popen[bytes]], wrong: list[str]) -> bool:
        """Kills a run at a random moment; returns False if it finished before."""
        starts, saved, is_early = self._starts(run), self._saved_step(run), self._random.random() < 0.1
        deadline = time.monotonic() + 300
        # One in ten is killed while it starts.
        while not (is_early or self._trains(run, starts, saved)) and time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            assert not any(codes), f"{run}: ended by itself with {codes}: {self._runs.messages(run)}"
            if 0 in codes:
                break
            time.sleep(0.02)
        time.sleep(self._random.uniform(0, LONGEST_LIFE))
        if all(process.poll() == 0 for process in processes) or self._runs.last_step(run) >= NUM_STEPS - 2:
            return False
        number = signal.SIGKILL if self._random.random() < 0.5 else signal.SIGTERM
        when = self._phase(run) if self._trains(run, starts, saved) else "starting"
        # During the start all processes are killed: survivors would wait five minutes for the others.
        parts = [processes] if when == "starting" or len(processes) == 1 else [processes, processes[:1], processes[1:]]
        victims = self._random.choice(parts)
        which = "both" if len(victims) == 2 else f"process {processes.index(victims[0])} of {len(processes)}"
        for process in victims:
            process.send_signal(number)
        kind, began = (when, f"{number.name} {which}"), time.monotonic()
        for process in processes:
            try:
                process.wait(max(0.1, LIMIT - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                wrong.append(f"{run}: {' '.join(kind)}: a process hangs: {self._runs.messages(run)}")
        self.kills[kind] += 1
        self.seconds[kind].append(time.monotonic() - began)
        self.codes[kind].add("/".join(str(process.returncode) for process in processes))
        for process in processes:
            role = "victim" if process in victims else "other"
            role = "starting" if number == signal.SIGTERM and when == "starting" else role
            if process.returncode not in ALLOWED[number, role]:
                code = f"exit code {process.returncode} of process {processes.index(process)}"
                wrong.append(f"{run}: {' '.join(kind)}: {code}: {self._runs.messages(run)}")
        return True

    def _phase(self, run: str) -> str:
        if any((self._runs.directory / run / "checkpoints").glob("*-tmp")):
            return "saving"
        records = read_metrics(self._runs.directory / run / "metrics.jsonl")
        is_due = self._runs.config.cadence.evaluates_after(records[-1]["step"], NUM_STEPS)
        return "evaluation" if is_due and "train/loss" in records[-1] else "step"

    def _trains(self, run: str, starts: int, saved: int) -> bool:
        """Returns whether the newest start of a run has done a step; the log also contains those of earlier starts."""
        return self._starts(run) > starts and self._runs.last_step(run) > saved

    def _starts(self, run: str) -> int:
        path = self._runs.directory / run / "starts.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def _saved_step(self, run: str) -> int:
        """Returns the step from which the run resumes."""
        folder = self._runs.directory / run / "checkpoints"
        return max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=0)


if __name__ == "__main__":
    sys.exit(main())
