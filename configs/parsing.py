"""Configurations of runs and evaluations, from files and the flags of the user; imports nothing that only runs need."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.configs.flags import with_flags
from lit_het.data_pipelines.shards import urls
from lit_het.errors import UserError
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.folders import parse_set
from lit_het.eval.suite import EVALUATIONS, UNLABELLED, EvaluationConfig
from lit_het.training.directory import config_path, load_config


def parse_config(
    path: Path, flags: Sequence[str], command: str = "lit-het train", *, allow_commands: bool = False
) -> ExperimentConfig:
    """Returns the configuration in a Python or JSON file, with the changes of ``flags``.

    Args:
        path: of the file.
        flags: flags of the user.
        command: command of the user, for messages.
        allow_commands: whether JSON, which may come from others, may contain shell commands.
    """
    is_json = path.suffix == ".json"
    if path == config_path(path.parent):
        config = load_config(path.parent)  # also compares it with the run's manifest
    else:
        config = experiment.load(path) if is_json else experiment.load_module_config(path)
    config = with_flags(config, flags, f"{command} --config {path}")
    if is_json and not allow_commands:
        check_commands(config, path, flags)
    return config


def parse_tower(source: Path, flags: Sequence[str] = ()) -> ExperimentConfig:
    """Returns the configuration of the tower of a run, or of the configuration file of a run to be trained."""
    is_run = ".py" not in source.name
    saved = load_config(source) if is_run else experiment.load_module_config(source)
    config = with_flags(saved, flags, f"lit-het embed --tower {source} --output DIR")
    changed = experiment.differences(saved, config)
    if is_run and not all(field.startswith(("data.", "mesh.")) for field in changed):
        raise UserError(
            f"the tower of the run {source} cannot be changed; flags of embed may change only --data and --mesh"
        )
    return config


def parse_evaluations(kind: str, data: Sequence[str], flags: Sequence[str]) -> list[EvaluationConfig]:
    """Returns evaluations of one kind on several sets.

    Args:
        kind: a key of `lit_het.eval.suite.EVALUATIONS`.
        data: data sets, each ``NAME=FOLDER`` or ``FOLDER``, see `parse_set`.
        flags: fields of the evaluation's configuration.
    """
    like = with_flags(EVALUATIONS[kind](ImageSet("", "")), flags, f"lit-het {kind} --data DIR", flat=True)
    # The captions of zero-shot take the place of labels.
    labelled = kind not in UNLABELLED and getattr(like, "captions", None) is None
    of_kind = dataclasses.replace(like.data, labelled=labelled)
    return [dataclasses.replace(like, data=parse_set(argument, of_kind)) for argument in data]


def check_commands(config: ExperimentConfig, path: Path, flags: Sequence[str]) -> None:
    """Checks that a configuration read from JSON, which may come from others, contains no shell command.

    Args:
        config: the configuration after flags were applied.
        path: the JSON file.
        flags: the user's flags; commands in them are allowed.
    """
    typed = {*flags, *(flag.partition("=")[2] for flag in flags)}
    for field, text in _texts(experiment.to_dict(config), ""):
        if urls.is_pipe(text) and text not in typed:
            raise UserError(
                f"{path}: {field} is the shell command {urls.shortened(text)}; allow it with --allow-commands if "
                f"you trust the file, or replace it with --{field.partition('[')[0].replace('_', '-')}"
            )


def _texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """Yields the field and the value of every string in a configuration of JSON values."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{field}[{number}]")
