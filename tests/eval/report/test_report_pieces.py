import base64
import dataclasses
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from lit_het.eval.evaluation import Drawing, Record
from lit_het.eval.metrics.ambiguity import GroupErrors, RankTest
from lit_het.eval.metrics.calibration import ReliabilityCurve
from lit_het.eval.metrics.scores import chance
from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.report.comparison import Comparison, compare, comparison_table
from lit_het.eval.report.figures import Chart, curves, distribution, dots, pareto_front, reliability_diagrams, scatter
from lit_het.eval.report.grids import Mark, mark_of
from lit_het.eval.report.naming import STYLES
from lit_het.eval.report.page import Html, Section, configuration, img, render_page
from lit_het.eval.report.statements import describe_comparison, describe_group_errors, describe_rank_test
from lit_het.eval.report.tables import evaluation_table, plain_table
from lit_het.eval.report.texts import token


def record(**changes: float) -> Record:
    values = {"top1": 0.5, "top5": 0.8, "mean_class_recall": 0.5, "mean_reciprocal_rank": 0.6, "nll": 1.5, "brier": 0.6}
    values |= {"ece": 0.1} | changes
    errors = {name: 0.01 for name in values if name != "mean_class_recall"}
    return Record("zero_shot", "pets", values, errors, chance(10), 1, {}, Drawing())


def compared(**sets: tuple[Record, Record]) -> Comparison:
    return compare("DET", "HET-XL", sets)


def decode(image: Html) -> Image.Image:
    found = re.search(r"base64,([^\"]+)", image)
    assert found
    return Image.open(io.BytesIO(base64.b64decode(found[1])))


def test_higher_accuracy_wins_and_lower_loss_wins():
    comparison = compared(pets=(record(), record(top1=0.6, nll=1.4, ece=0.2)))
    assert [row.winner for row in comparison.rows] == [1, 0, 0, 0, 1, 0, -1]
    assert describe_comparison(comparison) == (
        "HET-XL is significantly better than DET on 2 of 7 figures, and worse on 1; 4 do not differ by more than two "
        "standard errors of the difference."
    )


def test_only_the_better_value_is_bold_and_chance_stands_beside_it():
    table = comparison_table(compared(pets=(record(), record(top1=0.6))), "Results").html()
    assert re.findall("<strong>(.*?)</strong>", table) == ["60.0% ± 1.0"]
    assert '<td class="chance">10.0%</td><td>50.0% ± 1.0</td><td><strong>60.0% ± 1.0</strong></td>' in table


def test_sets_with_other_numbers_of_classes_have_chance_levels_of_their_own():
    figures = {"top1": 0.5, "nll": 1.0, "few/top1": 0.9, "few/nll": 0.1}
    level = {"top1": 0.1, "nll": 2.3, "few/top1": 0.5, "few/nll": 0.7}
    found = Record("linear_probe", "many", figures, {}, level, 1, {}, Drawing())
    rows = evaluation_table({"run": found}).markdown()
    assert "| top-1 accuracy | 10.0% | 50.0% |" in rows
    assert "| top-1 accuracy | 50.0% | 90.0% |" in rows
    same = dataclasses.replace(found, chance={name: level[name.removeprefix("few/")] for name in level})
    assert "| top-1 accuracy | 10.0% | 50.0% | 90.0% |" in evaluation_table({"run": same}).markdown()


@pytest.mark.parametrize(
    "insignificant",
    [{"top1": 0.525}, {"nll": 1.475}, {"mean_class_recall": 0.9}, {"top1": math.nan}],
    ids=["within two standard errors", "of a loss", "without a standard error", "not a number"],
)
def test_a_difference_that_is_not_significant_is_neither_bold_nor_called_better(insignificant: dict[str, float]):
    comparison = compared(pets=(record(), record(**insignificant)))
    assert "<strong>" not in comparison_table(comparison, "Results").html()
    assert "better than DET on 0 of 7 figures, and worse on 0; 7 do not" in describe_comparison(comparison)


