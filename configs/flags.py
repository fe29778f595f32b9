"""Command line flags for all fields of a configuration, read by tyro.

Before tyro, flags such as ``--task.head het_xl`` choose among alternatives of a field by name, and give None a value:
tyro itself would make subcommands of them.
"""

import contextlib
import copy
import dataclasses
import difflib
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from lit_het.configs import experiment
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.errors import FieldError, UserError
from lit_het.training.durations import Duration

_Config = TypeVar("_Config", bound=Any)
_REGISTRY = ConstructorRegistry()


# Dataclasses that are set by one flag with a string, such as ``--length "90 epochs"``.
_TEXTS: dict[type[Any], str] = {Duration: "DURATION", Portion: "PORTION"}
# Names whose words are not told by their capital letters.
_ONE_WORD = {"ViT": "Vit", "ResNet": "Resnet"}


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
    """
    description = "Every field of the configuration that has a value."
    typed = flags
    if not flat:
        default, flags = _with_alternatives(default, flags)
        words = (f"{flag} {'|'.join(names)}" for flag, names in _words_of_flags(default).items())
        description += "\nClasses are chosen by name, and keep the values of equal fields:\n  " + "\n  ".join(words)
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            in_full = flat or not {"-h", "--help"}.isdisjoint(flags)
            read = default if in_full else _named_by([_path(flag) for flag in typed], default)
            read, unknown = tyro.cli(
                type(read),
                default=read,
                args=list(flags),
                prog=command,
                description=description,
                config=(tyro.conf.AvoidSubcommands, *((tyro.conf.OmitArgPrefixes,) if flat else ())),
                return_unknown_args=True,
                registry=_REGISTRY,
            )
            config = _with_named(default, read)
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


def _path(flag: str) -> list[str]:
    return flag.lstrip("-").partition("=")[0].replace("-", "_").split(".")


def _named_by(paths: Sequence[Sequence[str]], config: Any) -> Any:
    """Returns an object with the fields that paths name: to look at all of a configuration takes tyro 50 ms.

    Args:
        paths: of flags, such as ``["task", "head", "num_samples"]``.
        config: a frozen dataclass, from which unnamed fields come back by `_with_named`.
    """
    below: dict[str, list[Sequence[str]]] = {}
    for first, *rest in paths:
        below.setdefault(first, []).append(rest)
    hints, named = get_type_hints(type(config)), {}
    for field in dataclasses.fields(config):
        if (inner := below.get(field.name, below.get(f"no_{field.name}"))) is None:
            continue
        value = getattr(config, field.name)
        is_narrowed = _has_flags(type(value)) and all(inner) and _is_complete(value)
        value = _named_by(inner, value) if is_narrowed else value
        named[field.name] = type(value) if is_narrowed else hints[field.name], value
    form = dataclasses.make_dataclass("_Named", [(name, hint) for name, (hint, _) in named.items()], frozen=True)
    return form(**{name: value for name, (_, value) in named.items()})


def _with_named(config: Any, named: Any) -> Any:
    """Returns a configuration with the fields of what `_named_by` has made of it."""
    if type(named).__name__ != "_Named":
        return named
    changes = {name: _with_named(getattr(config, name), value) for name, value in vars(named).items()}
    return dataclasses.replace(config, **changes)


def _is_complete(config: Any) -> bool:
    values = [getattr(config, field.name) for field in dataclasses.fields(config)]
    return tyro.MISSING not in values and all(_is_complete(value) for value in values if _has_flags(type(value)))


def _with_alternatives(config: Any, flags: Sequence[str]) -> tuple[Any, list[str]]:
    """Returns a configuration with the alternatives that flags name, and the other flags.

    ``--task.head het_xl`` takes this class; fields that the replaced one has too, of the same type, keep their values.
    ``--pretrained.run DIR`` gives a field that is None its only class. Fields without a value are `tyro.MISSING`.

    Args:
        config: a frozen dataclass.
        flags: ``--field.of.it VALUE``.
    """
    rest = list(flags)

    def with_choices(config: Any, prefix: str) -> Any:
        changed = copy.copy(config)  # not `dataclasses.replace`: what is not yet complete cannot be checked
        for field, options in _fields(config):
            path, value = f"{prefix}{field.replace('_', '-')}", getattr(config, field)
            if options:
                value = _instance(options, value, path, rest)
            if _has_flags(type(value)):
                value = with_choices(value, f"{path}.")
            object.__setattr__(changed, field, value)
        return changed

    return with_choices(config, "--"), rest


def _words_of_flags(config: Any, prefix: str = "--") -> dict[str, list[str]]:
    """Returns the flags that name an alternative, with their words."""
    found: dict[str, list[str]] = {}
    for field, options in _fields(config):
        path, value = f"{prefix}{field.replace('_', '-')}", getattr(config, field)
        if len(options) > 1:
            found[path] = list(options)
        if _has_flags(type(value)):
            found |= _words_of_flags(value, f"{path}.")
    return found


def _fields(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the fields of a configuration, and their alternatives by name, if there are any."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        members = get_args(hints[field.name])
        classes = [member for member in members if _has_flags(member)]
        others = [member for member in members if member not in classes]
        if classes and set(others) <= {NoneType}:
            yield field.name, {**_words(classes), **({"None": None} if others else {})}
        else:
            yield field.name, {}


def _has_flags(form: Any) -> bool:
    """Returns whether a class is a dataclass whose fields have flags of their own."""
    return dataclasses.is_dataclass(form) and form not in _TEXTS


def _instance(options: Mapping[str, Any], value: Any, path: str, rest: list[str]) -> Any:
    """Returns the value of the alternative that flags ask for, whose flag is taken from ``rest``."""
    names = [_normalized(flag.partition("=")[0]) for flag in rest]
    if path in names:
        place = names.index(path)
        _, equals, word = rest[place].partition("=")
        length = 1 if equals else 2
        word = word if equals else "".join(rest[place + 1 : place + 2])
        del rest[place : place + length]
        by_word = {_letters(known): option for known, option in options.items()}
        if _letters(word) not in by_word:
            classes = [option for option in options.values() if option is not None]
            inner = f"{path}.{_normalized(dataclasses.fields(classes[0])[0].name)}"
            hint = f"; its fields are flags too, such as {inner}" if len(classes) == 1 else ""
            raise UserError(f"{path} {word or 'without a value'} is not one of {', '.join(options)}{hint}")
        option = by_word[_letters(word)]
        return value if option is type(value) else _filled(option, value)
    inner = next((flag for flag, name in zip(rest, names, strict=True) if name.startswith(f"{path}.")), None)
    if value is not None or inner is None:
        return value
    words = [word for word in options if options[word] is not None]
    if len(words) > 1:
        raise UserError(f"{inner.partition('=')[0]} needs {path} {'|'.join(words)} as well, because it is None")
    return _filled(options[words[0]], None)


def _filled(form: Any, before: Any) -> Any:
    """Returns an instance with the values of another one; not checked, as values may be missing."""
    if form is None:
        return None
    hints, hints_before = get_type_hints(form), {} if before is None else get_type_hints(type(before))
    found = object.__new__(form)
    for field in dataclasses.fields(form):
        if field.name in hints_before and hints_before[field.name] == hints[field.name]:
            value = getattr(before, field.name)
        else:
            # Frozen dataclasses are defaults themselves, so no configuration has factories.
            value = tyro.MISSING if field.default is dataclasses.MISSING else field.default
        object.__setattr__(found, field.name, value)
    return found


def _words(classes: Sequence[type[Any]]) -> dict[str, Any]:
    """Returns classes by short names: ``HetXLContrastiveConfig`` among heads is ``het_xl``."""
    names = {form: _parts(form.__name__) for form in classes}
    while len(classes) > 1 and len({parts[-1] for parts in names.values()}) == 1:
        names = {form: parts[:-1] for form, parts in names.items()}
    return {"_".join(parts).lower(): form for form, parts in names.items()}


def _parts(name: str) -> list[str]:
    for found, word in _ONE_WORD.items():
        name = name.replace(found, word)
    return re.findall(r"[A-Z]+(?=[A-Z][a-z]|$)|[A-Z][a-z0-9]*", name.removesuffix("Config"))


def _normalized(flag: str) -> str:
    return flag.replace("_", "-")


def _letters(word: str) -> str:
    return re.sub("[-_]", "", word).lower()


def _on_unknown(given: str, config: Any, command: str, *, flat: bool) -> str:
    fields = experiment.fields(config)
    values = {f"--{field.rpartition('.')[2] if flat else field}".replace("_", "-"): fields[field] for field in fields}
    flag = given.partition("=")[0].replace("_", "-")
    if flag in values:
        return f"{flag} is not a flag; set it in the configuration file"
    # The class of a field is given by the flag of the field itself.
    known = sorted(name for name in values if name.rpartition(".")[2] != "type")
    close = difflib.get_close_matches(flag, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown flag {given}; {hint}'{command} --help' lists all flags"


def _in_one_line(message: str) -> str:
    """Returns the first paragraph of tyro's error message, without the box around it."""
    lines = [line.strip("│ ") for line in message.splitlines() if not line.startswith(("╭", "╰"))]
    return " ".join(itertools.takewhile(lambda line: set(line) != {"─"}, lines))
