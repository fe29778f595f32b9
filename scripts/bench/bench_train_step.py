"""Times one training step of the quickstart's runs against baselines measured in the same process.

Every variant runs in turn, several rounds, so that a machine that speeds up or slows down does so for all of them. The
operation count is XLA's; "matrix products" is the same machine's rate on bare products of the sizes that occur.

    python -m scripts.bench.bench_train_step [--rounds 5]
"""

import dataclasses
import time

import jax
import numpy as np
from rich.console import Console

from lit_het.configs import quickstart_lit_deterministic, quickstart_lit_het_xl, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.types import Batch
from scripts.bench.tools import TrainingStep, between, machine, parser_of, print_table, product_rate, ratio, spread

STEPS_PER_ROUND = 20


def main() -> None:
    """Prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    upstream = _upstream()
    deterministic, het_xl = quickstart_lit_deterministic.get_config(), quickstart_lit_het_xl.get_config()
    # With the same loss: the quickstart's HET-XL smooths labels.
    het_xl = dataclasses.replace(het_xl, task=dataclasses.replace(het_xl.task, loss=deterministic.task.loss))
    unlocked = dataclasses.replace(deterministic, task=dataclasses.replace(deterministic.task, locked=()))
    variants = {
        "upstream, unrolled": Step(upstream),
        "upstream, scanned (baseline)": Step(_scanned(upstream)),
        "LiT deterministic, tower locked": Step(deterministic),
        "LiT deterministic, tower trained (baseline)": Step(unlocked),
        "LiT HET-XL, tower locked": Step(het_xl),
        "LiT deterministic, embeddings given": Step(deterministic, embeddings=True),
        "LiT HET-XL, embeddings given": Step(het_xl, embeddings=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, step in variants.items():
            seconds[name].append(step.seconds())
    rows = []
    for name, step in variants.items():
        median, gflop = float(np.median(seconds[name])), step.flops / 1e9
        rates = (f"{1 / median:.1f}", f"{gflop:.1f}", f"{gflop / median:.0f}", f"{step.compile_seconds:.1f}")
        rows.append((name, *between(seconds[name], 1e3, 1), *rates))
    console = Console(width=140)
    columns = ("step", "ms (median)", "min-max", "steps/s", "GFLOP", "GFLOP/s", "compile s")
    print_table(console, "training steps", columns, rows)
    rate = product_rate(1024, 256, 1024, repeats=200) / 1e9
    console.print(f"matrix products alone: {rate:.0f} GFLOP/s; {machine()}")
    for first, second in (
        ("upstream, scanned (baseline)", "upstream, unrolled"),
        ("LiT deterministic, tower trained (baseline)", "LiT deterministic, tower locked"),
        ("LiT HET-XL, tower locked", "LiT deterministic, tower locked"),
        ("LiT deterministic, tower locked", "LiT deterministic, embeddings given"),
    ):
        console.print(f"{first} / {second}: {spread(ratio(seconds, first, second))}")


class Step(TrainingStep):
    """A compiled training step with a batch of random data."""

    def __init__(self, config: ExperimentConfig, *, embeddings: bool = False):
        super().__init__(config)
        self._batch = _batch(config, embeddings)
        lowered, self.compile_seconds = self.compile(self._batch)
        self.flops = lowered.cost_analysis()["flops"]

    def seconds(self) -> float:
        """Returns the mean seconds of a step, over enough steps to hide the dispatch."""
        began = time.perf_counter()
        for _ in range(STEPS_PER_ROUND):
            self(self._batch)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - began) / STEPS_PER_ROUND


def _upstream() -> ExperimentConfig:
    config = quickstart_upstream.get_config()
    return dataclasses.replace(config, task=dataclasses.replace(config.task, num_classes=291))


def _scanned(config: ExperimentConfig) -> ExperimentConfig:
    tower = config.task.image_tower
    assert isinstance(tower, ViTConfig)
    scanned = dataclasses.replace(tower, encoder=dataclasses.replace(tower.encoder, unrolled=False))
    return dataclasses.replace(config, task=dataclasses.replace(config.task, image_tower=scanned))


def _batch(config: ExperimentConfig, embeddings: bool) -> Batch:
    random = np.random.default_rng(0)
    b, tower = config.data.batch_size, config.task.require_image_tower()
    image = random.integers(0, 256, (b, tower.image_size, tower.image_size, 3), dtype=np.uint8)
    embedding = random.normal(size=(b, tower.embedding_size)).astype(np.float32)
    return jax.device_put(
        Batch(
            valid=np.ones(b, bool),
            image=None if embeddings else image,
            image_embedding=embedding if embeddings else None,
            text=random.integers(0, 600, (b, quickstart_lit_deterministic.TEXT_LENGTH), dtype=np.int32),
            label=(random.random((b, 291)) < 0.02).astype(np.float32),
        )
    )


if __name__ == "__main__":
    main()
