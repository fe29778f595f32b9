import base64
import io
import re
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console

from lit_het.eval import report
from lit_het.eval.ambiguity import GroupErrors, RankTest
from lit_het.eval.report.figures import pareto_front, scatter
from lit_het.eval.report.grids import Mark, mark_of
from lit_het.eval.report.page import img
from lit_het.eval.report.texts import token
from lit_het.eval.scores import chance


def figures(**changes: float) -> dict[str, float]:
    values = {"top1": 0.5, "top5": 0.8, "mean_class_recall": 0.5, "mean_reciprocal_rank": 0.6, "nll": 1.5, "brier": 0.6}
    return values | {"ece": 0.1} | changes


def compared(**sets: tuple[dict[str, float], dict[str, float]]) -> report.Comparison:
    return report.compare("DET", "HET-XL", sets, dict.fromkeys(sets, chance(10)))


def decode(image: report.Html) -> Image.Image:
    found = re.search(r"base64,([^\"]+)", image)
    assert found
    return Image.open(io.BytesIO(base64.b64decode(found[1])))


def test_higher_accuracy_wins_and_lower_loss_wins():
    comparison = compared(pets=(figures(), figures(top1=0.6, nll=1.4, ece=0.2)))
    assert [row.winner for row in comparison.rows] == [1, 0, 0, 0, 1, 0, -1]
    assert report.describe_comparison(comparison) == (
        "HET-XL was better than DET: better on 2 of 7 figures, worse on 1 and equal on 4."
    )


def test_an_equal_candidate_is_not_described_as_better():
    said = report.describe_comparison(compared(pets=(figures(), figures())))
    assert said.startswith("HET-XL was not better than DET: better on 0 of 7 figures, worse on 0")
    assert "was not better" in report.describe_comparison(compared(pets=(figures(), figures(top1=0.4))))


def test_only_the_better_value_is_bold_and_chance_stands_beside_it_and_numbers_that_print_the_same_are_a_tie():
    table = report.comparison_table(compared(pets=(figures(), figures(top1=0.6))))
    assert re.findall("<strong>(.*?)</strong>", table) == ["60.0%"]
    assert '<td class="chance">10.0%</td><td>50.0%</td><td><strong>60.0%</strong></td>' in table
    tie = compared(pets=(figures(), figures(top1=0.50001)))
    assert tie.rows[0].winner == 0
    assert "<strong>" not in report.comparison_table(tie)


def test_the_terminal_shows_the_same_rows_and_takes_brackets_literally():
    comparison = compared(**{"set [bold]": (figures(), figures(top1=0.6)), "b": (figures(), figures())})
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(report.print_table(comparison, "Results"))
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
    shown = report.configuration({"path": Path("a/b"), "name": "é"})
    assert "&quot;path&quot;: &quot;a/b&quot;" in shown
    assert "é" in shown


def test_a_run_without_a_metric_is_left_out_and_a_metric_without_runs_is_said_to_be_missing():
    histories = {"DET": [{"step": 0, "loss": 2.0}], "HET-XL": [{"step": 0}, {"step": 5, "loss": 1.0, "noise": 0.1}]}
    drawn = report.curves(histories, [report.Chart(name, name.title()) for name in ("loss", "noise", "absent")])
    captions = re.findall("<figcaption>(.*?)</figcaption>", drawn)
    assert captions == ["DET ends at 2; HET-XL ends at 1", "HET-XL ends at 0.1"]
    assert drawn.count("not recorded") == 1
    assert "<svg" in report.distribution("Noise", {"a": np.zeros(3), "b": np.zeros(5)}, "of equal values")


def test_group_errors_are_described_with_their_chance_level():
    text = report.describe_group_errors(GroupErrors(errors=200, within=150, chance=0.0123), "DET", "homoglyph class")
    assert text == (
        "75.0% of the 200 errors of DET fall within a homoglyph class "
        "(150; 1.23% if errors were spread evenly over all classes)."
    )
    assert report.describe_group_errors(GroupErrors(0, 0, float("nan")), "DET") == "DET made no errors."


def test_a_rank_test_says_which_group_is_higher_only_where_it_is_significant():
    def said(p_value: float, auc: float) -> str:
        return report.describe_rank_test(RankTest(12.0, p_value, auc, 4, 5, 0.4, 0.3), "twins", "others")

    assert said(0.0004, 0.9) == (
        "Noise norm is higher for twins than for others: median 0.4 (n = 4) against 0.3 (n = 5); "
        "Mann-Whitney U = 12, p = 4.0e-04, AUC = 0.900."
    )
    assert "lower for twins" in said(0.01, 0.2)
    assert said(0.05, 0.9).startswith("No significant difference")
    assert "p < 1e-300" in said(0.0, 0.9)


def test_a_page_links_to_its_sections():
    section = report.Section("What it learnt", (report.Html("<p>x</p>"),), "a note")
    text = report.render_page("A & B", [section], verdict="B wins < A")
    assert "<title>A &amp; B</title>" in text
    assert '<a href="#what-it-learnt">' in text
    assert '<section id="what-it-learnt">' in text
    assert "B wins &lt; A" in text


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
