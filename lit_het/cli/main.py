"""The command ``lit-het``."""

import argparse
import contextlib
import difflib
import importlib
import io
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lit_het import __version__, library_logs, stopping
from lit_het.errors import TRY_AGAIN, DataError, UserError
from lit_het.eval.evaluators import COMMANDS as EVALUATIONS

# Name to the module of its arguments and the line of --help, in groups and in the order of --help.
_COMMANDS = {
    "start": {
        "quickstart": (
            "quickstart",
            "train LiT with and without HET-XL on images of characters, and write a report (about 5 minutes)",
        ),
        "new": ("new", "start a project with one's own image-text pairs, on a tower or a model"),
        "demo": ("demo", "try a model on a local web page"),
    },
    "data": {
        "data": ("data", "make shards, index them and check them"),
        "tokenizer": ("tokenizer", "train a tokenizer on captions"),
        "embed": ("embed", "compute the embeddings of a locked tower once, to train on them"),
    },
    "train": {
        "train": ("train", "train from a configuration file"),
        "tune": ("tune", "search fields of a configuration for the best value of a metric"),
        "add-noise": ("add_noise", "give a finished image-text model a head with noise, in minutes"),
        "merge": ("merge", "average the weights of fine-tuned models: mixtures (WiSE-FT), soups"),
        "calibrate": ("calibrate", "fit the temperature of a trained run, so that its probabilities can be trusted"),
        "checkpoint": ("checkpoint", "list a run's checkpoints, show the content of one, verify checksums"),
        "plan": ("plan", "estimate memory and operations of a run on N devices, without them"),
        "shape": ("shape", "find the width, depth and MLP size of an image tower for a budget (SoViT)"),
    },
    "evaluate": {
        **{name: ("evaluate", line) for name, (line, _) in EVALUATIONS.items()},
        "evaluate": ("evaluate", "run all evaluations of a configuration on a trained run"),
        "benchmark": ("benchmark", "evaluate a run on all sets of a suite, beside published figures"),
        "benchmark-vtab": ("benchmark_vtab", "fine-tune a run's image tower on 1,000 images of VTAB's 19 tasks"),
        "benchmark-uncertainty": ("benchmark_uncertainty", "compare how well models know how sure they are"),
        "report": ("report", "write a page with the configurations, curves and evaluations of runs"),
        "compare": ("report", "test whether two groups of runs differ, or what runs reach at what cost"),
    },
    "use": {
        "classify": ("classify", "classify images and show how certain the model is"),
        "caption": ("caption", "write captions of images, with the probability of each token"),
        "ask": ("caption", "answer a question about an image, or rank given answers"),
        "translate": ("caption", "translate texts, one a line"),
    },
    "convert": {
        "import": ("convert", "convert the weights of another library to a run"),
        "export": ("convert", "export a trained model for other libraries"),
    },
}

# Columns of the list of commands, and of their names in it.
_HELP_WIDTH, _NAME_WIDTH = 80, 24


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
    given = sys.argv[1:] if arguments is None else arguments
    parser = _parser(next((one for one in given if not one.startswith("-")), ""))
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
    if isinstance(error, DataError) and (way_out := getattr(options, "hints", {}).get(type(error))):
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


def _parser(asked: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lit-het",
        usage="lit-het COMMAND ... [--help]",
        allow_abbrev=False,
        description="Image-text models with uncertainty: LiT with HET-XL heads, in JAX.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n\n".join(f"{title}:\n{_lines(commands)}" for title, commands in _COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=f"lit-het {__version__}")
    commands: Any = parser.add_subparsers(required=True, metavar="COMMAND", prog="lit-het", help=argparse.SUPPRESS)
    modules = {name: module for group in _COMMANDS.values() for name, (module, _) in group.items()}
    for name, module in modules.items():
        if module != modules.get(asked):  # of the others argparse needs the names, for its errors
            commands.add_parser(name)
    if asked in modules:
        importlib.import_module(f"lit_het.cli.{modules[asked]}").add_to(commands)
    return parser


def _lines(commands: Mapping[str, tuple[str, str]]) -> str:
    """Returns the commands of a group, as --help lists them."""
    lines: list[str] = []
    for name, (_, text) in commands.items():
        first, *more = textwrap.wrap(text, width=_HELP_WIDTH - _NAME_WIDTH)
        between = "\n" + " " * _NAME_WIDTH if len(name) > _NAME_WIDTH - 4 else " " * (_NAME_WIDTH - 2 - len(name))
        lines += [f"  {name}{between}{first}", *(" " * _NAME_WIDTH + line for line in more)]
    return "\n".join(lines)


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
