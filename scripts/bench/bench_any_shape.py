"""Times images of any shape, as patches (NaFlex), against squares of as many patches, in turn in one process.

Photographs are cut to shapes from 1 : 2 to 2 : 1; patches keep the shape, squares do not. Rates are of patches: of all
in a batch, and of those that are not padding. Where all runs on a CPU, seconds are those of its cores.

    python -m scripts.bench.bench_any_shape [--size Ti] [--batch 16] [--rounds 7]
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import simplejpeg
from rich.console import Console

from lit_het.configs import quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.patches import split
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.types import Batch
from scripts.bench.bench_data import HEIGHT, WIDTH, photographs
from scripts.bench.tools import TrainingStep, between, machine, parser_of, print_table, ratio, spread

SIDE, PATCH = 256, 16
NUM_PATCHES = (SIDE // PATCH) ** 2
NUM_CLASSES = 1000
LOADED = 64  # images of a batch of the loader

# What each of the two ways takes.
Seconds = dict[str, list[float]]


def main() -> None:
    """Prints the table and the ratios."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", default="Ti", help="of the encoder")
    parser.add_argument("--compute-type", default="float32")
    parser.add_argument("--batch", type=int, default=16, help="images of a training step")
    parser.add_argument("--images", type=int, default=256, help="photographs")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), _samples(options.images), samples_per_shard=1000)
        towers = _towers(options.size, options.compute_type)
        steps = {name: _step(tower, folder, options.batch) for name, tower in towers.items()}
        filled = _filled(folder, towers["any shape"])
        for title, variants in (
            ("training step", steps),
            ("loader, evaluation", {name: _loaded(folder, tower, training=False) for name, tower in towers.items()}),
            ("loader, training", {name: _loaded(folder, tower, training=True) for name, tower in towers.items()}),
        ):
            found = _seconds(variants, options.rounds)
            rows = [(name, *between(seconds, 1e3, 1)) for name, seconds in found.items()]
            print_table(console, title, ("input", "ms (median)", "min-max"), rows)
            each = ratio(found, "squares", "any shape") or []
            console.print(f"{title}: any shape / squares, rate per patch {spread(each)}")
            console.print(f"{title}: per patch without padding {spread([filled * one for one in each])}")
    console.print(f"{filled:.3f} of the patches are not padding; {machine()}")


def _samples(count: int) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    for number, image in enumerate(photographs(count, 0)):
        height, width = _shape(float(np.exp(random.uniform(np.log(1 / 2), np.log(2)))))
        pixels = np.ascontiguousarray(image[:height, :width])
        yield {"__key__": f"{number:06}", "jpg": simplejpeg.encode_jpeg(pixels, 90, "RGB", "420"), "cls": number % 10}


def _shape(aspect: float) -> tuple[int, int]:
    """Returns the height and width of the largest part of a photograph with a width of so many heights."""
    height = min(HEIGHT, int(WIDTH / aspect))
    return height, int(height * aspect)


def _towers(size: str, compute_type: Any) -> dict[str, ViTConfig]:
    squares = ViTConfig(SIDE, PATCH, encoder_size(size, compute_type=compute_type))
    return {"squares": squares, "any shape": dataclasses.replace(squares, max_patches=NUM_PATCHES)}


def _data(folder: str, tower: ViTConfig, batch_size: int) -> LoaderConfig:
    preprocessing = Preprocessing(filter="fast", patches=tower.patches)
    return LoaderConfig((folder,), SIDE, batch_size, preprocessing=preprocessing, threads=0)


def _step(tower: ViTConfig, folder: str, batch_size: int) -> Callable[[], Any]:
    config: ExperimentConfig = quickstart_upstream.get_config()
    loss: Any = SoftmaxCrossEntropy()
    task = dataclasses.replace(config.task, image_tower=tower, num_classes=NUM_CLASSES, loss=loss)
    step = TrainingStep(dataclasses.replace(config, task=task))
    read = next(Loader(_data(folder, tower, batch_size)).epoch())
    batch = jax.device_put(Batch(valid=read.valid, image=read.image, label=np.arange(batch_size, dtype=np.int32)))
    step.compile(batch)
    return lambda: jax.block_until_ready(step(batch))


def _loaded(folder: str, tower: ViTConfig, *, training: bool) -> Callable[[], Any]:
    config = _data(folder, tower, LOADED)
    if not training:
        batches = Loader(config).batches()
    else:
        batches = Loader(dataclasses.replace(config, crop=InceptionCrop(), augmentations=(HorizontalFlip(),))).batches()
    return lambda: next(batches)


def _filled(folder: str, tower: ViTConfig) -> float:
    """Returns the share of patches that are not padding."""
    shares = [
        (split(batch.image)[1][batch.valid, :, 0] > 0).mean() for batch in Loader(_data(folder, tower, LOADED)).epoch()
    ]
    return float(np.mean(shares))


def _seconds(variants: dict[str, Callable[[], Any]], rounds: int) -> Seconds:
    found: Seconds = {name: [] for name in variants}
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    for call in variants.values():
        call()
    for _ in range(rounds):
        for name, call in variants.items():
            began = clock()
            call()
            found[name].append(clock() - began)
    return found


if __name__ == "__main__":
    main()
