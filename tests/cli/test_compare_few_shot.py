"""``lit-het compare --few-shot``: means over sets and upstream settings, as HET-XL Table 22."""

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from lit_het.eval.evaluation import Evaluation
from tests.cli.conftest import run_command
from tests.cli.seeds_of_heads import fails_with
from tests.eval.report.saved_runs import DETERMINISTIC, write_run, zero_shot

SETTINGS = ("vit_1_epoch", "vit_7_epochs", "resnet_7_epochs")
SETS = ("pets", "cars")
# Of each method, setting, set and number of shots.
VALUES = np.random.default_rng(0).uniform(0.3, 0.9, (2, 3, 2, 2))


def evaluation(name: str, values: np.ndarray) -> Evaluation:
    return Evaluation("few_shot", name, {"1_shot": float(values[0]), "5_shot": float(values[1])})


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    """Runs of two heads at three settings, the first of them with two seeds whose mean is that of the others' table."""
    root, groups = tmp_path_factory.mktemp("methods"), []
    for method, head in enumerate(("det", "het_xl")):
        runs = []
        for number, setting in enumerate(SETTINGS):
            task = {**DETERMINISTIC, "image_tower": setting, "head": head}
            for seed, apart in ((0, 0.05), (1, -0.05)) if number == 0 else ((0, 0.0),):
                found = [evaluation(*one) for one in zip(SETS, VALUES[method, number] + apart, strict=True)]
                # Means over sets, which few-shot saves too, are no sets; other evaluations do not count.
                found += [evaluation("mean", np.zeros(2)), *([zero_shot()] if seed else [])]
                runs.append(write_run(root / f"{head}_{setting}_{seed}", found, seed, task=task))
        groups.append(runs)
    return groups[0], groups[1]


def test_both_methods_have_their_means_and_errors_over_settings_and_sets(methods, tmp_path, capsys):
    det, het = methods
    for suffix in ("json", "csv", "md"):
        run_command("compare", *het, "--against", *det, "--few-shot", "--output", tmp_path / f"table.{suffix}")
    said, found = capsys.readouterr().out, json.loads((tmp_path / "table.json").read_text())
    assert (set(found["sets"]), list(found["runs"])) == (set(SETS), ["het_xl", "det"])
    with (tmp_path / "table.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    rows = [(method, shots) for method in (1, 0) for shots in (0, 1)]
    for (method, shots), row, line in zip(rows, found["means"], lines, strict=True):
        table = VALUES[method, :, :, shots]
        assert (row["group"], row["settings"], row["shots"]) == (("det", "het_xl")[method], 3, (1, 5)[shots])
        assert row["mean"] == pytest.approx(table.mean()) == float(line["mean"])
        assert row["error_over_settings"] == pytest.approx(table.mean(axis=1).std(ddof=1) / 3**0.5)
        assert row["error_over_sets"] == pytest.approx(table.mean(axis=0).std(ddof=1) / 2**0.5)
        assert f"{row['mean']:.2%} ± {100 * row['error_over_settings']:.2f}" in " ".join(said.split())
    assert "Mean few-shot accuracy over 2 sets and all settings" in said
    assert "| het\\_xl, 3 settings |" in (tmp_path / "table.md").read_text()


def test_one_group_of_one_setting_has_an_error_over_sets_alone(methods, tmp_path):
    det, _ = methods
    run_command("compare", *det[:2], "--few-shot", "--output", tmp_path / "table.json")
    row = json.loads((tmp_path / "table.json").read_text())["means"][0]
    assert (row["group"], row["settings"], row["error_over_settings"]) == ("all runs", 1, None)
    assert row["mean"] == pytest.approx(VALUES[0, 0, :, 0].mean()), "of two seeds"
    assert row["error_over_sets"] == pytest.approx(VALUES[0, 0, :, 0].std(ddof=1) / 2**0.5)


def test_runs_with_other_sets_shots_or_settings_are_refused_in_one_line(methods, tmp_path, capsys):
    first = methods[0][0]

    def refused(*found: Evaluation, **settings: object) -> str:
        number = len(list(tmp_path.iterdir()))
        run = write_run(tmp_path / f"other{number}", [*found], settings=settings or None)
        return fails_with(capsys, "compare", first, "--against", run, "--few-shot")

    pets, cars = (evaluation(name, VALUES[0, 0, 0]) for name in SETS)
    said = refused(pets, dataclasses.replace(cars, name="birds"))
    assert "det_vit_1_epoch_0 has few-shot accuracies of 2 sets and other0 of 2; of birds, cars only one has" in said
    said = refused(pets, dataclasses.replace(cars, figures={"1_shot": 0.5, "10_shot": 0.5}))
    assert "has accuracies of cars at 1, 5 shots, and other1 of cars at 1, 10; evaluate all with the same --s" in said
    assert "few-shot cars: fit is not set in det_vit_1_epoch_0 and 3 in other2" in refused(
        pets, cars, fit=3, data={"name": "cars"}
    )
    assert "other3 has no few-shot evaluation; run lit-het few-shot --checkpoint first" in refused(zero_shot())
    nameless = write_run(tmp_path / "nameless", [pets, cars])
    (nameless / "config.json").unlink()
    said = fails_with(capsys, "compare", first, nameless, "--few-shot")
    assert "nameless has no config.json, which tells settings from seeds; leave the run out" in said
    assert "name must end in .md, .csv, .json" in fails_with(
        capsys, "compare", first, "--few-shot", "--output", "table.html"
    )
