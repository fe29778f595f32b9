"""The experts of a trained image tower, used in another way than in training (V-MoE Sec. 4; e3 App. G.2)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from lit_het.configs.flags import with_flags
from lit_het.errors import UserError
from lit_het.models.opening import Run

# Others have no effect outside training, or belong to the parameters.
_FLAGS = ("batch_priority", "multi_pred", "tiled")
_VALUES = (
    *("num_selected", "num_members", "overlap", "eval_capacity_factor", "tokens_per_group", "dispatch"),
    *("dropout_rate", "dropout_samples"),
)


def with_experts(run: Run, fields: Sequence[str]) -> Run:
    """Returns a run with other fields of its experts, such as K, M, the capacity, or samples of dropout.

    A tower that has several predictions then, and had one, has separate embeddings: predictions are averaged. An
    image-text model whose head or loss takes one key of an image averages its embeddings.

    Args:
        run: the trained run.
        fields: of `ExpertsConfig`, such as ``num_selected=1``; none for those of training.
    """
    if not fields:
        return run
    task = run.config.task
    tower = task.require_image_tower()
    if tower.experts is None:
        raise UserError(f"the image tower of {run.run_dir} has no experts; leave out --experts")
    changed: Any = tower.with_encoder(experts=with_flags(tower.experts, _flags(fields), "--experts", flat=True))
    if changed.num_members > tower.num_members == 1 and task.takes_members:
        changed = dataclasses.replace(changed, members="apart")
    config = dataclasses.replace(task, image_tower=changed)
    return dataclasses.replace(run, config=dataclasses.replace(run.config, task=config), task=config.build())


def _flags(fields: Sequence[str]) -> list[str]:
    """Returns the flags of fields with values."""
    flags = []
    for field in fields:
        name, found, value = field.partition("=")
        if not found:
            raise UserError(f"--experts {field} is not FIELD=VALUE, such as num_selected=1")
        if name not in (*_FLAGS, *_VALUES):
            raise UserError(f"--experts takes {', '.join(sorted((*_FLAGS, *_VALUES)))}; {name} is none of them")
        flag = name.replace("_", "-")
        if name in _VALUES:
            flags += [f"--{flag}", value]
        elif value in ("True", "False"):
            flags.append(f"--{flag}" if value == "True" else f"--no-{flag}")
        else:
            raise UserError(f"--experts {field}: {name} is True or False")
    return flags
