import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lit_het.eval.evaluation import Evaluation
from tests.cli.conftest import run_command
from tests.cli.seeds_of_heads import fails_with, groups, write_seeds
from tests.eval.report.saved_runs import all_kinds, write_run, zero_shot


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeds(tmp_path_factory.mktemp("seeds"))


def shown(capsys: pytest.CaptureFixture[str], ones: list[Path], others: list[Path]) -> str:
    """Returns what the command prints of two groups of runs."""
    run_command("compare", *ones, "--against", *others)
    return " ".join(capsys.readouterr().out.split())


def written(output: Path, ones: list[Path], others: list[Path]) -> dict[str, Any]:
    """Returns what the command writes as JSON of two groups of runs."""
    run_command("compare", *ones, "--against", *others, "--output", output)
    return json.loads(output.read_text())


def test_the_written_comparisons_hold_what_welch_gives_by_hand(seeds: Path, tmp_path: Path):
    het, det = groups(seeds)
    for suffix in ("csv", "md"):
        run_command("compare", *het, "--against", *det, "--output", tmp_path / f"table.{suffix}")
    found = written(tmp_path / "table.json", het, det)["figures"]["zero_shot/pets/top1"]
    # 0.50, 0.51, 0.52 against 0.30, 0.32, 0.34: means 0.51 and 0.32, variances 1e-4 and 4e-4, of 3 runs each.
    assert found["mean"] == pytest.approx(0.51)
    assert found["error"] == pytest.approx((1e-4 / 3) ** 0.5)
    assert found["difference"] == pytest.approx(0.19)
    assert found["t"] == pytest.approx(0.19 / (5e-4 / 3) ** 0.5)
    assert found["degrees"] == pytest.approx((5e-4 / 3) ** 2 / ((1e-4 / 3) ** 2 / 2 + (4e-4 / 3) ** 2 / 2))
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = {row["figure"]: row for row in csv.DictReader(file)}
    assert float(rows["zero_shot/pets/top1"]["p"]) == found["p"]
    assert rows["zero_shot/pets/ece"]["p"] == ""
    assert rows["zero_shot/pets/ece"]["untested"] == "equal"
    markdown = (tmp_path / "table.md").read_text()
    assert "| top-1 accuracy | 51.0% ± 0.6 | 32.0% ± 1.2 | **+19.0%** |" in markdown


def test_the_comparison_counts_its_tests_and_those_that_survive_holm(seeds: Path, capsys: pytest.CaptureFixture[str]):
    text = shown(capsys, *groups(seeds))
    assert "3 runs against 3: 1 of 1 tested figures differ at p < 0.05" in text
    assert "1 is significant after Holm's correction. 6 have no test." in text


def compared(tmp_path: Path, **changes: tuple[list[float], list[float]]) -> dict[str, Any]:
    """The comparison of two groups of runs, with some figures of each run."""
    ones, others = ([tmp_path / f"{group}{seed}" for seed in range(3)] for group in ("a", "b"))
    for group, runs in enumerate((ones, others)):
        for seed, run in enumerate(runs):
            write_run(run, [zero_shot(0, **{name.replace("__", "/"): of[group][seed] for name, of in changes.items()})])
    return written(tmp_path / "table.json", ones, others)


def test_ranks_of_calibrated_predictions_are_those_of_plain_ones_and_not_compared_again(tmp_path: Path):
    ranks = {f"calibrated__{name}": ([0.1, 0.2, 0.3], [0.4, 0.5, 0.7]) for name in ("top1", "mean_class_recall")}
    found = compared(tmp_path, **ranks, calibrated__nll=([1.0, 1.1, 1.2], [1.5, 1.6, 1.8]))
    calibrated = {name.rpartition("/")[2] for name in found["figures"] if "/calibrated/" in name}
    assert calibrated == {"nll", "ece", "temperature_factor"}


def test_a_figure_that_equals_another_in_every_run_is_tested_once(tmp_path: Path):
    values = ([0.1, 0.2, 0.3], [0.4, 0.5, 0.7])
    summed_otherwise = ([value * (1 + 1e-15) for value in values[0]], values[1])
    found = compared(tmp_path, top1=values, mean_class_recall=summed_otherwise, brier=(values[0], [0.4, 0.5, 0.6]))
    assert "zero_shot/pets/mean_class_recall" not in found["figures"]
    assert "of 2 tested figures" in found["verdict"]
    told = "another figure has the same value in every run: zero_shot/pets/mean_class_recall (zero_shot/pets/top1)."
    assert told in found["remarks"][-1]


