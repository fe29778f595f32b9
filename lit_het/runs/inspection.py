"""``lit-het checkpoint``: what lies in a run's folder of checkpoints, and whether it is what was saved."""

from pathlib import Path

import numpy as np

from lit_het.checkpoints import manifest
from lit_het.checkpoints.native.checksums import Mark
from lit_het.checkpoints.native.folders import entries
from lit_het.checkpoints.native.saved_step import Damaged
from lit_het.checkpoints.native.saving import Checkpoints
from lit_het.console import Bar
from lit_het.errors import UserError
from lit_het.runs.directory import checkpoint_dir


def list_checkpoints(directory: Path) -> None:
    """Prints a line for every step, and for what a kill or a fault left of one.

    Raises:
        UserError: there is no such folder, or nothing in it.
    """
    found = list(entries(_folder(directory)))
    if not found:
        raise UserError(f"no checkpoints in {directory}; give the directory of a run that has saved one")
    print(f"{'step':>10}  {'saved':16}  {'MB':>10}  state")
    for entry in found:
        print(f"{entry.step:>10,}  {entry.time:%Y-%m-%d %H:%M}  {entry.size / 1e6:>10,.1f}  {entry.state}")


def show(directory: Path, step: int | None = None) -> None:
    """Prints the info of a step and a line for every array; the newest step by default.

    Raises:
        UserError: there is no such step, or it is damaged.
    """
    with Checkpoints(_folder(directory), read_only=True) as checkpoints:
        step = checkpoints.newest_step() if step is None else _existing(checkpoints, step)
        info, saved = checkpoints.at(step).about()
        print(f"step {step:,} in {checkpoints.directory}")
        for name, value in info.items():
            print(f"{name}: {value}")
        print(f"{'norm':>12}  type      shape and path")
        for path, content in checkpoints.at(step).arrays(saved):
            if isinstance(content, Damaged):
                raise content
            norm = float(np.linalg.norm(content.astype(np.float64)))
            print(f"{norm:>12.6g}  {saved[path].dtype:8}  {list(saved[path].shape)} {path}")


def verify(directory: Path, step: int | None = None) -> None:
    """Compares a run's files with its manifest, and every array of all steps, or of one, with its checksum.

    Raises:
        UserError: there is nothing to compare, or something is damaged.
    """
    if files := manifest.check(directory):
        print(f"whole: {', '.join(files)} in {directory}")
    damaged: list[tuple[int, str, str]] = []
    with Checkpoints(_folder(directory), read_only=True) as checkpoints:
        checkpoints.newest_step()
        steps = checkpoints.steps if step is None else [_existing(checkpoints, step)]
        for one in steps:
            damaged += [(one, path, reason) for path, reason in damage(checkpoints, one)]
    if damaged:
        print(f"{'step':>10}  what is damaged")
        for one, path, reason in damaged:
            print(f"{one:>10,}  {path}: {reason}")
        places = len({one for one, _, _ in damaged})
        way_out = "training goes on from one that is not" if places < len(steps) else "bring back a copy"
        raise UserError(f"{places} of {len(steps)} checkpoints in {checkpoints.directory} damaged; {way_out}")
    print(f"whole: {len(steps)} checkpoints in {checkpoints.directory}")


def damage(checkpoints: Checkpoints, step: int) -> list[tuple[str, str]]:
    """Returns path of what is damaged in a step, and how; where processes share it, all must ask."""
    try:
        _, saved = checkpoints.at(step).about()
    except Damaged as error:
        return [("info", str(error))]
    if not _has_checksums(saved):
        return [("info", "it was saved without checksums, by an earlier version: nothing can be said")]
    found = []
    with Bar(f"step {step}", len(saved), "arrays") as bar:
        for path, content in checkpoints.at(step).arrays(saved):
            if isinstance(content, Damaged):
                found.append((path, str(content)))
            bar.advance(1)
    return found


def _has_checksums(saved: dict[str, Mark]) -> bool:
    return all(mark.checksum for mark in saved.values())


def _folder(directory: Path) -> Path:
    """Returns the folder of checkpoints that a run has, or that was given itself."""
    below = checkpoint_dir(directory)
    return below if below.is_dir() else directory


def _existing(checkpoints: Checkpoints, step: int) -> int:
    if step not in checkpoints.steps:
        there = ", ".join(map(str, checkpoints.steps)) or "none"
        raise UserError(f"{checkpoints.directory} holds no whole checkpoint of step {step}; there are: {there}")
    return step
