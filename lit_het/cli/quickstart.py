"""The arguments of ``lit-het quickstart``."""

import argparse
import os
from pathlib import Path
from typing import Any

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    quickstart = commands.add_parser(
        "quickstart",
        allow_abbrev=False,
        description="Renders characters in many typefaces, trains an image tower on them, locks it, trains text towers "
        "with a deterministic and with a HET-XL head, evaluates both zero-shot and writes a report. "
        "The same command continues an interrupted quickstart.",
    )
    quickstart.add_argument("--run-dir", type=Path, default=Path("runs/quickstart"), help="default: %(default)s")
    quickstart.add_argument("--seed", type=int, default=0, help="seed of data order, initialisation and noise")
    quickstart.add_argument("--fast", action="store_true", help="fewer characters and steps, only wrong captions")
    quickstart.set_defaults(command=_quickstart, name="quickstart", if_stopped="the same command continues")


def _quickstart(options: argparse.Namespace, _: list[str]) -> None:
    # Small models are compiled for as long as they are trained, and this takes a third of the compilation away.
    os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=1 {os.environ.get('XLA_FLAGS', '')}"

    from lit_het.apps.quickstart.running import quickstart

    quickstart(options.run_dir, options.seed, fast=options.fast)
