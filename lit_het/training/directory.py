"""Paths and files of a run directory: configuration, tokenizer, and the run of the locked parameters."""

import dataclasses
from pathlib import Path
from typing import Any

from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError
from lit_het.weights import manifest


def config_path(run_dir: Path) -> Path:
    """Returns the path of a run's configuration."""
    return run_dir / "config.json"


def tokenizer_path(run_dir: Path) -> Path:
    """Returns the path of a run's tokenizer model."""
    return run_dir / "tokenizer.model"


def checkpoint_dir(run_dir: Path) -> Path:
    """Returns the folder of a run's checkpoints."""
    return run_dir / "checkpoints"


def write(run_dir: Path, config: ExperimentConfig, tokenizer: bytes | None) -> None:
    """Writes a run's configuration, its tokenizer file if it has one, and their manifest."""
    files = {config_path(run_dir).name: experiment.to_json(config).encode()}
    if tokenizer is not None:
        files[tokenizer_path(run_dir).name] = tokenizer
    manifest.write(run_dir, files)


def load_config(run_dir: Path) -> ExperimentConfig:
    """Returns the configuration of a run after it and the tokenizer were compared with the run's manifest."""
    if config_path(run_dir).is_file():
        manifest.check(run_dir)
    return experiment.load(config_path(run_dir))


def find_pretrained(recorded: Path, run_dir: Path) -> Path:
    """Returns the run with the locked parameters: at its recorded path, or if runs were moved in or beside this one."""
    here = run_dir.resolve()
    for place in (recorded, here / recorded.name, here.parent / recorded.name):
        if config_path(place).is_file() and (place is recorded or place != here):
            return place
    raise UserError(
        f"the run with the locked parameters, {recorded}, is missing; put it beside {run_dir}, or where a command has "
        "the flag, give its path with --pretrained DIR"
    )


def check_chain(run_dir: Path) -> None:
    """Checks that the chain of pretrained runs has no cycle."""
    place, visited = run_dir, []
    while config_path(place).is_file():
        if place.resolve() in visited:
            raise UserError(
                f"the pretrained run of {run_dir} leads back to {place}, which takes its parameters from itself; name "
                "the run that trained them with --pretrained.run"
            )
        visited.append(place.resolve())
        try:
            pretrained = experiment.load(config_path(place)).pretrained
            if pretrained is None:
                return
            place = find_pretrained(pretrained.run, place)
        except UserError:
            return  # opening the run reports the error, if it needs this one


def with_absolute_weights(config: Any) -> Any:
    """Returns a task's configuration with absolute paths of weights, to open it from other directories."""
    moved: dict[str, Any] = {
        part: dataclasses.replace(tower, weights=str(Path(tower.weights).resolve()))
        for part, tower in config.towers.items()
        if tower.weights is not None and "://" not in tower.weights
    }
    return dataclasses.replace(config, **moved)
