"""The arguments of ``lit-het train``, and those of every command that several processes may run together."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.errors import UserError

# Imports of JAX and its friends wait until a subcommand runs.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    train = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train from a configuration file",
        usage="lit-het train --config FILE [--resume | --start-or-resume] [--distributed [HOST:PORT,I/N]] "
        "[--allow-commands] [--any.field.of-the-configuration VALUE ...]",
        description="Trains the experiment that FILE describes. Every field with a value can be "
        "changed by a flag with its dotted path, e.g. --length 100 --task.head.covariance.num-factors 8; "
        "'lit-het train --config FILE --help' lists them with their values.",
        add_help=False,
    )
    train.add_argument(
        "--config", type=Path, help="a Python file with get_config(), e.g. configs/*.py, or a run's config.json"
    )
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the run directory")
    train.add_argument(
        "--start-or-resume",
        action="store_true",
        help="start, go on, or leave alone what is done: for jobs that restart",
    )
    train.add_argument(
        "--allow-commands",
        action="store_true",
        help="run the shell commands (pipe:COMMAND) that a config.json or a list of shards names; those of a Python "
        "configuration and of flags run anyway. Read them first: whoever wrote the file decides what they do",
    )
    add_distributed(train)
    train.add_argument("-h", "--help", action="store_true", help="this text; with --config every field as well")
    train.set_defaults(
        command=_train,
        name="train",
        parser=train,
        takes_fields=True,
        if_stopped="checkpoints that were saved stay, --resume goes on from the newest",
    )


def add_distributed(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that makes a command one of several processes, which `lit_het.cli.main` lets it join."""
    parser.add_argument(
        "--distributed",
        nargs="?",
        const="",
        metavar="HOST:PORT,I/N",
        help="work together with the other processes of a TPU slice, or of a job of Slurm, Kubernetes or MPI; "
        "elsewhere name the address of process 0, and which of how many this is",
    )


def _train(options: argparse.Namespace, flags: list[str]) -> None:
    if options.config is None:
        if not options.help:
            raise UserError("train needs --config FILE, e.g. --config configs/quickstart_upstream.py")
        options.parser.print_help()
        return
    if options.resume and options.start_or_resume:
        raise UserError("--resume and --start-or-resume exclude one another; give the latter to jobs that restart")
    from lit_het.runs.training import parse_config, train, train_unless_done

    if options.help:
        options.parser.print_help()
        flags = [*flags, "--help"]
    allow_commands = options.allow_commands
    config = parse_config(options.config, flags, allow_commands=allow_commands)
    if options.start_or_resume:
        train_unless_done(config, allow_commands=allow_commands)
    else:
        train(config, resume=options.resume, allow_commands=allow_commands)
