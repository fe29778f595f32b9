"""Compares efficient ensembles of e3's Tables 2 to 5 and 12, on the glyph data, over seeds (docs/ensembles.md).

    python -m scripts.studies.study_ensembles --output runs/ensembles --seeds 0 1 2 3 4

A ViT and a V-MoE are trained upstream on the words of names. Every method starts from one of them and learns the names;
the held-out typeface is measured. Finished runs are skipped, and processes with other seeds can share the output.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, Int

from lit_het.apps.quickstart.running import write_data
from lit_het.configs import glyph_classifier, quickstart_upstream
from lit_het.console import message
from lit_het.data_pipelines.glyphs import TYPEFACES
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.errors import UserError
from lit_het.eval.metrics import scores
from lit_het.eval.metrics.ensembles import mean_prediction, score_ensemble
from lit_het.eval.metrics.significance import estimate, holm, welch
from lit_het.eval.predictions import Predictions, Predictor, member_blocks
from lit_het.eval.sets import ImageSet
from lit_het.files import write_atomically
from lit_het.models.experts import with_experts
from lit_het.models.opening import open_run
from lit_het.search import grid
from lit_het.training.train import train_unless_done
from scripts.studies.ensembles.methods import METHODS, ORDERINGS, UPSTREAM, Method, downstream, upstream
from scripts.studies.harness import study_parser
from scripts.studies.noise.paired import cells_of

FIGURES = ("joint_nll", "joint_error", "joint_ece", "fitted_nll", "kl", "individual_nll")
SET = "held_out_typeface"
_DEPENDENT = [name for name, method in METHODS.items() if any(part.endswith("/next") for part in method.runs)]


def train(root: Path, data: Path, seed: int, names: Sequence[str], steps: int, learning_rate: float) -> None:
    """Trains the upstream models and the methods of a seed, unless they are finished."""
    num_words = len(read_lines(str(data / "words.txt")))
    for source in UPSTREAM:
        train_unless_done(upstream(source, data, root / f"upstream_{source}", seed, num_words))
    runs = [run.removesuffix("/next") for name in names for run in METHODS[name].runs or (name,)]
    for name in dict.fromkeys(runs):
        # Other members of a deep ensemble have other seeds.
        own = seed + (1000 if name.endswith("_2") and not METHODS[name].title else 0)
        start = root / f"upstream_{METHODS[name].source}"
        train_unless_done(downstream(name, data, start, root / name, own, steps, learning_rate))


def members(run_dir: Path, data: Path, method: Method) -> tuple[Float[np.ndarray, "n m k"], Int[np.ndarray, " n"]]:
    """Returns the log-probabilities of a run's members on the held-out typeface, and the labels.

    The noise samples of each member are averaged.
    """
    run = with_experts(open_run(run_dir), method.used_with)
    model = run.model(calibrated=False)
    opened = run.sets().open(ImageSet(SET, str(data / SET), split="."))
    predictor = Predictor(model, glyph_classifier.NUM_NAMES, samples=method.samples)
    blocks = list(member_blocks(predictor, opened.features(model.features)))
    log_p, labels = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return over_noise(log_p, method.samples) if method.samples else log_p, labels


def over_noise(log_p: Float[np.ndarray, "n sm k"], samples: int) -> Float[np.ndarray, "n m k"]:
    """Returns the mean prediction of each member over its samples; the first sample of every member comes first."""
    by_sample = log_p.reshape(len(log_p), samples, -1, log_p.shape[2])
    return np.stack([mean_prediction(by_sample[:, :, member]) for member in range(by_sample.shape[2])], axis=1)


def measure(output: Path, data: Path, seed: int, following: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns the figures of every method of a seed.

    Args:
        output: folder of the study.
        data: of the glyphs.
        seed: of the runs.
        following: the seed whose run is the second member of upstream ensembles.
        names: of the methods.
    """
    found = {}
    for name in names:
        method = METHODS[name]
        if not method.title:
            continue
        parts = [members(_run_dir(output, part, seed, following), data, method) for part in method.runs or (name,)]
        labels = parts[0][1]
        found[name] = figures(np.concatenate([log_p for log_p, _ in parts], axis=1), labels)
    return found


def _run_dir(output: Path, part: str, seed: int, following: int) -> Path:
    return output / f"seed{following if part.endswith('/next') else seed}" / part.removesuffix("/next")


def figures(log_p: Float[np.ndarray, "n m k"], labels: Int[np.ndarray, " n"]) -> dict[str, float]:
    """Returns the figures of an ensemble, or of a single prediction, which counts as two equal members."""
    found, _ = score_ensemble(np.repeat(log_p, 2, axis=1) if log_p.shape[1] == 1 else log_p, labels).figures()
    if log_p.shape[1] == 1:
        found["kl"] = math.nan
    nothing = np.zeros(len(labels))
    joint = Predictions(mean_prediction(log_p), labels, np.arange(len(labels)), nothing, nothing)
    fitted, _ = scores.calibrated(joint, SET)
    values, _ = scores.figures(fitted)
    return {**found, "joint_error": 1 - found["joint_top1"], "fitted_nll": values["nll"]}


