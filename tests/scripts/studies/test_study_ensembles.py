"""The studies of ensembles: their runs can be built, and their tables follow from the measured figures."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from scripts.studies import harness, study_ensembles, study_keys_of_members
from scripts.studies.ensembles.methods import METHODS, ORDERINGS, downstream
from tests.scripts.conftest import refusal

TRAINED = [name for name, method in METHODS.items() if not method.runs]
SETTINGS = {"steps": 2000, "learning_rate": 5e-3, "typeface": None}
FIGURES = dict.fromkeys(study_ensembles.FIGURES, 0.5)


@pytest.mark.parametrize("name", TRAINED)
def test_every_method_is_a_run_that_can_be_built(tmp_path, name):
    config = downstream(name, tmp_path / "data", tmp_path / "upstream", tmp_path / name, 3, 10, 1e-3)
    assert config.task.build().num_predictions == {"e3_1_4": 4}.get(name, 2 if _has_two(name) else 1)
    assert config.seed == config.data.seed == 3


def _has_two(name):
    return name.startswith(("e3", "tiling", "overlap", "batch", "multi", "heads", "mimo", "joint", "permuted"))


@pytest.mark.parametrize("form", study_keys_of_members.FORMS, ids=lambda form: form.title)
@pytest.mark.parametrize("head", study_keys_of_members.HEADS)
def test_every_form_of_a_locked_e3_is_a_run_that_can_be_built(tmp_path, form, head):
    config = study_keys_of_members.configuration(form, head, tmp_path, tmp_path / "data", 3, 10)
    assert config.task.build().num_predictions == (2 if form.members == "apart" else 1)


def test_noise_is_averaged_within_each_member():
    # Two members with the probabilities 0.1 and 0.9, and as much more or less in their two samples.
    p = np.array([[[0.05], [0.85], [0.15], [0.95]]])
    found = np.exp(study_ensembles.over_noise(np.log(p), 2))
    np.testing.assert_allclose(found, [[[0.1], [0.9]]])


def write(tmp_path, seed, found):
    for name, nll in found.items():
        content = {"settings": SETTINGS, "figures": {**FIGURES, "joint_nll": nll}}
        harness.write_json(tmp_path / "results" / f"{name}_seed{seed}.json", content)


def table_of(tmp_path, *methods):
    flags = ["--output", str(tmp_path), "--table", "--methods", *methods]
    assert study_ensembles.main(flags) == 0
    return (tmp_path / "table.md").read_text()


def test_tables_have_differences_from_the_v_moe_and_the_papers_pairs(tmp_path):
    for seed, noise in enumerate((-0.002, -0.001, 0.001, 0.002)):
        found = {"vmoe_2": 1.0 + noise, "e3_1_2": 0.9 - noise, "vmoe_upstream": 0.8 + noise, "vit": 2.0 * seed}
        write(tmp_path, seed, found if seed else {**found, "e3_het": 0.5})
    table = table_of(tmp_path, *METHODS)
    assert "| e3, K = 1, M = 2 | 0.900 ± 0.001 (-0.100 ± 0.002 * W)" in table
    assert "| V-MoE, K = 1, 2 upstream runs | 0.800 |" in table, "every run is in two of them"
    assert "HET-XL" not in table, "not measured for every seed"
    assert "| Table 5 | e3, K = 1, M = 2 - V-MoE, K = 2 | -0.016 | -0.100 ± 0.002 W |" in table
    assert "| Table 5 | V-MoE, K = 2 - ViT | -0.050 |" in table
    assert "partitioning" not in table


def test_pairs_are_of_methods_that_are_measured():
    names = {name for _, *pair, printed in ORDERINGS for name in pair if not math.isnan(printed)}
    assert names <= {name for name, method in METHODS.items() if method.title}


def test_methods_are_measured_once_with_runs_of_their_own_and_of_the_next_seed(tmp_path, monkeypatch):
    trained, measured = [], []

    def members(run_dir, *_):
        measured.append(run_dir.relative_to(tmp_path))
        return np.log(np.full((4, 1, 2), 0.5)), np.zeros(4, int)

    monkeypatch.setattr(study_ensembles, "write_data", lambda *_: None)
    monkeypatch.setattr(study_ensembles, "upstream", lambda *_: SimpleNamespace(run_dir=tmp_path))
    monkeypatch.setattr(study_ensembles, "downstream", lambda name, *_: name)
    monkeypatch.setattr(harness, "trained", trained.append)
    monkeypatch.setattr(study_ensembles, "members", members)
    flags = ["--output", str(tmp_path), "--seeds", "3", "7", "--methods", "vit", "vmoe_upstream"]
    assert study_ensembles.main(flags) == 0
    assert trained.count("vit") == trained.count("vmoe_1") == 2
    assert measured[:3] == [Path("seed3/vit"), Path("seed3/vmoe_1"), Path("seed7/vmoe_1")]
    table = (tmp_path / "table.md").read_text()
    trained.clear()
    assert study_ensembles.main(flags) == 0
    assert not trained
    assert (tmp_path / "table.md").read_text() == table


def test_figures_of_other_settings_are_refused(tmp_path, capsys):
    write(tmp_path, 0, {"vit": 1.0})
    line = refusal(capsys, study_ensembles.main, "--output", tmp_path, "--table", "--methods", "vit", "--steps", 7)
    assert "'steps': 2000" in line
    assert "give another --output" in line


def test_a_study_that_was_not_begun_has_no_table(tmp_path, capsys):
    assert "start without --table" in refusal(capsys, study_ensembles.main, "--output", tmp_path, "--table")


def test_keys_of_members_are_compared_with_the_v_moe_of_the_same_head(tmp_path):
    for number, head in enumerate(study_keys_of_members.HEADS):
        for place, form in enumerate(study_keys_of_members.FORMS):
            for seed in range(3):
                value = number + seed + 0.1 * place + 0.001 * seed * place
                figures = dict.fromkeys(study_keys_of_members.FIGURES.values(), value)
                path = harness._path(tmp_path, f"{form.title}, {head}", seed)
                harness.write_json(path, {"settings": {"steps": 800}, "figures": figures})
    assert study_keys_of_members.main(["--output", str(tmp_path), "--seeds", "0", "1", "2", "--table"]) == 0
    rows = (tmp_path / "keys_of_members.md").read_text().splitlines()[2:]
    assert [row.count("(") for row in rows] == [0, 7, 7, 7] * 2
    assert rows[1].startswith("| e3, averaged, deterministic | 1.101 ± 0.578 (0.101 ± 0.001 *) |")
