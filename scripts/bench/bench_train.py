"""Times training of LiT on a ViT-B/32 with a 12-layer text tower, beside a PyTorch model of the same shapes.

Variants run in turn, several rounds, so that a machine that speeds up or slows down does so for all of them; ratios are
taken round by round. Of each turn the first step is not timed. MFU is the share of what bare matrix products reach in
the same process. The images are those of `bench_data`, read from shards; weights are random, which changes no time.
PyTorch, of the extra "parity", has the deterministic head and keeps its locked tower in `torch.inference_mode`.

    python -m scripts.bench.bench_train --rounds 3                  # a quarter of an hour on two idle cores
    python -m scripts.bench.bench_train --compute-type bfloat16 --batch-size 1024 --batches 4   # on an accelerator
"""

import argparse
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# PyTorch measures beside JAX on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
from rich.console import Console

from lit_het import parameters
from lit_het.configs import lit_so400m_het_xl
from lit_het.configs.experiment import ExperimentConfig
from lit_het.heads.contrastive_config import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.planning.costs import product_flops
from lit_het.random import keys_at
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.types import Batch
from scripts.bench.bench_embeddings import IMAGES, STORED, loaders_of, towers_of
from scripts.bench.tools import Report, TrainingStep, between, parser_of, product_rate, program_bytes, ratio, spread

try:
    from scripts.bench.bench_train_torch import TorchStep
except ImportError:  # PyTorch is of the extra "parity"
    TorchStep = None

HEADS = {"DET": DeterministicContrastiveConfig(), "HET-XL": HetXLContrastiveConfig()}


