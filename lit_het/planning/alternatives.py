"""Changes of a configuration that make its step smaller."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError
from lit_het.planning.plan import Plan, Step
from lit_het.sharding import MeshConfig

# Rows of logits that are computed at once; below, products become narrow.
_SMALL_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Change:
    """A configuration with changes.

    Attributes:
        flags: what changes it.
        config: the result.
        bytes: of a device, by formula.
    """

    flags: dict[str, str]
    config: ExperimentConfig
    bytes: int

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self.flags.items())


def smaller(config: ExperimentConfig, made: Plan, *, together: bool) -> Iterator[Change]:
    """Yields changes that need less memory by formula, cheapest first.

    Args:
        config: the configuration.
        made: its plan.
        together: whether each is in addition to those before it, and needs less than they do.
    """
    start = best = Change({}, config, sum(made.memory.values()))
    for flag, value, change in _remedies(config, made):
        before = best if together else start
        try:
            changed = change(before.config)
            memory = Step(changed, changed.mesh.build(list(made.mesh.devices.flat))).memory()
        except UserError:
            continue  # experts or examples cannot be split so
        found = Change(before.flags | {flag: value}, changed, sum(memory.values()))
        if found.bytes < before.bytes:
            yield found
            best = found


def _remedies(config: ExperimentConfig, made: Plan) -> Iterator[tuple[str, str, Callable[[ExperimentConfig], Any]]]:
    """Yields flags that may help and their values, with the change that each makes, cheapest first."""
    mesh, task = MeshConfig(*made.mesh.devices.shape), config.task
    loss: Any = task.loss
    parts_at_once = vars(task).get("microbatches")
    for factor in (2, 4, 8):
        wider = dataclasses.replace(mesh, data=-1, fsdp=factor * mesh.fsdp)
        yield "--mesh.fsdp", f"{wider.fsdp}", lambda config, wider=wider: dataclasses.replace(config, mesh=wider)
    if getattr(loss, "form", "ring") != "ring":
        yield "--task.loss.form", "ring", lambda config: _with_loss(config, form="ring")
    if getattr(loss, "block_size", 0) > _SMALL_BLOCK:
        rows = loss.block_size // 4
        yield "--task.loss.block-size", f"{rows}", lambda config: _with_loss(config, block_size=rows)
    for part in ("text_tower", "decoder", "image_tower"):
        tower: Any = vars(task).get(part)
        if made.counts.get(part, (0, 0))[1] and (encoder := getattr(tower, "encoder", None)) is not None:
            for policy in ("dots", "full"):
                changed: Any = dataclasses.replace(tower, encoder=dataclasses.replace(encoder, remat=policy))
                flag = f"--task.{part.replace('_', '-')}.encoder.remat"
                yield flag, policy, lambda config, part=part, changed=changed: _with_task(config, **{part: changed})
    if parts_at_once is not None:
        for parts in (4 * parts_at_once, 16 * parts_at_once):
            yield "--task.microbatches", f"{parts}", lambda config, parts=parts: _with_task(config, microbatches=parts)
    data = dataclasses.replace(config.data, batch_size=config.data.batch_size // 2)
    yield "--data.batch-size", f"{data.batch_size}", lambda config: dataclasses.replace(config, data=data)


def _with_loss(config: ExperimentConfig, **fields: Any) -> ExperimentConfig:
    loss: Any = config.task.loss
    return _with_task(config, loss=dataclasses.replace(loss, **fields))


def _with_task(config: ExperimentConfig, **fields: Any) -> ExperimentConfig:
    return dataclasses.replace(config, task=dataclasses.replace(config.task, **fields))