def test_numbers_that_print_the_same_are_equal_whatever_their_errors():
    assert STYLES["top1"].compared(Estimate(0.50004, 1e-9), Estimate(0.5, 1e-9)) == 0


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_column_is_cut_off_in_a_narrow_terminal(width):
    columns = ("T ± standard error", "NLL before", "NLL after", "ECE before", "ECE after")
    row = ("mean of 4 samples", "1.386 ± 0.232", "0.1956", "0.0385", "0.0485", "0.1234")
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(plain_table("120 texts", columns, [row]).terminal())
    text = console.export_text()
    assert all(figure in text for figure in row[2:])


def test_the_terminal_shows_the_same_rows_and_takes_brackets_literally():
    comparison = compared(**{"set [bold]": (record(), record(top1=0.6)), "b": (record(), record())})
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(comparison_table(comparison, "Results").terminal())
    text = console.export_text()
    assert "set [bold]" in text
    for row in comparison.rows:
        assert re.search(rf"{re.escape(row.label)}.*{row.chance}.*{row.baseline}.*{row.candidate}", text)


def test_an_answer_is_right_or_a_homoglyph_or_wrong():
    groups = np.array([0, 0, 1, 1, -1, -1])
    assert mark_of(3, 3, groups) is Mark.RIGHT
    assert mark_of(1, 0, groups) is Mark.HOMOGLYPH
    assert mark_of(2, 0, groups) is Mark.WRONG
    assert mark_of(5, 4, groups) is Mark.WRONG
    assert mark_of(1, 0, None) is Mark.WRONG


def test_a_small_image_is_stored_pixel_for_pixel_and_a_large_one_is_shrunk_and_keeps_its_shape():
    pixels = np.random.default_rng(0).integers(0, 256, size=(24, 32, 3), dtype=np.uint8)
    for drawn, expected in ((pixels, pixels), (pixels[:, :, :1], pixels[:, :, 0]), (pixels[:, :, 0], pixels[:, :, 0])):
        np.testing.assert_array_equal(np.asarray(decode(img(drawn, "noise"))), expected)
    assert decode(img(np.zeros((640, 320, 3), np.uint8), "tall")).size == (80, 160)


def test_descriptions_and_configurations_cannot_break_a_page_whatever_they_hold():
    assert 'alt="&quot;&gt;&lt;b&gt;"' in img(np.zeros((2, 2, 3), np.uint8), '"><b>')
    shown = configuration({"path": Path("a/b"), "name": "é"})
    assert "&quot;path&quot;: &quot;a/b&quot;" in shown
    assert "é" in shown


def test_a_run_without_a_metric_is_left_out_and_a_metric_without_runs_is_said_to_be_missing():
    histories = {"DET": [{"step": 0, "loss": 2.0}], "HET-XL": [{"step": 0}, {"step": 5, "loss": 1.0, "noise": 0.1}]}
    drawn = curves(histories, [Chart(name, name.title()) for name in ("loss", "noise", "absent")])
    captions = re.findall("<figcaption>(.*?)</figcaption>", drawn)
    assert captions == ["DET ends at 2; HET-XL ends at 1", "HET-XL ends at 0.1"]
    assert drawn.count("not recorded") == 1
    assert "<svg" in distribution("Noise", {"a": np.zeros(3), "b": np.zeros(5)}, "of equal values")


def test_group_errors_are_described_with_their_chance_level():
    text = describe_group_errors(GroupErrors(errors=200, within=150, chance=0.0123), "DET", "homoglyph class")
    assert text == (
        "75.0% of the 200 errors of DET fall within a homoglyph class "
        "(150; 1.23% if errors were spread evenly over all classes)."
    )
    assert describe_group_errors(GroupErrors(0, 0, float("nan")), "DET") == "DET made no errors."


