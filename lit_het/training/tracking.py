"""Sends the metrics of a run to Weights & Biases or Trackio as well, which are imported only when asked for."""

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lit_het.console import message
from lit_het.errors import UserError
from lit_het.files import write_atomically

# The name of the run at the service, which a resumed run continues.
_ID = "tracking_id"


def require(package: str) -> Any:
    """Returns the module ``wandb`` or ``trackio``."""
    try:
        if package == "wandb":
            import wandb as module  # pyright: ignore[reportMissingImports]
        else:
            import trackio as module  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"--log {package} needs the package {package} ({error}); pip install {package}") from error
    if not hasattr(module, "init"):  # a folder of this name, such as wandb's own
        raise UserError(f"--log {package} needs the package {package}; pip install {package}")
    return module


class Tracker:
    """A run at a service. Its failures are a message, and never end a training.

    Args:
        package: ``wandb`` or ``trackio``.
        run_dir: directory of the run; a resumed run continues the one that it started there.
        config: the configuration, which the service shows.
    """

    def __init__(self, package: str, run_dir: Path, config: Mapping[str, Any]):
        self.package = package
        self._module = require(package)
        self._works = True
        self._try(lambda: _start(self._module, package, run_dir, config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one record after ``step`` optimizer updates."""
        self._try(lambda: self._module.log(dict(metrics), step=step))

    def close(self) -> None:
        """Sends what is waiting."""
        self._try(self._module.finish)

    def _try(self, act: Callable[[], object]) -> None:
        if not self._works:
            return
        try:
            act()
        except Exception as error:  # of any kind: network, login, disk
            self._works = False
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            message(
                f"{self.package} gets no more metrics ({reason}); the training continues, and metrics.jsonl has all"
            )


def _start(module: Any, package: str, run_dir: Path, config: Mapping[str, Any]) -> None:
    path = run_dir / _ID
    if not path.exists():
        write_atomically(path, secrets.token_hex(4))
    identity = path.read_text()
    project = os.environ.get(f"{package.upper()}_PROJECT", "lit-het")
    if package == "trackio":  # knows runs by their names
        module.init(project=project, name=f"{run_dir.name}-{identity}", config=dict(config), resume="allow")
        return
    settings = module.Settings(silent=True, console="off")  # its own lines would tear the progress bar
    module.init(
        project=project,
        name=run_dir.name,
        id=identity,
        resume="allow",
        dir=str(run_dir),
        config=dict(config),
        settings=settings,
    )
