"""The harness of studies: flags, models that are trained and measured once for each seed, and tables over seeds."""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import stats

from lit_het import untrusted
from lit_het.configs import quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.console import Bar, message
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.errors import UserError
from lit_het.eval.metrics.significance import estimate, holm, welch
from lit_het.files import write_atomically
from lit_het.search import grid
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from lit_het.training.loop import NonFinite
from lit_het.training.train import train_unless_done

Figures = Mapping[str, float]
"""Of a model, by name."""

Found = Mapping[str, Mapping[int, Figures]]
"""The figures of each method, by seed."""


def study_parser(
    description: str | None,
    output: str,
    *,
    data: bool = False,
    steps: int | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
) -> argparse.ArgumentParser:
    """Returns a parser with the flags of studies.

    Args:
        description: of the study.
        output: folder of its runs and tables, by default.
        data: whether it takes the folder of the quickstart's characters.
        steps: updates of a run, by default; None for a study whose runs have lengths of their own.
        seeds: by default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path(output), metavar="DIR")
    if data:
        parser.add_argument("--data", type=Path, default=Path("runs/quickstart/data"), metavar="DIR")
    if steps:
        parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--table", action="store_true", help="train nothing; write the tables of finished runs")
    return parser


def run_study(name: str, study: Callable[[argparse.Namespace], object], options: argparse.Namespace) -> int:
    """Runs a study; user errors are printed as one line, with exit code 1."""
    if not options.table:
        # The programs of all seeds are the same.
        jax.config.update("jax_compilation_cache_dir", str(options.output.absolute() / "programs"))
    return grid.run_main(name, lambda: study(options))


def run_cells(
    methods: Mapping[str, Mapping[str, Any]],
    measure: Callable[[str, int], Mapping[str, Any]],
    options: argparse.Namespace,
) -> dict[str, dict[int, Any]]:
    """Measures every method with every seed unless that is finished, with one bar over all; with ``--table`` nothing.

    Args:
        methods: what the figures of each method depend on, beside its name and the seed.
        measure: trains and measures a method with a seed.
        options: of `study_parser`.

    Returns:
        What was measured by method and seed, here or by other processes with the same output.
    """
    with Bar("study", len(methods) * len(options.seeds), "runs") as bar:
        for seed in options.seeds:
            for method in methods:
                with bar.paused():
                    measured(method, seed, methods[method], measure, options)
                bar.advance(1)
    found = {}
    for method in methods:
        if paths := sorted(options.output.glob(str(_path(Path(), method, "*")))):
            of_seeds = {int(path.stem.rpartition("_seed")[2]): path for path in paths}
            found[method] = {seed: json.loads(path.read_text())["figures"] for seed, path in of_seeds.items()}
    if not found:
        raise UserError(f"{options.output} has no finished runs; start without --table")
    return found


def measured(
    method: str,
    seed: int,
    settings: Mapping[str, Any],
    measure: Callable[[str, int], Mapping[str, Any]],
    options: argparse.Namespace,
) -> Mapping[str, Any]:
    """Returns the figures of a method with a seed, measured unless they are a file; empty ones with ``--table``."""
    path = _path(options.output, method, seed)
    if path.exists():
        result = untrusted.read_json(path)
        if result["settings"] != settings:
            raise UserError(f"{path} was measured with {result['settings']}, not {settings}; give another --output")
        return result["figures"]
    if options.table:
        return {}
    figures = measure(method, seed)
    write_json(path, {"settings": settings, "figures": figures})
    return figures


def _path(output: Path, method: str, seed: int | str) -> Path:
    return output / "results" / f"{re.sub(r'[^0-9A-Za-z_.-]+', '_', method)}_seed{seed}.json"


def cells_of(values: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Returns the cells of a figure, from its values by method and seed.

    A cell is the mean over seeds with its standard error, and in parentheses the mean difference from the first method,
    seed by seed: seeds differ in data and towers much more than methods do. A star marks a significant difference by a
    paired t-test, and ``W`` by Welch's test, both with Holm's correction over the methods, at 5 %.
    """
    first = next(iter(values.values()))
    differences, paired, unpaired = {}, {}, {}
    for method, found in values.items():
        seeds = sorted(first.keys() & found.keys())
        if found is first or len(seeds) < 2:
            continue
        differences[method] = own = [found[seed] - first[seed] for seed in seeds]
        _, paired[method] = stats.ttest_1samp(own, 0.0) if np.ptp(own) else (0.0, np.nan)
        unpaired[method] = welch(list(found.values()), list(first.values())).p_value
    significant, by_welch = (holm({h: p for h, p in tests.items() if np.isfinite(p)}) for tests in (paired, unpaired))
    cells = []
    for method, found in values.items():
        shown = estimate(list(found.values())).shown(3) if found else "-"
        if method in differences:
            marks = f"{' *' if method in significant else ''}{' W' if method in by_welch else ''}"
            shown += f" ({estimate(differences[method]).shown(3)}{marks})"
        cells.append(shown)
    return cells