def main() -> None:
    """Prints tables, and writes them if a folder is named."""
    options = _options()
    report = Report(Console(width=140), "Training step")
    sizes = ((1024, 768, 3072), (3136, 768, 3072), (4096, 4096, 4096))  # the best of some that occur in the towers
    if jax.default_backend() != "cpu":
        sizes = ((8192, 8192, 8192),)
    peak = max(product_rate(*size, options.compute_type) for size in sizes * 3)
    report.note(f"Bare products of {options.compute_type} reach {peak / 1e9:.0f} GFLOP/s here: MFU is the share of it.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.directory or Path(temporary)
        for length in options.text_lengths:
            _measure(folder, options, length, peak, report)
    if options.output:
        report.write(options.output, "bench_train", None)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "JSON and Markdown")
    parser.add_argument("--tower", choices=("B/32", "So400m/14"), default="B/32", help="and a text tower of its size")
    parser.add_argument("--text-lengths", type=int, nargs="+", default=[16, 77])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--images", type=int, default=512, help="that the shards hold")
    parser.add_argument("--directory", type=Path, default=None, help="keeps the shards, and takes those that it holds")
    parser.add_argument("--kinds", choices=(IMAGES, STORED), nargs="+", default=[IMAGES, STORED], help="of input")
    parser.add_argument("--batches", type=int, default=0, help="are read first, and taken in turn; 0 reads on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="of a measurement")
    parser.add_argument("--threads", type=int, default=1, help="of the loader")
    parser.add_argument("--compute-type", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--unrolled", action=argparse.BooleanOptionalAction, default=jax.default_backend() == "cpu")
    parser.add_argument("--torch-compile", action="store_true", help="also PyTorch's compiled form")
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=TorchStep is not None)
    return parser.parse_args()


@dataclasses.dataclass
class Split:
    """Seconds of a step, round by round: waiting for the batch on the device, beginning the step, waiting for its end.

    Attributes:
        flops: of the matrix products of a step.
        memory: bytes of the compiled program, where that is known.
    """

    flops: int
    memory: int | None
    input: list[float] = dataclasses.field(default_factory=list)
    host: list[float] = dataclasses.field(default_factory=list)
    device: list[float] = dataclasses.field(default_factory=list)

    def add(self, seconds: Sequence[float]) -> None:
        """Adds a round."""
        for part, value in zip((self.input, self.host, self.device), seconds, strict=True):
            part.append(value)

    @property
    def computed(self) -> list[float]:
        """Without waiting for the batch."""
        return list(map(sum, zip(self.host, self.device, strict=True)))

    @property
    def whole(self) -> list[float]:
        """All of it."""
        return list(map(sum, zip(self.input, self.computed, strict=True)))


def _measure(folder: Path, options: argparse.Namespace, length: int, peak: float, report: Report) -> None:
    config = _config(options, length)
    splits: dict[str, Split] = {}
    for kind, loader in loaders_of(folder, config, options, length).items():
        if kind not in options.kinds:
            continue
        # One kind after the other: the states of all would not fit into a small machine.
        reading = loader.batches()
        source: Iterator[Batch] = reading
        if options.batches:
            source = itertools.cycle(list(itertools.islice(reading, options.batches)))
            reading.close()  # its threads would slow down whoever dispatches many operations
        steps = _steps(config, kind, next(source), options)
        for name, step in steps.items():
            splits[name] = Split(step.flops, step.memory)
        with report.console.status(kind) as status:
            for number in range(options.rounds + 1):
                for name, step in steps.items():
                    status.update(f"{length} tokens, round {number} of {options.rounds}: {name}")
                    _timed(step, source)  # what ran before has left the memory in another state
                    times = np.mean([_timed(step, source) for _ in range(options.steps)], axis=0).tolist()
                    if number:  # the first round warms up
                        splits[name].add(times)
                        splits[name].memory = step.memory
        reading.close()
    _tell(options, length, splits, peak, report)


def _steps(config: ExperimentConfig, kind: str, batch: Batch, options: argparse.Namespace) -> dict[str, Any]:
    task = config.task
    assert isinstance(task, ContrastiveConfig)
    steps: dict[str, Any] = {
        f"{name}, {kind}": JaxStep(dataclasses.replace(config, task=dataclasses.replace(task, head=head)), batch)
        for name, head in HEADS.items()
    }
    if options.torch and TorchStep is not None:
        flops = steps[f"DET, {kind}"].flops
        steps[f"PyTorch DET, {kind}"] = TorchStep(task, options.compute_type, flops, compiled=False)
        if options.torch_compile:
            steps[f"PyTorch compiled DET, {kind}"] = TorchStep(task, options.compute_type, flops, compiled=True)
    return steps


def _timed(step: Any, source: Iterator[Batch]) -> tuple[float, float, float]:
    """Returns the seconds of input, host and device in one step."""
    marks = [time.perf_counter()]
    batch = step.place(next(source))
    marks.append(time.perf_counter())
    wait = step(batch)
    marks.append(time.perf_counter())
    wait()
    marks.append(time.perf_counter())
    seconds = np.diff(marks)
    return float(seconds[0]), float(seconds[1]), float(seconds[2])


def _tell(
    options: argparse.Namespace,
    length: int,
    splits: dict[str, Split],
    peak: float,
    report: Report,
) -> None:
    rows = []
    for name, split in splits.items():
        median = float(np.median(split.whole))
        parts = (np.median(part) for part in (split.input, split.host, split.device))
        rows.append(
            (
                name,
                "{} ({})".format(*between(split.whole)),
                f"{1 / median:.2f}",
                f"{options.batch_size / median:.1f}",
                f"{split.flops / 1e9:.0f}",
                f"{split.flops / median / peak:.0%}",
                f"{split.flops / float(np.median(split.computed)) / peak:.0%}",
                " / ".join(f"{part:.3f}" for part in parts),
                "-" if split.memory is None else f"{split.memory / 2**20:,.0f}",
            )
        )
    columns = ("step", "s (min-max)", "steps/s", "pairs/s", "GFLOP", "MFU", "without input")
    columns += ("input / host / device s", "MiB")
    report.table(f"{options.tower}, {length} tokens, batch {options.batch_size}, {options.compute_type}", columns, rows)
    computed = {name: split.computed for name, split in splits.items()}
    lines = []
    for kind in options.kinds:
        for rival in ("PyTorch", "PyTorch compiled"):
            found = ratio(computed, f"{rival} DET, {kind}", f"DET, {kind}")
            lines.append((f"{rival} / DET, {kind}, without input", spread(found), "at least 1.0"))
        lines.append(
            (f"HET-XL / DET, {kind}", spread(ratio(computed, f"HET-XL, {kind}", f"DET, {kind}")), "at most 1.03")
        )
        split = splits[f"DET, {kind}"]
        share = [wait / whole for wait, whole in zip(split.input, split.whole, strict=True)]
        lines.append((f"share of waiting for input, DET, {kind}", spread(share), "little" if kind == STORED else ""))
    lines = [line for line in lines if line[1] != "-"]
    report.table(f"Ratios round by round, {length} tokens", ("ratio", "median (min-max)", "aim"), lines)
    report.data[f"{length} tokens"] = {name: dataclasses.asdict(split) for name, split in splits.items()}


def _config(options: argparse.Namespace, length: int) -> ExperimentConfig:
    config = towers_of(lit_so400m_het_xl.get_config(), options.tower, length, options.compute_type)
    task: Any = config.task
    towers = {
        part: dataclasses.replace(tower, encoder=dataclasses.replace(tower.encoder, unrolled=options.unrolled))
        for part, tower in (("image_tower", task.image_tower), ("text_tower", task.text_tower))
    }
    return dataclasses.replace(config, task=dataclasses.replace(task, **towers), optimizer=Optimizer(rule=AdamW()))


class JaxStep(TrainingStep):
    """A compiled step.

    Attributes:
        flops: of its matrix products.
        memory: bytes of the compiled program.
    """

    def __init__(self, config: ExperimentConfig, batch: Batch):
        super().__init__(config)

        def loss(trainable: Any, locked: Any, batch: Batch) -> Any:
            return self.task.loss(parameters.merge(locked, trainable), batch, keys_at(0, 0))[0]

        self.flops = product_flops(jax.grad(loss), self.state.params, self.locked, batch)
        self.compile(batch)
        self.memory = program_bytes(self.step)[1]

    def place(self, batch: Batch) -> Batch:
        """Returns the batch on the device, once it is there."""
        return jax.block_until_ready(jax.device_put(batch))

    def __call__(self, batch: Batch) -> Callable[[], float]:
        """Begins a step and returns what waits for its end."""
        metrics = super().__call__(batch)
        return lambda: float(metrics["loss"])


if __name__ == "__main__":
    main()
