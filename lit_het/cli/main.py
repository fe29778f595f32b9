"""The command ``lit-het``."""

import argparse
import contextlib
import difflib
import io
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from lit_het import __version__, library_logs, stopping
from lit_het.cli import (
    add_noise,
    benchmark,
    benchmark_uncertainty,
    calibrate,
    caption,
    checkpoint,
    classify,
    convert,
    data,
    demo,
    embed,
    evaluate,
    new,
    plan,
    quickstart,
    report,
    shape,
    tokenizer,
    train,
    tune,
)
from lit_het.errors import TRY_AGAIN, DataError, UserError

# In the order of --help.
_COMMANDS = {
    "start": (quickstart, new, demo),
    "data": (data, tokenizer, embed),
    "train": (train, tune, add_noise, calibrate, checkpoint, plan, shape),
    "evaluate": (evaluate, benchmark, benchmark_uncertainty, report),
    "use": (classify, caption),
    "convert": (convert,),
}

# Columns of the list of commands, and of their names in it.
_HELP_WIDTH, _NAME_WIDTH = 80, 24

# JAX and the other heavy packages are imported only when a command runs, so that --help is fast.


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; user errors are printed as one line, with exit code 1.

    Where the reader of the output has gone, such as ``head``, the command ends quietly with exit code 1.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where its encoding lacks a character of a table or a name
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()  # here, and not when Python exits, where nothing could catch the error
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        # Python flushes the output again when it exits (its documentation of `signal`, "Note on SIGPIPE").
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _reader_has_gone() -> bool:
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False  # another pipe broke


def _main(arguments: Sequence[str] | None) -> int:
    library_logs.silence()
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(options, "takes_fields", False):
        parser.error(f"unknown argument {rest[0]}; see lit-het {options.name} --help")
    if getattr(options, "distributed", None) is None:
        return _run(options, rest)
    from lit_het import distributed

    try:
        code = _run(options, rest)
    except BaseException as error:
        code = 1
        if lost := distributed.lost_process_error(error):
            code = TRY_AGAIN  # the exit code of the lost process says whether a restart helps
            reason = " ".join(str(lost).split())[:200]
            print(
                f"lit-het: lost another process or a device ({reason}); restart all processes{_left_by(options)}",
                file=sys.stderr,
            )
        else:
            traceback.print_exc()
    if code:
        distributed.leave(code)
    return code


def _run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    try:
        with stopping.signals_as_exceptions():
            if getattr(options, "distributed", None) is not None:
                from lit_het import distributed

                distributed.join(options.distributed, stops_together=getattr(options, "stops_together", False))
            options.command(options, rest)
    except UserError as error:
        if getattr(options, "distributed", None) is not None:
            from lit_het import distributed

            if distributed.lost_process_error(error):
                raise
        print(f"lit-het: {_with_way_out(error, options)}", file=sys.stderr)
        return error.code
    except MemoryError as error:
        print(f"lit-het: out of memory ({error}); use smaller sizes, or a machine with more memory", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"lit-het: interrupted{_left_by(options)}", file=sys.stderr)
        return 130
    except stopping.Stopped as error:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(f"lit-het: stopped by {error.signal.name}{_left_by(options)}", file=sys.stderr)
        return 128 + error.signal
    return 0


def _with_way_out(error: UserError, options: argparse.Namespace) -> UserError:
    """Returns an error of data with the way out that a command has in place of the usual one, such as another flag."""
    if isinstance(error, DataError) and (way_out := getattr(options, "ways_out", {}).get(type(error))):
        return DataError(error.problem, way_out)
    return error


def _left_by(options: argparse.Namespace) -> str:
    """Returns what an interrupted command leaves behind, as the end of a message."""
    return f"; {options.if_stopped}" if hasattr(options, "if_stopped") else ""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors propose the choice that was meant."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument (.*): invalid choice: '(.*?)' \(choose from (.*)\)", message, re.DOTALL):
            meant = difflib.get_close_matches(wrong[2], re.findall(r"[\w-]+", wrong[3]), n=1)
            message = f"{message}; did you mean {meant[0]}?" if meant else message
        super().error(message)


class _Group:
    """Commands that are listed together in --help, in place of one list of all."""

    def __init__(self, commands: Any):
        self._commands = commands
        self.lines: list[str] = []

    def add_parser(self, name: str, *, help: str, **options: Any) -> argparse.ArgumentParser:
        """Adds a command, as that of `argparse` does."""
        first, *more = textwrap.wrap(help, width=_HELP_WIDTH - _NAME_WIDTH)
        between = "\n" + " " * _NAME_WIDTH if len(name) > _NAME_WIDTH - 4 else " " * (_NAME_WIDTH - 2 - len(name))
        self.lines += [f"  {name}{between}{first}", *(" " * _NAME_WIDTH + line for line in more)]
        return self._commands.add_parser(name, **options)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lit-het",
        usage="lit-het COMMAND ... [--help]",
        allow_abbrev=False,
        description="Image-text models with uncertainty: LiT with HET-XL heads, in JAX.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lit-het {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog="lit-het", help=argparse.SUPPRESS)
    groups = []
    for title, modules in _COMMANDS.items():
        group = _Group(commands)
        for module in modules:
            module.add_to(group)
        groups.append("\n".join([f"{title}:", *group.lines]))
    parser.epilog = "\n\n".join(groups)
    return parser


def run() -> NoReturn:
    """Ends the process with the code of a command."""
    code = main()
    if code:
        # At once: threads of XLA and Orbax that a stop has left at work may crash while Python exits.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit()


if __name__ == "__main__":
    run()
