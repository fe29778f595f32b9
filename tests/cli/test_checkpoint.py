"""The command ``lit-het checkpoint``: it lists, shows and verifies what a run has saved."""

import shutil

import jax.numpy as jnp
import pytest

from lit_het.cli.main import main
from lit_het.weights.native.saving import Checkpoints
from tests.weights.test_damage import cut, data_file, flip
from tests.weights.test_native import INFO, make_params, make_state


@pytest.fixture
def run(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for step in (1, 2):
            checkpoints.save(make_state(step, {"a": jnp.full((3, 4), 2.0), **make_params(step)}), INFO)
    return tmp_path


def test_a_step_without_its_parameters_is_damaged_and_the_others_are_shown(run, capsys):
    shutil.rmtree(run / "checkpoints" / "2" / "params")
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert "params is missing" in capsys.readouterr().out
    assert main(["checkpoint", "show", str(run)]) == 1


def test_steps_are_listed_with_what_a_kill_and_a_fault_have_left(run, capsys):
    folder = run / "checkpoints"
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp")
    (folder / "2").rename(folder / "2.damaged")
    assert main(["checkpoint", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [(line.split()[0], line.split("  ")[-1]) for line in lines] == [
        ("1", "complete"),
        ("2", "set aside: damaged"),
        ("3", "half written"),
    ]
    assert main(["checkpoint", "list", str(run / "none")]) == 1


def test_a_step_is_shown_with_its_arrays_norms_and_position(run, capsys):
    assert main(["checkpoint", "show", str(run), "--step", "1"]) == 0
    shown = capsys.readouterr().out
    assert "position: 48" in shown
    assert f"{48**0.5:>12.6g}  float32   [3, 4] params/a" in shown
    assert "int32     [] optimizer/" in shown
    assert main(["checkpoint", "show", str(run), "--step", "7"]) == 1
    assert "no complete checkpoint of step 7; it has steps: 1, 2" in capsys.readouterr().err


def test_verifying_ends_with_exit_code_1_and_a_table_of_what_is_damaged(run, capsys):
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert "whole: 2 checkpoints" in capsys.readouterr().out
    cut(data_file(run / "checkpoints" / "2", "params"))
    assert main(["checkpoint", "verify", str(run)]) == 1
    captured = capsys.readouterr()
    assert "  params/image_tower/mlp/up/kernel: " in captured.out
    assert "optimizer/" not in captured.out
    assert "1 of 2 checkpoints" in captured.err
    flip(run / "checkpoints" / "1" / "info" / "_strings.json", 100)
    assert main(["checkpoint", "verify", str(run), "--step", "1"]) == 1
    assert "info" in capsys.readouterr().out
