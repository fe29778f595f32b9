"""The page that the quickstart writes: which sections, in which order."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from lit_het.apps.quickstart_evaluation import CHARACTERS, FACE, GlyphEvaluation, ModelEvaluation, noise_by_ambiguity
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
            "HET-XL is evaluated without its noise, as in the paper (App. A.2), at a temperature that was learnt with "
            "it: read its likelihood and calibration error with that in mind. A uniform guess is perfectly calibrated, "
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
                        "deterministic": evaluations["deterministic"].results[FACE].reliability(),
                        "HET-XL": het_xl.results[FACE].reliability(),
                    }
                ),
            ),
            "Images of the held-out face, all names to choose from: how often the best name is right, "
            "against the probability that the model gives it.",
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
    everything = np.ones(len(data.images[FACE].labels), bool)
    look_alikes, unique = noise_by_ambiguity(model, data, everything)
    images, norms = data.images[FACE], model.noise_norms[FACE]
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
        "What HET-XL learnt",
        (
            figures.distribution(
                "Noise of look-alikes and of unique shapes",
                {"look-alikes": look_alikes, "unique shapes": unique},
                "noise norm √tr Σ(x)",
            ),
            *(
                page.paragraph(f"{kind.capitalize()}: {describe_rank_test(test, 'look-alikes', 'unique shapes')}")
                for kind, test in tests.items()
            ),
            *strips,
        ),
        "The head draws noise around every image's embedding; its size depends on the image. Some characters "
        "of different scripts share one shape, so their names cannot be told apart. Look-alikes are mostly "
        "plain letters: a difference over all characters that vanishes within plain and within marked ones says that "
        "the noise follows marks, not ambiguity.",
    )


def _names_of_images(model: ModelEvaluation, data: GlyphEvaluation) -> Section:
    bodies = []
    for name in (FACE, CHARACTERS):
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
            page.paragraph("Held-out face: known names, new images."),
            bodies[0],
            page.paragraph("Held-out characters: neither images nor names were seen in training."),
            bodies[1],
        ),
        "The five best of all names for images spread evenly over each set, by the HET-XL model.",
    )


def _images_of_names(model: ModelEvaluation, data: GlyphEvaluation) -> Section:
    images = data.images[FACE]
    names = images.labels[_spread(len(images.labels))]
    best = highest(model.class_embeddings[names] @ model.image_embeddings[FACE].T, NUM_TOP)
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
        "The five nearest images of the held-out face; each name has one image there.",
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
            page.paragraph("LiT: the text towers, with the same seed and the same order of data."),
            figures.curves(histories, figures.training_charts(histories)),
            page.paragraph("Upstream: the image tower, as a classifier of the words of the names."),
            figures.curves(upstream, upstream_charts),
        ),
    )


def _configuration(run_dir: Path) -> page.Html:
    return page.configuration(experiment.to_dict(experiment.load(config_path(run_dir))), run_dir.name)


def _spread(count: int) -> np.ndarray:
    """Returns indices spread evenly over ``count`` items: examples that nobody has picked."""
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
