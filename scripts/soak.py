"""Kills a small run on two processes again and again, and compares what is left with a run that nobody disturbed.

Each kill is SIGKILL or SIGTERM, of one process or of both, at a random moment; the run is then resumed. At the end
every batch (the keys of its samples by their position) and every loss must be that of the undisturbed run.

    python -m scripts.soak [--kills 200] [--seed 0] [--directory DIR]

Starting again takes most of the time, some 10 s; compiled programs are kept in the folder.
"""

import argparse
import collections
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configs import experiment, quickstart_lit_het_xl
from configs.experiment import ExperimentConfig
from eval.evaluators.frozen import FewShotConfig
from eval.few_shot import FewShotOptions
from eval.sets import ImageSet
from lit_het.durations import Duration
from lit_het.sharding import MeshConfig
from lit_het.training.logging import read_metrics
from lit_het.training.loop import Cadence
from tests import tiny

NUM_STEPS, BATCH_SIZE = 40, 16
# Seconds within which every process must have ended after a kill of any.
LIMIT = 90.0
LONGEST_LIFE = 2.5


def main() -> int:
    """Prints a table of the kills, and what was lost, repeated or different: exit code 1 if anything was."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and kinds of kills")
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        soak = Soak(options.directory or Path(temporary), random.Random(options.seed))
        began = time.monotonic()
        undisturbed = soak.undisturbed()
        print(f"undisturbed: {NUM_STEPS} steps in {time.monotonic() - began:.0f} s", flush=True)
        wrong = soak.kill_and_compare(options.kills, undisturbed)
        print(f"{sum(soak.kills.values())} kills in {(time.monotonic() - began) / 60:.0f} minutes")
    print(f"{'when':10}  {'what':18}  {'kills':>5}  {'all ended after':>15}  exit codes")
    for (when, what), count in sorted(soak.kills.items()):
        slowest, codes = max(soak.seconds[when, what]), " ".join(sorted(soak.codes[when, what]))
        print(f"{when:10}  {what:18}  {count:>5}  {slowest:>13.1f} s  {codes}")
    print("\n".join(wrong) or "lost: 0, repeated: 0, other batches: 0, other losses: 0")
    return bool(wrong)


@dataclasses.dataclass(frozen=True)
class Left:
    """What a run leaves: the sample at each position that it trained on, the losses, and the accuracies, by step."""

    samples: dict[int, str]
    losses: list[tuple[int, float]]
    accuracies: list[tuple[int, float]]


class Soak:
    """Runs and kills."""

    def __init__(self, directory: Path, generator: random.Random):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._random = directory, generator
        self.kills: collections.Counter[tuple[str, str]] = collections.Counter()
        self.seconds: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        self.codes: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        data = directory / "data"
        if not data.exists():
            tiny.write_data(data)
            for split in ("train", "test"):
                shutil.copytree(data / "train", data / "shapes" / split)
            shutil.copy(data / "train" / "classnames.txt", data / "shapes")
        self._config = _config(data, directory)

    def undisturbed(self) -> Left:
        """Returns what a run leaves that nobody kills."""
        run = "undisturbed"
        if self._last_step(run) < NUM_STEPS:  # else the folder has one
            codes = [process.wait() for process in self._start(run, resume=False)]
            assert codes == [0, 0], self._messages(run)
        return self._left(run)

    def kill_and_compare(self, kills: int, expected: Left) -> list[str]:
        """Kills runs until there were enough kills; returns a line for everything that is not as expected."""
        wrong: list[str] = []
        for number in range(kills):
            run = f"killed-{number}"
            before = sum(self.kills.values())
            while True:
                processes = self._start(run, resume=(self._directory / run / "config.json").exists())
                done = sum(self.kills.values()) >= kills or not self._kill(run, processes)
                if not done:
                    continue
                codes = [process.wait() for process in processes]
                if codes != [0, 0]:
                    return [*wrong, f"{run}: ended with {codes}: {self._messages(run)}"]
                break
            wrong += [f"{run}: {line}" for line in _differences(self._left(run), expected)]
            print(f"{run}: {sum(self.kills.values()) - before} kills, {len(wrong)} faults", flush=True)
            if sum(self.kills.values()) >= kills:
                break
        return wrong

    def _start(self, run: str, resume: bool) -> list[subprocess.Popen[bytes]]:
        port = tiny.free_port()
        config = self._directory / f"{run}.json"
        experiment.save(dataclasses.replace(self._config, run_dir=self._directory / run), config)
        environment = {
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(self._directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        processes = []
        for number in (0, 1):
            command = [sys.executable, "-m", "tests.cli.elastic_run", "--config", str(config)]
            command += ["--record", str(self._record(run, number)), "--distributed", f"localhost:{port},{number}/2"]
            with (self._directory / f"{run}-{number}.log").open("ab") as log:
                process = subprocess.Popen([*command, *(["--resume"] if resume else [])], env=environment, stderr=log)
            processes.append(process)
        return processes

    def _kill(self, run: str, processes: list[subprocess.Popen[bytes]]) -> bool:
        """Waits for a random moment of a run and kills; returns whether it came to that."""
        starts, kept, begins = self._starts(run), self._kept(run), self._random.random() < 0.1
        deadline = time.monotonic() + 300
        # One in ten dies while it starts.
        while not (begins or self._trains(run, starts, kept)) and time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            assert not any(codes), f"{run}: ended by itself with {codes}: {self._messages(run)}"
            if 0 in codes:
                break
            time.sleep(0.02)
        time.sleep(self._random.uniform(0, LONGEST_LIFE))
        if all(process.poll() == 0 for process in processes) or self._last_step(run) >= NUM_STEPS - 2:
            return False
        number = signal.SIGKILL if self._random.random() < 0.5 else signal.SIGTERM
        when = self._phase(run) if self._trains(run, starts, kept) else "starting"
        # A process that the others wait for at the beginning, in vain, they miss after five minutes only.
        victims = processes if when == "starting" else self._random.choice([processes, processes[:1], processes[1:]])
        which = "both" if len(victims) == 2 else f"process {processes.index(victims[0])}"
        for process in victims:
            process.send_signal(number)
        began = time.monotonic()
        kind = when, f"{number.name} {which}"
        for process in processes:
            try:
                process.wait(max(0.1, LIMIT - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self.codes[kind].add("HANGS")
        self.kills[kind] += 1
        self.seconds[kind].append(time.monotonic() - began)
        self.codes[kind].add("/".join(str(process.returncode) for process in processes))
        return True

    def _phase(self, run: str) -> str:
        if any((self._directory / run / "checkpoints").glob("*-tmp")):
            return "saving"
        records = read_metrics(self._directory / run / "metrics.jsonl")
        is_due = self._config.cadence.evaluates_after(records[-1]["step"], NUM_STEPS)
        return "evaluation" if is_due and "train/loss" in records[-1] else "step"

    def _trains(self, run: str, starts: int, kept: int) -> bool:
        """Returns whether a run that was started has done a step: its log may still hold those of the start before."""
        return self._starts(run) > starts and self._last_step(run) > kept

    def _starts(self, run: str) -> int:
        path = self._directory / run / "starts.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def _last_step(self, run: str) -> int:
        records = read_metrics(self._directory / run / "metrics.jsonl")
        return records[-1]["step"] if records else 0

    def _kept(self, run: str) -> int:
        """Returns the step from which the run goes on."""
        folder = self._directory / run / "checkpoints"
        return max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=0)

    def _record(self, run: str, number: int) -> Path:
        return self._directory / f"{run}-{number}.txt"

    def _messages(self, run: str) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._directory.glob(f"{run}-*.log")))

    def _left(self, run: str) -> Left:
        samples: dict[int, str] = {}
        for record in sorted(self._directory.glob(f"{run}-*.txt")):
            for line in record.read_text().splitlines():
                batch = json.loads(line)
                for position, key in zip(batch["positions"], batch["keys"], strict=True):
                    assert samples.setdefault(position, key) == key, f"{run}: two samples at position {position}"
        records = read_metrics(self._directory / run / "metrics.jsonl")

        def logged(name: str) -> list[tuple[int, float]]:
            return [(record["step"], record[name]) for record in records if name in record]

        consumed = {position: samples.get(position, "") for position in range(NUM_STEPS * BATCH_SIZE)}
        return Left(consumed, logged("train/loss"), logged("few_shot/shapes/2_shot"))


def _config(data: Path, directory: Path) -> ExperimentConfig:
    config = tiny.classifier(quickstart_lit_het_xl.get_config(), data, directory / "run")
    shapes = ImageSet("shapes", str(data / "shapes"), batch_size=7)
    return dataclasses.replace(
        config,
        length=Duration(NUM_STEPS),
        data=dataclasses.replace(config.data, batch_size=BATCH_SIZE),
        mesh=MeshConfig(fsdp=2),
        cadence=Cadence(log_steps=1, save_steps=5, evaluate_steps=4),
        evaluations=(FewShotConfig(shapes, fit=FewShotOptions(shots=(2,), seeds=(0,), l2=(1.0,))),),
    )


def _differences(found: Left, expected: Left) -> list[str]:
    """Returns how a run differs from the undisturbed one."""
    others = sum(found.samples[position] != key for position, key in expected.samples.items())
    steps = [step for step, _ in found.losses]
    lost, repeated = len(set(range(1, NUM_STEPS + 1)) - set(steps)), len(steps) - len(set(steps))
    losses = sum(one != other for one, other in zip(found.losses, expected.losses, strict=False))
    counts = {"lost": lost, "repeated": repeated, "other batches": others, "other losses": losses}
    counts["other accuracies"] = int(found.accuracies != expected.accuracies)
    return [f"{what}: {count}" for what, count in counts.items() if count]


if __name__ == "__main__":
    sys.exit(main())
