import csv
import dataclasses
import html
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_het.cli.main import main
from lit_het.errors import UserError
from lit_het.eval import evaluation
from lit_het.eval.evaluation import Drawing, Evaluation
from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.report.naming import STYLES
from lit_het.eval.report.page import NOTHING
from lit_het.eval.report.tables import best_of
from tests.cli.seeds_of_heads import fails_with, groups, write_seeds
from tests.eval.report.outline import Outline
from tests.eval.report.saved_runs import (
    DETERMINISTIC,
    NAMES,
    NUM_IMAGES,
    all_kinds,
    predictions,
    write_run,
    zero_shot,
)


def report(*arguments: object) -> None:
    assert main(["report", *map(str, arguments)]) == 0


def page_of(run: Path, *others: Path) -> str:
    """The page of one run, or of several."""
    report(run, *others, "--output", run / "page.html")
    return (run / "page.html").read_text()


def titles_of(run: Path) -> Sequence[str]:
    return Outline(page_of(run)).titles


def section_of(page: str, name: str) -> str:
    return page.partition(f'<div class="anchor" id="{name}">')[2].partition("</section>")[0]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("runs") / "mine", all_kinds())
    report(run)
    return run


@pytest.fixture(scope="module")
def page(full: Path) -> str:
    return (full / "report.html").read_text("utf-8")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch):
    """Figures have their headings only: to draw one takes a tenth of a second."""
    monkeypatch.setattr("lit_het.eval.report.canvas._svg", lambda *_: NOTHING)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeds(tmp_path_factory.mktemp("seeds"))


def test_there_is_a_section_for_everything_that_was_measured(page: str):
    assert Outline(page).titles == [
        "Zero-shot",
        "Calibration",
        "Prediction sets and selective prediction",
        "Worst classes",
        "Confidence",
        "Top class names",
        "Spectrum of the noise",
        "Alignment of W and the noise",
        "Retrieval",
        "Few-shot",
        "Linear probe",
        "Corrupted images",
        "Out of distribution",
        "Ensemble",
        "Training",
        "Configuration",
    ]


def test_the_page_asks_for_nothing_from_outside(page: str):
    outline = Outline(page)
    for tag, attributes in outline.tags:
        for name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert not {"script", "iframe", "object"} & {tag for tag, _ in outline.tags}
    assert "@import" not in page
    assert "://" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}


def test_names_cannot_break_the_page_are_unique_and_every_reference_finds_one(page: str):
    assert "<b>cat" not in page
    assert "<i>query" not in page
    assert "a &lt;b&gt;cat&lt;/b&gt; &amp; &quot;dog&quot;" in page
    names = [attributes["id"] for _, attributes in Outline(page).tags if "id" in attributes]
    assert len(names) == len(set(names))
    assert set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", page)) <= set(names)


def test_the_page_opens_with_one_sentence_of_what_was_found_and_one_figure(page: str):
    top = page.partition("<nav")[0]
    assert "<h1>Zero-shot on pets, top-1 accuracy: 50.0% ± 2.0 (chance 25.0%).</h1>" in top
    assert re.findall("<p>(.*?)</p>", top)[0].endswith("it is overconfident (calibration error 12.5%).")
    assert re.findall('<figure class="plot"><h3>(.*?)</h3>', top) == ["Zero-shot on pets: calibration"]


def test_a_run_whose_confidence_fits_its_accuracy_is_neither_over_nor_underconfident(tmp_path: Path):
    saved = predictions()
    arrays = {**saved.arrays, "confidence": np.full(NUM_IMAGES, saved.arrays["correct"].mean() + 0.05)}
    run = write_run(tmp_path / "run", [dataclasses.replace(zero_shot(), draw=lambda: Drawing(arrays, saved.texts))])
    assert "it is neither over- nor underconfident (" in page_of(run)


def test_the_worst_classes_stand_beside_all_that_they_were_taken_for(page: str):
    titles = re.findall("<h3>([^<]*predicted as[^<]*)</h3>", page)
    assert [html.unescape(title) for title in titles] == [
        f"{NAMES[0]}, predicted as {NAMES[1]} (2 of 8), {NAMES[2]} (3 of 8)",
        f"{NAMES[1]}, predicted as {NAMES[2]} (3 of 8)",
    ]


