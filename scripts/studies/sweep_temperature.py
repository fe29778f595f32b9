r"""Compares temperatures of one classifier: the fixed τ of HET-XL App. G.1 and the learned τ of Eq. 16.

Trains the configuration once for each τ and seed, evaluates every run on held-out shards, and writes a table and a
plot. Finished runs are skipped, and several processes with the same flags share the runs.

    python -m scripts.studies.sweep_temperature --config configs/glyph_classifier.py \
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

from lit_het.errors import UserError
from lit_het.heads.temperature_config import BoundedTemperature
from lit_het.search import grid, temperatures
from lit_het.search.grid import Row
from lit_het.search.temperatures import LEARNED, NLL, TEMPERATURE, TOP1

TAUS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 5.0)  # App. G.1
FIXED_COLOUR, LEARNED_COLOUR, MUTED = "#52708c", "#c8501e", "#5f6a73"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sweep; user errors are printed as one line, with exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a classifier with softmax loss")
    parser.add_argument("--taus", type=float, nargs="*", default=TAUS, help="fixed temperatures; default: App. G.1's")
    temperatures.add_arguments(parser, output=Path("runs/temperature"))
    return grid.run_main("sweep_temperature", lambda: _sweep(parser.parse_args(arguments)))


def check_taus(taus: Sequence[float], bounds: tuple[float, float]) -> None:
    """Checks that a learned τ can have every fixed one."""
    learned = BoundedTemperature(*bounds)
    for tau in taus:
        if not learned.minimum <= tau <= learned.maximum:
            raise UserError(
                f"--taus {tau:g} lies outside the range of the learned τ; leave it out or widen "
                f"--learned {learned.minimum:g} {learned.maximum:g}"
            )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws NLL and Prec@1 over τ, with bars of one standard error, as a PNG."""
    figure = Figure(figsize=(8.4, 3.6), layout="constrained", dpi=160)
    panels = figure.subplots(1, 2)
    _panel(panels[0], rows, NLL, "NLL on held-out images, nats", "lower is better")
    _panel(panels[1], rows, TOP1, "Prec@1 on held-out images, %", "higher is better", scale=100.0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path)


def _panel(axes: Axes, rows: Sequence[Row], metric: str, label: str, hint: str, scale: float = 1.0) -> None:
    fixed = [row for row in rows if row.setting["temperature"] != LEARNED]
    learned = [row for row in rows if row.setting["temperature"] == LEARNED]
    style = {
        "color": LEARNED_COLOUR,
        "marker": "D",
        "markersize": 6,
        "linestyle": "",
        "label": "learned τ, final value",
    }
    _errorbar(axes, fixed, metric, scale, color=FIXED_COLOUR, marker="o", markersize=4, label="fixed τ")
    _errorbar(axes, learned, metric, scale, **style)
    for row in learned:
        axes.axhline(scale * row.figures[metric].mean, color=LEARNED_COLOUR, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    ticks = [row.figures[TEMPERATURE].mean for row in fixed] or [row.figures[TEMPERATURE].mean for row in learned]
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


def _errorbar(axes: Axes, rows: Sequence[Row], metric: str, scale: float, **style: Any) -> None:
    if rows:
        taus, values = ([row.figures[name] for row in rows] for name in (TEMPERATURE, metric))
        # A single seed has no standard error and no error bar.
        bars = {
            "xerr": np.nan_to_num([tau.error for tau in taus]),
            "yerr": scale * np.nan_to_num([value.error for value in values]),
        }
        style |= {"capsize": 2.5, "linewidth": 1.4, "elinewidth": 1.0, **bars}
        axes.errorbar([tau.mean for tau in taus], [scale * value.mean for value in values], **style)


def _sweep(options: argparse.Namespace) -> None:
    bounds = tuple(options.learned)
    config = temperatures.load_classifier(options)
    check_taus(options.taus, bounds)
    heads = {"": config.task.head}
    planned = temperatures.plan(config, heads, options.taus, bounds, options.seeds, options.output)
    rows = temperatures.compare(config, planned, list(heads), options.output)
    # A failed run has no metrics.
    if drawn := [row for row in rows if np.isfinite(row.figures[NLL].mean)]:
        plot(drawn, options.output / "temperature.png")
        print(f"table: {options.output / 'table.md'}; plot: {options.output / 'temperature.png'}")


if __name__ == "__main__":
    sys.exit(main())
