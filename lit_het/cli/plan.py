"""The arguments of ``lit-het plan``."""

import argparse
import math
from pathlib import Path
from typing import Any

from lit_het.errors import UserError
from lit_het.paths import locate_training

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    plan = commands.add_parser(
        "plan",
        allow_abbrev=False,
        usage="lit-het plan --config FILE --devices N [--memory-gib G] [--any.field.of-the-configuration VALUE ...]",
        description="Compiles the training step of FILE for N virtual devices and reports parameters, operations, "
        "memory per device by formula and by the compiler, collectives and their bytes, and, if the step does not fit, "
        "flags that would help. Nothing is read, allocated or trained. Fields are changed as for train.",
        add_help=False,
    )
    plan.add_argument(
        "--config",
        type=Path,
        help="a Python file with get_config(), the name of a shipped one, or a run's config.json",
    )
    plan.add_argument("--devices", type=int, metavar="N", help="number of accelerators of all hosts together")
    plan.add_argument(
        "--memory-gib", type=float, default=32, metavar="G", help="memory per device; default: %(default)s"
    )
    plan.add_argument("-h", "--help", action="store_true", help="show this text; with --config also every field")
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
        raise UserError(f"--devices {options.devices} must be at least 1")
    if not 0 < options.memory_gib < math.inf:
        raise UserError(f"--memory-gib {options.memory_gib:g} must be above 0 and finite")
    path = locate_training(options.config)
    from lit_het.configs.parsing import parse_config

    config = parse_config(path, flags, "lit-het plan", allow_commands=True)  # plan runs no command
    import jax

    # These settings take effect only before JAX initializes its backends. Accelerators are not used.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    from lit_het.planning.report import report

    if not report(config, jax.devices(), options.memory_gib):
        raise UserError(
            f"the step does not fit into {options.memory_gib:g} GiB; flags that would help are listed above"
        )
