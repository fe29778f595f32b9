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
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from lit_het.apps.add_noise import add_noise
from lit_het.apps.data import corrupt
from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.apps.quickstart.running import write_data
from lit_het.apps.uncertainty.benchmark import benchmark, options_of, write
from lit_het.configs import quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.glyphs import GlyphConfig, write_glyph_shards
from lit_het.data_pipelines.prepare.writer import WriteOptions
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.errors import UserError
from lit_het.eval.metrics.significance import Estimate, estimate
from lit_het.files import write_atomically
from lit_het.planning.plan import Step
from lit_het.search import grid
from lit_het.sharding import MeshConfig
from lit_het.training.train import train_unless_done
from scripts.studies.noise.paired import cells_of
from scripts.studies.noise.sources import CHARACTER_STYLES
from scripts.studies.rivals.methods import ALL, CANDIDATES, ENSEMBLE, FIRST, METHODS, configuration

CONDITIONS = {"clean": "train", "noisy": "train_noisy"}
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
_VALIDATION_STYLE = "STIXGeneralItalic"  # as of scripts.studies.study_noise
OTHER_SCRIPTS = ("armenian", "georgian", "hebrew", "canadian", "tifinagh", "lao")


def prepare(root: Path, seed: int, style: str) -> None:
    """Draws the data of a seed, trains its image tower and stores the embeddings, unless that is done."""
    write_data(root / "data", dataclasses.replace(quickstart_upstream.glyphs(seed), held_out_typeface=style))
    _write_other_scripts(root / "other_scripts", seed)
    typeface = root / "data" / "held_out_typeface"
    corrupt(str(typeface), typeface / "corrupted", CORRUPTIONS, SEVERITIES, seed, WriteOptions())
    upstream = quickstart_upstream.get_config(root)
    num_words = len(read_lines(str(root / "data" / "words.txt")))
    task = dataclasses.replace(upstream.task, num_classes=num_words)
    upstream = dataclasses.replace(upstream, task=task, seed=seed, data=dataclasses.replace(upstream.data, seed=seed))
    train_unless_done(upstream)
    shards = tuple(str(root / "data" / name) for name in CONDITIONS.values())
    embed(upstream.run_dir, upstream, str(root / "embeddings"), EmbedOptions(shards))


def _write_other_scripts(directory: Path, seed: int) -> None:
    """Draws characters of scripts that training has not seen, in a typeface that it has seen."""
    if not directory.exists():
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        config = GlyphConfig(scripts=OTHER_SCRIPTS, min_typefaces=1, held_out_typeface="DejaVuSans", seed=seed)
        write_glyph_shards(config, partial)
        partial.rename(directory)


def train(root: Path, seed: int, condition: str, methods: Sequence[str], steps: int) -> None:
    """Trains the runs of a condition that are not finished, and notes the seconds that each took."""
    for name in methods:
        shards, run_dir = str(root / "data" / CONDITIONS[condition]), root / condition / name
        cost, began = run_dir / "cost.json", time.monotonic()
        if cost.exists():
            continue
        method, config = ALL[name], None
        if isinstance(method.head, tuple):
            add_noise(str(root / condition / str(method.towers_of)), shards, run_dir, method.head)
        else:
            config = configuration(name, root, condition, shards, seed, steps)
            train_unless_done(config)
        found = {"seconds": time.monotonic() - began}
        if config is not None:
            found["megabytes"] = training_megabytes(config)
        write_atomically(cost, json.dumps(found) + "\n")


def training_megabytes(config: ExperimentConfig) -> float:
    """Returns the memory of a training step on one device, as compiled: arguments and temporary values."""
    compiled = Step(config, MeshConfig().build(jax.devices()[:1])).compile()
    return (compiled.arguments + compiled.temporary) / 1e6


