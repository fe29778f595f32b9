"""Times LiT training end to end: on images, on stored embeddings, and with no reading at all.

The last is the bound: the same step on a batch in device memory, so that only the text tower, the head and the loss
remain. The photographs are those of `bench_data`; towers have random weights, so their embeddings are
random too. Variants run in turn; ratios are taken round by round.

    python -m scripts.bench.bench_embeddings --tower B/32 --text-lengths 16 77 --batch-size 32
    python -m scripts.bench.bench_embeddings --tower So400m/14 --batch-size 4 --rounds 3
"""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from lit_het.configs import lit_so400m_het_xl
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.embeddings import EmbeddingFolder, Recipe, describe
from lit_het.data_pipelines.images.transforms import Preprocessing, Training
from lit_het.data_pipelines.shards.index import index_shard, summarize
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import IMAGE, expand
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text_config import TextConfig
from lit_het.types import Batch
from scripts.bench.bench_data import photograph_shards
from scripts.bench.tools import TrainingStep, between, machine, parser_of, print_table, ratio, spread

IMAGES, STORED, BOUND = "images", "stored embeddings", "nothing read (bound)"


def main() -> None:
    """Prints a table for every length of text."""
    parser = parser_of(__doc__)
    parser.add_argument("--tower", choices=("B/32", "So400m/14"), default="B/32", help="and a text tower of its size")
    parser.add_argument("--text-lengths", type=int, nargs="+", default=[16])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of a measurement")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compute-type", default="float32", help="bfloat16 on accelerators")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        for length in options.text_lengths:
            _compare(Path(folder), options, length)


def _compare(folder: Path, options: argparse.Namespace, length: int) -> None:
    config = towers_of(lit_so400m_het_xl.get_config(), options.tower, length, options.compute_type)
    step = TrainingStep(config)
    batches = {name: loader.batches() for name, loader in loaders_of(folder, config, options, length).items()}
    on_device = jax.device_put(next(batches[STORED]))
    sources: dict[str, Iterator[Batch]] = {**batches, BOUND: iter(lambda: on_device, None)}
    seconds: dict[str, list[float]] = {name: [] for name in sources}
    for number in track(range(options.rounds + 1), f"{options.tower}, {length} tokens", transient=True):
        for name, source in sources.items():
            began = time.perf_counter()
            for _ in range(options.steps):
                step(jax.device_put(next(source)))
            jax.block_until_ready(step.state)
            if number:  # the first round compiles
                seconds[name].append((time.perf_counter() - began) / options.steps)
    for generator in batches.values():
        generator.close()
    _print(options, length, seconds)


def _print(options: argparse.Namespace, length: int, seconds: dict[str, list[float]]) -> None:
    rows = [
        (
            name,
            *between(times),
            f"{options.batch_size / np.median(times):.1f}",
            *(spread(ratio(seconds, other, name)) for other in (IMAGES, BOUND)),
        )
        for name, times in seconds.items()
    ]
    columns = ("step on", "s (median)", "min-max", "pairs/s", "over images", "of the bound")
    title = f"{options.tower}, text of {length} tokens, batch {options.batch_size}"
    print_table(Console(width=120), title, columns, rows)


def towers_of(config: ExperimentConfig, tower: str, length: int, compute_type: Any) -> ExperimentConfig:
    """Returns a recipe with towers of another size, such as ``B/32``, and texts of another length."""
    name, patch_size = tower.split("/")
    encoder = encoder_size(name, compute_type=compute_type)
    task = config.task
    assert isinstance(task, ContrastiveConfig)
    assert isinstance(task.image_tower, ViTConfig)
    assert isinstance(task.text_tower, TextConfig)
    image = dataclasses.replace(task.image_tower, patch_size=int(patch_size), encoder=encoder)
    text = dataclasses.replace(task.text_tower, length=length, embedding_size=encoder.width, encoder=encoder)
    return dataclasses.replace(config, task=dataclasses.replace(task, image_tower=image, text_tower=text))


def loaders_of(folder: Path, config: ExperimentConfig, options: argparse.Namespace, length: int) -> dict[str, Loader]:
    """Writes photographs, and embeddings for them, and returns a loader of each."""
    shards = folder / "shards"
    tokenizer = photograph_shards(shards, options.images, seed=0, length=length)
    data = LoaderConfig(
        (str(shards),),
        config.data.image_size,
        options.batch_size,
        preprocessing=Preprocessing(filter="fast"),
        threads=options.threads,
    )
    _store(folder / "embeddings", data, config.task.require_image_tower().embedding_size)
    stored = dataclasses.replace(data, embeddings=str(folder / "embeddings"))
    return {IMAGES: Loader(data, tokenizer), STORED: Loader(stored, tokenizer)}


def _store(folder: Path, data: LoaderConfig, size: int) -> None:
    """Writes random embeddings of the images of ``data`` into a folder."""
    images = describe(Training(data.preprocessing), data.image_size, random=False)
    output = EmbeddingFolder(str(folder), Recipe("random", images, size, 0, "float16", 0))
    random = np.random.default_rng(0)
    for address in expand(data.shards):
        table = index_shard(address)
        if not output.has(summarize(address)):
            output.write(table, random.normal(size=(int(table.has([IMAGE]).sum()), 1, size)).astype(np.float32))


if __name__ == "__main__":
    main()
