"""Every shipped configuration, as ``config.json`` of a run holds it."""

import dataclasses
import json
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lit_het.configs import experiment
from lit_het.paths import locate_config, shipped_configs


def recorded() -> dict[str, dict[str, Any]]:
    """Returns the configurations and evaluations by name; of those with arguments, what other arguments change."""
    found = {name: _json(name) for name in shipped_configs()}
    changed = {other: _changes(found[name], _json(other)) for name in found for other in with_arguments(name)}
    evaluations = {name: _evaluations(name) for name in shipped_configs("get_evaluations")}
    return {"configurations": found, "arguments": changed, "evaluations": evaluations}


def with_arguments(name: str) -> Iterator[str]:
    """Yields the name with each choice of each argument."""
    function = runpy.run_path(str(locate_config(Path(name))))["get_config"]
    for argument, form in get_type_hints(function).items():
        for choice in get_args(form) if get_origin(form) is Literal else ():
            yield f"{name}:{argument}={choice}"


def read(recorded: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a ``config.json`` after it was read and written by this version."""
    (folder / "config.json").write_text(json.dumps(recorded))
    return experiment.to_dict(experiment.load(folder / "config.json"))


def _json(name: str) -> dict[str, Any]:
    return experiment.to_dict(experiment.load_module_config(locate_config(Path(name))))


def _evaluations(name: str) -> list[Any]:
    """Returns the evaluations of a file as a run holds them."""
    evaluations = experiment.load_evaluations(locate_config(Path(name), "get_evaluations"))
    any_run = experiment.load_module_config(locate_config(Path("quickstart_upstream")))
    return experiment.to_dict(dataclasses.replace(any_run, evaluations=evaluations))["evaluations"]


def _changes(before: Any, after: Any, path: str = "") -> dict[str, Any]:
    """Returns the dotted fields whose values differ, with those of ``after``."""
    if before == after:
        return {}
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)) or before.keys() != after.keys():
        return {path: after}
    changed = {}
    for key in before:
        changed |= _changes(before[key], after[key], f"{path}.{key}" if path else key)
    return changed
