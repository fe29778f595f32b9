"""Small runs for `scripts.testing.soak`: starts them and reads their results."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from lit_het.configs import experiment, quickstart_lit_het_xl
from lit_het.configs.experiment import ExperimentConfig
from lit_het.eval.fits import FewShotOptions
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import FewShotConfig
from lit_het.sharding import MeshConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from tests import tiny

NUM_STEPS, BATCH_SIZE = 40, 16


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of a run: the sample at each position, and losses and accuracies by step."""

    samples: dict[int, str]
    losses: list[tuple[int, float]]
    accuracies: list[tuple[int, float]]


class Runs:
    """Runs in a folder.

    Attributes:
        directory: the folder.
        config: base configuration of all runs.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        data = directory / "data"
        if not data.exists():
            tiny.write_data(data)
            for split in ("train", "test"):
                shutil.copytree(data / "train", data / "shapes" / split)
            shutil.copy(data / "train" / "classnames.txt", data / "shapes")
        self.directory, self.config = directory, _config(data, directory)

    def undisturbed(self) -> Results:
        """Returns the results of an undisturbed run."""
        run = "undisturbed"
        if self.last_step(run) < NUM_STEPS:  # else the folder has one
            codes = [process.wait() for process in self.start(run)]
            assert codes == [0, 0], self.messages(run)
        return self.results(run)

    def forget(self, run: str) -> None:
        """Removes the files of an earlier soak of a run."""
        shutil.rmtree(self.directory / run, ignore_errors=True)
        for path in self.directory.glob(f"{run}-*.*"):
            path.unlink()

    def start(
        self, run: str, count: int = 2, *, run_dir: Path | None = None, shell: str = "", **changes: object
    ) -> list[subprocess.Popen[bytes]]:
        """Starts or resumes a run on one process with two devices, or on two with one each.

        Args:
            run: its name.
            count: of processes.
            run_dir: where it writes; None for the folder of the soak.
            shell: commands to run before it, such as ``ulimit -n 256 &&``.
            changes: fields of its configuration.
        """
        run_dir = run_dir or self.directory / run
        config = self.directory / f"{run}.json"
        experiment.save(dataclasses.replace(self.config, run_dir=run_dir, **changes), config)
        environment = {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // count} --xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(self.directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        resume = ["--resume"] if (run_dir / "config.json").exists() else []
        port = tiny.free_port()
        processes = []
        for number in range(count):
            command = [sys.executable, "-m", "tests.cli.elastic_run", "--config", str(config), *resume]
            command += ["--record", str(self.directory / f"{run}-{number}.txt")]
            command += ["--distributed", f"localhost:{port},{number}/2"] if count == 2 else []
            with (self.directory / f"{run}-{number}.log").open("ab") as log:
                shelled = ["bash", "-c", f'{shell} exec "$@"', "bash", *command]
                processes.append(subprocess.Popen(shelled, env=environment, stderr=log))
        return processes

    def last_step(self, run: str, run_dir: Path | None = None) -> int:
        """Returns the last step that a run has logged."""
        records = read_metrics((run_dir or self.directory / run) / "metrics.jsonl")
        return records[-1]["step"] if records else 0

    def messages(self, run: str) -> str:
        """Returns the ends of the logs of a run's processes."""
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.directory.glob(f"{run}-*.log")))

    def results(self, run: str, run_dir: Path | None = None) -> Results:
        """Returns the results of a run."""
        samples: dict[int, str] = {}
        for record in sorted(self.directory.glob(f"{run}-*.txt")):
            for line in record.read_text().splitlines():
                batch = json.loads(line)
                for position, key in zip(batch["positions"], batch["keys"], strict=True):
                    assert samples.setdefault(position, key) == key, f"{run}: two samples at position {position}"
        records = read_metrics((run_dir or self.directory / run) / "metrics.jsonl")

        def logged(name: str) -> list[tuple[int, float]]:
            return [(record["step"], record[name]) for record in records if name in record]

        consumed = {position: samples.get(position, "") for position in range(NUM_STEPS * BATCH_SIZE)}
        return Results(consumed, logged("train/loss"), logged("few_shot/shapes/2_shot"))


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


def differences(found: Results, expected: Results) -> list[str]:
    """Returns how a run differs from the undisturbed one."""
    others = sum(found.samples[position] != key for position, key in expected.samples.items())
    steps = [step for step, _ in found.losses]
    lost, repeated = len(set(range(1, NUM_STEPS + 1)) - set(steps)), len(steps) - len(set(steps))
    losses = sum(one != other for one, other in zip(found.losses, expected.losses, strict=False))
    counts = {"lost": lost, "repeated": repeated, "other batches": others, "other losses": losses}
    counts["other accuracies"] = int(found.accuracies != expected.accuracies)
    return [f"{what}: {count}" for what, count in counts.items() if count]
