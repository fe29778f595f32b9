"""Times the search for near-duplicates end to end beside bare matrix products of the same size, in turn.

Random embeddings, of which some are near copies of others, are stored as by ``lit-het embed``. A round reads them and
compares a block of rows with all samples, and multiplies bare matrices of the shapes of the search in the same type.
Rates are extrapolated to whole sets: n samples are n² / 2 pairs and a sixteenth more, as blocks are not halved. On a
CPU seconds are those of its cores, which other jobs on the machine do not lengthen by their turns.

    python -m scripts.bench.bench_dedup [--samples 16384] [--rows 16384] [--width 768] [--copies 0.1]
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from lit_het.apps.dedup import search
from lit_het.apps.dedup.deduplication import EmbeddedSamples
from lit_het.apps.dedup.pairs import Found
from lit_het.apps.dedup.search import BlockSearch
from lit_het.data_pipelines.embeddings import EmbeddingFolder, Recipe
from lit_het.data_pipelines.shards.index import index_shard
from lit_het.data_pipelines.shards.writing import expand, write_shards
from lit_het.sharding import MeshConfig
from scripts.bench.tools import machine, parser_of, print_table, product_rate, spread

FLOOR, PER_SHARD = 0.9, 8192
_UNITS = {"cpu": "core-minutes"}
WHOLE = {"1 M x 1 M": 10**6, "10 M x 10 M": 10**7, "a billion": 10**9}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints rates, their ratio and the cost of whole sets."""
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--width", type=int, default=768, help="of an embedding")
    parser.add_argument("--copies", type=float, default=0.1, help="share of the samples that are near copies")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    print(f"{machine()}; load {os.getloadavg()[0]:.2f} of {os.cpu_count()} cores")
    searched, bare = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        samples = _written(Path(folder), options)
        for number in track(range(options.rounds + 1), "search and products", transient=True):
            rates = _searched(samples, options), _multiplied(options)
            if number:  # the first round compiles
                searched.append(rates[0])
                bare.append(rates[1])
    ratios = [one / other for one, other in zip(searched, bare, strict=True)]
    rows = [
        ("search, GFLOP/s", spread([rate / 1e9 for rate in searched])),
        ("bare products, GFLOP/s", spread([rate / 1e9 for rate in bare])),
        ("search / bare products", spread(ratios)),
        *((name, _cost(count, float(np.median(searched)), options)) for name, count in WHOLE.items()),
    ]
    title = f"{options.rows:,} rows x {options.samples:,} samples, width {options.width}, {options.copies:.0%} copies"
    print_table(Console(), title, ("", ""), rows)


def _written(folder: Path, options: argparse.Namespace) -> EmbeddedSamples:
    """Writes shards of samples without images, and their embeddings."""
    write_shards(
        folder / "shards",
        ({"__key__": f"{number:08d}", "jpg": b"-"} for number in range(options.samples)),
        samples_per_shard=PER_SHARD,
    )
    output = EmbeddingFolder(str(folder / "embeddings"), Recipe("random", {}, options.width, 0, "float16", 0))
    shards = expand(str(folder / "shards"))
    for shard, embeddings in zip(shards, _embeddings(options), strict=True):
        output.write(index_shard(shard), embeddings[:, None])
    return EmbeddedSamples(shards, [], str(folder / "embeddings"))


def _embeddings(options: argparse.Namespace) -> Iterator[np.ndarray]:
    random, before = np.random.default_rng(0), np.empty((0, options.width), np.float32)
    for start in range(0, options.samples, PER_SHARD):
        values = random.standard_normal((min(PER_SHARD, options.samples - start), options.width), np.float32)
        near = np.flatnonzero(random.random(len(values)) < options.copies) if start else []
        values[near] = before[near] + 0.2 * values[near]
        yield values
        before = values


def _searched(samples: EmbeddedSamples, options: argparse.Namespace) -> float:
    """Returns the FLOP/s of the products that a search needs, of all seconds that it takes."""
    clock = _clock()
    began = clock()
    count, mesh = options.samples, MeshConfig().build(jax.local_devices())
    blocks = BlockSearch(samples.read, range(options.rows), FLOOR, mesh)
    Found.of(blocks.pairs(count, count, lambda _: None), count)
    return 2 * options.width * options.rows * count / (clock() - began)


def _multiplied(options: argparse.Namespace) -> float:
    """Returns the FLOP/s of bare products, of a whole block of rows or of a tile, what is faster."""
    platform = jax.default_backend()
    kind, tile = search.TYPES.get(platform, "float16"), search.TILES.get(platform, search.TILE)
    repeats = -(-options.samples // search.COLUMNS)
    whole = product_rate(options.rows, options.width, search.COLUMNS, kind, repeats, _clock())
    return max(whole, product_rate(tile, options.width, search.COLUMNS, kind, repeats * options.rows // tile, _clock()))


def _cost(count: int, rate: float, options: argparse.Namespace) -> str:
    seconds = count**2 * options.width * 17 / 16 / rate
    return f"{seconds / 60:,.0f} {_UNITS.get(jax.default_backend(), 'minutes of this machine')}"


def _clock() -> Callable[[], float]:
    return time.process_time if jax.default_backend() == "cpu" else time.perf_counter


if __name__ == "__main__":
    main()
