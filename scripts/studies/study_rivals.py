"""Compares methods of uncertainty on the glyph data, over seeds (docs/rivals.md).

    python -m scripts.studies.study_rivals --output runs/rivals_settings --candidates    # on a validation typeface
    python -m scripts.studies.study_rivals --output runs/rivals --seeds 0 1 2 3 4

Every seed draws its own held-out characters and typeface and trains its own image tower. A method trains a text tower
and a head on the tower's embeddings, or only a head on the finished towers of another method. Finished runs are
skipped. With ``--candidates`` other settings of the methods stand beside those that they have, on characters and a
typeface that no seed of the study holds out.
"""

import argparse
import dataclasses
import functools
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from lit_het.apps.add_noise import add_noise
from lit_het.apps.data import corrupt
from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.apps.quickstart.running import CONDITIONS, write_data
from lit_het.apps.uncertainty.benchmark import options_of, write
from lit_het.apps.uncertainty.measuring import Benchmark
from lit_het.configs import quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.glyphs import GlyphConfig, write_glyph_shards
from lit_het.data_pipelines.prepare.writer import WriteOptions
from lit_het.eval.metrics.significance import estimate
from lit_het.eval.report.tables import markdown_table
from lit_het.planning.plan import Step
from lit_het.sharding import MeshConfig
from scripts.studies import harness
from scripts.studies.noise.sources import CHARACTER_STYLES
from scripts.studies.rivals.methods import ALL, CANDIDATES, ENSEMBLE, FIRST, METHODS, configuration

# One of noise, blur and weather each, with which the accuracy of the deterministic head (seed 0) falls at every step.
CORRUPTIONS = ("gaussian_noise", "zoom_blur", "snow")
SEVERITIES = (1, 2, 3, 4, 5)
SETS = ("held_out_typeface", "held_out_characters")
# Figures whose differences from the deterministic head are tested, seed by seed.
DIFFERENCES = (
    *(
        f"{name}/best/{figure}"
        for name in SETS
        for figure in ("top1", "nll", "fitted_nll", "ece", "fitted_ece", "aurc")
    ),
    "held_out_typeface/best/set_size90",
    "retrieval/held_out_characters/map_at_r",
)
VALIDATION = "STIXGeneralItalic"  # as of the study of noise
OTHER_SCRIPTS = ("armenian", "georgian", "hebrew", "canadian", "tifinagh", "lao")


@functools.cache
def prepare(root: Path, seed: int, style: str) -> None:
    """Draws the data of a seed, trains its image tower and stores the embeddings, unless that is done."""
    data = root / "data"
    write_data(data, dataclasses.replace(quickstart_upstream.glyphs(seed), held_out_typeface=style))
    _write_other_scripts(root / "other_scripts", seed)
    typeface = data / "held_out_typeface"
    corrupt(str(typeface), typeface / "corrupted", CORRUPTIONS, SEVERITIES, seed, WriteOptions())
    tower = harness.upstream(root, data, seed)
    harness.trained(tower)
    embed(tower.run_dir, tower, str(root / "embeddings"), EmbedOptions(tower.data.shards))


def _write_other_scripts(directory: Path, seed: int) -> None:
    """Draws characters of scripts that training has not seen, in a typeface that it has seen."""
    if not directory.exists():
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        config = GlyphConfig(scripts=OTHER_SCRIPTS, min_typefaces=1, held_out_typeface="DejaVuSans", seed=seed)
        write_glyph_shards(config, partial)
        partial.rename(directory)


def train(name: str, root: Path, condition: str, seed: int, steps: int) -> dict[str, float]:
    """Trains the run of a method; returns what it cost."""
    captions, run_dir = CONDITIONS[condition], root / condition / name
    method, began = ALL[name], time.monotonic()
    if isinstance(method.head, tuple):
        shards = str(root / "data" / "train")
        add_noise(str(root / condition / str(method.towers_of)), shards, run_dir, method.head, captions=captions)
        return {"seconds": time.monotonic() - began}
    config = configuration(name, root, condition, captions, seed, steps)
    harness.trained(config)
    return {"seconds": time.monotonic() - began, "megabytes": training_megabytes(config)}


def training_megabytes(config: ExperimentConfig) -> float:
    """Returns the memory of a training step on one device, as compiled: arguments and temporary values."""
    compiled = Step(config, MeshConfig().build(jax.devices()[:1])).compile()
    return (compiled.arguments + compiled.temporary) / 1e6


