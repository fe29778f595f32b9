"""The study of rivals: its runs can be built, and its tables follow from the measured figures."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.studies import harness, study_rivals
from scripts.studies.rivals.methods import ALL, FIRST, configuration

TRAINED = [name for name, method in ALL.items() if not isinstance(method.head, tuple)]


@pytest.mark.parametrize("name", TRAINED)
def test_every_method_is_a_run_that_can_be_built(tmp_path, name):
    config = configuration(name, tmp_path, "clean", "txt", 3, 10)
    task = config.task.build()
    # A head on finished towers trains nothing else.
    assert ("text_tower" in task.trained) == (ALL[name].towers_of is None)
    assert config.run_dir == tmp_path / "clean" / name
    assert config.seed == config.data.seed == 3 + ALL[name].seed


def measured(nll: float, kind: str) -> dict[str, float]:
    found = {f"errors/{name}/max_probability": 0.7 for name in study_rivals.SETS}
    for name in study_rivals.SETS:
        for part in {"quiet", kind}:
            figures = ("top1", "nll", "fitted_nll", "ece", "fitted_ece", "aurc")
            found |= {f"{name}/{part}/{figure}": nll for figure in figures}
    return found | {"cost/quiet_microseconds": 20.0, "cost/sampled_microseconds": 90.0}


def write(folder: Path, seed: int, found: Mapping[str, Mapping[str, float]]) -> None:
    for title, figures in found.items():
        path = folder / "results" / f"clean_{title}_seed{seed}.json"
        harness.write_json(path, {"settings": {"steps": 800}, "figures": {title: figures}})


FLAGS = ("--conditions", "clean", "--table", "--output")


def test_tables_have_means_and_differences_from_the_first_method(capsys, tmp_path):
    for seed in range(4):
        found = {FIRST: measured(1.0 + seed, "quiet"), "HET-XL": measured(0.9 + seed - 0.001 * seed, "sampled")}
        write(tmp_path, seed, found)
    assert study_rivals.main([*FLAGS, str(tmp_path)]) == 0
    table = (tmp_path / "clean_differences.md").read_text().splitlines()
    assert table[0] == "|  | deterministic | HET-XL |"
    [row] = [line for line in table if line.startswith("| held_out_typeface/best/fitted_nll ")]
    # The mean of the samples is taken where there is one; the differences are -0.1, -0.101, ...
    assert row.endswith("(-0.102 ± 0.001 *) |")
    assert "HET-XL has the lowest NLL" in (tmp_path / "clean.html").read_text()


def test_a_method_that_one_seed_lacks_is_left_out(tmp_path):
    for seed in range(2):
        write(tmp_path, seed, {name: measured(1.0, "quiet") for name in [FIRST, "HET-XL"][: 2 - seed]})
    assert study_rivals.main([*FLAGS, str(tmp_path)]) == 0
    assert (tmp_path / "clean_differences.md").read_text().splitlines()[0] == "|  | deterministic |"


class Measuring:
    """In place of a benchmark."""

    def measure(self, title, runs, *, baselines):
        yield title, measured(1.0, "quiet")
        if baselines:
            yield f"{title}, augmented", measured(2.0, "quiet")


@pytest.mark.slow
def test_other_settings_are_compared_on_a_typeface_that_no_seed_holds_out(monkeypatch, tmp_path):
    prepared, trained = set(), []

    def train(name, *_):
        trained.append(name)
        return {"seconds": 3.0, "megabytes": float(len(trained))}

    monkeypatch.setattr(study_rivals, "prepare", lambda _, seed, style: prepared.add((seed, style)))
    monkeypatch.setattr(study_rivals, "train", train)
    monkeypatch.setattr(study_rivals, "benchmark", lambda _: Measuring())
    flags = ["--output", str(tmp_path), "--candidates", "--conditions", "clean"]
    assert study_rivals.main(flags) == 0
    [(seed, style)] = prepared
    assert seed not in range(5)
    assert style not in study_rivals.CHARACTER_STYLES
    # Each stands beside the setting that the study has, and is trained once.
    assert {"prob_vlm", "prob_vlm_0.1", "prob_vlm_0.3", "bayes_vlm", "bayes_vlm_10"} <= set(trained)
    assert len({ALL[name].title for name in trained}) == len(trained)
    values = json.loads((tmp_path / "clean.json").read_text())
    assert f"{FIRST}, augmented" in values
    assert values[FIRST]["cost/training_seconds"] == {str(seed): 3.0}
    trained.clear()
    assert study_rivals.main(flags) == 0
    assert not trained


def test_an_ensemble_costs_what_its_members_do(monkeypatch, tmp_path):
    monkeypatch.setattr(study_rivals, "prepare", lambda *_: None)
    monkeypatch.setattr(study_rivals, "train", lambda *_: {"seconds": 3.0, "megabytes": 5.0})
    monkeypatch.setattr(study_rivals, "benchmark", lambda _: Measuring())
    flags = ["--output", str(tmp_path), "--conditions", "clean", "--seeds", "1", "--methods", *study_rivals.ENSEMBLE]
    assert study_rivals.main(flags) == 0
    found = json.loads((tmp_path / "clean.json").read_text())["ensemble of 3 text towers"]
    assert found["cost/training_seconds"] == {"1": 9.0}
    assert found["cost/training_megabytes"] == {"1": 5.0}
