"""The arguments of ``lit-het plan``."""

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_het.errors import UserError
from lit_het.paths import locate_training

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.
if TYPE_CHECKING:
    from lit_het.configs.experiment import ExperimentConfig

_DEFAULT_GIB = 32
# What the compiler says where it gets no memory, or no thread for lack of it.
_NO_MEMORY = ("mmap error", "pthread_create failed", "bad_alloc", "Cannot allocate memory")
# Set in the process that compiles for TPUs.
_COMPILES = "LIT_HET_COMPILES_FOR_TPUS"


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    plan = commands.add_parser(
        "plan",
        allow_abbrev=False,
        usage="lit-het plan --config FILE (--topology T [--slices S] [--fit] [--output PAGE] | --devices N "
        "[--memory-gib G]) [--any.field.of-the-configuration VALUE ...]",
        description="Compiles the training step of FILE, for TPU chips by their own compiler or for N virtual devices, "
        "and reports parameters, operations, memory per device by formula and by the compiler, collectives and their "
        "bytes, for chips also bounds of the step's time, and, if the step does not fit, flags that would help. "
        "Nothing is read, allocated or trained, and no TPU is needed. Fields are changed as for train.",
        add_help=False,
    )
    plan.add_argument(
        "--config",
        type=Path,
        help="a Python file with get_config(), the name of a shipped one, or a run's config.json",
    )
    plan.add_argument(
        "--topology", metavar="T", help="chips of a slice, such as v5e:16x16 or v5e-256; needs the extra tpu-plan"
    )
    plan.add_argument("--slices", type=int, default=1, metavar="S", help="number of slices; default: %(default)s")
    plan.add_argument("--fit", action="store_true", help="if it does not fit, compile changes that need less memory")
    plan.add_argument("--output", type=Path, metavar="PAGE", help="HTML file for all figures; JSON lies beside it")
    plan.add_argument("--devices", type=int, metavar="N", help="number of virtual devices, for GPUs and CPUs")
    plan.add_argument("--memory-gib", type=float, metavar="G", help=f"memory of each of them; default: {_DEFAULT_GIB}")
    plan.add_argument("-h", "--help", action="store_true", help="show this text; with --config also every field")
    plan.set_defaults(command=_plan, name="plan", parser=plan, takes_fields=True)


def _plan(options: argparse.Namespace, flags: list[str]) -> None:
    if options.help:
        options.parser.print_help()
        flags = [*flags, "--help"]
    _check(options)
    if options.config is None:
        return
    path = locate_training(options.config)
    if options.topology is not None and not options.help and _COMPILES not in os.environ:
        _in_a_process(options, flags)
        return
    from lit_het.configs.parsing import parse_config

    config = parse_config(path, flags, "lit-het plan", allow_commands=True)  # plan runs no command
    if options.topology is None:
        _for_virtual_devices(config, options)
    else:
        _for_chips(config, options)


def _check(options: argparse.Namespace) -> None:
    """Checks arguments that need each other."""
    if options.help:
        return
    if options.config is None or (options.devices is None and options.topology is None):
        raise UserError("plan needs --config FILE and --devices N or --topology T, see lit-het plan --help")
    if options.devices is not None and options.topology is not None:
        raise UserError("--devices is for CPUs and GPUs, --topology for TPUs: leave one out")
    if options.devices is not None and options.devices < 1:
        raise UserError(f"--devices {options.devices} must be at least 1")
    if options.slices < 1:
        raise UserError(f"--slices {options.slices} must be at least 1")
    if options.topology is None:
        for name in ("fit", "output"):
            if getattr(options, name):
                raise UserError(f"--{name} needs --topology")
    elif options.memory_gib is not None:
        raise UserError("--memory-gib is for --devices; the memory of the chips of --topology is known")
    if options.memory_gib is not None and not 0 < options.memory_gib < math.inf:
        raise UserError(f"--memory-gib {options.memory_gib:g} must be above 0 and finite")


def _check_output(output: Path) -> None:
    """Checks before minutes of compiling that the page can be written."""
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; name a file in it")
    if output.suffix == ".json":
        raise UserError(f"--output {output} names the page, such as {output.with_suffix('.html')}; JSON lies beside it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror})") from error


def _for_virtual_devices(config: "ExperimentConfig", options: argparse.Namespace) -> None:
    import jax

    # These settings take effect only before JAX initializes its backends. Accelerators are not used.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    from lit_het.planning.report import report

    memory_gib = _DEFAULT_GIB if options.memory_gib is None else options.memory_gib
    if not report(config, jax.devices(), memory_gib):
        raise UserError(f"the step does not fit into {memory_gib:g} GiB; flags that would help are listed above")


def _in_a_process(options: argparse.Namespace, flags: list[str]) -> None:
    """Compiles in a process of its own: the compiler ends it where it fails, and needs an environment of its own."""
    from lit_het.planning import chips

    chips.parse(options.topology, options.slices)
    if options.output is not None:
        _check_output(options.output)
    chips.check_libtpu()
    given = ["--config", str(options.config), "--topology", options.topology, "--slices", str(options.slices)]
    given += ["--fit"] * options.fit + (["--output", str(options.output)] if options.output else [])
    command = [sys.executable, "-m", "lit_het", "plan", *given, *flags]
    said = []
    with subprocess.Popen(
        command, env=chips.environment() | {_COMPILES: "1"}, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if line.startswith("lit-het:"):
                    print(line, end="", file=sys.stderr, flush=True)
                else:
                    said.append(line)
        except BaseException:
            process.kill()  # the compiler hears no other signal, and would go on for minutes
            raise
    if process.returncode < 0:
        # The compiler, in C++, says in many lines where it ended.
        raise UserError(f"the compiler for TPUs was stopped ({_reason(process.returncode, said)})")
    sys.stderr.writelines(said)
    if process.returncode:
        sys.exit(process.returncode)


def _reason(code: int, said: Sequence[str]) -> str:
    """Returns why a process ended that a signal stopped."""
    if code == -signal.SIGKILL or any(sign in line for line in said for sign in _NO_MEMORY):
        return "out of memory: it takes 1 to 4 GiB; plan fewer chips or a smaller model"
    last = next((line.strip()[:200] for line in reversed(said) if line.strip()), "it said nothing")
    return f"{signal.Signals(-code).name}: {last}"


def _for_chips(config: "ExperimentConfig", options: argparse.Namespace) -> None:
    from lit_het.planning import chips
    from lit_het.planning.report import report_on_chips

    topology = chips.parse(options.topology, options.slices)
    if not report_on_chips(config, topology, options.output, fit=options.fit):
        raise UserError(f"the step does not fit into the memory of {topology}")