@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_of_an_earlier_version_is_drawn_without_what_it_lacks(tmp_path: Path):
    saved = predictions()
    old = {name: array for name, array in saved.arrays.items() if not re.match("worst|sets/|risk/", name)}
    titles = titles_of(
        write_run(tmp_path / "run", [dataclasses.replace(zero_shot(), draw=lambda: Drawing(old, saved.texts))])
    )
    assert "Calibration" in titles
    assert not {"Worst classes", "Prediction sets and selective prediction"} & set(titles)


def test_ensembles_of_some_members_are_drawn_by_their_number(page: str, tmp_path: Path):
    plots = re.findall(r'<figure class="plot"><h3>(.*?)</h3>', section_of(page, "ensemble"))
    assert plots == [f"pets: {STYLES[figure].label}" for figure in ("nll", "top1", "ece", "mutual_information")]
    earlier = page_of(write_run(tmp_path / "run", [dataclasses.replace(all_kinds()[-1], draw=Drawing)]))
    assert "<table" in section_of(earlier, "ensemble")
    assert '<figure class="plot">' not in section_of(earlier, "ensemble")


def test_sets_and_errors_are_drawn_for_all_parts_and_errors_by_noise(page: str):
    section = section_of(page, "prediction-sets-and-selective-prediction")
    sets, errors = section.split("Errors among the most confident</h3>")
    parts = ("as trained", "calibrated", "mean over noise samples")
    assert all(part in sets and part in errors for part in parts)
    assert "lowest noise norm first" in errors
    assert "lowest noise norm first" not in sets


def test_sets_that_need_more_images_than_there_are_have_no_plot(tmp_path: Path):
    saved = predictions()
    few = {name: array[:, :0] if name.startswith("sets/") else array for name, array in saved.arrays.items()}
    page = page_of(
        write_run(tmp_path / "run", [dataclasses.replace(zero_shot(), draw=lambda: Drawing(few, saved.texts))])
    )
    assert "Errors among the most confident" in page
    assert "Size of prediction sets" not in page


