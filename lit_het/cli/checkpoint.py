"""The arguments of ``lit-het checkpoint``."""

import argparse
from pathlib import Path
from typing import Any

# Imports of JAX and its friends wait until a subcommand runs.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    kinds = commands.add_parser(
        "checkpoint",
        allow_abbrev=False,
        help="list a run's checkpoints, look into one, and compare it with its checksums",
    ).add_subparsers(required=True, metavar="KIND")
    for name, command, text in (
        ("list", _list, "which steps were saved to the end, when, and how large; verify tells whether they are whole"),
        ("show", _show, "what a step holds: path, shape, type and norm of every array, and the info beside them"),
        ("verify", _verify, "read every array and compare it with its checksum; exit code 1 if one is damaged"),
    ):
        kind = kinds.add_parser(name, allow_abbrev=False, help=text)
        kind.add_argument("directory", type=Path, metavar="DIR", help="a run, or its folder of checkpoints")
        if command is not _list:
            which = "the newest" if command is _show else "all of them"
            kind.add_argument("--step", type=int, metavar="N", help=f"instead of {which}")
        kind.set_defaults(command=command, name=f"checkpoint {name}")


def _list(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.runs.inspection import list_checkpoints

    list_checkpoints(options.directory)


def _show(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.runs.inspection import show

    show(options.directory, options.step)


def _verify(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.runs.inspection import verify

    verify(options.directory, options.step)
