"""The arguments of ``lit-het checkpoint``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.errors import UserError

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    kinds = commands.add_parser(
        "checkpoint",
        allow_abbrev=False,
    ).add_subparsers(required=True, metavar="KIND")
    for name, command, text in (
        ("list", _list, "step, time and size of every checkpoint; use verify to check that they are intact"),
        ("show", _show, "path, shape, type and norm of every array of a step, and the info saved with them"),
        ("verify", _verify, "read every array and compare it with its checksum; exit code 1 if one is damaged"),
    ):
        kind = kinds.add_parser(name, allow_abbrev=False, help=text)
        kind.add_argument("directory", type=Path, metavar="DIR", help="a run, or its folder of checkpoints")
        if command is not _list:
            which = "the newest" if command is _show else "all"
            kind.add_argument("--step", type=int, metavar="N", help=f"default: {which}")
        kind.set_defaults(command=command, name=f"checkpoint {name}")


def _check(directory: Path) -> None:
    if not directory.is_dir():
        raise UserError(f"no checkpoints in {directory}; give the directory of a run that has saved one")


def _list(options: argparse.Namespace, _: list[str]) -> None:
    _check(options.directory)
    from lit_het.weights.native.inspection import list_checkpoints

    list_checkpoints(options.directory)


def _show(options: argparse.Namespace, _: list[str]) -> None:
    _check(options.directory)
    from lit_het.weights.native.inspection import show

    show(options.directory, options.step)


def _verify(options: argparse.Namespace, _: list[str]) -> None:
    _check(options.directory)
    from lit_het.weights.native.inspection import verify

    verify(options.directory, options.step)