def of_figure(found: Found, figure: str) -> dict[str, dict[int, float]]:
    """Returns the values of a figure by method and seed."""
    return {method: {s: of[figure] for s, of in seeds.items() if figure in of} for method, seeds in found.items()}


def rows_of(found: Found, figures: Iterable[str]) -> list[tuple[str, ...]]:
    """Returns a row for each method with its figures, and differences from the first method."""
    return list(zip(found, *(cells_of(of_figure(found, figure)) for figure in figures), strict=True))


def write_tables(path: Path, *tables: str) -> str:
    """Writes and prints tables; returns the text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(tables)
    write_atomically(path, text)
    print(f"{text}\ntable: {path}")
    return text


def write_json(path: Path, content: object) -> None:
    """Writes a JSON file, replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def trained(config: ExperimentConfig) -> dict[str, float]:
    """Trains a run unless it is finished; returns the last value of each metric, or nothing if it diverged."""
    try:
        train_unless_done(config)
    except NonFinite as error:
        message(f"{config.run_dir}: {error}")
        return {}
    return {name: value for record in read_metrics(config.run_dir / "metrics.jsonl") for name, value in record.items()}


def run_of(
    config: ExperimentConfig,
    run_dir: Path,
    data: Path,
    seed: int,
    *,
    steps: int | None = None,
    loader: LoaderConfig | None = None,
    **fields: Any,
) -> ExperimentConfig:
    """Returns a configuration on the training characters in ``data``, with another seed and other fields.

    A run of few ``steps``, as to try a study, has a warm-up of at most half of them.
    """
    loader = dataclasses.replace(loader or config.data, shards=(str(data / "train"),), seed=seed)
    if steps:
        warmup = Duration(min(config.schedule.warmup.amount, steps // 2))
        schedule = dataclasses.replace(config.schedule, warmup=warmup)
        config = dataclasses.replace(config, length=Duration(steps), schedule=schedule)
    return dataclasses.replace(config, run_dir=run_dir, data=loader, seed=seed, **fields)


def lit_run_of(
    config: ExperimentConfig,
    run_dir: Path,
    data: Path,
    seed: int,
    *,
    tower: Path,
    embeddings: str,
    loader: LoaderConfig | None = None,
    **fields: Any,
) -> ExperimentConfig:
    """Returns a run as `run_of`, with captions, on the stored embeddings of the tower of a finished run."""
    assert config.tokenizer is not None
    return run_of(
        config,
        run_dir,
        data,
        seed,
        loader=dataclasses.replace(loader or config.data, embeddings=embeddings),
        tokenizer=dataclasses.replace(config.tokenizer, model=data / "tokenizer.model"),
        pretrained=PretrainedConfig(tower),
        cadence=dataclasses.replace(config.cadence, log_steps=100, save_steps=10_000),
        **fields,
    )


def upstream(root: Path, data: Path, seed: int) -> ExperimentConfig:
    """Returns the quickstart's image tower of a seed, on the words of the characters in ``data``."""
    config = quickstart_upstream.get_config(root)
    task = dataclasses.replace(config.task, num_classes=len(read_lines(str(data / "words.txt"))))
    return run_of(config, config.run_dir, data, seed, task=task)