@functools.cache
def benchmark(root: Path) -> Benchmark:
    """Returns what measures the models of a seed."""
    data = root / "data"
    options = options_of(
        [str(data / name) for name in SETS],
        candidates=data / "names.txt",
        outside=(f"other scripts={root / 'other_scripts' / 'held_out_typeface'}",),
        corrupted=str(data / "held_out_typeface" / "corrupted"),
        pairs=str(data / "train"),
        captions=CONDITIONS["noisy"],
        training=str(data / "train"),
    )
    return Benchmark(options)


def conclude(found: harness.Found, output: Path, condition: str) -> None:
    """Writes the page and the tables of a condition over all seeds, of the methods that all have."""
    seeds = max((of.keys() for of in found.values()), key=len)
    found = {name: of for name, of in found.items() if of.keys() == seeds}
    values = {
        name: {figure: harness.of_figure({name: of}, figure)[name] for figure in of[min(of)]}
        for name, of in found.items()
    }
    estimates = {
        name: {figure: estimate(list(by_seed.values())) for figure, by_seed in of.items()}
        for name, of in values.items()
    }
    page = output / f"{condition}.html"
    write(estimates, SETS, page, f"Means over {len(seeds)} seeds with standard errors: {condition} captions.")
    rows = [
        (figure, *harness.cells_of({name: _of_best(of, figure) for name, of in values.items()}))
        for figure in DIFFERENCES
    ]
    harness.write_tables(output / f"{condition}_differences.md", markdown_table(("", *values), rows))
    harness.write_json(page.with_suffix(".json"), values)


def _of_best(figures: Mapping[str, Mapping[int, float]], name: str) -> Mapping[int, float]:
    """Returns a figure of the mean over samples, or where there is none of the prediction without noise."""
    return figures.get(name.replace("/best/", "/sampled/"), figures.get(name.replace("/best/", "/quiet/"), {}))


def study(options: argparse.Namespace) -> None:
    """Trains and measures what is not finished, and writes the tables."""
    # The methods whose runs a model has.
    models: dict[str, Sequence[str]] = {ALL[name].title: (name,) for name in options.methods if ALL[name].title}
    if set(ENSEMBLE) <= set(options.methods):
        models["ensemble of 3 text towers"] = ENSEMBLE
    cells = {f"{condition} {title}": (condition, title) for condition in options.conditions for title in models}
    settings = {"steps": options.steps}

    def measure(cell: str, seed: int) -> Mapping[str, harness.Figures]:
        (condition, title), root = cells[cell], options.output / f"seed{seed}"
        prepare(root, seed, VALIDATION if options.candidates else CHARACTER_STYLES[seed % len(CHARACTER_STYLES)])

        def cost(name: str) -> harness.Figures:
            return harness.measured(
                f"{condition} training {name}",
                seed,
                settings,
                lambda *_: train(name, root, condition, seed, options.steps),
                options,
            )

        if towers := ALL[models[title][0]].towers_of:
            cost(towers)
        costs = [cost(name) for name in models[title]]
        runs = [root / condition / name for name in models[title]]
        found = dict(benchmark(root).measure(title, runs, baselines=title == FIRST))
        found[title]["cost/training_seconds"] = sum(of["seconds"] for of in costs)
        if all("megabytes" in of for of in costs):
            found[title]["cost/training_megabytes"] = max(of["megabytes"] for of in costs)
        return found

    found = harness.run_cells({cell: settings for cell in cells}, measure, options)
    for condition in options.conditions:
        by_method: dict[str, dict[int, harness.Figures]] = {}
        # A cell of the first method has its baselines too.
        for cell, by_seed in found.items():
            for seed, methods in by_seed.items() if cells[cell][0] == condition else ():
                for method, figures in methods.items():
                    by_method.setdefault(method, {})[seed] = figures
        if by_method:
            conclude(by_method, options.output, condition)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    parser = harness.study_parser(__doc__, "runs/rivals", steps=800)
    parser.set_defaults(seeds=None)
    parser.add_argument("--candidates", action="store_true", help="compare settings, on a validation typeface")
    parser.add_argument("--conditions", nargs="+", choices=list(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--methods", nargs="+", choices=list(ALL), metavar="METHOD")
    options = parser.parse_args(arguments)
    options.seeds = options.seeds or ([100] if options.candidates else [0, 1, 2, 3, 4])
    tried = [name for name in METHODS if any(other.startswith(f"{name}_") for other in CANDIDATES)]
    compared = ("deterministic", *tried, *CANDIDATES) if options.candidates else METHODS
    options.methods = options.methods or list(compared)
    return harness.run_study("study_rivals", study, options)


if __name__ == "__main__":
    sys.exit(main())
