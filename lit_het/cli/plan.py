"""The arguments of ``lit-het plan``."""

import argparse
import math
from pathlib import Path
from typing import Any

from lit_het.errors import UserError

# Imports of JAX and its friends wait until the subcommand runs.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    plan = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="find out what a run needs on so many devices, without them",
        usage="lit-het plan --config FILE --devices N [--memory-gib G] [--any.field.of-the-configuration VALUE ...]",
        description="Compiles the training step of FILE for N virtual devices and says what it takes: parameters, "
        "operations, memory of a device by formula and by the compiler, collectives and their bytes, what will not "
        "fit and which flags would help. Nothing is read, allocated or trained; fields are changed as for train.",
        add_help=False,
    )
    plan.add_argument("--config", type=Path, help="a Python file with get_config(), or a run's config.json")
    plan.add_argument("--devices", type=int, metavar="N", help="accelerators of all hosts together")
    plan.add_argument("--memory-gib", type=float, default=32, metavar="G", help="of a device; default: %(default)s")
    plan.add_argument("-h", "--help", action="store_true", help="this text; with --config every field as well")
    plan.set_defaults(command=_plan, name="plan", parser=plan, takes_fields=True)


def _plan(options: argparse.Namespace, flags: list[str]) -> None:
    if options.help:
        options.parser.print_help()
        flags = [*flags, "--help"]
    if options.config is None or (options.devices is None and not options.help):
        if options.help:
            return
        raise UserError("plan needs --config FILE and --devices N, see lit-het plan --help")
    if options.devices is not None and options.devices < 1:
        raise UserError(f"--devices {options.devices}: there must be at least one")
    if not 0 < options.memory_gib < math.inf:
        raise UserError(f"--memory-gib {options.memory_gib:g}: a device has more than 0, and not all")
    from lit_het.runs.training import parse_config

    config = parse_config(options.config, flags, "lit-het plan", allow_commands=True)  # none is run
    import jax

    # Devices must be asked for before JAX looks for any; accelerators that are there are left alone.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    from lit_het.runs.plan_report import report

    if not report(config, jax.devices(), options.memory_gib):
        raise UserError(f"the step does not fit into {options.memory_gib:g} GiB; what would help stands above")
