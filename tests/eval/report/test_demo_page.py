"""A full page of made-up measurements, which exercises every part of a report.

``python tests/eval/report/test_demo_page.py demo.html`` writes it, to be looked at.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from scipy import special

from lit_het.eval.evaluation import Drawing, Record
from lit_het.eval.metrics import scores
from lit_het.eval.metrics.ambiguity import errors_within_groups, groups_of, rank_test, split_by_ambiguity
from lit_het.eval.predictions import Predictions, highest
from lit_het.eval.report.comparison import compare, comparison_table
from lit_het.eval.report.figures import Chart, curves, distribution, reliability_diagrams
from lit_het.eval.report.grids import image_row, image_strip, image_to_name_grid, mark_legend, mark_of
from lit_het.eval.report.page import Html, Section, configuration, facts, paragraph, render_page, side_by_side
from lit_het.eval.report.statements import describe_comparison, describe_group_errors, describe_rank_test
from tests.eval.report.outline import Outline

CHARACTERS = {
    "A": ("latin capital letter a", "A"),
    "Α": ("greek capital letter alpha", "A"),
    "А": ("cyrillic capital letter a", "A"),
    "B": ("latin capital letter b", "B"),
    "В": ("cyrillic capital letter ve", "B"),
    "o": ("latin small letter o", "o"),
    "ο": ("greek small letter omicron", "o"),
    "q": ("latin small letter q", "q"),
    "Ж": ("cyrillic capital letter zhe", "Ж"),
    "ω": ('greek small letter omega with <hook> & "quotes"', "ω"),
    "7": ("digit seven", "7"),
    "ѝ": ("cyrillic small letter byelorussian-ukrainian i with grave and descender", "ѝ"),
}
NAMES = [name for name, _ in CHARACTERS.values()]
GROUPS = groups_of([shape for _, shape in CHARACTERS.values()])


def draw(character: str) -> np.ndarray:
    font = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSerif.ttf"
    image = Image.new("L", (32, 32), 255)
    ImageDraw.Draw(image).text((16, 24), character, fill=0, font=ImageFont.truetype(str(font), 22), anchor="ms")
    return np.asarray(image)[:, :, None]


class Simulated:
    """360 images whose embeddings lie near those of their shapes, not of their characters."""

    def __init__(self, seed: int, noise: float):
        generator = np.random.default_rng(seed)
        shapes = {shape: generator.normal(size=16) for _, shape in CHARACTERS.values()}
        classes = np.stack([shapes[shape] + 0.2 * generator.normal(size=16) for _, shape in CHARACTERS.values()])
        labels = np.tile(np.arange(len(NAMES)), 30)
        images = classes[labels] + noise * generator.normal(size=(labels.size, 16))
        self.images, self.classes = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (images, classes))
        log_p = special.log_softmax(self.images @ self.classes.T / 0.08, axis=1).astype(np.float32)
        zeros = np.zeros(labels.size, np.float32)
        self.predictions = Predictions(log_p, labels, np.arange(labels.size), zeros, zeros)

    def record(self) -> Record:
        found, errors = scores.figures(self.predictions)
        return Record("zero_shot", "glyphs", found, errors, scores.chance(len(NAMES)), 1, {}, Drawing())


def simulate_history(seed: int, heteroscedastic: bool) -> list[dict[str, float]]:
    generator = np.random.default_rng(seed)
    records = []
    for step in range(0, 1500, 10):
        record = {
            "step": step,
            "train/loss": 1.2 + 4 * np.exp(-step / (300 + 60 * seed)) + 0.08 * generator.normal(),
            "train/temperature": 0.06 + (0.27 if heteroscedastic else 0.04) * np.exp(-step / 400),
        }
        if heteroscedastic:
            record["train/image_noise_norm"] = 0.1 + 0.3 * (1 - np.exp(-step / 500))
            record["train/text_noise_norm"] = 0.1 + 0.1 * (1 - np.exp(-step / 700))
        records.append(record)
    return records


def demo_page() -> Html:
    deterministic, heteroscedastic = Simulated(0, 0.95), Simulated(1, 0.85)
    models = {"DET": deterministic, "HET-XL": heteroscedastic}
    results = {
        "held-out typeface, all names": (deterministic.record(), heteroscedastic.record()),
        "held-out characters, held-out names": (Simulated(2, 0.7).record(), Simulated(3, 0.75).record()),
    }
    comparison = compare("DET", "HET-XL", results)
    verdict = describe_comparison(comparison)
    errors = [
        errors_within_groups(model.predictions.predicted, model.predictions.labels, GROUPS) for model in models.values()
    ]
    within_groups = [
        paragraph(describe_group_errors(one, name, "homoglyph class")) for one, name in zip(errors, models, strict=True)
    ]
    histories = {"DET": simulate_history(0, False), "HET-XL": simulate_history(1, True)}
    charts = [
        Chart("train/loss", "Training loss, nats"),
        Chart("train/temperature", "Temperature τ", logarithmic=True),
        Chart("train/image_noise_norm", "Noise norm, images"),
        Chart("train/text_noise_norm", "Noise norm, names"),
    ]
    reliability = {name: model.predictions.reliability() for name, model in models.items()}
    generator = np.random.default_rng(5)
    characters = np.arange(600)
    ambiguous = characters < 140
    noise = np.where(ambiguous, generator.normal(0.46, 0.06, 600), generator.normal(0.36, 0.05, 600))
    twin, lone = split_by_ambiguity(noise, ambiguous, characters)
    groups = {"homoglyphs": twin, "unambiguous glyphs": lone}
    outcome = describe_rank_test(rank_test(twin, lone), *groups)
    title, axis = "Noise of homoglyphs and of unambiguous glyphs", "noise norm √tr Σ(x), mean per character"
    drawn = [draw(character) for character in CHARACTERS]
    most = image_strip("Most noise", drawn[:8], NAMES[:8], [f"{0.61 - 0.01 * n:.2f}" for n in range(8)])
    least = image_strip("Least noise", drawn[7:], NAMES[7:], [f"{0.21 + 0.01 * n:.2f}" for n in range(5)])
    found, shown, queries = heteroscedastic.predictions, np.arange(9), [0, 4, 8, 9]
    images, labels = [drawn[label] for label in found.labels[shown]], found.labels[shown]
    best_labels = found.labels[highest(heteroscedastic.classes[queries] @ heteroscedastic.images.T, 5)]
    images_of_names = [
        image_row(
            NAMES[query],
            [drawn[label] for label in best],
            [mark_of(label, query, GROUPS) for label in best],
            [NAMES[label] for label in best],
        )
        for query, best in zip(queries, best_labels.tolist(), strict=True)
    ]
    legend = mark_legend("another character of the same shape")
    table = comparison_table(comparison, "Chance is a uniform guess, which is always perfectly calibrated").html()
    sections = {
        "Results": (table, paragraph(verdict), *within_groups),
        "Training curves": (curves(histories, charts),),
        "Calibration": (reliability_diagrams(reliability),),
        "What HET-XL learnt": (side_by_side(distribution(title, groups, axis, outcome), Html(most + least)),),
        "Names for an image": (
            legend,
            image_to_name_grid(images, labels, *found.take(shown).top(), NAMES, GROUPS),
        ),
        "Images for a name": (legend, *images_of_names),
        "Configuration": (
            configuration({"model": {"width": 192}, "head": {"num_factors": 15}, "lr": 1e-3}, "HET-XL"),
            configuration("plain text <config> & more", "DET"),
        ),
    }
    notes = {"Calibration": "A calibrated model is on the dotted line."}
    drawn_sections = [Section(name, parts, notes.get(name, "")) for name, parts in sections.items()]
    run = {"seed": 0, "commit": "5d20da7", "machine": "2 × Xeon 2.80 GHz, 8 GB", "time": "412 s"}
    return render_page("Quickstart: DET against HET-XL", drawn_sections, verdict, facts(run))


@pytest.fixture(scope="module")
def page() -> Html:
    return demo_page()


@pytest.fixture(scope="module")
def outline(page: Html) -> Outline:
    """The page, whose tags are all closed in order."""
    return Outline(page)


def test_the_page_has_no_external_references(page: Html, outline: Outline):
    for tag, attributes in outline.tags:
        for name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert not {"script", "iframe", "object"} & {tag for tag, _ in outline.tags}
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert "://" not in page


def test_every_image_and_figure_has_a_description(outline: Outline):
    drawn = [attributes for tag, attributes in outline.tags if tag == "img"]
    assert len(drawn) == 8 + 5 + 9 + 4 * 5
    assert all(attributes["alt"] for attributes in drawn)
    figures = [attributes for tag, attributes in outline.tags if tag == "svg"]
    assert len(figures) == 4 + 2 + 1
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in figures)


def test_names_on_the_page_are_unique_and_every_reference_finds_one(page: Html, outline: Outline):
    names = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(names) == len(set(names))
    assert set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", page)) <= set(names)


def test_class_names_cannot_break_the_page(page: Html):
    assert "<hook>" not in page
    assert "&lt;hook&gt; &amp; &quot;quotes&quot;" in page
    assert "plain text &lt;config&gt; &amp; more" in page


def test_figures_are_well_formed_and_take_their_colours_from_the_page(page: Html):
    for drawing in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(drawing.replace("<svg", '<svg xmlns:xlink="x"', 1))
        assert "var(--series-" in drawing
        assert "font-family" not in drawing
        assert not re.search(r"#[0-9a-f]{6}\b", drawing)


def test_the_page_is_the_same_each_time(page: Html):
    assert demo_page() == page


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(demo_page(), encoding="utf-8")