def test_a_rank_test_says_which_group_is_higher_only_where_it_is_significant():
    def said(p_value: float, auc: float) -> str:
        return describe_rank_test(RankTest(12.0, p_value, auc, 4, 5, 0.4, 0.3), "twins", "others")

    assert said(0.0004, 0.9) == (
        "Noise norm is higher for twins than for others: median 0.4 (n = 4) against 0.3 (n = 5); "
        "Mann-Whitney U = 12, p = 4.0e-04, AUC = 0.900."
    )
    assert "lower for twins" in said(0.01, 0.2)
    assert said(0.05, 0.9).startswith("No significant difference")
    assert "p < 1e-300" in said(0.0, 0.9)


def test_a_page_begins_with_its_verdict_and_links_to_its_sections_the_fourth_of_which_is_folded():
    sections = [Section(f"What {name} learnt", (Html("<p>x</p>"),), "a note") for name in "abcd"]
    text = render_page("A & B", sections, verdict="B wins < A")
    assert "<title>A &amp; B</title>" in text
    assert "<h1>B wins &lt; A</h1>" in text
    assert "<h1>A &amp; B</h1>" in render_page("A & B", sections)
    blocks = text.split("<details ")[1:]
    assert [block.startswith('class="section" open>') for block in blocks] == [True, True, True, False]
    for name, block in zip("abcd", blocks, strict=True):
        # Below the summary: browsers unfold what a link leads into.
        assert f'id="what-{name}-learnt"' in block.partition("</summary>")[2]
        assert f'<a href="#what-{name}-learnt">' in text.partition("<details")[0]


def test_the_pareto_front_has_the_points_that_no_other_beats_and_points_are_drawn_with_their_names():
    points = [(float(x), float(y)) for x, y in np.random.default_rng(0).integers(0, 9, (40, 2))]
    beaten = {p for p in points for o in points if o != p and o[0] <= p[0] and o[1] <= p[1]}
    assert pareto_front(points) == sorted(set(points) - beaten)
    assert "fast &amp; good" in scatter("Cost", {"fast & good": (1.0, 2.0)}, "s", "nats")
    drawn = scatter("Cost", {"a": (1.0, 2.0), "b": (100.0, 1.0), "c": (90.0, 3.0)}, "s", "nats")
    assert all(f">{name}<" in drawn for name in "abc")


def test_tokens_stand_above_their_probabilities_and_are_never_markup():
    assert token(" <b>", 0.25) == '<ruby style="--doubt: 75%">&lt;b&gt;<rt>25</rt></ruby>'
    assert token("", 1.0, (0.954, 1.0)) == '<ruby style="--doubt: 0%">⏎<rt>100 (95–100)</rt></ruby>'
    assert "␣" in token(" ", 0.5)


@pytest.mark.parametrize(("count", "is_faded"), [(0, False), (1, True), (2, True), (3, False)])
def test_bins_of_one_or_two_images_are_faded_and_the_caption_says_so(count: int, is_faded: bool):
    middles = np.array([0.25, 0.75])
    curve = ReliabilityCurve(np.array([0, 0.5, 1]), middles, middles, np.array([count, 9]))
    drawn = reliability_diagrams({"DET": curve})
    assert ("opacity: 0.3" in drawn) == is_faded
    assert ("Faded: bins of at most 2 images." in drawn) == is_faded


def test_names_in_figures_are_never_formulas():
    drawn = dots("NLL", {"$\\frac{$": Estimate(0.5, 0.1), "a$b$": Estimate(0.4, math.nan)}, chance=0.2)
    assert "$\\frac{$<" in drawn
    assert "a$b$<" in drawn


def test_long_names_leave_room_for_their_values():
    drawn = dots("NLL", {"runs/" + "long/" * 20 + end: Estimate(0.5, 0.1) for end in ("one", "other")})
    assert "long/one<" in drawn
    assert "long/other<" in drawn
    assert "runs/" not in drawn
