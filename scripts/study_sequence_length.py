"""Accuracy over sequence length of towers of one patch size, before and after training with random ones (FlexiViT).

    python -m scripts.study_sequence_length --output runs/sequence_length --seeds 0 1 2

SoViT Sec. 5.5 and Fig. 7 at the size of the glyph data: classifiers of characters, of a plain ViT's proportions and of
those of SoViT-150m at equal operations. Each is trained with patches of one size, then "flexified" by half as many
steps with random sizes, and evaluated on another typeface at these sizes, a larger and a smaller one. Finished runs are
skipped.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from matplotlib.figure import Figure

from lit_het.configs import glyph_classifier
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.configs.quickstart_evaluations import TYPEFACE
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.eval.metrics.significance import estimate
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.files import write_atomically
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.models.evaluation import evaluate
from lit_het.models.sizes import Sizes
from lit_het.planning.costs import product_flops
from lit_het.search import grid
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from lit_het.training.train import train_unless_done
from scripts.study import run_seeds, study_parser

IMAGE_SIZE, PATCH_SIZE = 48, 12
TRAINED_SIZES = (24, 16, 12)
# 1, 4, 9, 16 and 36 patches: the first and the last are never trained.
PATCH_SIZES = (48, *TRAINED_SIZES, 8)
SHAPES = {
    # ViT-B's MLP is 4 times as wide as its tokens; that of SoViT-150m (880 wide, 18 deep, 2,320) 2.6 times.
    "plain": EncoderConfig(width=128, depth=3, mlp_width=512, num_heads=4),
    "SoViT": EncoderConfig(width=112, depth=5, mlp_width=288, num_heads=4),
}
# Sizes of patches in training; the second starts from the first.
KINDS = {"one size": (), "flexified": TRAINED_SIZES}
FIGURES = "sequence_length.json"


def tower(shape: str, kind: str) -> ViTConfig:
    """Returns the image tower of a shape in `SHAPES` and a kind of training in `KINDS`."""
    return ViTConfig(IMAGE_SIZE, PATCH_SIZE, SHAPES[shape], pooling="mean", patch_sizes=KINDS[kind])


def gflop(shape: str, patch_size: int) -> float:
    """Returns the GFLOP of matrix products for an image."""
    config = dataclasses.replace(tower(shape, "one size"), patch_size=patch_size)
    graph, state = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))
    pixels = jax.ShapeDtypeStruct((1, IMAGE_SIZE, IMAGE_SIZE, 3), jnp.uint8)
    return product_flops(lambda state, image: nnx.merge(graph, state)(image).embedding, state, pixels) / 1e9


def configuration(shape: str, kind: str, root: Path, data: Path, seed: int, steps: int) -> ExperimentConfig:
    """Returns a run."""
    base = glyph_classifier.get_config(root)
    num_classes = len(read_lines(str(data / "train" / "classnames.txt")))
    is_first = not KINDS[kind]
    steps = steps if is_first else steps // 2
    return dataclasses.replace(
        base,
        run_dir=root / _folder(shape, kind),
        task=ClassificationConfig(tower(shape, kind), DeterministicConfig(), num_classes),
        pretrained=None if is_first else PretrainedConfig(root / _folder(shape, "one size"), "(image_tower|head)/.*"),
        data=dataclasses.replace(base.data, shards=(str(data / "train"),), image_size=IMAGE_SIZE, seed=seed),
        seed=seed,
        length=Duration(steps),
        schedule=Schedule(learning_rate=2e-3 if is_first else 1e-3, warmup=Duration(steps // 10)),
        cadence=dataclasses.replace(base.cadence, save_steps=steps),
    )


def _folder(shape: str, kind: str) -> str:
    return f"{shape} {kind}".replace(" ", "_")


def train(root: Path, data: Path, seed: int, steps: int) -> None:
    """Trains the runs of a seed and evaluates them at every patch size, unless it is done."""
    images = ZeroShotConfig(ImageSet(TYPEFACE, str(data / TYPEFACE), split="."))
    for shape in SHAPES:
        for kind in KINDS:
            config = configuration(shape, kind, root, data, seed, steps)
            train_unless_done(config)
            found, path = {}, config.run_dir / FIGURES
            for size in () if path.exists() else PATCH_SIZES:
                [evaluation] = evaluate([config.run_dir], [images], sizes=Sizes(patch=size))
                found[size] = evaluation.figures["top1"]
            if found:
                write_atomically(path, json.dumps(found) + "\n")


def conclude(output: Path, data: Path, seeds: Sequence[int], steps: int) -> None:
    """Writes a table and draws accuracy over sequence length."""
    found = {(shape, kind): _accuracies(output, shape, kind, seeds) for shape in SHAPES for kind in KINDS}
    titles = [f"{shape}, {kind}" for shape, kind in found]
    lines = [
        f"| patch, pixels | tokens | GFLOP: {', '.join(SHAPES)} | {' | '.join(titles)} |",
        f"| --- | --- | --- |{' --- |' * len(found)}",
    ]
    for size in PATCH_SIZES:
        costs = ", ".join(f"{gflop(shape, size):.4f}" for shape in SHAPES)
        cells = [estimate([100 * one for one in of[size]]).shown(1) for of in found.values()]
        lines.append(f"| {size} | {(IMAGE_SIZE // size) ** 2} | {costs} | {' | '.join(cells)} |")
    write_atomically(output / "sequence_length.md", "\n".join(lines) + "\n")
    draw(found, output / "sequence_length.png")
    print(f"table: {output / 'sequence_length.md'}")


def _accuracies(output: Path, shape: str, kind: str, seeds: Sequence[int]) -> dict[int, list[float]]:
    """Returns the accuracies of all seeds by patch size."""
    figures = [json.loads((output / f"seed{seed}" / _folder(shape, kind) / FIGURES).read_text()) for seed in seeds]
    return {size: [one[str(size)] for one in figures] for size in PATCH_SIZES}


def draw(found: Mapping[tuple[str, str], Mapping[int, Sequence[float]]], path: Path) -> None:
    """Draws accuracy over sequence length, with bars of one standard error."""
    figure = Figure(figsize=(7, 4.2), layout="constrained", dpi=140)
    axes = figure.subplots()
    tokens = [(IMAGE_SIZE // size) ** 2 for size in PATCH_SIZES]
    colours = dict(zip(SHAPES, ("#52708c", "#c8501e"), strict=True))
    for (shape, kind), by_size in found.items():
        means = [estimate([100 * one for one in by_size[size]]) for size in PATCH_SIZES]
        style: dict[str, Any] = {"linestyle": "-" if KINDS[kind] else ":", "marker": "o" if KINDS[kind] else "s"}
        errors = [one.error for one in means]
        axes.errorbar(
            tokens, [one.mean for one in means], errors, color=colours[shape], label=f"{shape}, {kind}", **style
        )
    axes.set_xscale("log")
    axes.set_xticks(tokens, [str(number) for number in tokens])
    axes.minorticks_off()
    axes.set_xlabel("tokens of an image")
    axes.set_ylabel("top-1 on another typeface, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, title="proportions, patches in training")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; user errors are printed as one line, with exit code 1."""
    parser = study_parser(__doc__, steps=2500)
    parser.set_defaults(output=Path("runs/sequence_length"), seeds=[0, 1, 2])
    options = parser.parse_args(arguments)
    return grid.run_main("study_sequence_length", lambda: run_seeds(options, train, conclude))


if __name__ == "__main__":
    sys.exit(main())
