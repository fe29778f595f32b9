"""``lit-het train --members``: trains the members of a deep ensemble, which differ in their seeds alone."""

import dataclasses
from pathlib import Path
from typing import Any

from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import message
from lit_het.errors import UserError
from lit_het.paths import member_dir, require_run
from lit_het.training.checks import check_run_dir, with_saved_rule
from lit_het.training.directory import config_path
from lit_het.training.train import train_unless_done


def member(config: ExperimentConfig, number: int) -> ExperimentConfig:
    """Returns the configuration of one member of a deep ensemble (Lakshminarayanan et al. 2017), counted from 0.

    Its run directory is that of `lit_het.paths.member_dir`. Its seeds, of initialisation and noise and of the order of
    the data, are those of ``config`` plus its number: where all parameters are pretrained, the order alone makes
    members differ. ``{member}`` in strings and paths is its number, so that members may start from different runs.
    """
    numbered: ExperimentConfig = _numbered(config, number)
    return dataclasses.replace(
        numbered,
        run_dir=member_dir(config.run_dir, number),
        seed=config.seed + number,
        data=dataclasses.replace(numbered.data, seed=config.data.seed + number),
    )


def train_members(
    config: ExperimentConfig, count: int, *, start: bool, resume: bool, allow_commands: bool = False
) -> None:
    """Trains the members of a deep ensemble, one after another; those that are finished are skipped.

    Args:
        config: of member 0, but for its directory, which holds those of all members.
        count: number of members, M.
        start: whether there may be no member yet.
        resume: whether there may be members already.
        allow_commands: whether lists of shards may contain shell commands.
    """
    if count < 2:
        raise UserError(f"--members {count} must be at least 2; leave it out to train a single run")
    if config_path(config.run_dir).exists():
        raise UserError(
            f"{config.run_dir} already holds a single run; choose another --run-dir, or leave out --members"
        )
    members = [member(config, number) for number in range(count)]
    new = [one for one in members if not config_path(one.run_dir).exists()]
    if len(new) == count and not start:
        raise UserError(f"{config.run_dir} contains no members to resume; leave out --resume to start them")
    # All are checked before the first is trained for days.
    for one in members:
        if one in new and one.pretrained is not None:
            require_run(one.pretrained.run)
        if one not in new or not resume:
            check_run_dir(with_saved_rule(one), resume)
    for number, one in enumerate(members):
        message(f"member {number + 1} of {count} in {one.run_dir}")
        train_unless_done(one, allow_commands=allow_commands)


def _numbered(value: Any, number: int) -> Any:
    if isinstance(value, str | Path):
        return type(value)(str(value).replace("{member}", str(number)))
    if isinstance(value, tuple):
        return tuple(_numbered(one, number) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: _numbered(getattr(value, name), number) for name in names})
    return value
