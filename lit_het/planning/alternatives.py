"""Changes of a configuration that make its step smaller."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from lit_het.configs.experiment import ExperimentConfig
from lit_het.planning.plan import Plan
from lit_het.sharding import MeshConfig

# Rows of logits that are computed at once; below, products become narrow.
_SMALL_BLOCK = 128


def remedies(config: ExperimentConfig, made: Plan) -> Iterator[tuple[str, Callable[[ExperimentConfig], Any]]]:
    """Yields flags that may help, with the change that each makes, cheapest first."""
    mesh, task = MeshConfig(*made.mesh.devices.shape), config.task
    loss: Any = task.loss
    for factor in (2, 4, 8):
        wider = dataclasses.replace(mesh, data=-1, fsdp=factor * mesh.fsdp)
        yield f"--mesh.fsdp {wider.fsdp}", lambda config, wider=wider: dataclasses.replace(config, mesh=wider)
    if vars(loss).get("form", "ring") != "ring":
        ring = dataclasses.replace(loss, form="ring")
        yield "--task.loss.form ring", lambda config: _with_task(config, loss=ring)
    if vars(loss).get("block_size", 0) > _SMALL_BLOCK:
        smaller = dataclasses.replace(loss, block_size=loss.block_size // 4)
        yield f"--task.loss.block-size {smaller.block_size}", lambda config: _with_task(config, loss=smaller)
    for part in ("text_tower", "decoder", "image_tower"):
        tower: Any = vars(task).get(part)
        if made.counts.get(part, (0, 0))[1] and (encoder := getattr(tower, "encoder", None)) is not None:
            for policy in ("dots", "full"):
                changed: Any = dataclasses.replace(tower, encoder=dataclasses.replace(encoder, remat=policy))
                flag = f"--task.{part.replace('_', '-')}.encoder.remat {policy}"
                yield flag, lambda config, part=part, changed=changed: _with_task(config, **{part: changed})
    if "microbatches" in vars(task):
        parts = 4 * task.microbatches
        yield f"--task.microbatches {parts}", lambda config: _with_task(config, microbatches=parts)
    data = dataclasses.replace(config.data, batch_size=config.data.batch_size // 2)
    yield f"--data.batch-size {data.batch_size}", lambda config: dataclasses.replace(config, data=data)


def _with_task(config: ExperimentConfig, **fields: Any) -> ExperimentConfig:
    return dataclasses.replace(config, task=dataclasses.replace(config.task, **fields))