def test_a_figure_that_is_the_same_in_both_groups_is_called_equal_and_not_tested(tmp_path: Path):
    found = compared(tmp_path, top1=([0.1, 0.2, 0.3], [0.1, 0.2, 0.3]), nll=([1.0, 1.1, 1.2], [1.5, 1.6, 1.8]))
    assert found["figures"]["zero_shot/pets/top1"]["untested"] == "equal"
    assert "of 1 tested figures" in found["verdict"]


def test_neither_settings_nor_single_members_of_ensembles_are_compared(tmp_path: Path):
    one, other = (write_run(tmp_path / name, all_kinds()) for name in ("a", "b"))
    figures = written(tmp_path / "table.json", [one], [other])["figures"]
    assert {"ensemble/pets/joint_top1", "ensemble/pets/kl", "linear_probe/pets/top1"} <= set(figures)
    assert not [name for name in figures if "member_" in name or "best/" in name]


def test_a_comparison_of_one_group_or_into_an_unknown_kind_of_file_is_refused_in_one_line(
    seeds: Path, capsys: pytest.CaptureFixture[str]
):
    (het, *_), (det, *_) = groups(seeds)
    assert "compare needs two groups of runs: RUN_DIR ... --against" in fails_with(capsys, "compare", het)
    message = fails_with(capsys, "compare", het, "--against", det, "--output", "table.xlsx")
    assert "must end in .md, .csv, .json" in message


def test_single_runs_are_compared_without_a_test(seeds: Path, capsys: pytest.CaptureFixture[str]):
    (het, *_), (det, *_) = groups(seeds)
    assert "no test (a test needs two runs in each group)" in shown(capsys, [het], [det])


def test_seeds_may_have_data_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = {"data": {"directory": "/data/a/pets"}, "near": ["a"], "others": ["r=/data/a/r"]}
    runs = [write_run(tmp_path / f"run{seed}", [zero_shot()], settings=settings) for seed in range(4)]
    elsewhere = {"data": {"directory": "/elsewhere/pets/"}, "near": ["x/a"], "others": ["r=/elsewhere/r"]}
    moved = write_run(tmp_path / "moved", [zero_shot()], settings=elsewhere)
    text = shown(capsys, [*runs[:2], moved], runs[2:])
    assert "Runs were evaluated on different folders of the same name: pets" in text


def deep_ensemble(folder: Path, *members: str) -> Path:
    found = Evaluation("deep_ensemble", "pets", {"joint_top1": 0.5})
    settings = {"samples": 0, "checkpoints": [f"{one} at step 5" for one in members], "weights": [len(folder.name), 1]}
    return write_run(folder, [found], settings=settings)


def test_deep_ensembles_of_other_models_are_compared_but_not_those_of_more_members(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first, other = deep_ensemble(tmp_path / "a", "a", "x"), deep_ensemble(tmp_path / "other", "b", "y")
    assert "deep_ensemble/pets/joint_top1" in written(tmp_path / "table.json", [first], [other])["figures"]
    message = fails_with(capsys, "compare", first, "--against", deep_ensemble(tmp_path / "b", "b", "y", "z"))
    assert "deep-ensemble pets: checkpoints is 2 in a and 3 in b" in message


def test_evaluations_with_other_settings_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, other = (
        write_run(
            tmp_path / name, [zero_shot()], settings={"data": {"batch_size": size}, "names": {"prompts": prompts}}
        )
        for name, size, prompts in (("first", 1, "set"), ("other", 2, "x.txt"))
    )
    message = fails_with(capsys, "compare", first, "--against", other)
    assert "zero-shot pets: names.prompts is set in first and x.txt in other" in message


def test_runs_with_no_evaluation_in_common_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = write_run(tmp_path / "a", [all_kinds()[1]]), write_run(tmp_path / "b", [all_kinds()[2]])
    assert "no figure is in all of these runs" in fails_with(capsys, "compare", first, "--against", second)
    empty = write_run(tmp_path / "c", [])
    assert "has no evaluations" in fails_with(capsys, "compare", first, "--against", empty)


def test_other_steps_and_evaluations_left_out_are_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = write_run(tmp_path / "first", [zero_shot()], step=50)
    second = write_run(tmp_path / "second", [zero_shot(), all_kinds()[1]], step=60)
    text = shown(capsys, [first], [second])
    assert "Checkpoints were evaluated at different steps: first 50, second 60." in text
    assert "Left out because not all runs have them: retrieval coco." in text