def measure(root: Path, condition: str, methods: Sequence[str]) -> None:
    """Measures the finished runs of a condition, unless that is done."""
    output = root / condition / "benchmark.html"
    models = {ALL[name].title: [name] for name in methods if ALL[name].title}
    if set(ENSEMBLE) <= set(methods):
        models["ensemble of 3 text towers"] = list(ENSEMBLE)
    known = _read(output.with_suffix(".json")) if output.with_suffix(".json").exists() else {}
    models = {title: names for title, names in models.items() if title not in known}
    if not models:
        return
    data = root / "data"
    options = options_of(
        [str(data / name) for name in SETS],
        candidates=data / "names.txt",
        outside=(f"other scripts={root / 'other_scripts' / 'held_out_typeface'}",),
        corrupted=str(data / "held_out_typeface" / "corrupted"),
        pairs=str(data / "train_noisy"),
        training=str(data / "train"),
    )
    runs = {title: [root / condition / name for name in names] for title, names in models.items()}
    # Beside those that are known already: it writes after each model.
    found = benchmark(runs, options, output.with_name("latest.html"), baselines=FIRST in models)
    for title, names in models.items():
        costs = [_read(root / condition / name / "cost.json") for name in names]
        found[title]["cost/training_seconds"] = sum(cost["seconds"] for cost in costs)
        if all("megabytes" in cost for cost in costs):
            found[title]["cost/training_megabytes"] = max(cost["megabytes"] for cost in costs)
    found = {**known, **found}
    write({name: {path: Estimate(x, math.nan) for path, x in of.items()} for name, of in found.items()}, SETS, output)
    write_atomically(output.with_suffix(".json"), json.dumps(found, indent=1) + "\n")


def conclude(output: Path, condition: str) -> None:
    """Writes the page and the tables of a condition over all seeds that are measured."""
    by_seed = {
        int(path.parent.parent.name.removeprefix("seed")): _read(path)
        for path in sorted(output.glob(f"seed*/{condition}/benchmark.json"))
    }
    if not by_seed:
        raise UserError(f"{output} has no measured runs with {condition} captions; leave out --table")
    every = [figures for found in by_seed.values() for figures in found]
    methods = [name for name in dict.fromkeys(every) if every.count(name) == len(by_seed)]
    values = {
        name: {
            figure: {seed: found[name][figure] for seed, found in by_seed.items() if figure in found[name]}
            for figure in next(iter(by_seed.values()))[name]
        }
        for name in methods
    }
    estimates = {
        name: {figure: estimate(list(seeds.values())) for figure, seeds in of.items()} for name, of in values.items()
    }
    note = f"Means over {len(by_seed)} seeds with standard errors: {condition} captions."
    page = output / f"{condition}.html"
    write(estimates, SETS, page, note)
    lines = [f"| | {' | '.join(methods)} |", f"| --- |{' --- |' * len(methods)}"]
    for figure in DIFFERENCES:
        cells = cells_of({name: _of_best(of, figure) for name, of in values.items()})
        lines.append(f"| {figure} | {' | '.join(cells)} |")
    write_atomically(output / f"{condition}_differences.md", "\n".join(lines) + "\n")
    write_atomically(page.with_suffix(".json"), json.dumps(values, indent=1) + "\n")


def _of_best(figures: Mapping[str, Mapping[int, float]], name: str) -> Mapping[int, float]:
    """Returns a figure of the mean over samples, or where there is none of the prediction without noise."""
    return figures.get(name.replace("/best/", "/sampled/"), figures.get(name.replace("/best/", "/quiet/"), {}))


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def run(options: argparse.Namespace) -> None:
    """Prepares the data of all seeds, trains and measures all runs that are not finished, and writes the tables."""
    for seed in [] if options.table else options.seeds:
        root = options.output / f"seed{seed}"
        prepare(root, seed, _VALIDATION_STYLE if options.candidates else CHARACTER_STYLES[seed % len(CHARACTER_STYLES)])
        for condition in options.conditions:
            train(root, seed, condition, options.methods, options.steps)
            measure(root, condition, options.methods)
    for condition in options.conditions:
        conclude(options.output, condition)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; user errors are printed as one line, with exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path("runs/rivals"), metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 to 4, and 100 with --candidates")
    parser.add_argument("--candidates", action="store_true", help="compare settings, on a validation typeface")
    parser.add_argument("--conditions", nargs="+", choices=list(CONDITIONS), default=list(CONDITIONS))
    parser.add_argument("--methods", nargs="+", choices=list(ALL), metavar="METHOD")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--table", action="store_true", help="only write the tables of what is measured")
    options = parser.parse_args(arguments)
    options.seeds = options.seeds or ([100] if options.candidates else [0, 1, 2, 3, 4])
    tried = [name for name in METHODS if any(other.startswith(f"{name}_") for other in CANDIDATES)]
    compared = ("deterministic", *tried, *CANDIDATES) if options.candidates else METHODS
    options.methods = options.methods or list(compared)
    return grid.run_main("study_rivals", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
