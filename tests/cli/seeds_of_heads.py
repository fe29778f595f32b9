"""Saved runs of two heads, three seeds each, and the message of a command that fails."""

import dataclasses
from pathlib import Path

import pytest

from lit_het.cli.main import main
from lit_het.eval.evaluation import Drawing
from tests.eval.report.saved_runs import DETERMINISTIC, write_run, zero_shot


def fails_with(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def write_seeds(root: Path) -> Path:
    """Three runs of two heads, without anything to draw, which takes seconds."""
    for seed in range(3):
        het, det = (
            dataclasses.replace(one, draw=Drawing) for one in (zero_shot(seed), zero_shot(seed, top1=0.3 + 0.02 * seed))
        )
        write_run(root / f"seed{seed}" / "het", [het], seed)
        write_run(root / f"seed{seed}" / "det", [det], seed, task=DETERMINISTIC)
    return root


def groups(seeds: Path) -> tuple[list[Path], list[Path]]:
    het, det = ([seeds / f"seed{seed}" / name for seed in range(3)] for name in ("het", "det"))
    return het, det
