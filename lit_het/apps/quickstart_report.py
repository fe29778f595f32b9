"""The sections that the quickstart adds to its report, and its findings."""

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np

from lit_het.apps.quickstart_evaluation import (
    TITLES,
    Homoglyphs,
    Models,
    Suspects,
    group_errors,
    noise_by_ambiguity,
    zero_shot,
)
from lit_het.configs.quickstart_evaluations import CHARACTERS, TYPEFACE
from lit_het.data_pipelines.glyphs import name_of
from lit_het.eval.ambiguity import RankTest
from lit_het.eval.drawings import thumbnails
from lit_het.eval.evaluators.zero_shot import CALIBRATED
from lit_het.eval.report import figures, grids, page
from lit_het.eval.report.comparison import comparison_table
from lit_het.eval.report.figures import Line
from lit_het.eval.report.grids import Mark
from lit_het.eval.report.page import Html, Section
from lit_het.eval.report.predictions import top_names
from lit_het.eval.report.statements import describe_comparison, describe_group_errors, describe_rank_test
from lit_het.eval.saved_runs import SavedRun
from lit_het.eval.significance import standard_error

TITLES_OF_CONDITIONS = {"clean": "clean captions", "noisy": "40 % of the Cyrillic captions wrong"}


def findings(models: Mapping[str, Models], suspects: Suspects) -> list[str]:
    """Returns what the quickstart shows, in sentences whose words follow from the figures."""
    noise, loss = (suspects.auroc(by) for by in ("noise_norm", "loss"))
    return [
        *(describe_condition(models[condition], TITLES_OF_CONDITIONS[condition]) for condition in ("noisy", "clean")),
        f"Wrong training captions are found by the noise norm of their images with an AUROC of {noise:.3f}, by their "
        f"loss with {loss:.3f}: the noise marks images whose captions are unreliable, the loss single captions.",
    ]


def describe_condition(both: Models, title: str) -> str:
    """Returns which head is better, in a typeface that training has not seen and on characters that it has not seen.

    By the fitted NLL, beyond two standard errors over the differences of single images, which both heads share.
    """
    (known, of_known), (new, of_new) = (_difference(both, name) for name in (TYPEFACE, CHARACTERS))
    return (
        f"Trained with {title}, HET-XL is {known} the deterministic head on new images (NLL with fitted temperatures "
        f"{of_known}); on new characters it is {new} the deterministic head ({of_new})."
    )


def _difference(both: Models, name: str) -> tuple[str, str]:
    """Returns what HET-XL is in comparison, and the figures."""
    runs = (both.het_xl, both.deterministic)
    one, other = (zero_shot(run, name).drawing.arrays[f"nll/{CALIBRATED}"].astype(np.float64) for run in runs)
    error = standard_error(one - other)
    found = "not significantly different from"
    if abs(np.mean(one - other)) > 2 * error:
        found = "better than" if np.mean(one - other) < 0 else "worse than"
    ece = [zero_shot(run, name).figures["ece"] for run in runs]
    nll = f"{np.mean(one):.3f} against {np.mean(other):.3f}, difference ± {error:.3f}"
    return found, f"{nll}; calibration error before fitting {ece[0]:.1%} against {ece[1]:.1%}"


