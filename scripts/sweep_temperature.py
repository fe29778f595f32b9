r"""Compares temperatures of one classifier: the fixed τ of HET-XL App. G.1 and the learned τ of Eq. 16.

Trains the configuration once for each τ and seed, evaluates every run on held-out shards, and writes a table and a
plot. Finished runs are skipped, and several processes with the same flags share the runs.

    python scripts/sweep_temperature.py --config configs/glyph_classifier.py \
        --held-out runs/quickstart/data/held_out_typeface --seeds 0 1 2 --output runs/temperature
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lit_het.apps import sweep
from lit_het.apps.sweep import Setting
from lit_het.errors import UserError
from lit_het.eval.sweeps import RunResult, Summary
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature

TAUS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 5.0)  # App. G.1
FIXED_COLOUR, LEARNED_COLOUR, MUTED = "#52708c", "#c8501e", "#5f6a73"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sweep; user errors are printed as one line, with exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a classifier with softmax loss")
    parser.add_argument("--taus", type=float, nargs="*", default=TAUS, help="fixed temperatures; default: App. G.1's")
    sweep.add_arguments(parser, output=Path("runs/temperature"))
    return sweep.run_main("sweep_temperature", lambda: _sweep(parser.parse_args(arguments)))


def settings(head: Any, taus: Sequence[float], bounds: tuple[float, float]) -> list[Setting]:
    """Returns the head with each fixed τ and with the learned one.

    Raises:
        UserError: the bounds are invalid, or a τ lies outside them.
    """
    learned = BoundedTemperature(*bounds)
    for tau in taus:
        if not learned.minimum <= tau <= learned.maximum:
            raise UserError(
                f"--taus {tau:g} lies outside the range of the learned τ; leave it out or widen "
                f"--learned {learned.minimum:g} {learned.maximum:g}"
            )
    fixed = [
        Setting(f"tau{tau:g}", f"τ = {tau:g}", sweep.with_temperature(head, FixedTemperature(tau)))
        for tau in dict.fromkeys(taus)
    ]
    return [*fixed, Setting("learned", "τ learned", sweep.with_temperature(head, learned))]


def row_order(result: RunResult) -> tuple[bool, float]:
    """Sorts by fixed τ; the learned one, which differs between seeds, is last."""
    return result.learned, 0.0 if result.learned else result.temperature


def plot(summaries: Sequence[Summary], path: Path) -> None:
    """Draws NLL and Prec@1 over τ, with bars of one standard error, as a PNG."""
    figure = Figure(figsize=(8.4, 3.6), layout="constrained", dpi=160)
    panels = figure.subplots(1, 2)
    _panel(panels[0], summaries, "nll", "NLL on held-out images, nats", "lower is better")
    _panel(panels[1], summaries, "top1", "Prec@1 on held-out images, %", "higher is better", scale=100.0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path)


def _panel(axes: Axes, summaries: Sequence[Summary], metric: str, label: str, hint: str, scale: float = 1.0) -> None:
    fixed = [summary for summary in summaries if not summary.learned]
    learned = [summary for summary in summaries if summary.learned]
    for runs, style in (
        (fixed, {"color": FIXED_COLOUR, "marker": "o", "markersize": 4, "label": "fixed τ"}),
        (
            learned,
            {
                "color": LEARNED_COLOUR,
                "marker": "D",
                "markersize": 6,
                "linestyle": "",
                "label": "learned τ, final value",
            },
        ),
    ):
        if runs:
            axes.errorbar(
                [summary.temperature.mean for summary in runs],
                [scale * summary.metrics[metric].mean for summary in runs],
                # A single seed has no standard error and no error bar.
                yerr=np.nan_to_num([scale * summary.metrics[metric].error for summary in runs]),
                xerr=np.nan_to_num([summary.temperature.error for summary in runs]),
                capsize=2.5,
                linewidth=1.4,
                elinewidth=1.0,
                **style,
            )
    for summary in learned:
        axes.axhline(scale * summary.metrics[metric].mean, color=LEARNED_COLOUR, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    ticks = [summary.temperature.mean for summary in fixed] or [summary.temperature.mean for summary in learned]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("temperature τ (no unit, log scale)", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.set_title(hint, fontsize=9, loc="left", color=MUTED)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dfe3e6", linewidth=0.6)
    axes.set_axisbelow(True)


def _sweep(options: argparse.Namespace) -> None:
    config = sweep.load_classifier(options.config, options.length)
    summaries = sweep.sweep(
        config,
        settings(config.task.head, options.taus, tuple(options.learned)),
        options.seeds,
        options.held_out,
        options.output,
        batch_size=options.batch_size,
        order=row_order,
    )
    if summaries:
        plot(summaries, options.output / "temperature.png")
        print(f"table: {options.output / 'table.md'}; plot: {options.output / 'temperature.png'}")


if __name__ == "__main__":
    sys.exit(main())
