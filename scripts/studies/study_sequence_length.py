"""Accuracy over sequence length of towers of one patch size, before and after training with random ones (FlexiViT).

    python -m scripts.studies.study_sequence_length --output runs/sequence_length --seeds 0 1 2

SoViT Sec. 5.5 and Fig. 7 at the size of the glyph data: classifiers of characters, of a plain ViT's proportions and of
those of SoViT-150m at equal operations. Each is trained with patches of one size, then "flexified" by half as many
steps with random sizes, and evaluated on another typeface at these sizes, a larger and a smaller one. Finished runs are
skipped.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from matplotlib.figure import Figure

from lit_het.apps.quickstart.running import write_data
from lit_het.configs import glyph_classifier, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.configs.quickstart_evaluations import TYPEFACE
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.eval.metrics.significance import Estimate, estimate
from lit_het.eval.report.tables import markdown_table
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.models.evaluation import evaluate
from lit_het.models.sizes import Sizes
from lit_het.planning.costs import product_flops
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from scripts.studies import harness

IMAGE_SIZE, PATCH_SIZE = 48, 12
TRAINED_SIZES = (24, 16, 12)
# 1, 4, 9, 16 and 36 patches: the first and the last are never harness.trained.
PATCH_SIZES = (48, *TRAINED_SIZES, 8)
SHAPES = {
    # ViT-B's MLP is 4 times as wide as its tokens; that of SoViT-150m (880 wide, 18 deep, 2,320) 2.6 times.
    "plain": EncoderConfig(width=128, depth=3, mlp_width=512, num_heads=4),
    "SoViT": EncoderConfig(width=112, depth=5, mlp_width=288, num_heads=4),
}
# Sizes of patches in training; the second starts from the first.
KINDS = {"one size": (), "flexified": TRAINED_SIZES}


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
    base, is_first = glyph_classifier.get_config(root), not KINDS[kind]
    num_classes = len(read_lines(str(data / "train" / "classnames.txt")))
    steps = steps if is_first else steps // 2
    return harness.run_of(
        base,
        root / _folder(shape, kind),
        data,
        seed,
        steps=steps,
        task=ClassificationConfig(tower(shape, kind), DeterministicConfig(), num_classes),
        pretrained=None if is_first else PretrainedConfig(root / _folder(shape, "one size"), "(image_tower|head)/.*"),
        loader=dataclasses.replace(base.data, image_size=IMAGE_SIZE),
        schedule=Schedule(learning_rate=2e-3 if is_first else 1e-3, warmup=Duration(steps // 10)),
        cadence=dataclasses.replace(base.cadence, save_steps=steps),
    )


def _folder(shape: str, kind: str) -> str:
    return f"{shape} {kind}".replace(" ", "_")


def study(options: argparse.Namespace) -> None:
    """Trains and measures what is not finished, writes a table and draws accuracy over sequence length."""
    runs = {f"{shape}, {kind}": (shape, kind) for shape in SHAPES for kind in KINDS}

    def measure(title: str, seed: int) -> dict[str, float]:
        write_data(options.data, quickstart_upstream.glyphs())
        config = configuration(*runs[title], options.output / f"seed{seed}", options.data, seed, options.steps)
        harness.trained(config)
        images = ZeroShotConfig(ImageSet(TYPEFACE, str(options.data / TYPEFACE), split="."))
        found = {}
        for size in PATCH_SIZES:
            [evaluation] = evaluate([config.run_dir], [images], sizes=Sizes(patch=size))
            found[str(size)] = evaluation.figures["top1"]
        return found

    found = harness.run_cells({title: {"steps": options.steps} for title in runs}, measure, options)
    accuracies = {
        title: {size: estimate([100 * of[str(size)] for of in by_seed.values()]) for size in PATCH_SIZES}
        for title, by_seed in found.items()
    }
    rows = [
        (
            str(size),
            str((IMAGE_SIZE // size) ** 2),
            ", ".join(f"{gflop(shape, size):.4f}" for shape in SHAPES),
            *(of[size].shown(1) for of in accuracies.values()),
        )
        for size in PATCH_SIZES
    ]
    titles = ("patch, pixels", "tokens", f"GFLOP: {', '.join(SHAPES)}", *found)
    harness.write_tables(options.output / "sequence_length.md", markdown_table(titles, rows))
    draw({runs[title]: of for title, of in accuracies.items()}, options.output / "sequence_length.png")


def draw(found: Mapping[tuple[str, str], Mapping[int, Estimate]], path: Path) -> None:
    """Draws accuracy over sequence length, with bars of one standard error."""
    figure = Figure(figsize=(7, 4.2), layout="constrained", dpi=140)
    axes = figure.subplots()
    tokens = [(IMAGE_SIZE // size) ** 2 for size in PATCH_SIZES]
    colours = dict(zip(SHAPES, ("#52708c", "#c8501e"), strict=True))
    for (shape, kind), by_size in found.items():
        style: dict[str, Any] = {"linestyle": "-" if KINDS[kind] else ":", "marker": "o" if KINDS[kind] else "s"}
        means, errors = ([getattr(by_size[size], part) for size in PATCH_SIZES] for part in ("mean", "error"))
        axes.errorbar(tokens, means, errors, color=colours[shape], label=f"{shape}, {kind}", **style)
    axes.set_xscale("log")
    axes.set_xticks(tokens, [str(number) for number in tokens])
    axes.minorticks_off()
    axes.set_xlabel("tokens of an image")
    axes.set_ylabel("top-1 on another typeface, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, title="proportions, patches in training")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    parser = harness.study_parser(__doc__, "runs/sequence_length", data=True, steps=2500, seeds=(0, 1, 2))
    return harness.run_study("study_sequence_length", study, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
