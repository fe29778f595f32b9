"""The sections that the quickstart adds to its report, and its findings."""

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np

from lit_het.apps.quickstart_evaluation import (
    TITLES,
    TYPEFACE,
    Homoglyphs,
    group_errors,
    noise_by_ambiguity,
    zero_shot,
)
from lit_het.eval.ambiguity import RankTest
from lit_het.eval.report import figures, grids, page
from lit_het.eval.report.comparison import Comparison, compare, comparison_table
from lit_het.eval.report.page import Section
from lit_het.eval.report.predictions import top_names
from lit_het.eval.report.statements import describe_comparison, describe_group_errors, describe_rank_test
from lit_het.eval.saved_runs import SavedRun


def compare_models(deterministic: SavedRun, het_xl: SavedRun) -> Comparison:
    """Compares the deterministic head with HET-XL on every set."""
    pairs = {title: (zero_shot(deterministic, name), zero_shot(het_xl, name)) for name, title in TITLES.items()}
    return compare(
        "deterministic",
        "HET-XL",
        {title: (one.figures, other.figures) for title, (one, other) in pairs.items()},
        {title: one.chance for title, (one, _) in pairs.items()},
    )


def findings(
    deterministic: SavedRun, het_xl: SavedRun, homoglyphs: Homoglyphs, noise: Mapping[str, RankTest]
) -> list[str]:
    """Returns the findings as sentences."""
    models = {"the deterministic head": deterministic, "HET-XL": het_xl}
    return [
        describe_comparison(compare_models(deterministic, het_xl)),
        *(
            f"{TITLES[TYPEFACE].capitalize()}: {describe_group_errors(group_errors(run, TYPEFACE, homoglyphs), name)}"
            for name, run in models.items()
        ),
        *(
            f"{kind.capitalize()}: {describe_rank_test(test, 'homoglyphs', 'unique shapes', 'HET-XL noise norm')}"
            for kind, test in noise.items()
        ),
    ]


def results_section(comparison: Comparison, sentences: list[str], results: Mapping[str, Any]) -> Section:
    """Returns the comparison of the heads, the findings, and the facts of this quickstart."""
    facts = {
        "names": f"{results['num_names']:,}",
        "seconds": f"{results['seconds']:.0f}",
        "peak memory": f"{results['peak_memory_bytes'] / 1e9:.2f} GB",
        "seed": results["seed"],
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    return Section(
        "Results",
        (page.facts(facts), comparison_table(comparison), *map(page.paragraph, sentences)),
        "HET-XL is evaluated without noise, as in the paper (App. A.2), but its temperature was learned with "
        "noise, which affects its likelihood and calibration error. A uniform prediction is perfectly calibrated, "
        "so chance has no calibration error.",
    )


def homoglyphs_section(het_xl: SavedRun, homoglyphs: Homoglyphs) -> Section:
    """Returns the noise of homoglyphs and of unique shapes, and the top names of images with homoglyphs marked."""
    ambiguous, unique = noise_by_ambiguity(het_xl, homoglyphs, np.ones_like(homoglyphs.marked))
    return Section(
        "What HET-XL learned",
        (
            figures.distribution(
                "Noise of homoglyphs and of unique shapes",
                {"homoglyphs": ambiguous, "unique shapes": unique},
                "noise norm √tr Σ(x)",
            ),
            grids.mark_legend("looks the same as the right answer"),
            top_names(zero_shot(het_xl, TYPEFACE), homoglyphs.groups),
        ),
        "The head adds noise to every image's embedding; its norm depends on the image. Some characters of different "
        "scripts have the same shape, so their names cannot be distinguished. Homoglyphs are mostly plain letters: if "
        "a difference over all characters vanishes within plain and within marked ones, the noise follows marks, not "
        "ambiguity.",
    )
