"""What ``lit-het`` asks its parsers, whatever lies between: its own, and tyro for the fields of configurations."""

import argparse
import contextlib
import functools
import io
import re
import warnings
from typing import Any
from unittest import mock

import tyro

from lit_het.cli.main import main
from lit_het.configs import parsing


class _Asked(BaseException):
    """A parser was asked, and the command need not go on."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    found = _asked()
    commands = _commands_of(found)
    for name in commands:
        commands[name] = _commands_of(_asked(name))[name]
    return found


def _asked(*arguments: str) -> argparse.ArgumentParser:
    """Returns the parser that is asked for these arguments; only the command among them has its flags."""
    asked: list[argparse.ArgumentParser] = []

    def ask(parser: argparse.ArgumentParser, *_: Any) -> None:
        asked.append(parser)
        raise _Asked

    # Defaults are numbers of this machine's cores.
    with (
        mock.patch("os.cpu_count", return_value=4),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", ask),
    ):
        _run(*arguments)
    return asked[0]


def _commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [commands] = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands


def configuration(name: str, *flags: str) -> Any:
    """Returns what ``lit-het train --config NAME`` would train."""
    parsed, parse = [], parsing.with_flags

    def ask(*arguments: Any) -> None:
        parsed.append(parse(*arguments))
        raise _Asked

    with mock.patch.object(parsing, "with_flags", ask):
        code = _run("train", "--config", name, *flags)
    assert parsed, f"exit code {code}"
    return parsed[0]


class Offer:
    """What a command offers for the fields of a configuration.

    Attributes:
        command: the command.
        default: the configuration whose fields are offered.
        choices: flags that choose among alternatives, with their words.
    """

    default: Any
    choices: dict[str, str]
    _options: dict[str, Any]

    def __init__(self, *command: str):
        self.command = command

        def ask(_: type[Any], default: Any, description: str, config: Any, registry: Any, **__: Any) -> None:
            self.default, self._options = default, {"config": config, "registry": registry}
            self.choices = dict(re.findall(r"^ +(--\S+) (\S+)$", description, re.MULTILINE))
            raise _Asked

        with mock.patch("tyro.cli", ask):
            _run(*command, "--help")

    def value(self, flag: str) -> Any:
        """Returns the value of the field that a flag sets."""
        return functools.reduce(field_of, flag.removeprefix("--").split("."), self.default)

    def actions(self, config: Any) -> Any:
        """Returns the flags of the fields of a configuration, or of a part of it, as `argparse` has them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # nothing else of tyro tells all flags
            return tyro.extras.get_parser(type(config), default=config, **self._options)._actions


def field_of(value: Any, name: str) -> Any:
    """Returns a field of a dataclass, or an entry of a tuple, by its name in a flag."""
    return value[int(name)] if name.isdigit() else getattr(value, name.replace("-", "_"))


def _run(*command: str) -> int | None:
    with contextlib.suppress(_Asked), contextlib.redirect_stdout(io.StringIO()):
        return main(command)
