"""The command ``lit-het``."""

import argparse
import contextlib
import logging
import signal
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Sequence

from lit_het.cli import (
    checkpoint,
    classify,
    convert,
    data,
    demo,
    embed,
    evaluate,
    plan,
    quickstart,
    report,
    train,
)
from lit_het.errors import TRY_AGAIN, UserError

# In the order in which --help lists them.
_COMMANDS = (quickstart, train, plan, embed, checkpoint, evaluate, report, classify, demo, data, convert)

# Imports of JAX and its friends wait until a subcommand runs: `lit-het --help` answers at once.


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; mistakes of the user end in one line and exit code 1."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it writes
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
        if lost := distributed.fault_of_machines(error):
            code = TRY_AGAIN  # whether that helps, the code of the other tells
            reason = " ".join(str(lost).split())[:200]
            print(
                f"lit-het: another process or a device is gone ({reason}); start all again{_left_by(options)}",
                file=sys.stderr,
            )
        else:
            traceback.print_exc()
    if code:
        distributed.leave(code)
    return code


def _run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    try:
        with _endings_unwind():
            if getattr(options, "distributed", None) is not None:
                from lit_het import distributed

                distributed.join(options.distributed)
            options.command(options, rest)
    except UserError as error:
        if getattr(options, "distributed", None) is not None:
            from lit_het import distributed

            if distributed.fault_of_machines(error):
                raise
        print(f"lit-het: {error}", file=sys.stderr)
        return error.code
    except MemoryError as error:
        print(f"lit-het: out of memory ({error}); use smaller sizes, or a machine with more", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"lit-het: interrupted{_left_by(options)}", file=sys.stderr)
        return 130
    except _Ended as error:
        with contextlib.suppress(OSError):  # the terminal may be what has gone
            print(f"lit-het: ended by {error.signal.name}{_left_by(options)}", file=sys.stderr)
        return 128 + error.signal
    return 0


def _left_by(options: argparse.Namespace) -> str:
    """Returns what a command leaves behind that is stopped, if anything."""
    return f"; {options.if_stopped}" if hasattr(options, "if_stopped") else ""


class _Ended(BaseException):
    """A signal asks for the end."""

    def __init__(self, number: int):
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def _endings_unwind() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise `_Ended`, as Ctrl-C raises: commands that streams read end with this process."""
    # What is ignored (nohup) or handled by others stays so; handlers are for the main thread.
    is_main = threading.current_thread() is threading.main_thread()
    ours = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(number) == signal.SIG_DFL
    ]

    def end(number: int, _: types.FrameType | None) -> None:
        for one in ours:
            signal.signal(one, signal.SIG_IGN)  # a second one must not interrupt the clearing up
        raise _Ended(number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lit-het",
        allow_abbrev=False,
        description="Image-text models that know how sure they are: LiT with HET-XL heads, in JAX.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for command in _COMMANDS:
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
