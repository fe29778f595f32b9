"""The experts of a trained image tower, used in another way than in training (V-MoE Sec. 4; e3 App. G.2, Table 19)."""

import dataclasses
from collections.abc import Sequence

import jax

from lit_het.configs import experiment
from lit_het.errors import UserError
from lit_het.runs.flags import with_flags
from lit_het.runs.opening import Run
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.vit import ViTConfig


def with_experts(run: Run, fields: Sequence[str]) -> Run:
    """Returns a run with other fields of its experts, such as K, M, the capacity, or samples of dropout.

    A classifier that has several predictions then, and had one, averages them.

    Args:
        run: the trained run.
        fields: of `ExpertsConfig`, such as ``num_selected=1``; none for those of training.

    Raises:
        UserError: the run has no experts, a field is unknown, or its value is invalid or changes the parameters.
    """
    if not fields:
        return run
    task = run.config.task
    tower = task.image_tower
    if not isinstance(tower, ViTConfig) or tower.encoder.experts is None:
        raise UserError(f"the image tower of {run.run_dir} has no experts; leave out --experts")
    experts = with_flags(tower.encoder.experts, _flags(fields), "--experts", flat=True)
    encoder = dataclasses.replace(tower.encoder, experts=experts)
    changed = dataclasses.replace(tower, encoder=encoder)
    if isinstance(task, ClassificationConfig) and changed.num_members > tower.num_members == 1:
        changed = dataclasses.replace(changed, members="apart")
    config = dataclasses.replace(task, image_tower=changed)
    built = config.build()
    if jax.tree.map(lambda x: x.shape, built.shapes) != jax.tree.map(lambda x: x.shape, run.task.shapes):
        names = ", ".join(sorted(experiment.differences(tower.encoder.experts, experts)))
        raise UserError(f"--experts cannot change {names} of {run.run_dir}: the parameters would have other shapes")
    return dataclasses.replace(run, config=dataclasses.replace(run.config, task=config), task=built)


def _flags(fields: Sequence[str]) -> list[str]:
    """Returns the flags of fields with values.

    Raises:
        UserError: a field has no value.
    """
    flags = []
    for field in fields:
        name, found, value = field.partition("=")
        if not found:
            raise UserError(f"--experts {field} is not FIELD=VALUE, such as num_selected=1")
        flags += [f"--{name.replace('_', '-')}", value]
    return flags
