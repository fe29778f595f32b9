"""Trains the configurations of tests/frozen/steps.json with two trees of the repository, and compares them bit by bit.

    git worktree add /tmp/old main
    python -m scripts.testing.compare_trees /tmp/old . [CASE ...] [--devices 8]

Both train on this machine, in this environment, by their command line. Losses, gradient norms, other metrics and all
arrays of the last checkpoints are ``equal``, or the table has their largest relative difference. The exit code is 1
where any differ. Programs are compiled without optimisation, unless XLA_FLAGS says otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

ROOT = Path(__file__).resolve().parents[2]
# As `python -m lit_het train`, for one configuration after another: to import takes as long as to train.
TRAIN = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = ["lit-het", "train", "--config", f"{name}.json"]
    try:
        runpy.run_module("lit_het", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""
COLUMNS = ("loss", "gradient_norm", "other metrics", "parameters", "optimizer")

Arrays: TypeAlias = dict[str, np.ndarray]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    recorded = json.loads((ROOT / "tests/frozen/steps.json").read_text())
    parser.add_argument("old", type=Path, metavar="OLD", help="folder of a tree")
    parser.add_argument("new", type=Path, metavar="NEW", help="folder of another")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(recorded)}; default: all")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="virtual devices; default: %(default)s")
    options = parser.parse_intermixed_args(arguments)  # cases may follow flags
    if unknown := {*options.cases} - {*recorded}:
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; the choices are {', '.join(recorded)}")
    cases = {name: case["config"] for name, case in recorded.items() if not options.cases or name in options.cases}
    # Checkpoints are read onto the devices that wrote them.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    warnings.filterwarnings("ignore", message="Sharding info not provided")
    with tempfile.TemporaryDirectory() as folder:
        for tree in ("old", "new"):
            train(getattr(options, tree).resolve(), Path(folder, tree), with_sources(cases, recorded), options.devices)
        print(" | ".join([f"{'case':42}", *COLUMNS]))
        return int(not all([row(name, Path(folder)) for name in cases]))


def with_sources(cases: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """Returns the names of cases, and those of the runs whose towers they lock, in the order of the record."""
    sources = {config["pretrained"]["run"] for config in cases.values() if config["pretrained"]}
    return [name for name in recorded if name in sources or name in cases]


def train(tree: Path, folder: Path, names: Sequence[str], devices: int) -> None:
    """Trains cases with a tree; the rest is trained where one fails."""
    flags = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    subprocess.run(
        [sys.executable, "-m", "tests.frozen.steps", folder], cwd=ROOT, env=environment | {"PYTHONPATH": ""}, check=True
    )
    left = [*names]
    while left:
        code = subprocess.run([sys.executable, "-c", TRAIN, *left], cwd=folder, env=environment).returncode
        if not code:
            return
        failed, *left = [name for name in left if not checkpoints(folder / name)]
        print(f"{tree}: {failed} ends with exit code {code}", file=sys.stderr)


def row(name: str, folder: Path) -> bool:
    """Prints the differences of a case; returns whether there are none."""
    old, new = (saved(folder / tree / name) for tree in ("old", "new"))
    if old is None or new is None:
        trees = [tree for tree, arrays in (("old", old), ("new", new)) if arrays is None]
        print(f"{name:42} | not trained by {' and '.join(trees)}")
        return False
    found = [difference(old[column], new[column]) for column in COLUMNS]
    print(" | ".join([f"{name:42}", *(f"{cell:>{len(column)}}" for cell, column in zip(found, COLUMNS, strict=True))]))
    return {*found} == {"equal"}


def saved(run: Path) -> dict[str, Arrays] | None:
    """Returns the arrays of a finished run by the columns of the table; None where it did not finish."""
    steps = checkpoints(run)
    if not steps:
        return None
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = {key: np.array([record.get(key, np.nan) for record in records]) for record in records for key in record}
    metrics.pop("train/steps_per_second", None)
    first = {column: {column: metrics.pop(f"train/{column}")} for column in ("loss", "gradient_norm")}
    checkpoint = ocp.load_checkpointables(str(steps[-1].resolve()))
    return first | {
        "other metrics": metrics,
        "parameters": flat(checkpoint["params"]),
        "optimizer": flat(checkpoint["optimizer"]),
    }


def checkpoints(run: Path) -> list[Path]:
    """Returns the folders of the complete checkpoints of a run, the oldest first."""
    found = [path for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def flat(tree: Any) -> Arrays:
    """Returns the arrays of a tree by their paths."""
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def difference(old: Arrays, new: Arrays) -> str:
    """Returns ``equal``, the largest relative difference, or how keys, shapes or types differ."""
    if others := old.keys() ^ new.keys():
        return f"only in one: {', '.join(sorted(others)[:3])}"
    forms = [key for key in old if (old[key].shape, old[key].dtype) != (new[key].shape, new[key].dtype)]
    if forms:
        return f"other shape or type: {', '.join(forms[:3])}"
    pairs = [(old[key], new[key]) for key in old if old[key].tobytes() != new[key].tobytes()]
    return f"{np.max([relative(pair) for pair in pairs]):.1e}" if pairs else "equal"


def relative(pair: Iterable[np.ndarray]) -> float:
    """Returns the largest difference of two arrays over their largest finite number; NaN where only one has a NaN."""
    one, other = (array.astype(np.float64) for array in pair)
    with np.errstate(invalid="ignore"):
        gaps = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other))
    sizes = np.abs([one, other])
    return float(np.max(gaps) / np.max(sizes, initial=np.finfo(np.float64).tiny, where=np.isfinite(sizes)))


if __name__ == "__main__":
    sys.exit(main())
