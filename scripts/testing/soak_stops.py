"""Stops commands by SIGTERM at random moments, from their start to their end.

Each must end within half a minute, with an exit code that launchers know, and without a traceback. What it leaves is
stopped again and again; the last start finishes, and its result must be that of a command that nothing has stopped.

    python -m scripts.testing.soak_stops [--stops 200] [--seed 0] [--directory DIR]
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_het.cli import main as cli
from lit_het.configs import experiment, quickstart_lit_het_xl
from lit_het.errors import TRY_AGAIN
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.models.opening import open_run
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from lit_het.weights.native import checksums
from tests import tiny

# Seconds within which a command must end after the signal.
LIMIT = 30.0
# Before Python has set a handler, the signal itself ends the process; 0 if the command had just finished.
ALLOWED = {-signal.SIGTERM, 128 + signal.SIGTERM, 0}


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that is stopped.

    Attributes:
        line: its arguments; ``{here}`` is the folder that it works in, a copy of the finished run beside it.
        result: that folder to what the command has computed.
        allowed: exit codes after a stop.
        has_finished: that folder to whether it holds a result that the command refuses to write again.
    """

    line: str
    result: Callable[[Path], Any]
    allowed: frozenset[int] = frozenset(ALLOWED)
    has_finished: Callable[[Path], bool] = lambda here: False


def main() -> int:
    """Prints a table of the stops, and every fault; exit code 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--stops", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = options.directory or Path(temporary)
        _prepare(root)
        stopper = Stopper(root, random.Random(options.seed))
        for number, (name, command) in enumerate(COMMANDS.items()):
            stopper.stop_and_compare(name, command, len(range(number, options.stops, len(COMMANDS))))
    print("\n".join(stopper.wrong) or "faults: 0")
    return bool(stopper.wrong)


class Stopper:
    """Stops commands and checks their results; `wrong` has a line for every fault."""

    def __init__(self, root: Path, generator: random.Random):
        self._root, self._random = root, generator
        self.wrong: list[str] = []

    def stop_and_compare(self, name: str, command: Command, stops: int) -> None:
        """Stops a command ``stops`` times, and prints how it ended."""
        expected, duration = self._undisturbed(f"{name}-once", command)
        codes, slowest = collections.Counter[int](), 0.0
        here = self._fresh(name)
        while sum(codes.values()) < stops:
            process, log = self._start(here, command)
            time.sleep(self._random.uniform(0, duration))
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                self.wrong.append(f"{name}: does not end: {log.read_text()[-500:]}")
            slowest = max(slowest, time.monotonic() - began)
            codes[process.wait()] += 1
            said = log.read_text()
            if process.returncode not in command.allowed or "Traceback" in said or "Exception ignored" in said:
                self.wrong.append(f"{name}: exit code {process.returncode}: {said[-2000:]}")
            if renamed := [str(path) for path in here.rglob("*.damaged*")]:
                self.wrong.append(f"{name}: taken for damaged: {', '.join(renamed)}")
            if process.returncode == 0 or command.has_finished(here):
                self._compare(name, command.result(here), expected)
                here = self._fresh(name)
        process, log = self._start(here, command)
        if process.wait():
            self.wrong.append(f"{name}: does not finish after stops: {log.read_text()[-500:]}")
        else:
            self._compare(name, command.result(here), expected)
        ends = ", ".join(f"{code} ({count})" for code, count in sorted(codes.items()))
        print(
            f"{name:10}  {stops:>3} stops within {duration:.0f} s, ended after at most {slowest:.1f} s: {ends}",
            flush=True,
        )

    def _compare(self, name: str, found: Any, expected: Any) -> None:
        if found != expected:
            self.wrong.append(f"{name}: after stops the result differs: {found} for {expected}")

    def _undisturbed(self, name: str, command: Command) -> tuple[Any, float]:
        """Returns the result of a command that nothing stops, and its seconds; programs are compiled before."""
        seconds = 0.0
        for _ in range(2):
            began = time.monotonic()
            process, log = self._start(self._fresh(name), command)
            if process.wait():
                raise SystemExit(f"{name}: {log.read_text()}")
            seconds = time.monotonic() - began
        return command.result(self._root / name), seconds

    def _fresh(self, name: str) -> Path:
        here = self._root / name
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(self._root / "finished", here / "run")
        return here

    def _start(self, here: Path, command: Command) -> tuple[subprocess.Popen[bytes], Path]:
        line = command.line.format(here=here, root=self._root).split()
        log = here.with_suffix(".log")
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(self._root / "compiled")}
        environment = {**os.environ, **compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        with log.open("wb") as file:
            command_line = [sys.executable, "-m", "lit_het.cli.main", *line]
            return subprocess.Popen(command_line, env=environment, stdout=file, stderr=file), log


def _losses(here: Path) -> list[tuple[int, float]]:
    return [
        (record["step"], record["train/loss"])
        for record in read_metrics(here / "trained" / "metrics.jsonl")
        if "train/loss" in record
    ]


def _figures(here: Path) -> Any:
    return json.loads((here / "figures.json").read_text())


COMMANDS = {
    "train": Command(
        "train --config {root}/config.json --run-dir {here}/trained --start-or-resume",
        _losses,
        frozenset({*ALLOWED, TRY_AGAIN}),
    ),
    "calibrate": Command(
        "calibrate {here}/run --data {root}/held_out/train",
        lambda here: (here / "run" / "calibration.json").read_text(),
    ),
    "evaluate": Command(
        "zero-shot --checkpoint {here}/run --data {root}/held_out --prompts bare --output {here}/figures.json",
        _figures,
    ),
    "embed": Command(
        "embed --tower {here}/run --data {root}/held_out/train --output {here}/embeddings",
        lambda here: {path.name: path.read_bytes() for path in sorted((here / "embeddings").glob("*.npy"))},
    ),
    "import": Command(
        "import --from {root}/exported --to {here}/imported",
        lambda here: checksums.digest(open_run(here / "imported").params),
        has_finished=lambda here: (here / "imported" / "config.json").exists(),
    ),
}


def _prepare(root: Path) -> None:
    """Writes data, a finished run, an exported model and the configuration of a training, unless they exist."""
    if (root / "config.json").exists():
        return
    root.mkdir(parents=True, exist_ok=True)
    data = tiny.write_data(root / "data")
    held_out = tiny.write_data(root / "held_out", num_samples=160, seed=1, every_wrong=7)
    shutil.copytree(held_out / "train", held_out / "test")
    shutil.copy(held_out / "train" / "classnames.txt", held_out)
    plain = quickstart_lit_het_xl.get_config()
    upstream = tiny.classifier(plain, data, root / "upstream")
    tiny.finish_untrained(upstream)
    config = tiny.shrink(plain, data, root / "finished", pretrained=upstream.run_dir)
    config = dataclasses.replace(config, calibration=None)
    train(config)
    line = f"export --to huggingface --checkpoint {config.run_dir} --output {root / 'exported'}"
    if cli.main(line.split()):
        raise SystemExit("the run cannot be exported")
    images = ImageSet("shapes", str(held_out))
    config = dataclasses.replace(
        config,
        length=Duration(20),
        cadence=Cadence(log_steps=1, save_steps=3, evaluate_steps=7),
        evaluations=(ZeroShotConfig(images, samples=4),),
    )
    experiment.save(config, root / "config.json")


if __name__ == "__main__":
    sys.exit(main())
