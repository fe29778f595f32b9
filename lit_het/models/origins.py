"""The towers that a model started from, by a digest: only weights that started from the same towers have a mean."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from lit_het import parameters
from lit_het.configs.experiment import ExperimentConfig
from lit_het.towers.tuning import joined
from lit_het.training.directory import checkpoint_dir, find_pretrained, load_config
from lit_het.types import Params
from lit_het.weights.native import checksums
from lit_het.weights.native.saving import Checkpoints


def origin(run_dir: Path) -> str | Path:
    """Returns the digest of the towers that a run started from, or that those started from, and so on.

    Where it is not recorded, as in runs of earlier versions, the run at the root is returned, which has these towers.
    """
    if (found := recorded(run_dir)) is not None:
        return found
    config = load_config(run_dir)
    if config.pretrained is None or not _takes_all(config):
        return run_dir
    return origin(find_pretrained(config.pretrained.run, run_dir))


def recorded(run_dir: Path) -> str | None:
    """Returns the digest of the towers that a run or an exported folder started from; None if it is not recorded."""
    from lit_het.weights import portable  # needs metrics, for calibrations

    if portable.is_portable(run_dir):
        return portable.origin(run_dir)
    found = newest_info(run_dir).get("origin")
    return found if isinstance(found, str) else None


def newest_info(run_dir: Path) -> dict[str, Any]:
    """Returns what the newest checkpoint of a run records beside its state; nothing of a run without checkpoints."""
    if not checkpoint_dir(run_dir).is_dir():
        return {}
    with Checkpoints(checkpoint_dir(run_dir), read_only=True) as checkpoints:
        return checkpoints.at(checkpoints.newest_step()).read_info()[0]


def merged(run_dir: Path) -> tuple[Path, ...]:
    """Returns the runs whose mean a run is, as they were recorded; none of a run that is no mean."""
    return tuple(map(Path, newest_info(run_dir).get("merged", ())))


def of_start(config: ExperimentConfig, params: Params) -> str | None:
    """Returns the digest to record of a run that starts; None if a part of its towers is drawn, or it is not known.

    Args:
        config: of the run.
        params: its first ones.
    """
    if config.pretrained is not None and _takes_all(config):
        found = origin(config.pretrained.run)
        if isinstance(found, str):
            return found
        # The towers of a run between, of an earlier version, are not those of the root.
        return digest(params) if found == config.pretrained.run else None
    return digest(params) if all(tower.weights for tower in config.task.towers.values()) else None


def digest(params: Params) -> str:
    """Returns the digest of the towers among parameters, without low-rank changes, of which there are none at first.

    It is of bfloat16, in which runs may hold what they lock.
    """
    towers = {part: tree for part, tree in params.items() if part.endswith("_tower")}
    flat: dict[str, Any] = {path: leaf for path, leaf in parameters.flatten(towers).items() if "/lora/" not in path}
    return checksums.digest(parameters.cast(parameters.unflatten(joined(flat)), jnp.bfloat16))


def _takes_all(config: ExperimentConfig) -> bool:
    """Returns whether all parameters of the towers of a run come from its ``pretrained`` run."""
    assert config.pretrained is not None
    patterns = (config.pretrained.pattern or "", *config.task.locked)
    shapes = config.task.untuned().build().shapes
    towers = {part: shapes[part] for part, tower in config.task.towers.items()}
    return not any(tower.weights for tower in config.task.towers.values()) and all(
        any(re.fullmatch(pattern, path) for pattern in patterns) for path in parameters.flatten(towers)
    )
