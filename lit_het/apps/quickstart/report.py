"""The sections that the quickstart adds to its report, and its findings."""

import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_het.apps.quickstart.answers import AS_TRAINED, BOTH, CALIBRATED, KNOWN, NEW, SURE, Answers
from lit_het.apps.quickstart.evaluation import (
    HET_XL,
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
from lit_het.eval.drawings import thumbnails
from lit_het.eval.evaluators.zero_shot import CALIBRATED as FITTED
from lit_het.eval.metrics.ambiguity import RankTest
from lit_het.eval.metrics.significance import Estimate, standard_error
from lit_het.eval.report import figures, grids, page
from lit_het.eval.report.comparison import comparison_table
from lit_het.eval.report.figures import Line
from lit_het.eval.report.grids import Mark
from lit_het.eval.report.naming import STYLES
from lit_het.eval.report.page import Html, Section
from lit_het.eval.report.predictions import top_names
from lit_het.eval.report.runs import Opening
from lit_het.eval.report.statements import describe_comparison, describe_group_errors, describe_rank_test
from lit_het.eval.report.tables import NO_FIGURE, Cell, Row, Table
from lit_het.eval.saved_runs import SavedRun
from lit_het.models.calibration.by_names import LEAST_NAMES

_VERDICTS = {1: "better", -1: "worse", 0: "not significantly different"}
TITLES_OF_CONDITIONS = {"clean": "clean captions", "noisy": "40 % of the Cyrillic captions wrong"}


def findings(models: Mapping[str, Models], suspects: Suspects) -> list[str]:
    """Returns what the quickstart shows, in sentences whose words follow from the figures."""
    noise, loss = (suspects.auroc(by) for by in ("noise_norm", "loss"))
    titled = [(both, TITLES_OF_CONDITIONS[condition]) for condition, both in models.items()][::-1]
    return [
        *(describe_answers(both, title) for both, title in titled),
        describe_calibration(models),
        describe_new_images(models),
        *(describe_condition(both, title) for both, title in titled),
        f"Wrong training captions are found by the noise norm of their images with an AUROC of {noise:.3f}, by their "
        f"loss with {loss:.3f}: the noise marks images whose captions are unreliable, the loss single captions.",
    ]


def describe_answers(both: Models, title: str) -> str:
    """Returns how many answers of both models are right, all and those that are sure, in one sentence."""
    ours, plain = both.answers[CALIBRATED], both.plain_answers[CALIBRATED]
    # One temperature for all names changes no ranking, and knows no prior.
    has_prior = ours[BOTH].by_kind != both.answers[AS_TRAINED][BOTH].by_kind
    how = "with the prior balanced" if has_prior else "without a prior"
    known = [f"{100 * answers[KNOWN].right.mean:.0f}" for answers in (ours, plain)]
    mixed = [" and ".join(f"{100 * share:.0f}" for share in answers[BOTH].by_kind) for answers in (ours, plain)]
    sure = [answers[BOTH].right_if_sure.mean for answers in (ours, plain)]
    of_sure = (
        f"no answer is {SURE:.0%} sure"
        if all(map(math.isnan, sure))
        else f"of the answers that are {SURE:.0%} sure, {_share(sure[0])} and {_share(sure[1])} are right"
    )
    return (
        f"Trained with {title}, HET-XL with smoothed labels gets {known[0]} of 100 new images of known names right, "
        f"the deterministic head {known[1]}; {how}, {mixed[0]} of known and of new names, the "
        f"deterministic head {mixed[1]}, and {of_sure}."
    )


def describe_calibration(models: Mapping[str, Models]) -> str:
    """Returns how sure the deterministic head is before it is calibrated, in one sentence."""
    parts = list[str]()
    for condition, both in models.items():
        answers = both.plain_answers[AS_TRAINED][BOTH]
        share = answers.right_if_sure.mean
        right = "" if math.isnan(share) else f" ({_share(share)} of them right)"
        parts.append(f"with {TITLES_OF_CONDITIONS[condition]} {answers.sure:.1%}{right}")
    return (
        "Both are calibrated by what fits images of other names. As trained, so many of the deterministic head's "
        f"answers to as many images of known as of new names are {SURE:.0%} sure: {', '.join(parts)}."
    )


def _share(share: float) -> str:
    return "none" if math.isnan(share) else f"{share:.0%}"


def describe_new_images(models: Mapping[str, Models]) -> str:
    """Returns which head is better in a typeface that training has not seen, in one sentence."""
    found: dict[str, list[str]] = {}
    for name, both in [*models.items()][::-1]:
        captions = "wrong" if name == "noisy" else name
        found.setdefault(_fitted_nll(both, TYPEFACE)[0], []).append(f"with {captions} captions")
    parts = (f"{verdict} {' and '.join(captions)}" for verdict, captions in found.items())
    return f"The fitted NLL of HET-XL with smoothed labels on new images is {', '.join(parts)}."


def describe_condition(both: Models, title: str) -> str:
    """Returns which head is better, in a typeface that training has not seen and on characters that it has not seen."""
    (known, of_known), (new, of_new) = (_fitted_nll(both, name) for name in (TYPEFACE, CHARACTERS))
    (ece, of_ece), (new_ece, of_new_ece) = (_calibration_error(both, name) for name in (TYPEFACE, CHARACTERS))
    return (
        f"HET-XL with smoothed labels beside the deterministic head, trained with {title}: on new images its fitted "
        f"NLL (with a temperature from the other half of them) is {known} ({of_known}), and its calibration error "
        f"before fitting is {ece} ({of_ece}); on new characters the fitted NLL is {new} ({of_new}), and the "
        f"calibration error is {new_ece} ({of_new_ece})."
    )


def _fitted_nll(both: Models, name: str) -> tuple[str, str]:
    """Returns what the fitted NLL of HET-XL is in comparison, and both values with their difference.

    Its standard error is over names, of the differences of single images, which both models share.
    """
    arrays = [zero_shot(run, name).drawing.arrays for run in (both.het_xl, both.deterministic)]
    one, other = (of[f"nll/{FITTED}"].astype(np.float64) for of in arrays)
    error = standard_error(one - other, arrays[0]["true_class"])
    found = STYLES["nll"].compared(Estimate(float(np.mean(one - other)), error), Estimate(0.0, 0.0))
    return _VERDICTS[found], f"{one.mean():.3f} against {other.mean():.3f}: {np.mean(one - other):+.3f} ± {error:.3f}"


def _calibration_error(both: Models, name: str) -> tuple[str, str]:
    """Returns what the calibration error of HET-XL as trained is in comparison, and both values."""
    one, other = (zero_shot(run, name).estimate("ece") for run in (both.het_xl, both.deterministic))
    style = STYLES["ece"]
    shown = (style.shown(value.mean, value.error) for value in (one, other))
    return _VERDICTS[style.compared(one, other)], " against ".join(shown)


def answers_section(models: Mapping[str, Models]) -> Section:
    """Returns how often each model is right, and where it is sure."""
    return Section(
        "Right answers, and sure ones",
        tuple(_answers_table(both, TITLES_OF_CONDITIONS[condition]).html() for condition, both in models.items()),
        f"An answer is sure if its probability, among all names, is at least {SURE:.0%}. Images are new ones of known "
        "names, images of names that training never had, or as many of both; calibrated ones have the priors seen, new "
        "and balanced, by what fits images of the other half of the names (one temperature, if fewer than "
        f"{LEAST_NAMES} names are new).",
    )


def _answers_table(both: Models, title: str) -> Table:
    rows = []
    for names in (KNOWN, NEW, BOTH):
        rows.append(Row(names))
        for head, found in (("deterministic", both.plain_answers), (HET_XL, both.answers)):
            for how, answers in found.items():
                rows.append(Row(f"{head}, {how}", tuple(map(Cell, _cells(answers[names])))))
    return Table(f"Trained with {title}, ± standard error", ("right", "sure", "right if sure"), tuple(rows))


def _cells(answers: Answers) -> tuple[str, ...]:
    style = STYLES["top1"]
    shares = (answers.right, Estimate(answers.sure, math.nan), answers.right_if_sure)
    return tuple(NO_FIGURE if math.isnan(share.mean) else style.shown(share.mean, share.error) for share in shares)


def summary_section(
    models: Mapping[str, Models], suspects: Suspects, finding: str, results: Mapping[str, Any]
) -> Section:
    """Returns both models with clean and with wrong captions, and how the noise finds these."""
    facts = {
        "names": f"{results['num_names']:,}",
        "seconds": f"{results['seconds']:.0f}",
        "of these compiling": f"{results['compile_seconds']:.0f}",
        "peak memory": f"{results['peak_memory_bytes'] / 1e9:.2f} GB",
        "seed": results["seed"],
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    return Section(
        "What HET-XL with smoothed labels buys",
        (
            _both_conditions(models, "Right answers", "top1", "top-1", as_share=True),
            page.paragraph(finding),
            _noise_of_captions(suspects),
            _noisiest(suspects),
            page.facts(facts),
        ),
        f"New images of {results['num_names']:,} names in a typeface that training has not seen; evaluation labels are "
        "clean, and predictions without noise.",
    )


def opening(models: Mapping[str, Models], sentences: Sequence[str]) -> Opening:
    """Returns the top of the page, with the fitted NLL of both heads."""
    plot = _both_conditions(models, "NLL on new images, temperature fitted", f"{FITTED}/nll", "nats, lower is better")
    return Opening("Quickstart: HET-XL with smoothed labels beside a deterministic head", sentences, plot)


def comparison_section(both: Models, condition: str) -> Section:
    """Returns all figures of both heads, trained in one condition."""
    compared = both.compared()
    table = comparison_table(compared, "± standard error over images")
    return Section(
        f"Both heads, {TITLES_OF_CONDITIONS[condition]}",
        (table.html(), page.paragraph(describe_comparison(compared))),
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
        HET_XL: line([both.het_xl for both in models.values()], 1),
    }
    caption = "Bars: standard errors over images."
    return figures.plot(title, lines, "", y_label, ticks=ticks, as_share=as_share, caption=caption)


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