def test_json_csv_and_markdown_hold_the_figures_of_the_records(full: Path):
    content = json.loads((full / "report.json").read_text("utf-8"))
    with (full / "report.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    markdown = (full / "report.md").read_text("utf-8")
    of_json = {
        (record["kind"], figure): value
        for record in content["runs"][0]["evaluations"]
        for figure, value in record["figures"].items()
    }
    of_csv = {(row["kind"], row["figure"]): float(row["value"]) for row in rows}
    assert of_json == of_csv == {(e.kind, name): value for e in all_kinds() for name, value in e.figures.items()}
    assert "| top-1 accuracy | 25.0% | 50.0% ± 2.0 | 50.0% | 48.0% |" in markdown
    assert "| member 1 | 40.0% | – | – |" in markdown
    (top1,) = (row for row in rows if (row["kind"], row["figure"]) == ("zero_shot", "top1"))
    assert (top1["error"], top1["chance"], top1["step"]) == ("0.02", "0.25", "50")


@pytest.mark.usefixtures("undrawn")
def test_a_figure_that_is_not_finite_is_null_in_json(tmp_path: Path):
    run = write_run(tmp_path / "run", [dataclasses.replace(zero_shot(nll=float("inf")), draw=Drawing)])
    report(run)
    text = (run / "report.json").read_text()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert content["runs"][0]["evaluations"][0]["figures"]["nll"] is None


def test_a_run_that_only_trained_has_curves_and_says_that_nothing_was_measured(tmp_path: Path):
    page = page_of(write_run(tmp_path / "run", []))
    assert Outline(page).titles == ["Training", "Configuration"]
    assert "No evaluations yet" in page


def test_an_imported_image_tower_has_a_page_with_its_configuration(tmp_path: Path):
    run = write_run(tmp_path / "run", [], task={"type": "ClassificationConfig", "image_tower": {"width": 8}})
    (run / "metrics.jsonl").unlink()
    assert titles_of(run) == ["Configuration"]


@pytest.mark.usefixtures("undrawn")
def test_a_configuration_of_another_version_is_shown_as_it_is(tmp_path: Path):
    page = page_of(write_run(tmp_path / "run", [], task=None, forgotten_field=3))
    assert "&quot;forgotten_field&quot;: 3" in page


@pytest.mark.usefixtures("undrawn")
def test_evaluations_without_anything_to_draw_have_their_tables(tmp_path: Path):
    run = write_run(tmp_path / "run", [Evaluation(e.kind, e.name, e.figures) for e in all_kinds()])
    assert "Calibration" not in titles_of(run)


@pytest.mark.usefixtures("undrawn")
def test_several_seeds_of_two_heads_are_tested(seeds: Path, tmp_path: Path):
    het, det = groups(seeds)
    report(*het, *det, "--output", tmp_path / "all.html")
    page = (tmp_path / "all.html").read_text()
    titles = Outline(page).titles
    assert titles[:3] == ["Runs", "Comparison", "Zero-shot"]
    assert "differ in task.head" in page
    assert "<title>het against det</title>" in page
    assert "<h3>Zero-shot on pets: top-1 accuracy</h3>" in page.partition("<nav")[0]
    assert "het against det, 3 runs against 3" in page
    assert json.loads((tmp_path / "all.json").read_text())["comparison"]["figures"]["zero_shot/pets/top1"]["p"] < 0.05


def side_by_side(tmp_path: Path, other: Evaluation, first: Evaluation | None = None) -> str:
    """The page of two runs that differ in more than their seeds; evaluations are not drawn, which takes seconds."""
    first, other = (dataclasses.replace(one, draw=Drawing) for one in (first or zero_shot(), other))
    return page_of(write_run(tmp_path / "first", [first]), write_run(tmp_path / "second", [other], task=DETERMINISTIC))


@pytest.mark.usefixtures("undrawn")
def test_runs_that_differ_otherwise_stand_side_by_side(tmp_path: Path):
    page = side_by_side(tmp_path, zero_shot(top1=0.7))
    assert "Comparison" not in Outline(page).titles
    assert "<strong>70.0% ± 2.0</strong>" in page
    assert "<title>first and second</title>" in page
    assert "<h3>Zero-shot on pets: top-1 accuracy</h3>" in page.partition("<nav")[0]
    assert "task.head.type" in page


@pytest.mark.usefixtures("undrawn")
def test_a_value_is_bold_only_where_it_is_significantly_better(tmp_path: Path):
    assert "<strong>" not in side_by_side(tmp_path, zero_shot(top1=0.55))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("other", "errors", "said"),
    [
        (0.4, {}, "without standard errors it is unknown whether they differ"),
        (0.4, {"mean_average_precision": 0.01}, "a difference of more than two standard errors"),
        (0.49, {"mean_average_precision": 0.01}, "a difference of no more than two standard errors"),
    ],
)
def test_the_verdict_says_whether_a_run_is_better_by_more_than_two_standard_errors(
    tmp_path: Path, other: float, errors: Mapping[str, float], said: str
):
    precisions = (0.501 if not errors else 0.5, other)
    first, second = (Evaluation("zero_shot", "voc", {"mean_average_precision": one}, errors) for one in precisions)
    page = side_by_side(tmp_path, second, first)
    assert said in page
    if not errors:
        assert "a difference of" not in page
        assert "<strong>" not in page


@pytest.mark.parametrize(
    ("errors", "best"),
    [((0.01, 0.01, 0.01), 1), ((0.01, 0.01, math.nan), None), ((0.3, 0.01, 0.01), None), ((0.01, 0.04, 0.04), None)],
)
def test_the_best_value_is_significantly_better_than_all_others(errors: tuple[float, ...], best: int | None):
    assert best_of([*map(Estimate, (0.3, 0.5, 0.4), errors)], STYLES["top1"]) == best


def test_many_runs_are_drawn_though_colours_come_again(tmp_path: Path):
    runs = [write_run(tmp_path / f"run{seed}", [], seed) for seed in range(10)]
    page = page_of(*runs)
    assert 'class="swatch dashed"' in page
    assert "<title>run0, run1, run2 and 7 other runs</title>" in page


