"""Compares ways to adapt a trained image-text model to few pairs of a new domain, over seeds.

    python -m scripts.studies.study_adapting --output runs/adapting --seeds 0 1 2

The start is the quickstart's deterministic pair of towers, trained on Latin, Greek, Cyrillic and digits. The new
domain are Armenian and Georgian characters, two fifths of their images: about four of each name. Every way trains from
the start for as many steps; then all are evaluated on known and new names of the new domain, and on the old domain.
Learning rates were chosen with seed 9 (``--rates``), whose figures are not in the tables. Finished runs are skipped.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from lit_het import parameters
from lit_het.apps.embed.captions import embed_captions
from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.apps.merging import merge, soup
from lit_het.apps.quickstart.running import write_data
from lit_het.configs import quickstart_lit_deterministic, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.configs.quickstart_evaluations import CHARACTERS, TYPEFACE
from lit_het.data_pipelines.glyphs import GlyphConfig, write_glyph_shards
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.errors import UserError
from lit_het.eval.evaluation import opened_evaluations
from lit_het.eval.report.tables import markdown_table
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ClassNamesConfig, ZeroShotConfig
from lit_het.models.opening import open_run
from lit_het.objectives.teacher import TeacherConfig
from lit_het.planning.plan import Step
from lit_het.towers.tuning_config import LoRA, Tuning
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from scripts.studies import harness

NEW_SCRIPTS, FEW, CHOOSING = ("armenian", "georgian"), Portion(0, 40), Portion(40, 60)
STEPS, BATCH_SIZE, SEED_OF_RATES = 200, 64, 9
START, LOCKED, LAST, FULL = "start", "locked image tower", "last block", "full"
LORA, LORA_ALL, TAUGHT = "LoRA, rank 8", "LoRA of all layers", "full, taught by the start"
MIXED, SOUP = "full, WiSE-FT 0.5", "full, greedy soup of three rates"
# (tuning of the image tower, of the text tower, learning rate)
WAYS: Mapping[str, tuple[Tuning | None, Tuning | None, float]] = {
    LOCKED: (None, None, 3e-3),
    LAST: (Tuning(last_blocks=1), Tuning(last_blocks=1), 1e-3),
    LORA: (Tuning(lora=LoRA()), Tuning(lora=LoRA()), 1e-2),
    LORA_ALL: (Tuning(lora=LoRA(pattern="encoder/.*")), Tuning(lora=LoRA(pattern="encoder/.*")), 1e-2),
    FULL: (None, None, 3e-3),
    TAUGHT: (None, None, 3e-3),
}
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
# The rates of a soup, times that of the way.
OF_SOUP = (1 / 3, 1.0, 3.0)
SETS = ("new_typeface", "new_characters", "old_typeface")
FIGURES = ("top1", "nll", "ece")


def prepare(root: Path, seed: int) -> tuple[Path, Path, Path]:
    """Returns the start of a seed, and the folders of the old and of the new domain, all made unless they exist."""
    old, new, start = root / "data", root / "new", root / "start"
    write_data(old, quickstart_upstream.glyphs(seed))
    if not (new / "glyphs.json").exists():
        write_glyph_shards(GlyphConfig(scripts=NEW_SCRIPTS, seed=seed), new)
    tower = harness.upstream(root, old, seed)
    harness.trained(tower)
    embeddings = str(root / "embeddings")
    embed(tower.run_dir, tower, embeddings, EmbedOptions((str(old / "train"),)))
    base = quickstart_lit_deterministic.get_config(root)
    harness.trained(harness.lit_run_of(base, start, old, seed, tower=tower.run_dir, embeddings=embeddings))
    return start, old, new


def stored_by(start: Path, new: Path) -> tuple[str, str]:
    """Returns the folders of the start's embeddings of the new domain's images and captions, made unless they exist."""
    images, texts = (str(start.parent / f"teacher_{side}s") for side in ("image", "text"))
    config, options = open_run(start).config, EmbedOptions((str(new / "train"),))
    embed(start, config, images, options)
    embed_captions(start, config, texts, options)
    return images, texts


def configuration(
    way: str, run_dir: Path, start: Path, old: Path, new: Path, seed: int, rate: float
) -> ExperimentConfig:
    """Returns the run that adapts the start in one way."""
    base, (image, text, _) = quickstart_lit_deterministic.get_config(), WAYS[way]
    assert base.tokenizer is not None
    towers: dict[str, Any] = base.task.towers
    tuned = {
        part: dataclasses.replace(towers[part], tuning=tuning)
        for part, tuning in (("image_tower", image), ("text_tower", text))
    }
    task = dataclasses.replace(base.task, **tuned, locked=("image_tower/.*",) if way == LOCKED else ())
    data = dataclasses.replace(
        base.data, shards=(str(new / "train"),), portion=FEW, batch_size=BATCH_SIZE, seed=seed, embeddings=None
    )
    if way == TAUGHT:
        # Its embeddings of the new domain stay near those of the start.
        task = dataclasses.replace(task, teacher=TeacherConfig(relation_weight=0.0))
        images, texts = stored_by(start, new)
        data = dataclasses.replace(data, teacher_embeddings=images, teacher_text_embeddings=texts)
    return dataclasses.replace(
        base,
        run_dir=run_dir,
        task=task,
        data=data,
        tokenizer=dataclasses.replace(base.tokenizer, model=old / "tokenizer.model"),
        pretrained=PretrainedConfig(start, ".*"),
        length=Duration(STEPS),
        schedule=Schedule(learning_rate=rate, warmup=Duration(20)),
        cadence=dataclasses.replace(base.cadence, log_steps=50, save_steps=10_000),
        seed=seed,
    )


def figures_of(run_dir: Path, old: Path, new: Path) -> dict[str, float]:
    """Returns the zero-shot figures of a run on both domains."""
    places = {
        "new_typeface": (new / TYPEFACE, new / "names.txt"),
        "new_characters": (new / CHARACTERS, new / "names.txt"),
        "old_typeface": (old / TYPEFACE, old / "names.txt"),
    }
    configs = [
        ZeroShotConfig(ImageSet(name, str(folder), split="."), ClassNamesConfig(candidates=names))
        for name, (folder, names) in places.items()
    ]
    run = open_run(run_dir)
    model, found = run.model(calibrated=False), {}
    for _, evaluation in opened_evaluations(configs, run.sets(), model)(model):
        found |= {f"{evaluation.name}/{figure}": evaluation.figures[figure] for figure in FIGURES}
    return found


def measured(way: str, root: Path, seed: int, rate: float | None = None) -> dict[str, float]:
    """Returns the figures of a way to adapt, with those of its cost."""
    start, old, new = prepare(root, seed)
    if way == START:
        return figures_of(start, old, new)
    if way in (MIXED, SOUP):
        return _merged(way, root, seed)
    rate = WAYS[way][2] if rate is None else rate
    run_dir = root / f"{way.replace(', ', '_').replace(' ', '_')}_{rate:g}"
    config = configuration(way, run_dir, start, old, new, seed, rate)
    began = time.perf_counter()
    harness.trained(config)
    seconds = time.perf_counter() - began
    step = Step(config, config.mesh.build(jax.devices()[:1]))
    memory = step.memory()
    return {
        **figures_of(run_dir, old, new),
        "trained": parameters.count(step.inputs.state.params),
        "MiB": sum(memory.values()) / 2**20,
        "GFLOP": step.flops()[0] / 1e9 / BATCH_SIZE,
        "seconds": seconds,
    }


def _merged(way: str, root: Path, seed: int) -> dict[str, float]:
    """Returns the figures of a mean of the start and the full fine-tuning, or of a greedy soup of three of these."""
    start, old, new = prepare(root, seed)
    rates = [WAYS[FULL][2] * factor for factor in (OF_SOUP if way == SOUP else (1.0,))]
    runs = []
    for rate in rates:
        runs.append(root / f"{FULL}_{rate:g}")
        harness.trained(configuration(FULL, runs[-1], start, old, new, seed, rate))
    output = root / ("greedy_soup" if way == SOUP else "mixed")
    if way == SOUP and not output.exists():
        # Of the same typefaces as the pairs that were trained on.
        held_out = ImageSet("held_out", str(new / "train"), split=".", portion=CHOOSING)
        soup(runs, ZeroShotConfig(held_out, ClassNamesConfig(candidates=new / "names.txt")), "top1", output)
    elif not output.exists():
        merge([start, *runs], None, output)
    return figures_of(output, old, new)


def study(options: argparse.Namespace) -> None:
    """Trains what is not finished, and writes a table for each set, and one of costs."""
    if options.rates:
        for way in WAYS:
            for rate in RATES:
                harness.measured(
                    f"{way} {rate:g}",
                    SEED_OF_RATES,
                    {"rate": rate},
                    lambda _, seed, way=way, rate=rate: measured(way, _root(options, seed), seed, rate),
                    options,
                )
        _tell_rates(options)
        return
    if SEED_OF_RATES in options.seeds:
        raise UserError(f"--seeds {SEED_OF_RATES} is the one that learning rates were chosen with; take others")
    methods = {way: {"rate": WAYS[way][2] if way in WAYS else WAYS[FULL][2]} for way in (START, *WAYS, MIXED, SOUP)}
    found = harness.run_cells(methods, lambda way, seed: measured(way, _root(options, seed), seed), options)
    tables = []
    for name in SETS:
        names = [f"{name}/{figure}" for figure in FIGURES]
        tables.append(f"\n{name}\n\n" + markdown_table(("way", *FIGURES), harness.rows_of(found, names)))
    costs = {way: seeds for way, seeds in found.items() if way in WAYS}
    columns = ("trained", "MiB", "GFLOP", "seconds")
    tables.append("\ncosts\n\n" + markdown_table(("way", *columns), harness.rows_of(costs, columns)))
    harness.write_tables(options.output / "table.md", *tables)


def _root(options: argparse.Namespace, seed: int) -> Path:
    return options.output / f"seed{seed}"


def _tell_rates(options: argparse.Namespace) -> None:
    rows = []
    for way in WAYS:
        for rate in RATES:
            got = harness.measured(f"{way} {rate:g}", SEED_OF_RATES, {"rate": rate}, _never, options)
            rows.append((way, f"{rate:g}", *(f"{got[f'{name}/top1']:.3f}" for name in SETS)))
    harness.write_tables(options.output / "rates.md", markdown_table(("way", "rate", *SETS), rows))


def _never(method: str, seed: int) -> Mapping[str, Any]:
    raise UserError(f"{method} of seed {seed} is not finished; start without --table")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.study_parser(__doc__, "runs/adapting", seeds=(0, 1, 2))
    parser.add_argument("--rates", action="store_true", help=f"try learning rates with seed {SEED_OF_RATES} alone")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    work: Callable[[argparse.Namespace], object] = study
    return harness.run_study("study_adapting", work, _options(arguments))


if __name__ == "__main__":
    sys.exit(main())
