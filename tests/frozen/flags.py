"""Every command and every flag, with types, choices and defaults."""

import argparse
import functools
from collections.abc import Iterator
from typing import Any, TypeAlias

from tests.frozen.command_line import Offer, field_of, parser

TASKS = ("quickstart_lit_het_xl", "glyph_classifier", "quickstart_decoder", "translation_base")
"""A configuration of each kind of task."""

EVALUATIONS = (
    *("zero-shot", "retrieval", "few-shot", "linear-probe", "shift", "out-of-distribution", "ensemble"),
    *("captioning", "question-answering"),
)

Flags: TypeAlias = dict[str, dict[str, Any]]


def recorded() -> dict[str, Any]:
    """Returns the flags of commands, and of the fields of evaluations and of configurations."""
    return {
        "commands": commands(),
        "evaluations": {kind: fields(Offer(kind, "--data", "set")) for kind in EVALUATIONS},
        "configurations": {task: of_task(task) for task in TASKS},
    }


def commands() -> dict[str, Flags]:
    """Returns the flags and positional arguments of every command, and of commands of commands."""
    return dict(sorted(_commands("lit-het", parser())))


def of_task(task: str) -> dict[str, Flags]:
    """Returns the flags of a configuration, and of each alternative, such as those of ``--task.head het_xl``."""
    offer = Offer("train", "--config", task)
    found = {"": fields(offer)}
    if task != TASKS[0]:  # what is not of the task is the same for all
        offer.choices = {flag: words for flag, words in offer.choices.items() if flag.startswith("--task.")}
    return found | dict(_alternatives(offer))


def fields(offer: Offer, flag: str = "") -> Flags:
    """Returns the flags of all fields of a configuration, or of those of the field ``flag``."""
    config, prefix = (offer.value(flag), f"{flag}.") if flag else (offer.default, "--")
    flags = {
        " ".join(name.replace("--", prefix) for name in action.option_strings): _described(
            action, functools.reduce(field_of, action.dest.split("."), config), _sorted(action.metavar)
        )
        for action in offer.actions(config)
        if action.dest != "help"
    }
    alternatives = {name: words for name, words in offer.choices.items() if name.startswith(prefix)}
    return flags | {name: {"choices": sorted(words.split("|"))} for name, words in alternatives.items()}


def _alternatives(offer: Offer) -> Iterator[tuple[str, Flags]]:
    """Yields the flags of every alternative that the configuration does not have."""
    for flag, words in offer.choices.items():
        for word in words.split("|"):
            if flag == "--task" or word == "None":
                continue
            chosen = Offer(*offer.command, flag, word)
            if type(chosen.value(flag)) is type(offer.value(flag)):
                continue
            yield f"{flag} {word}", fields(chosen, flag)
            chosen.choices = {
                inner: words
                for inner, words in chosen.choices.items()
                if inner.startswith(f"{flag}.") and inner not in offer.choices
            }
            yield from ((f"{flag} {word} {inner}", flags) for inner, flags in _alternatives(chosen))


def _commands(name: str, of: argparse.ArgumentParser) -> Iterator[tuple[str, Flags]]:
    flags: Flags = {}
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from _commands(f"{name} {word}", inner)
        else:
            number = sum(name.startswith("argument") for name in flags) + 1
            flags[_names(action) or f"argument {number}"] = _described(
                action, action.default, getattr(action.type, "__name__", None)
            )
    for group in of._mutually_exclusive_groups:
        names = [_names(action) for action in group._group_actions]
        for name_of_flag in names:
            flags[name_of_flag]["exactly one of" if group.required else "at most one of"] = names
    yield name, dict(sorted(flags.items()))


def _names(action: argparse.Action) -> str:
    return " ".join(action.option_strings)


def _described(action: argparse.Action, default: Any, form: str | None) -> dict[str, Any]:
    """Returns what is not usual of a flag: by default it takes one text, and need not be given."""
    kind = type(action).__name__.strip("_").removesuffix("Action")
    takes_values = kind in ("Store", "Append")
    described = {
        "action": None if kind == "Store" else kind,
        "type": form if takes_values and not action.choices else None,
        "choices": sorted(action.choices, key=str) if action.choices else None,
        "nargs": action.nargs if takes_values and action.nargs != 1 else None,
        "const": action.const if action.nargs == "?" else None,
        "default": None if default is argparse.SUPPRESS or action.required else default,
        "required": action.required or None,
    }
    return {name: _plain(value) for name, value in described.items() if value is not None}


def _sorted(form: Any) -> str:
    """Returns what tyro calls a type: Python orders the members of a union by what was imported before."""
    return "|".join(sorted(str(form).split("|")))


def _plain(value: Any) -> Any:
    """Returns a value of JSON."""
    if isinstance(value, list | tuple | range):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | float | str) else str(value)
