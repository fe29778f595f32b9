"""``lit-het checkpoint``: lists, shows and verifies the checkpoints of a run."""

from pathlib import Path

import numpy as np

from lit_het.console import Bar
from lit_het.errors import UserError, pluralize
from lit_het.training.directory import checkpoint_dir
from lit_het.weights import manifest
from lit_het.weights.native.checksums import Fingerprint
from lit_het.weights.native.folders import entries
from lit_het.weights.native.saved_step import Damaged
from lit_het.weights.native.saving import Checkpoints


def list_checkpoints(directory: Path) -> None:
    """Prints one line per step, including incomplete and damaged ones."""
    found = list(entries(_folder(directory)))
    if not found:
        raise UserError(f"no checkpoints in {directory}; give the directory of a run that has saved one")
    print(f"{'step':>10}  {'saved':16}  {'MB':>10}  state")
    for entry in found:
        print(f"{entry.step:>10,}  {entry.time:%Y-%m-%d %H:%M}  {entry.size / 1e6:>10,.1f}  {entry.state}")


def show(directory: Path, step: int | None = None) -> None:
    """Prints the info of a step and one line per array; the newest step by default."""
    with Checkpoints(_folder(directory), read_only=True) as checkpoints:
        step = checkpoints.newest_step() if step is None else _existing(checkpoints, step)
        info, saved = checkpoints.at(step).read_info()
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
    """Compares a run's files with its manifest, and every array of all steps, or of one step, with its checksum."""
    if files := manifest.check(directory):
        print(f"whole: {', '.join(files)} in {directory}")
    damaged: list[tuple[int, str, str]] = []
    with Checkpoints(_folder(directory), read_only=True) as checkpoints:
        checkpoints.newest_step()
        steps = checkpoints.steps if step is None else [_existing(checkpoints, step)]
        for number in steps:
            damaged += [(number, path, reason) for path, reason in damage(checkpoints, number)]
    if damaged:
        print(f"{'step':>10}  damage")
        for number, path, reason in damaged:
            print(f"{number:>10,}  {path}: {reason}")
        count = len({number for number, _, _ in damaged})
        way_out = "training continues from an intact one" if count < len(steps) else "restore a copy"
        raise UserError(f"{count} of {len(steps)} checkpoints in {checkpoints.directory} damaged; {way_out}")
    print(f"whole: {pluralize(len(steps), 'checkpoint')} in {checkpoints.directory}")


def damage(checkpoints: Checkpoints, step: int) -> list[tuple[str, str]]:
    """Returns the path and the problem of everything damaged in a step; all processes of a run must call it."""
    try:
        _, saved = checkpoints.at(step).read_info()
    except Damaged as error:
        return [("info", str(error))]
    if not _has_checksums(saved):
        return [("info", "it was saved without checksums, by an earlier version, and cannot be verified")]
    found = []
    with Bar(f"step {step}", len(saved), "arrays") as bar:
        for path, content in checkpoints.at(step).arrays(saved):
            if isinstance(content, Damaged):
                found.append((path, str(content)))
            bar.advance(1)
    return found


def _has_checksums(saved: dict[str, Fingerprint]) -> bool:
    return all(mark.checksum for mark in saved.values())


def _folder(directory: Path) -> Path:
    """Returns the folder of checkpoints of a run; ``directory`` itself if it has no such subfolder."""
    below = checkpoint_dir(directory)
    return below if below.is_dir() else directory


def _existing(checkpoints: Checkpoints, step: int) -> int:
    if step not in checkpoints.steps:
        there = ", ".join(map(str, checkpoints.steps)) or "none"
        raise UserError(f"{checkpoints.directory} holds no complete checkpoint of step {step}; it has steps: {there}")
    return step
