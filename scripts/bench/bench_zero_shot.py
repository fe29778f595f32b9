"""Times zero-shot evaluation end to end against the image tower's bare forward pass, and the embedding of names.

End to end is what `lit-het zero-shot` does from shards to the record, after programs are compiled and names embedded:
reading and decoding photographs (those of `bench_data`), the tower, the head, log-probabilities of all names, figures
with their standard errors, fitted temperatures, and what is drawn. The bare pass is the tower on a batch that lies on
the device, for as many images. Both run in turn; ratios are taken round by round. Towers have random weights, which
cost what trained ones do.

    python -m scripts.bench.bench_zero_shot --tower B/32 --images 512
"""

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from lit_het.configs import lit_so400m_het_xl
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.data_pipelines.texts.prompts import BARE_TEMPLATE, FAMILIES, fill_template
from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lit_het.eval.evaluators.zero_shot import ZeroShot
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.open_sets import Sets
from lit_het.eval.sets.recognition import Recognition, embed_texts
from lit_het.models.predictor import Model, Programs
from lit_het.sharding import MeshConfig, tree_shardings
from lit_het.types import EvaluatedModel
from scripts.bench.bench_data import photograph_shards
from scripts.bench.bench_embeddings import towers_of
from scripts.bench.tools import between, machine, parser_of, print_table, ratio, spread

END_TO_END, BARE = "shards to record", "bare forward pass"
NUM_CLASSES, NUM_PROMPTS = 1000, 80


def main() -> None:
    """Prints both tables."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--tower", choices=("B/32", "B/16", "So400m/14"), default="B/32", help="and a text tower of its size"
    )
    parser.add_argument("--text-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64, help="images of a device")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, nargs="+", default=[0, 22], help="noise samples of an image")
    parser.add_argument("--captions", type=int, default=NUM_CLASSES * NUM_PROMPTS, help="that are really embedded")
    parser.add_argument("--compute-type", default="float32", help="bfloat16 on accelerators")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # embeddings of class names are cached there
        _compare(Path(folder), options)


def _compare(folder: Path, options: argparse.Namespace) -> None:
    names = tuple(f"class number {number}" for number in range(NUM_CLASSES))
    model = _model(options, names)
    photograph_shards(folder / "test", options.images, seed=0, length=options.text_length)
    opened = Sets(224, Preprocessing(filter="fast"), lambda: "").open(
        ImageSet("photographs", str(folder), batch_size=options.batch_size, labelled=False)
    )
    recognition = Recognition(names, BARE_TEMPLATE, names)
    seconds: dict[str, list[float]] = {BARE: [], **{_title(samples): [] for samples in options.samples}}
    size = options.batch_size * model.features.num_shards
    batch = np.zeros((size, 224, 224, 3), np.uint8)
    for number in track(range(options.rounds + 1), options.tower, transient=True):
        began = time.perf_counter()
        passes = [model.features.extract(batch) for _ in range(-(-options.images // size))]
        jax.block_until_ready(passes)
        timed = {BARE: time.perf_counter() - began}
        for samples in options.samples:
            began = time.perf_counter()
            # Another key of the tower, so that features are computed again.
            tower = dataclasses.replace(model.features, tower=f"{number} {samples}")
            ZeroShot(opened, recognition, samples)(dataclasses.replace(model, features=tower)).draw()
            timed[_title(samples)] = time.perf_counter() - began
        if number:  # the first round compiles
            for name, value in timed.items():
                seconds[name].append(value)
    _print_images(options, seconds)
    _print_names(options, model, names)


def _print_images(options: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    rows = [
        (
            name,
            *between(times, digits=2),
            f"{options.images / np.median(times):.1f}",
            spread(ratio(seconds, name, BARE)),
        )
        for name, times in seconds.items()
    ]
    columns = ("what", "s (median)", "min-max", "images/s", "of the bare pass (aim: 1.15)")
    title = f"{options.tower}, {options.images} photographs among {NUM_CLASSES:,} names"
    print_table(Console(width=120), title, columns, rows)


def _print_names(options: argparse.Namespace, model: EvaluatedModel, names: Sequence[str]) -> None:
    templates = (FAMILIES["photos"] * 3)[:NUM_PROMPTS]
    captions = [fill_template(template, name) for name in names for template in templates][: options.captions]
    embed_texts(model, captions[:64])
    began = time.perf_counter()
    embed_texts(model, captions)
    seconds = time.perf_counter() - began
    whole = seconds * NUM_CLASSES * NUM_PROMPTS / len(captions)
    measured = "" if len(captions) == NUM_CLASSES * NUM_PROMPTS else f", extrapolated from {len(captions):,} captions"
    print(
        f"{NUM_CLASSES:,} classes x {NUM_PROMPTS} prompts of {options.text_length} tokens: {whole:.0f} s"
        f" ({len(captions) / seconds:.0f} captions/s{measured}); the second time from the cache"
    )


def _model(options: argparse.Namespace, names: Sequence[str]) -> Model:
    config = towers_of(lit_so400m_het_xl.get_config(), options.tower, options.text_length, options.compute_type)
    task, mesh = config.task.build(), MeshConfig().build()
    shapes = task.shapes
    params = jax.jit(task.initialize, out_shardings=tree_shardings(shapes, mesh))(jax.random.key(0))
    words = train_sentencepiece(names, vocabulary_size=64, model_type="bpe")
    tokenizer = SentencePieceTokenizer(words, options.text_length)
    return Programs(task, mesh, tokenizer).model(params, "random", text_tower="random")


def _title(samples: int) -> str:
    return END_TO_END + (f", {samples} noise samples" if samples else "")


if __name__ == "__main__":
    main()
