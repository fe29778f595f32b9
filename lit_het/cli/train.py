"""The arguments of ``lit-het train``, and ``--distributed`` of all commands that several processes can run."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.errors import TooManyBadSamples, UserError
from lit_het.paths import locate_training

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.

ALLOW_BAD_SAMPLES = {TooManyBadSamples: "fix them, or allow more with --data.max-bad-fraction"}
"""The way out of commands that take the fields of a training configuration, see `lit_het.cli.main`."""


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    train = commands.add_parser(
        "train",
        allow_abbrev=False,
        usage="lit-het train --config FILE [--members M] [--resume | --start-or-resume] "
        "[--distributed [HOST:PORT,I/N]] [--allow-commands] [--any.field.of-the-configuration VALUE ...]",
        description="Trains the experiment that FILE describes. Every field can be changed by the flag with its dotted "
        "path, e.g. --length 100 --pretrained.run DIR --task.head het_xl --task.head.covariance.num-factors 8; "
        "'lit-het train --config FILE --help' lists them with their values. FILE.py:name=value,name=value gives "
        "arguments of its get_config().",
        add_help=False,
    )
    train.add_argument(
        "--config",
        type=Path,
        help="a Python file with get_config(), the name of a shipped one such as lit_so400m_het_xl, or a run's "
        "config.json",
    )
    train.add_argument(
        "--members",
        type=int,
        metavar="M",
        help="train a deep ensemble: M runs, one after another, in the folders member_0, member_1, ... of the run "
        "directory, with the seeds of the configuration plus 0, 1, ...; {member} in an address, such as "
        "--pretrained.run RUN/member_{member}, is replaced by the number",
    )
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the run directory")
    train.add_argument(
        "--start-or-resume",
        action="store_true",
        help="start, continue, or do nothing if the run is finished: for jobs that restart",
    )
    train.add_argument(
        "--allow-commands",
        action="store_true",
        help="run the shell commands (pipe:COMMAND) in a config.json or a list of shards; commands in a Python "
        "configuration and in flags always run. Read them first: the author of the file decides what they do",
    )
    add_distributed(train)
    train.add_argument("-h", "--help", action="store_true", help="show this text; with --config also every field")
    train.set_defaults(
        command=_train,
        name="train",
        parser=train,
        takes_fields=True,
        stops_together=True,
        hints=ALLOW_BAD_SAMPLES,
        if_stopped="--resume continues from the newest checkpoint, if one was saved",
    )


def add_distributed(parser: argparse.ArgumentParser) -> None:
    """Adds ``--distributed``; `lit_het.cli.main` then joins the other processes before it runs the command."""
    parser.add_argument(
        "--distributed",
        nargs="?",
        const="",
        metavar="HOST:PORT,I/N",
        help="run together with the other processes of a TPU slice, or of a Slurm, Kubernetes or MPI job; elsewhere "
        "give the address of process 0, the index of this process and their number",
    )


def _train(options: argparse.Namespace, flags: list[str]) -> None:
    if options.config is None:
        if not options.help:
            file = flags[0] if flags and not flags[0].startswith("-") else "quickstart_upstream"
            raise UserError(f"train needs --config FILE, such as --config {file}")
        options.parser.print_help()
        return
    if options.resume and options.start_or_resume:
        raise UserError(
            "--resume and --start-or-resume exclude each other; use --start-or-resume for jobs that restart"
        )
    path = locate_training(options.config)
    from lit_het.configs.parsing import parse_config

    if options.help:
        options.parser.print_help()
        flags = [*flags, "--help"]
    allow_commands = options.allow_commands
    config = parse_config(path, flags, allow_commands=allow_commands)
    # Imported after the flags were checked, as it takes seconds.
    if options.members is not None:
        from lit_het.training.members import train_members

        resume = options.resume or options.start_or_resume
        train_members(config, options.members, start=not options.resume, resume=resume, allow_commands=allow_commands)
        return
    from lit_het.training.train import train, train_unless_done

    if options.start_or_resume:
        train_unless_done(config, allow_commands=allow_commands)
    else:
        train(config, resume=options.resume, allow_commands=allow_commands)
