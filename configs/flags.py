"""Command line flags for all fields of a configuration."""

import contextlib
import difflib
import io
import itertools
from collections.abc import Sequence
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from lit_het.configs import alternatives, experiment
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.errors import FieldError, UserError
from lit_het.training.durations import Duration

_Config = TypeVar("_Config", bound=Any)
_REGISTRY = ConstructorRegistry()


# Dataclasses that are set by one flag with a string, such as ``--length "90 epochs"``.
_TEXTS: dict[type[Any], str] = {Duration: "DURATION", Portion: "PORTION"}


@_REGISTRY.primitive_rule
def _text(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    # Also where a field may be None or a word instead: tyro takes a dataclass in a union for a group of flags.
    members = get_args(info.type) if get_origin(info.type) in (Union, UnionType) else (info.type,)
    form: Any = next((member for member in members if member in _TEXTS), None)
    if form is None:
        return None
    words = {str(word): word for member in members if member is not form for word in get_args(member) or (None,)}
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join([_TEXTS[form], *words]),
        instance_from_str=lambda texts: words[texts[0]] if texts[0] in words else form.parse(texts[0]),
        is_instance=lambda value: isinstance(value, form) or value in words.values(),
        str_from_instance=lambda value: [str(value)],
    )


def with_flags(default: _Config, flags: Sequence[str], command: str, *, flat: bool = False) -> _Config:
    """Returns a configuration with the changes of ``flags``.

    Args:
        default: a frozen dataclass.
        flags: ``--field.of.it VALUE``.
        command: the command line of the user, for messages.
        flat: whether flags are only the last parts of the fields' paths.

    Raises:
        UserError: a flag is not a field, or its value is invalid.
    """
    description = "Every field of the configuration that has a value."
    typed = flags
    if not flat:
        default, flags = alternatives.chosen(default, flags, _is_text)
        words = (f"{flag} {'|'.join(names)}" for flag, names in alternatives.flags_of(default, _is_text).items())
        description += "\nClasses are chosen by name, and keep the values of equal fields:\n  " + "\n  ".join(words)
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            config, unknown = tyro.cli(
                type(default),
                default=default,
                args=list(flags),
                prog=command,
                description=description,
                config=(tyro.conf.AvoidSubcommands, *((tyro.conf.OmitArgPrefixes,) if flat else ())),
                return_unknown_args=True,
                registry=_REGISTRY,
            )
    except FieldError as error:
        names = (flag.partition("=")[0] for flag in typed if flag.startswith("--"))
        given = [name for name in names if name.strip("-").rpartition(".")[2].replace("-", "_") == error.field]
        if len(given) != 1:
            raise  # the field was not set by a flag, or several flags match
        raise UserError(f"{given[0]} {error.problem}") from error
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_in_one_line(messages.getvalue())) from stop
    if unknown:
        raise UserError(_on_unknown(unknown[0], default, command, flat=flat))
    return config


def _is_text(form: type[Any]) -> bool:
    return form in _TEXTS


def _on_unknown(given: str, config: Any, command: str, *, flat: bool) -> str:
    fields = experiment.fields(config)
    values = {f"--{field.rpartition('.')[2] if flat else field}".replace("_", "-"): fields[field] for field in fields}
    flag = given.partition("=")[0].replace("_", "-")
    if flag in values:
        return f"{flag} is no flag; set it in the configuration file"
    # The class of a field is given by the flag of the field itself.
    known = sorted(name for name in values if name.rpartition(".")[2] != "type")
    close = difflib.get_close_matches(flag, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown flag {given}; {hint}'{command} --help' lists all flags"


def _in_one_line(message: str) -> str:
    """Returns the first paragraph of tyro's error message, without the box around it."""
    lines = [line.strip("│ ") for line in message.splitlines() if not line.startswith(("╭", "╰"))]
    return " ".join(itertools.takewhile(lambda line: set(line) != {"─"}, lines))
