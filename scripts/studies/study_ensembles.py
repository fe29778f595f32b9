"""Compares efficient ensembles of e3's Tables 2 to 5 and 12, on the glyph data, over seeds (docs/ensembles.md).

    python -m scripts.studies.study_ensembles --output runs/ensembles --seeds 0 1 2 3 4

A ViT and a V-MoE are trained upstream on the words of names. Every method starts from one of them and learns the names;
the held-out typeface is measured. Finished runs are skipped, and processes with other seeds can share the output.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from lit_het.apps.quickstart.running import write_data
from lit_het.configs import glyph_classifier, quickstart_upstream
from lit_het.console import message
from lit_het.data_pipelines.glyphs import TYPEFACES
from lit_het.eval.metrics import scores
from lit_het.eval.metrics.ensembles import mean_prediction, score_ensemble
from lit_het.eval.metrics.significance import estimate, holm, welch
from lit_het.eval.predictions import Predictions, Predictor, member_blocks
from lit_het.eval.report.tables import markdown_table
from lit_het.eval.sets import ImageSet
from lit_het.models.experts import with_experts
from lit_het.models.opening import open_run
from scripts.studies import harness
from scripts.studies.ensembles.methods import METHODS, ORDERINGS, Method, downstream, upstream

FIGURES = ("joint_nll", "joint_error", "joint_ece", "fitted_nll", "kl", "individual_nll")
SET = "held_out_typeface"
_DEPENDENT = [name for name, method in METHODS.items() if any(part.endswith("/next") for part in method.runs)]


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


def orderings(found: harness.Found) -> str:
    """Returns a table of the pairs that the paper compares, with Welch's tests over seeds."""
    pairs = [pair for pair in ORDERINGS if {pair[1], pair[2]} <= found.keys()]
    figures = ("joint_nll", "fitted_nll", "joint_error")
    columns = []
    for figure in figures:
        p_values, differences = {}, {}
        for _, one, other, _ in pairs:
            values, against = ([of[figure] for of in found[name].values()] for name in (one, other))
            differences[f"{one} {other}"] = estimate(list(np.subtract(values, against)))
            p_values[f"{one} {other}"] = welch(values, against).p_value
        significant = holm({name: p for name, p in p_values.items() if math.isfinite(p)})
        columns.append([of.shown(3) + (" W" if name in significant else "") for name, of in differences.items()])
    rows = [
        (table, f"{METHODS[one].title} - {METHODS[other].title}", f"{printed:+.3f}", *cells)
        for (table, one, other, printed), cells in zip(pairs, zip(*columns, strict=True), strict=True)
    ]
    return markdown_table(("e3", "compared", "NLL printed", *figures), rows)


def conclude(found: harness.Found, output: Path) -> None:
    """Writes the tables of what is measured for all seeds; differences are from the V-MoE with K = 2, seed by seed."""
    seeds = max((of.keys() for of in found.values()), key=len)
    if lacking := [name for name, of in found.items() if of.keys() != seeds]:
        message(f"not measured for every seed, and left out: {', '.join(sorted(lacking))}")
    found = {name: of for name, of in found.items() if name not in lacking}
    first = "vmoe_2" if "vmoe_2" in found else next(iter(found))
    found = {first: found[first], **found}
    columns = []
    for figure in FIGURES:
        values = {
            name: of for name, of in harness.of_figure(found, figure).items() if not any(map(math.isnan, of.values()))
        }
        # Every run is in two of these ensembles, whose values are thus not independent: no error, and no test.
        means = {name: f"{np.mean(list(values.pop(name).values())):.3f}" for name in _DEPENDENT if name in values}
        shown = [estimate(list(of.values())).shown(3) for of in values.values()]
        cells = harness.cells_of(values) if first in values else shown
        columns.append(dict(zip(values, cells, strict=True)) | means)
    rows = [(METHODS[name].title, *(column.get(name, "") for column in columns)) for name in found]
    legend = (
        f"In brackets differences from {METHODS[first].title}, seed by seed; * and W: significant by a paired and by "
        "Welch's t-test (5 %, with Holm's correction within the column).\n"
    )
    harness.write_tables(
        output / "table.md", markdown_table((f"{len(seeds)} seeds", *FIGURES), rows), legend, orderings(found)
    )


def study(options: argparse.Namespace) -> None:
    """Trains and measures what is not finished, and writes the tables."""
    glyphs, data = quickstart_upstream.glyphs(), options.data

    @functools.cache
    def trained_run(name: str, seed: int) -> Path:
        """Trains a run and the upstream model that it starts from, unless they are finished; returns its folder."""
        root, source = options.output / f"seed{seed}", METHODS[name].source
        start = upstream(source, data, root / f"upstream_{source}", seed)
        harness.trained(start)
        # Other members of a deep ensemble have other seeds.
        own = seed + (1000 if name.endswith("_2") and not METHODS[name].title else 0)
        harness.trained(downstream(name, data, start.run_dir, root / name, own, options.steps, options.learning_rate))
        return root / name

    def measure(name: str, seed: int) -> harness.Figures:
        write_data(data, dataclasses.replace(glyphs, held_out_typeface=options.typeface or glyphs.held_out_typeface))
        following = options.seeds[(options.seeds.index(seed) + 1) % len(options.seeds)]
        runs = [
            trained_run(part.removesuffix("/next"), following if part.endswith("/next") else seed)
            for part in METHODS[name].runs or (name,)
        ]
        parts = [members(run, data, METHODS[name]) for run in runs]
        return figures(np.concatenate([log_p for log_p, _ in parts], axis=1), parts[0][1])

    settings = {name: getattr(options, name) for name in ("steps", "learning_rate", "typeface")}
    # With a single seed there are no two upstream runs.
    names = [name for name in options.methods if name != "vmoe_upstream" or len(options.seeds) > 1]
    conclude(
        harness.run_cells({name: settings for name in names if METHODS[name].title}, measure, options), options.output
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    parser = harness.study_parser(__doc__, "runs/ensembles", data=True, steps=2000)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument(
        "--typeface",
        choices=TYPEFACES,
        metavar="NAME",
        help="hold out another typeface than the quickstart's, to choose settings",
    )
    return harness.run_study("study_ensembles", study, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
