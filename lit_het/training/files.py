"""Files that a run writes before training starts: configuration, tokenizer, and a record of the environment."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from lit_het import distributed
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.errors import UserError
from lit_het.files import write_atomically
from lit_het.training import directory
from lit_het.training.directory import config_path, with_absolute_weights

if TYPE_CHECKING:
    from lit_het.data_pipelines.shards.pipeline import AnyStream
    from lit_het.data_pipelines.texts.tokenizers import Tokenizer

# Variables that change the computation; none of them holds a secret.
_ENVIRONMENT = re.compile(r"XLA_FLAGS$|JAX_|LIBTPU")
_PACKAGES = ("lit-het", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")


def write_run_files(config: ExperimentConfig, tokenizer: "Tokenizer | None") -> None:
    """Writes the configuration and the tokenizer to the run's directory; only the main process writes."""
    if distributed.is_main_process():
        config.run_dir.mkdir(parents=True, exist_ok=True)
        model = None if tokenizer is None else tokenizer.model_bytes
        for name in ("config.json", "manifest.json", "metrics.jsonl", "tokenizer.model"):
            for half_written in config.run_dir.glob(f"{name}.partial-*"):  # by a killed process
                half_written.unlink()
        directory.write(config.run_dir, _openable_anywhere(config), model)
        _record_start(config.run_dir)
    distributed.wait_for_all("run files")
    if not config_path(config.run_dir).exists():
        raise UserError(
            f"process 0 has written to {config.run_dir}, but this process cannot see it; "
            "choose a --run-dir on storage that all machines share"
        )


def _record_start(run_dir: Path) -> None:
    """Appends what is needed to reproduce the run to ``starts.jsonl``."""
    environment = {name: value for name, value in sorted(os.environ.items()) if _ENVIRONMENT.match(name)}
    start = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "commit": _commit(),
        "processes": jax.process_count(),
        "devices": [f"{device.device_kind} ({device.platform})" for device in jax.devices()],
        "environment": environment,
    }
    path = run_dir / "starts.jsonl"
    if path.exists() and not path.is_file():  # opening a named pipe would block
        raise UserError(f"{path} is not a regular file; remove it")
    with path.open("a") as file:
        file.write(json.dumps(start) + "\n")


def _commit() -> str | None:
    """Returns the commit of the code, with ``-dirty`` if files were changed; None without a repository."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--exclude",
        "*",
        "--abbrev=40",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_nonfinite(config: ExperimentConfig, loader: "Loader | AnyStream", step: int) -> Path:
    """Writes the samples in the batch of a step to a JSON file, and returns its path."""
    positions = range((step - 1) * config.data.batch_size, step * config.data.batch_size)
    content: dict[str, Any] = {"step": step, "positions": [positions.start, positions.stop]}
    if isinstance(loader, Loader):  # a stream does not record its samples
        content["samples"] = [{"shard": shard, "key": key} for shard, key in loader.sources(positions)]
    path = config.run_dir / f"nonfinite_{step}.json"
    if distributed.is_main_process():
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    return path


def _openable_anywhere(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration with absolute paths, since the run is opened from other working directories."""
    if config.pretrained is not None:
        pretrained = dataclasses.replace(config.pretrained, run=config.pretrained.run.resolve())
        config = dataclasses.replace(config, pretrained=pretrained)
    return dataclasses.replace(config, task=with_absolute_weights(config.task))
