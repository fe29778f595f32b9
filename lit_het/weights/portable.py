"""Folders that others open: a run's model in one safetensors file, without what only training needs.

A folder holds ``config.json``, ``tokenizer.model`` and ``manifest.json`` as a run does, ``model.safetensors`` in place
of checkpoints, ``calibration.json`` and ``familiarity.npz`` if there are any. Every command opens it as a run;
every tower, head and tokenizer of this program can be written. Nothing is unpickled.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from lit_het import parameters, untrusted
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.shards.portions import ALL
from lit_het.errors import UserError
from lit_het.files import write_safetensors
from lit_het.models.calibration.saved import copy_calibration
from lit_het.models.calibration.seen_names import FAMILIARITY, copy_familiarity
from lit_het.tasks.base import AnyTask
from lit_het.training import directory
from lit_het.training.directory import config_path
from lit_het.types import Params
from lit_het.weights import sources

FILES = ("config.json", "manifest.json", "tokenizer.model", "calibration.json", FAMILIARITY, "model.safetensors")
"""The files that are downloaded from an address; without the model card."""

_STEP, _ORIGIN = "step", "origin"


def is_portable(folder: Path) -> bool:
    """Returns whether a folder holds a model that `write` wrote: a configuration of a run beside safetensors."""
    return (folder / "model.safetensors").is_file() and _has_config(folder)


def _has_config(folder: Path) -> bool:
    """Returns whether ``config.json`` is that of a run, and not of a model of another library."""
    if not config_path(folder).is_file():
        return False
    try:
        content = untrusted.read_json(config_path(folder), sources.MAX_INDEX_BYTES)
    except (OSError, untrusted.Malformed):
        return False
    return isinstance(content, dict) and "task" in content and "model_type" not in content


def find(address: str) -> Path | None:
    """Returns the local folder of a model that `write` wrote, downloaded from an address such as ``hf://owner/name``.

    None for other models.
    """
    if "://" in address and not address.endswith((".npz", ".index")) and ".npz:" not in address:
        folder = sources.fetch(address, FILES[:1])
        if not _has_config(folder):
            return None
        sources.fetch(address, FILES)
    else:
        folder = Path(address)
    return folder if is_portable(folder) else None


def write(
    folder: Path,
    config: ExperimentConfig,
    params: Params,
    step: int,
    run_dir: Path,
    tokenizer: bytes | None,
    data_digest: str | None,
    origin: str | None = None,
) -> None:
    """Writes a model to an empty folder, which `read` opens again with equal outputs.

    Args:
        folder: created if missing.
        config: of the run; paths of its data and of locked parameters are left out.
        params: of all parts.
        step: of the checkpoint, to which the calibration belongs.
        run_dir: of the run, whose calibration and table of captions are copied.
        tokenizer: content of its file; None without one.
        data_digest: of the data that it was trained on; None if that is unknown.
        origin: the digest of the towers that it started from; None if that is unknown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # float32 holds every value of a locked tower's bfloat16.
    flat = {path: np.asarray(array, np.float32, order="C") for path, array in parameters.flatten(params).items()}
    started = {} if origin is None else {_ORIGIN: origin}
    write_safetensors(folder / "model.safetensors", flat, {"format": "lit-het", _STEP: str(step), **started})
    copy_calibration(run_dir, folder, step)
    copy_familiarity(run_dir, folder, data_digest)
    directory.write(folder, _without_training(config), tokenizer)


def _without_training(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration without paths and evaluations of the machine that trained it."""
    towers: Any = config.task.towers
    # Some towers have no such field.
    loaded = {part: tower for part, tower in towers.items() if tower.weights is not None}
    without_weights: Any = {part: dataclasses.replace(tower, weights=None) for part, tower in loaded.items()}
    task = dataclasses.replace(config.task, locked=(), **without_weights)
    tokenizer = config.tokenizer and dataclasses.replace(config.tokenizer, model=Path("tokenizer.model"))
    # A decoder asks questions in the prompts of its data sets.
    asked = config.data.mixture if config.data.prompt is not None else ()
    mixture = tuple(dataclasses.replace(one, shards=(), portion=ALL) for one in asked)
    data = dataclasses.replace(config.data.without_embeddings(), shards=(), mixture=mixture)
    return dataclasses.replace(
        config, run_dir=Path("."), task=task, data=data, tokenizer=tokenizer, pretrained=None, evaluations=()
    )


def read(folder: Path, task: AnyTask) -> tuple[Params, int]:
    """Returns the parameters of all parts, without ``head`` if only an image tower was written, and the step.

    Args:
        folder: that `write` wrote.
        task: of its configuration.
    """
    arrays = sources.open_safetensors(folder)
    shapes = task.shapes
    if task.may_lack_head and not any(name.startswith("head/") for name in arrays):
        shapes = {"image_tower": shapes["image_tower"]}
    wanted = {path: tuple(leaf.shape) for path, leaf in parameters.flatten(shapes).items()}
    found = {path: tuple(array.shape) for path, array in arrays.items()}
    if differing := sorted(path for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path)):
        path = differing[0]
        raise UserError(
            f"{folder}/model.safetensors does not fit config.json: {path} has shape {found.get(path)}, not "
            f"{wanted.get(path)}; download or export the folder again"
        )
    params = parameters.unflatten({path: jnp.asarray(array.read(), jnp.float32) for path, array in arrays.items()})
    return params, _step(folder)


def origin(folder: Path) -> str | None:
    """Returns the digest of the towers that a model started from; None if it is not recorded."""
    return _metadata(folder).get(_ORIGIN)


def _metadata(folder: Path) -> Mapping[str, str]:
    with safetensors.safe_open(folder / "model.safetensors", "numpy") as file:
        return file.metadata() or {}


def _step(folder: Path) -> int:
    text = _metadata(folder).get(_STEP, "0")
    if not text.isdecimal() or len(text) > 15:
        raise UserError(f"{folder}/model.safetensors: step = {text!r:.50} is not a number; export the folder again")
    return int(text)
