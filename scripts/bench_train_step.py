"""Times one training step of the quickstart's runs against baselines measured in the same process.

Every variant runs in turn, several rounds, so that a machine that speeds up or slows down does so for all of them. The
operation count is XLA's; "matrix products" is the same machine's rate on bare products of the sizes that occur.

    python scripts/bench_train_step.py [--rounds 5]
"""

import argparse
import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from lit_het import parameters
from lit_het.configs import quickstart_lit_deterministic, quickstart_lit_het_xl, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.training.durations import RunLength
from lit_het.training.step import initial_state, make_step, of_trainable
from lit_het.types import Batch

STEPS_PER_ROUND = 20


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    upstream = _upstream()
    deterministic, het_xl = quickstart_lit_deterministic.get_config(), quickstart_lit_het_xl.get_config()
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
    table = Table("step", "ms (median)", "min-max", "steps/s", "GFLOP", "GFLOP/s", "compile s")
    for name, step in variants.items():
        median = float(np.median(seconds[name]))
        spread = f"{min(seconds[name]) * 1e3:.1f}-{max(seconds[name]) * 1e3:.1f}"
        gflop = step.flops / 1e9
        table.add_row(
            name,
            f"{median * 1e3:.1f}",
            spread,
            f"{1 / median:.1f}",
            f"{gflop:.1f}",
            f"{gflop / median:.0f}",
            f"{step.compile_seconds:.1f}",
        )
    console = Console(width=140)
    console.print(table)
    console.print(f"matrix products alone: {_product_rate():.0f} GFLOP/s; jax {jax.__version__}, {jax.devices()}")
    for first, second in (
        ("upstream, scanned (baseline)", "upstream, unrolled"),
        ("LiT deterministic, tower trained (baseline)", "LiT deterministic, tower locked"),
        ("LiT HET-XL, tower locked", "LiT deterministic, tower locked"),
        ("LiT deterministic, tower locked", "LiT deterministic, embeddings given"),
    ):
        ratios = np.divide(seconds[first], seconds[second])
        console.print(f"{first} / {second}: {np.median(ratios):.2f} ({ratios.min():.2f}-{ratios.max():.2f})")


class Step:
    """A compiled training step with a batch of random data."""

    def __init__(self, config: ExperimentConfig, *, embeddings: bool = False):
        task = config.task.build()
        locked, trainable = parameters.partition(task.initialize(jax.random.key(0)), task.locked)
        run = RunLength.resolve(config.length, config.data.batch_size, None)
        optimizer = config.optimizer.build(config.schedule, run, task.layers_above, task.learning_rates)
        self._state = jax.tree.map(jnp.copy, initial_state(trainable, optimizer))
        self._locked = locked
        self._batch = _batch(config, embeddings)
        lowered = jax.jit(make_step(of_trainable(task.loss), optimizer, 0), donate_argnums=0).lower(
            self._state, locked, self._batch
        )
        began = time.perf_counter()
        self._step: Callable = lowered.compile()
        self.compile_seconds = time.perf_counter() - began
        cost = lowered.cost_analysis()
        assert cost is not None
        self.flops = cost["flops"]

    def seconds(self) -> float:
        """Returns the mean seconds of a step, over enough steps to hide the dispatch."""
        began = time.perf_counter()
        for _ in range(STEPS_PER_ROUND):
            self._state, _ = self._step(self._state, self._locked, self._batch)
        jax.block_until_ready(self._state)
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
    b, tower = config.data.batch_size, config.task.image_tower
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


def _product_rate(rows: int = 1024, width: int = 256, hidden: int = 1024) -> float:
    """Returns GFLOP/s of ``[rows width] x [width hidden]`` in float32."""
    left, right = jnp.ones((rows, width)), jnp.ones((width, hidden))
    product = jax.jit(jnp.matmul)
    product(left, right).block_until_ready()
    began, repeats = time.perf_counter(), 200
    jax.block_until_ready([product(left, right) for _ in range(repeats)])
    return 2 * rows * width * hidden * repeats / (time.perf_counter() - began) / 1e9


if __name__ == "__main__":
    main()
