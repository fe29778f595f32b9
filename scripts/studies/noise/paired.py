"""Cells of tables over seeds: means, and differences from the first method, seed by seed."""

from collections.abc import Mapping

import numpy as np
from scipy import stats

from lit_het.eval.metrics.significance import estimate, holm, welch


def cells_of(values: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Returns the cells of a figure, from its values by head and seed; the first head is the one to compare with."""
    first = next(iter(values.values()))
    differences, paired, unpaired = {}, {}, {}
    for head, found in values.items():
        seeds = sorted(first.keys() & found.keys())
        if found is first or len(seeds) < 2:
            continue
        differences[head] = [found[seed] - first[seed] for seed in seeds]
        _, paired[head] = stats.ttest_1samp(differences[head], 0.0) if np.ptp(differences[head]) else (0.0, np.nan)
        unpaired[head] = welch(list(found.values()), list(first.values())).p_value
    significant, by_welch = (holm({h: p for h, p in tests.items() if np.isfinite(p)}) for tests in (paired, unpaired))
    cells = []
    for head, found in values.items():
        shown = estimate(list(found.values())).shown(3) if found else "-"
        if head in differences:
            marks = f"{' *' if head in significant else ''}{' W' if head in by_welch else ''}"
            shown += f" ({estimate(differences[head]).shown(3)}{marks})"
        cells.append(shown)
    return cells
