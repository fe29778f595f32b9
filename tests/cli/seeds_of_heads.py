"""Saved runs of two heads, three seeds each, and the message of a command that fails."""

from pathlib import Path

import pytest

from lit_het.cli.main import main
from tests.eval.report.saved_runs import DETERMINISTIC, write_run, zero_shot


def fails_with(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def write_seeds(root: Path) -> Path:
    """Three runs of two heads."""
    for seed in range(3):
        write_run(root / f"seed{seed}" / "het", [zero_shot(seed)], seed)
        write_run(root / f"seed{seed}" / "det", [zero_shot(seed, top1=0.3 + 0.02 * seed)], seed, task=DETERMINISTIC)
    return root


def groups(seeds: Path) -> tuple[list[Path], list[Path]]:
    het, det = ([seeds / f"seed{seed}" / name for seed in range(3)] for name in ("het", "det"))
    return het, det
