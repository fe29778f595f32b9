"""The sections of the quickstart's report."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from lit_het.apps.quickstart_evaluation import (
    CHARACTERS,
    TYPEFACE,
    GlyphEvaluation,
    ModelEvaluation,
    noise_by_ambiguity,
)
from lit_het.configs import experiment
from lit_het.eval.ambiguity import RankTest
from lit_het.eval.predictions import NUM_TOP, highest
from lit_het.eval.report import figures, grids, page
from lit_het.eval.report.comparison import Comparison, comparison_table
from lit_het.eval.report.page import Section
from lit_het.eval.report.statements import describe_rank_test
from lit_het.runs.directory import config_path
from lit_het.training.metric_log import read_metrics

NUM_EXAMPLES = 12


def write_report(
    run_dir: Path,
    data: GlyphEvaluation,
    evaluations: dict[str, ModelEvaluation],
    comparison: Comparison,
    noise: dict[str, RankTest],
    sentences: list[str],
    results: dict[str, Any],
) -> None:
    """Writes ``report.html`` into the run directory."""
    het_xl = evaluations["het_xl"]
    sections = [
        Section(
            "Results",
            (comparison_table(comparison), *(page.paragraph(text) for text in sentences[: 1 + len(evaluations)])),
            "HET-XL is evaluated without noise, as in the paper (App. A.2), but its temperature was learned with "
            "noise, which affects its likelihood and calibration error. A uniform prediction is perfectly calibrated, "
            "so chance has no calibration error.",
        ),
        _noise(het_xl, data, noise),
        _names_of_images(het_xl, data),
        _images_of_names(het_xl, data),
        Section(
            "Reliability",
            (
                figures.reliability_diagrams(
                    {
                        "deterministic": evaluations["deterministic"].results[TYPEFACE].reliability(),
                        "HET-XL": het_xl.results[TYPEFACE].reliability(),
                    }
                ),
            ),
            "Images of the held-out typeface, all names as candidates: the accuracy of the top prediction "
            "against its probability.",
        ),
        _curves(run_dir),
        Section("Configuration", tuple(_configuration(run_dir / name) for name in ("upstream", *evaluations))),
    ]
    page.write_page(
        run_dir / "report.html",
        "lit-het quickstart",
        sections,
        verdict=sentences[0],
        header=page.facts(
            {
                "names": f"{results['num_names']:,}",
                "seconds": f"{results['seconds']:.0f}",
                "peak memory": f"{results['peak_memory_bytes'] / 1e9:.2f} GB",
                "seed": results["seed"],
                "commit": _commit(),
                "machine": f"{platform.machine()}, {_num_cores()} cores, Python {platform.python_version()}",
            }
        ),
    )


def _noise(model: ModelEvaluation, data: GlyphEvaluation, tests: dict[str, RankTest]) -> Section:
    everything = np.ones(len(data.images[TYPEFACE].labels), bool)
    homoglyphs, unique = noise_by_ambiguity(model, data, everything)
    images, norms = data.images[TYPEFACE], model.noise_norms[TYPEFACE]
    order = np.argsort(norms)
    strips = [
        grids.image_strip(
            title,
            images.image[chosen],
            [data.names[label] for label in images.labels[chosen]],
            [f"{norm:.3f}" for norm in norms[chosen]],
        )
        for title, chosen in (("Most noise", order[::-1][:NUM_EXAMPLES]), ("Least noise", order[:NUM_EXAMPLES]))
    ]
    return Section(
        "What HET-XL learned",
        (
            figures.distribution(
                "Noise of homoglyphs and of unique shapes",
                {"homoglyphs": homoglyphs, "unique shapes": unique},
                "noise norm √tr Σ(x)",
            ),
            *(
                page.paragraph(f"{kind.capitalize()}: {describe_rank_test(test, 'homoglyphs', 'unique shapes')}")
                for kind, test in tests.items()
            ),
            *strips,
        ),
        "The head adds noise to every image's embedding; its norm depends on the image. Some characters of different "
        "scripts have the same shape, so their names cannot be distinguished. Homoglyphs are mostly plain letters: if "
        "a difference over all characters vanishes within plain and within marked ones, the noise follows marks, not "
        "ambiguity.",
    )


def _names_of_images(model: ModelEvaluation, data: GlyphEvaluation) -> Section:
    bodies = []
    for name in (TYPEFACE, CHARACTERS):
        chosen = _spread(len(data.images[name].labels))
        top_classes, top_probabilities = model.results[name].take(chosen).top()
        bodies.append(
            grids.image_to_name_grid(
                data.images[name].image[chosen],
                data.images[name].labels[chosen],
                top_classes,
                top_probabilities,
                data.names,
                data.groups,
            )
        )
    return Section(
        "Image to name",
        (
            grids.mark_legend("looks the same as the right answer"),
            page.paragraph("Held-out typeface: known names, new images."),
            bodies[0],
            page.paragraph("Held-out characters: neither their images nor their names were in training."),
            bodies[1],
        ),
        "The five best of all names for evenly spaced images of each set, by the HET-XL model.",
    )


def _images_of_names(model: ModelEvaluation, data: GlyphEvaluation) -> Section:
    images = data.images[TYPEFACE]
    names = images.labels[_spread(len(images.labels))]
    best = highest(model.class_embeddings[names] @ model.image_embeddings[TYPEFACE].T, NUM_TOP)
    return Section(
        "Name to image",
        (
            grids.mark_legend("looks the same as the right answer"),
            grids.name_to_image_grid(
                [int(name) for name in names],
                [images.image[row] for row in best],
                images.labels[best],
                data.names,
                data.groups,
            ),
        ),
        "The five nearest images of the held-out typeface; each name has one image there.",
    )


def _curves(run_dir: Path) -> Section:
    histories = {
        title: read_metrics(run_dir / name / "metrics.jsonl")
        for title, name in (("deterministic", "deterministic"), ("HET-XL", "het_xl"))
    }
    upstream = {"upstream": read_metrics(run_dir / "upstream" / "metrics.jsonl")}
    upstream_charts = (figures.Chart("train/loss", "Loss, nats"), figures.Chart("train/temperature", "Temperature τ"))
    return Section(
        "Training",
        (
            page.paragraph("LiT: the text towers, with equal seeds and equal order of data."),
            figures.curves(histories, figures.training_charts(histories)),
            page.paragraph("Upstream: the image tower, as a classifier of the words of the names."),
            figures.curves(upstream, upstream_charts),
        ),
    )


def _configuration(run_dir: Path) -> page.Html:
    return page.configuration(experiment.to_dict(experiment.load(config_path(run_dir))), run_dir.name)


def _spread(count: int) -> np.ndarray:
    """Returns evenly spaced indices of ``count`` items, so that examples are not picked by hand."""
    return np.linspace(0, count - 1, min(NUM_EXAMPLES, count)).astype(int)


def _num_cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _commit() -> str:
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