def summary_section(
    models: Mapping[str, Models], suspects: Suspects, finding: str, results: Mapping[str, Any]
) -> Section:
    """Returns what HET-XL buys: both heads with clean and with wrong captions, and how the noise finds these."""
    facts = {
        "names": f"{results['num_names']:,}",
        "seconds": f"{results['seconds']:.0f}",
        "peak memory": f"{results['peak_memory_bytes'] / 1e9:.2f} GB",
        "seed": results["seed"],
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    return Section(
        "What HET-XL buys",
        (
            page.side_by_side(
                _both_conditions(models, "NLL after fitting a temperature", f"{CALIBRATED}/nll", "nats"),
                _both_conditions(models, "Right answers", "top1", "top-1", as_share=True),
            ),
            page.paragraph(finding),
            _noise_of_captions(suspects),
            _noisiest(suspects),
            page.facts(facts),
        ),
        f"New images of {results['num_names']:,} names in a typeface that training has not seen; evaluation labels are "
        "clean, and predictions without noise. Bars are standard errors over images.",
    )


def comparison_section(both: Models, condition: str) -> Section:
    """Returns all figures of both heads, trained in one condition."""
    compared = both.compared()
    return Section(
        f"Both heads, {TITLES_OF_CONDITIONS[condition]}",
        (comparison_table(compared), page.paragraph(describe_comparison(compared))),
        "A uniform prediction is perfectly calibrated, so chance has no calibration error.",
    )


def homoglyphs_section(het_xl: SavedRun, homoglyphs: Homoglyphs, noise: Mapping[str, RankTest]) -> Section:
    """Returns the noise of homoglyphs and of unique shapes, and the top names of images with homoglyphs marked."""
    ambiguous, unique = noise_by_ambiguity(het_xl, homoglyphs, np.ones_like(homoglyphs.marked))
    tests = (
        f"{kind.capitalize()}: {describe_rank_test(test, 'homoglyphs', 'unique shapes', 'HET-XL noise norm')}"
        for kind, test in noise.items()
    )
    errors = describe_group_errors(group_errors(het_xl, TYPEFACE, homoglyphs), "HET-XL")
    return Section(
        "Homoglyphs",
        (
            page.paragraph(f"{TITLES[TYPEFACE].capitalize()}: {errors}"),
            *map(page.paragraph, tests),
            figures.distribution(
                "Noise of homoglyphs and of unique shapes",
                {"homoglyphs": ambiguous, "unique shapes": unique},
                "noise norm √tr Σ(x)",
            ),
            grids.mark_legend("looks the same as the right answer"),
            top_names(zero_shot(het_xl, TYPEFACE), homoglyphs.groups),
        ),
        "Some characters of different scripts have the same shape, so their names cannot be distinguished. Homoglyphs "
        "are mostly plain letters: if a difference over all characters vanishes within plain and within marked ones, "
        "the noise follows marks, not ambiguity.",
    )


def _both_conditions(
    models: Mapping[str, Models], title: str, name: str, y_label: str, *, as_share: bool = False
) -> Html:
    ticks = {float(place): f"{condition} captions" for place, condition in enumerate(models)}

    def line(runs: list[SavedRun], colour: int) -> Line:
        records = [zero_shot(run, TYPEFACE) for run in runs]
        errors = [record.errors[name] for record in records]
        return Line(tuple(ticks), [record.figures[name] for record in records], errors, colour=colour)

    lines = {
        "deterministic": line([both.deterministic for both in models.values()], 0),
        "HET-XL": line([both.het_xl for both in models.values()], 1),
    }
    return figures.plot(title, lines, "", y_label, ticks=ticks, as_share=as_share)


def _noise_of_captions(suspects: Suspects) -> Html:
    norms, wrong = suspects.scored.columns["noise_norm"], suspects.wrong
    scripts = np.array([name_of(character).partition(" ")[0] for character in suspects.characters])
    affected = np.isin(scripts, np.unique(scripts[wrong]))
    groups = {
        "wrong captions": norms[wrong],
        "right captions of the same script": norms[affected & ~wrong],
        "other images": norms[~affected],
    }
    return figures.distribution(
        "Noise of the training images", {name: found for name, found in groups.items() if found.size}, "noise norm"
    )


def _noisiest(suspects: Suspects, count: int = 12) -> Html:
    rows = suspects.scored.order("noise_norm")[:count]
    captions = [
        f"{suspects.scored.captions[row]} (is {name_of(suspects.characters[row])})"
        if suspects.wrong[row]
        else suspects.scored.captions[row]
        for row in rows
    ]
    return grids.image_strip(
        "The training images with the most noise, and their captions",
        thumbnails(suspects.scored.opened, suspects.scored.positions[rows]),
        captions,
        [f"{suspects.scored.columns['noise_norm'][row]:.2f}" for row in rows],
        [Mark.WRONG if suspects.wrong[row] else Mark.RIGHT for row in rows],
    )