@pytest.mark.parametrize("name", ["zero_shot_pets.npz", "zero_shot_pets.json"])
def test_an_evaluation_that_was_cut_short_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    run = write_run(tmp_path / "run", [zero_shot()])
    path = run / "evaluations" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    message = fails_with(capsys, "report", run)
    assert "zero_shot_pets.json is not a valid evaluation" in message
    assert "evaluate again" in message


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"figures": None}, "figures is not of type dict"),
        ({"figures": {"top1": "high"}}, "figures: top1 is 'high'"),
        ({"errors": [0.1]}, "errors is not of type dict"),
        ({"step": "50"}, "step is not of type int"),
        ({"name": None}, "name is not of type str"),
        ({"settings": []}, "settings is not of type dict"),
        ({"texts": {"class_names": None}}, "texts: class_names is None"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_an_evaluation_with_something_else_in_a_field_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any], reason: str
):
    run = write_run(tmp_path / "run", [zero_shot()])
    path = run / "evaluations" / "zero_shot_pets.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    message = fails_with(capsys, "report", run)
    assert "zero_shot_pets.json is not a valid evaluation" in message
    assert reason in message
    path.write_text("3")
    assert "is not a valid evaluation (not a JSON object)" in fails_with(capsys, "report", run)


def test_figures_never_stand_beside_the_drawing_of_another_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = write_run(tmp_path / "run", [zero_shot()])

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluation.write_record(zero_shot(1), run, 60, {})
    assert not evaluation.read_records(run)
    evaluation.write_record(zero_shot(1), run, 60, {})
    assert [record.step for record in evaluation.read_records(run)] == [60]


@pytest.mark.parametrize("name", ["/../../../out", "../out", "a/b", "a\0b", "a\ud800"])
def test_no_set_has_a_name_that_leads_out_of_the_run(tmp_path: Path, name: str):
    run = write_run(tmp_path / "run", [])
    (run / "evaluations" / "zero_shot_").mkdir(parents=True)  # a run of others may hold such a folder
    (run / "evaluations" / "zero_shot_..").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="cannot be part of a file name; give it another name"):
        evaluation.write_record(dataclasses.replace(zero_shot(), name=name), run, 60, {})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_no_run_is_refused_and_runs_below_it_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_run(tmp_path / "quickstart" / "het_xl", [])
    assert "is not a run" in fails_with(capsys, "report", tmp_path / "missing")
    assert "it contains the runs het_xl" in fails_with(capsys, "report", tmp_path / "quickstart")


def test_files_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").write_text("[1, 2]\n")
    assert "line 1 is not a record" in fails_with(capsys, "report", run)
    (run / "metrics.jsonl").write_text("what?\n")
    assert "metrics.jsonl: line 1 cannot be read" in fails_with(capsys, "report", run)
    (run / "config.json").write_text("{")
    assert "config.json: cannot be read" in fails_with(capsys, "report", run)


def test_a_run_cannot_be_named_twice(seeds: Path, capsys: pytest.CaptureFixture[str]):
    run = seeds / "seed0" / "het"
    assert "is listed twice" in fails_with(capsys, "report", run, run)
    assert "is listed twice" in fails_with(capsys, "compare", run, "--against", run)


def test_a_page_that_would_write_over_a_configuration_is_refused(full: Path, capsys: pytest.CaptureFixture[str]):
    assert "config.html" in fails_with(capsys, "report", full, "--output", full / "config.html")
    assert ".html" in fails_with(capsys, "report", full, "--output", full / "page.json")


@pytest.mark.usefixtures("undrawn")
def test_groups_whose_evaluations_differ_are_reported_without_a_test(seeds: Path, tmp_path: Path):
    shutil.copytree(seeds, tmp_path / "seeds")
    het, det = groups(tmp_path / "seeds")
    record = det[0] / "evaluations" / "zero_shot_pets.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"settings": {"data": {"name": "pets"}, "samples": 8}}))
    page = page_of(*het, *det)
    assert "The two groups of runs are not compared: zero-shot pets: samples is not set in" in page
