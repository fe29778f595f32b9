"""Flags that choose among alternatives of a field by name, such as ``--task.head het_xl``, and give None a value."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, get_args, get_type_hints

import tyro

from lit_het.errors import UserError

# Names whose words are not told by their capital letters.
_ONE_WORD = {"ViT": "Vit", "ResNet": "Resnet"}


def chosen(config: Any, flags: Sequence[str], is_text: Callable[[type[Any]], bool]) -> tuple[Any, list[str]]:
    """Returns a configuration with the alternatives that flags name, and the other flags.

    ``--task.head het_xl`` takes this class; fields that the replaced one has too, of the same type, keep their values.
    ``--pretrained.run DIR`` gives a field that is None its only class. Fields without a value are `tyro.MISSING`.

    Args:
        config: a frozen dataclass.
        flags: ``--field.of.it VALUE``.
        is_text: whether a dataclass is set by a single flag.

    Raises:
        UserError: a name is not an alternative, or several classes fit.
    """
    rest = list(flags)

    def with_choices(config: Any, prefix: str) -> Any:
        changed = copy.copy(config)  # not `dataclasses.replace`: what is not yet complete cannot be checked
        for field, options in _fields(config, is_text):
            path, value = f"{prefix}{field.replace('_', '-')}", getattr(config, field)
            if options:
                value = _instance(options, value, path, rest)
            if _is_config(type(value)) and not is_text(type(value)):
                value = with_choices(value, f"{path}.")
            object.__setattr__(changed, field, value)
        return changed

    return with_choices(config, "--"), rest


def flags_of(config: Any, is_text: Callable[[type[Any]], bool], prefix: str = "--") -> dict[str, list[str]]:
    """Returns the flags that name an alternative, with their words."""
    found: dict[str, list[str]] = {}
    for field, options in _fields(config, is_text):
        path, value = f"{prefix}{field.replace('_', '-')}", getattr(config, field)
        if len(options) > 1:
            found[path] = list(options)
        if _is_config(type(value)) and not is_text(type(value)):
            found |= flags_of(value, is_text, f"{path}.")
    return found


def _fields(config: Any, is_text: Callable[[type[Any]], bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the fields of a configuration, and their alternatives by name, if there are any."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        members = get_args(hints[field.name])
        classes = [member for member in members if _is_config(member) and not is_text(member)]
        others = [member for member in members if member not in classes]
        if classes and set(others) <= {NoneType}:
            yield field.name, {**_words(classes), **({"None": None} if others else {})}
        else:
            yield field.name, {}


def _is_config(form: Any) -> bool:
    return dataclasses.is_dataclass(form)


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
