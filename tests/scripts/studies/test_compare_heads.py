"""The comparison of heads shares everything but its settings with the sweep over τ."""

import dataclasses
import json

import pytest

from lit_het.configs import experiment
from lit_het.errors import UserError
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature
from lit_het.search import grid_runs, temperatures
from lit_het.search.grid import Result
from scripts.studies.compare_heads import HEADS, main
from tests.scripts.conftest import classifier_options, refusal


@pytest.fixture
def classifier(config_file, data):
    return temperatures.load_classifier(classifier_options(config_file, data))


def test_every_head_has_a_fixed_and_a_learned_temperature(classifier, tmp_path):
    planned = temperatures.plan(classifier, HEADS, [1.0], (0.05, 5.0), [0], tmp_path)
    assert [one.config.task.head.temperature for one in planned] == [
        FixedTemperature(1.0),
        BoundedTemperature(0.05, 5.0),
    ] * len(HEADS)
    assert [type(one.config.task.head) for one in planned[::2]] == [type(head) for head in HEADS.values()]
    assert [one.name for one in planned[:2]] == ["DET_tau1_seed0", "DET_learned_seed0"]


FIGURES = {"supervised/held_out/top1": 0.5, "supervised/held_out/ece": 0.25}


def write_metrics(config, **_):
    config.run_dir.mkdir(parents=True)
    found = {"train/loss": 1.0, "train/temperature": 2.0, "supervised/held_out/nll": 2.0, **FIGURES}
    (config.run_dir / "metrics.jsonl").write_text(json.dumps({"step": 2, **found}) + "\n")


@pytest.mark.slow
def test_heads_are_compared_in_their_order(config_file, data, tmp_path, capsys, monkeypatch):
    flags = ["--config", config_file, "--held-out", data / "train", "--output", tmp_path, "--length", 2]
    arguments = [str(flag) for flag in [*flags, "--seeds", 0, "--batch-size", 16, "--heads"]]
    monkeypatch.setattr(grid_runs, "train_unless_done", write_metrics)  # the sweep over τ trains
    for head in ("HET-XL", "DET"):
        assert main([*arguments, head]) == 0
    text = (tmp_path / "table.md").read_text()
    places = [text.index(f"| {name}, τ {kind} |") for name in ("DET", "HET-XL") for kind in ("= 1", "learned")]
    assert places == sorted(places), "the table holds all runs that were found, not only those of the last start"
    results = {path.stem: grid_runs.read_result(path) for path in (tmp_path / "results").iterdir()}
    assert results["DET_learned_seed0"].num_parameters < results["HET-XL_learned_seed0"].num_parameters
    assert text in capsys.readouterr().out


def test_an_unknown_head_is_one_line(capsys):
    line = refusal(capsys, main, "--held-out", "nowhere", "--heads", "DET", "HOT")
    assert line.endswith("--heads HOT is unknown; choose from DET, HET, HET-H, HET-XL, HET-XL-unshared")


def write_results(config, output, *results):
    (output / "results").mkdir()
    for head, tau, seed, nll, shown_tau in results:
        figures = {"train/temperature": shown_tau, "supervised/held_out/nll": nll, **FIGURES}
        seeded = dataclasses.replace(config, seed=seed)
        setting = {"head": head, "temperature": tau}
        result = Result(setting, seed, figures, 1234, 3.0, "cpu", experiment.fields(seeded))
        (output / "results" / f"{head}_{tau}_seed{seed}.json").write_text(json.dumps(dataclasses.asdict(result)))


def test_rows_stand_in_order_and_join_seeds(classifier, tmp_path):
    learned = [("DET", "learned", seed, 1.0, 0.5 + seed / 10) for seed in (0, 1)]
    fixed = [("DET", "3", 1, 4.0, 3.0), ("DET", "3", 0, 2.0, 3.0), ("DET", "0.4", 0, 2.0, 0.4)]
    write_results(classifier, tmp_path, *learned, *fixed, ("HET", "0.1", 0, 1.0, 0.1))
    rows = temperatures.compare(classifier, [], ["DET", "HET"], tmp_path)
    assert [row.setting["temperature"] for row in rows] == ["0.4", "3", "learned", "0.1"]
    assert [row.seeds for row in rows] == [(0,), (0, 1), (0, 1), (0,)]
    assert rows[1].figures[temperatures.NLL].mean == 3.0
    assert rows[1].figures[temperatures.NLL].error == pytest.approx(1.0)
    assert rows[2].figures[temperatures.TEMPERATURE].mean == pytest.approx(0.55)
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0] == "| setting | τ | NLL | Prec@1 | ECE | parameters | seeds |"
    assert lines[1] == "|" + "---|".replace("---", " --- ") * 7
    assert lines[3] == "| DET, τ = 3 | 3 | 3.000 ± 1.000 | 0.500 ± 0.000 | 0.250 ± 0.000 | 1,234 | 0, 1 |"
    assert "| 0.550 ± 0.050 |" in lines[4], "a learned temperature is shown with its spread"


def test_noisy_metrics_replace_those_without_noise():
    figures = {temperatures.NLL: 1.0, "supervised/held_out/noisy/nll": 2.0}
    result = Result({}, 0, figures, 1, 1.0, "cpu", {})
    assert temperatures.with_noise(result).figures[temperatures.NLL] == 2.0


def test_runs_of_different_experiments_never_share_a_table(classifier, tmp_path):
    write_results(classifier, tmp_path, ("DET", "1", 0, 2.0, 1.0), ("DET", "1", 1, 2.0, 1.0))
    assert temperatures.compare(classifier, [], ["DET"], tmp_path)
    other = dataclasses.replace(classifier, average_decay=0.5)
    with pytest.raises(UserError, match=r"DET_1_seed0\.json was written with average_decay = None, .* 0\.5.*--output"):
        temperatures.compare(other, [], ["DET"], tmp_path)
