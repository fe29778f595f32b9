"""``lit-het benchmark-uncertainty``: measures all models, and writes the page and the figures."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_het.apps.uncertainty import page
from lit_het.apps.uncertainty.measuring import Benchmark, BenchmarkOptions
from lit_het.console import Bar
from lit_het.errors import UserError
from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.report.page import render_page
from lit_het.eval.report.writing import write_benchmark, write_files
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.folders import parse_set, unlabelled
from lit_het.eval.suite import ClassNamesConfig


def options_of(
    data: Sequence[str],
    *,
    candidates: Path | None = None,
    prompts: str = "set",
    samples: int = 16,
    outside: tuple[str, ...] = (),
    corrupted: str | None = None,
    pairs: str | None = None,
    captions: str = "txt",
    wrong: str = "is_wrong",
    training: str | None = None,
) -> BenchmarkOptions:
    """Returns the options for sets that are named as on the command line, ``NAME=FOLDER`` or ``FOLDER``."""
    sets = tuple(parse_set(argument, ImageSet("", "")) for argument in data)
    names = [one.name for one in sets]
    if len(set(names)) < len(names):
        raise UserError(f"two sets are called {max(names, key=names.count)}; give each its own name, NAME=FOLDER")
    return BenchmarkOptions(
        sets,
        ClassNamesConfig(prompts, candidates),
        samples,
        outside,
        corrupted,
        None if pairs is None else unlabelled(pairs, "pairs"),
        captions,
        wrong,
        None if training is None else unlabelled(training, "training"),
    )


def benchmark(
    models: Mapping[str, Sequence[Path]], options: BenchmarkOptions, output: Path, *, baselines: bool = False
) -> dict[str, dict[str, float]]:
    """Measures models, prints tables, and writes a page, with the same figures as ``.json`` and ``.md`` beside it.

    The ``.json`` is written after each method, the page at the end.

    Args:
        models: the run of each model, or the runs of an ensemble.
        options: the images.
        output: path of the page.
        baselines: whether to measure the baselines around the first model too.

    Returns:
        The figures of each method, see `Benchmark.measure`.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)  # before anything is measured
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror})") from error
    measuring = Benchmark(options)
    found: dict[str, dict[str, float]] = {}
    with Bar("benchmark", len(models), "models") as bar:
        for name, runs in models.items():
            with bar.paused():
                for method, figures in measuring.measure(name, runs, baselines=baselines and not found):
                    found[method] = figures
                    # At once: an interruption loses one method.
                    write_files({output.with_suffix(".json"): json.dumps(found, indent=1) + "\n"})
            bar.advance(1)
    write(
        {method: {name: Estimate(value, math.nan) for name, value in of.items()} for method, of in found.items()},
        [one.name for one in options.data],
        output,
    )
    return found


def write(methods: Mapping[str, page.Figures], sets: Sequence[str], output: Path, note: str = "") -> None:
    """Writes the page and its tables as Markdown, and prints these."""
    rendered = render_page("Uncertainty", page.sections(methods, sets, note))
    write_benchmark(output, rendered, page.tables(methods, sets))
