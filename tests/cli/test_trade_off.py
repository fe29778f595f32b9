"""``lit-het compare --pareto`` and ``--gains``."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from lit_het.apps import trade_off
from lit_het.cli.main import main
from lit_het.configs.parsing import parse_config
from lit_het.eval.evaluation import write_record
from lit_het.eval.pareto import Cost
from lit_het.eval.saved_runs import SavedRun
from lit_het.training import directory
from tests.cli.seeds_of_heads import fails_with
from tests.eval.report.outline import Outline
from tests.eval.report.saved_runs import all_kinds, zero_shot

NLL = "zero_shot/pets/nll"


def write(folder: Path, model: str, seed: int, nll: float) -> Path:
    """A run of a published model, as training writes its configuration, with an evaluation."""
    flags = ["--seed", str(seed), "--run-dir", str(folder)]
    config = parse_config(Path(f"configs/fine_tune_experts.py:model={model},size=s32"), flags)
    folder.mkdir(parents=True)
    directory.write(folder, config, None)
    write_record(zero_shot(seed, nll=nll), folder, 10, {"data": {"name": "pets"}})
    return folder


@pytest.fixture(autouse=True, scope="module")
def counted_once() -> Iterator[None]:
    """Operations of a setting are counted once: a step takes seconds to trace."""
    costs, count = {}, trade_off._cost

    def cost(run: SavedRun) -> Cost:
        setting = run.directory.name.partition("_")[0]
        if setting not in costs:
            costs[setting] = count(run)
        return costs[setting]

    with mock.patch.object(trade_off, "_cost", cost):
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for seed, (vit, vmoe) in enumerate([(0.9, 0.8), (1.1, 0.9)]):
        write(root / f"vit_s{seed}", "vit", seed, vit)
        write(root / f"vmoe_s{seed}", "vmoe", seed, vmoe)
    return root


@pytest.mark.slow
def test_points_have_the_operations_of_the_plan_and_errors_over_seeds(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for suffix in ("json", "csv", "md", "html"):
        given = [*sorted(runs.iterdir()), "--pareto", NLL, "--output", tmp_path / f"front.{suffix}"]
        assert main(["compare", *map(str, given)]) == 0
    told = capsys.readouterr()
    assert "counting operations: 2/2 settings" in told.err
    assert "bold: the Pareto front" in told.out
    vit, vmoe = json.loads((tmp_path / "front.json").read_text())
    # e3 Table 20 has 24.01 and 31.66.
    assert (vit["name"], vit["gflop"], vit["dispatch_gflop"]) == ("vit", pytest.approx(23.84, abs=0.01), 0)
    assert (vmoe["name"], vmoe["gflop"]) == ("vmoe", pytest.approx(31.39, abs=0.01))
    assert vmoe["dispatch_gflop"] == pytest.approx(4.6, abs=0.1)
    assert (vit["mean"], vmoe["mean"]) == (pytest.approx(1.0), pytest.approx(0.85))
    assert (vit["error"], vmoe["error"]) == (pytest.approx(0.1), pytest.approx(0.05))
    assert vit["in_front"]
    assert vmoe["in_front"]
    with (tmp_path / "front.csv").open(newline="") as file:
        assert [row["runs"] for row in csv.DictReader(file)] == ["vit_s0 vit_s1", "vmoe_s0 vmoe_s1"]
    assert "| vmoe | 2 | 31.39 | 4.615 | **0.850 ± 0.050** |" in (tmp_path / "front.md").read_text()
    page = (tmp_path / "front.html").read_text()
    assert Outline(page).titles == [NLL]
    assert "GFLOP of training, per example" in page


def test_groups_of_runs_are_taken_together(runs: Path, tmp_path: Path):
    output = tmp_path / "front.json"
    vit, vmoe = (sorted(map(str, runs.glob(f"{model}_*"))) for model in ("vit", "vmoe"))
    assert main(["compare", *vmoe, "--against", *vit, "--pareto", NLL, "--output", str(output)]) == 0
    assert [point["name"] for point in json.loads(output.read_text())] == ["vit", "vmoe"]


def test_gains_are_those_over_the_second_group(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    vit, vmoe = (sorted(map(str, runs.glob(f"{model}_*"))) for model in ("vit", "vmoe"))
    for suffix in ("json", "csv", "md"):
        output = tmp_path / f"gains.{suffix}"
        assert main(["compare", *vmoe, "--against", *vit, "--gains", NLL, "--output", str(output)]) == 0
    assert "vmoe over vit" in capsys.readouterr().out
    (gain,) = json.loads((tmp_path / "gains.json").read_text())
    assert gain["improvement"] == pytest.approx(0.15)
    assert gain["improvement_error"] == pytest.approx((0.05**2 + (0.85 * 0.1) ** 2) ** 0.5)
    assert gain["normalized"] is None  # one size has no curve
    assert "| vmoe over vit | 31.39 | 23.84 | +15.00% ± 9.86 | – |" in (tmp_path / "gains.md").read_text()
    assert (tmp_path / "gains.csv").read_text().splitlines()[1].startswith("vmoe,vit,31.39")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pareto", "zero_shot/cars/nll"], "no run has the figure zero_shot/cars/nll; they have zero_shot/pets/nll"),
        (["--pareto", NLL, "zero_shot/pets/top1"], "cannot share an axis"),
        (["--pareto", NLL, "--output", "x.png"], "--output x.png: its name must end in .html, .md, .csv, .json"),
        (["--gains", NLL], "compare needs two groups of runs"),
        (["--against", "VIT", "--gains", "zero_shot/pets/top1"], "name a figure that is better if it is lower"),
        (["--against", "VIT", "--gains", NLL, "--output", "x.html"], "its name must end in .md, .csv, .json"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(runs: Path, arguments, message, capsys: pytest.CaptureFixture[str]):
    given = [runs / "vit_s1" if argument == "VIT" else argument for argument in arguments]
    assert message in fails_with(capsys, "compare", runs / "vit_s0", *given)


def test_both_ways_at_once_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]):
    both = ["compare", str(runs / "vit_s0"), "--pareto", NLL, "--gains", NLL]
    with pytest.raises(SystemExit):
        main(both)
    assert "not allowed with argument --pareto" in capsys.readouterr().err


def test_runs_without_a_readable_configuration_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "run"
    folder.mkdir()
    write_record(all_kinds()[0], folder, 10, {})
    assert f"{folder}/config.json is missing" in fails_with(capsys, "compare", folder, "--pareto", NLL)
    (folder / "config.json").write_text('{"seed": 0}')
    assert "does not fit this version of lit-het" in fails_with(capsys, "compare", folder, "--pareto", NLL)
    (folder / "config.json").write_text("{")
    assert "config.json: cannot be read" in fails_with(capsys, "compare", folder, "--pareto", NLL)