def conclude(output: Path) -> None:
    """Writes the table over all seeds that are measured; differences are from the V-MoE with K = 2, seed by seed."""
    by_seed = {
        int(path.parent.name.removeprefix("seed")): json.loads(path.read_text())
        for path in sorted(output.glob("seed*/figures.json"))
    }
    if not by_seed:
        raise UserError(f"{output} has no measured runs; leave out --table")
    names = [name for name in METHODS if all(name in found for found in by_seed.values())]
    if lacking := {name for found in by_seed.values() for name in found} - {*names}:
        message(f"not measured for every seed, and left out: {', '.join(sorted(lacking))}")
    first = "vmoe_2" if "vmoe_2" in names else names[0]
    names = [first, *(name for name in names if name != first)]
    columns = {}
    for figure in FIGURES:
        values = {name: {seed: found[name][figure] for seed, found in by_seed.items()} for name in names}
        known = {name: of for name, of in values.items() if not any(map(math.isnan, of.values()))}
        # Every run is in two of these ensembles, whose values are thus not independent: no error, and no test.
        means = {name: f"{np.mean(list(known.pop(name).values())):.3f}" for name in _DEPENDENT if name in known}
        cells = cells_of(known) if first in known else [estimate(list(of.values())).shown(3) for of in known.values()]
        columns[figure] = dict(zip(known, cells, strict=True)) | means
    lines = [f"| {len(by_seed)} seeds | {' | '.join(FIGURES)} |", f"| --- |{' --- |' * len(FIGURES)}"]
    for name in names:
        cells = (columns[figure].get(name, "") for figure in FIGURES)
        lines.append(f"| {METHODS[name].title} | {' | '.join(cells)} |")
    legend = (
        f"In brackets differences from {METHODS[first].title}, seed by seed; * and W: significant by a paired and by "
    )
    legend += "Welch's t-test (5 %, with Holm's correction within the column)."
    write_atomically(output / "table.md", "\n".join([*lines, "", legend, "", *orderings(by_seed)]) + "\n")
    print(f"table: {output / 'table.md'}")


def orderings(by_seed: Mapping[int, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Returns the lines of a table of the pairs that the paper compares, with Welch's tests over seeds."""
    pairs = [pair for pair in ORDERINGS if all({pair[1], pair[2]} <= found.keys() for found in by_seed.values())]
    figures = ("joint_nll", "fitted_nll", "joint_error")
    cells: dict[tuple[str, str], list[str]] = {(one, other): [] for _, one, other, _ in pairs}
    for figure in figures:
        p_values, differences = {}, {}
        for one, other in cells:
            values, against = ([found[name][figure] for found in by_seed.values()] for name in (one, other))
            differences[one, other] = estimate(list(np.subtract(values, against)))
            p_values[f"{one} {other}"] = welch(values, against).p_value
        significant = holm({name: p for name, p in p_values.items() if math.isfinite(p)})
        for (one, other), difference in differences.items():
            cells[one, other].append(difference.shown(3) + (" W" if f"{one} {other}" in significant else ""))
    lines = [
        f"| e3 | compared | NLL printed | {' | '.join(figures)} |",
        f"| --- | --- | --- |{' --- |' * len(figures)}",
    ]
    for table, one, other, printed in pairs:
        title = f"{METHODS[one].title} - {METHODS[other].title}"
        lines.append(f"| {table} | {title} | {printed:+.3f} | {' | '.join(cells[one, other])} |")
    return lines


def run(options: argparse.Namespace) -> None:
    """Trains and measures what is not finished, and writes the table."""
    data = options.data
    # The programs of all seeds are the same.
    jax.config.update("jax_compilation_cache_dir", str(options.output.absolute() / "programs"))
    if not options.table:
        glyphs = quickstart_upstream.glyphs()
        write_data(data, dataclasses.replace(glyphs, held_out_typeface=options.typeface or glyphs.held_out_typeface))
        for seed in options.seeds:
            train(options.output / f"seed{seed}", data, seed, options.methods, options.steps, options.learning_rate)
    for place, seed in enumerate(options.seeds):
        following = options.seeds[(place + 1) % len(options.seeds)]
        names = [name for name in options.methods if name != "vmoe_upstream" or following != seed]
        path = options.output / f"seed{seed}" / "figures.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        found = known | measure(options.output, data, seed, following, names)
        write_atomically(path, json.dumps(found, indent=1) + "\n")
    conclude(options.output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; user errors are printed as one line, with exit code 1."""
    parser = study_parser(__doc__, steps=2000)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument(
        "--typeface",
        choices=TYPEFACES,
        metavar="NAME",
        help="hold out another typeface than the quickstart's, to choose settings",
    )
    options = parser.parse_args(arguments)
    return grid.run_main("study_ensembles", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
