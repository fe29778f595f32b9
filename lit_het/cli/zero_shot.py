"""``lit-het zero-shot``: a trained run on any set in clip_benchmark's layout."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from eval.zero_shot import ZeroShotConfig
from lit_het.cli import runs
from lit_het.errors import UserError
from lit_het.training.logging import Bar

FIGURES = ("top1", "top5", "mean_reciprocal_rank", "nll", "ece")


def zero_shot(
    checkpoint: Path,
    data: Sequence[str],
    *,
    candidates: Path | None = None,
    pretrained: Path | None = None,
    batch_size: int = 256,
    num_samples: int = 0,
    embeddings: str | None = None,
    output: Path | None = None,
) -> dict[str, float]:
    """Evaluates a run on several sets, prints a table and returns ``zero_shot/<set>/<figure>``.

    Args:
        checkpoint: directory of the run.
        data: ``NAME=FOLDER`` or ``FOLDER`` each, see `parse_set`.
        candidates: a file of names to choose from; None means each set's class names.
        pretrained: where the run with the locked parameters lies now, if it has moved.
        batch_size: images at a time.
        num_samples: S, noise samples of each image to average probabilities over; 0 leaves the noise out.
        embeddings: a folder that ``lit-het embed`` wrote for all sets, to be read in place of pictures.
        output: a JSON file to write the figures to.

    Raises:
        UserError: the run or a set cannot be read.
    """
    sets = [
        dataclasses.replace(parse_set(argument, candidates, batch_size), num_samples=num_samples, embeddings=embeddings)
        for argument in data
    ]
    for name in {config.name for config in sets if [other.name for other in sets].count(config.name) > 1}:
        raise UserError(f"two sets are called {name}; give each a name of its own with --data NAME=FOLDER")
    if output is not None and not output.resolve().parent.is_dir():
        raise UserError(f"no folder {output.parent} to write {output.name} to; make it first")
    run = runs.open_contrastive(checkpoint, pretrained)
    encoder = run.encoder()
    trained_on = run.config.data
    tower = runs.tower_fingerprint(run.config, run.params) if embeddings is not None else ""
    evaluations = [config.build(trained_on.image_size, trained_on.preprocessing, tower) for config in sets]
    metrics: dict[str, float] = {}
    for config, evaluation in zip(sets, evaluations, strict=True):
        with Bar(f"zero-shot {config.name}", evaluation.num_embeddings, "embeddings") as bar:
            metrics |= dataclasses.replace(evaluation, advance=bar.advance)(encoder)
    Console().print(_table([config.name for config in sets], metrics))
    if output is not None:
        output.write_text(json.dumps(metrics, indent=2) + "\n")
    return metrics


def parse_set(argument: str, candidates: Path | None, batch_size: int) -> ZeroShotConfig:
    """Returns the set that a ``--data`` argument names.

    The folder holds ``classnames.txt`` and either shards or a folder ``test`` of them; or it holds shards and the
    folder above it ``classnames.txt``.

    Raises:
        UserError: there is no such folder, or no class names.
    """
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).is_dir():
        name, path = "", argument
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; --data takes folders with classnames.txt and shards")
    if (folder / "classnames.txt").is_file():
        directory, split = folder, "." if any(folder.glob("*.tar")) else "test"
    elif (folder.parent / "classnames.txt").is_file():
        directory, split = folder.parent, folder.name
    else:
        raise UserError(f"no classnames.txt in {folder} or above it; write one with a class name a line")
    return ZeroShotConfig(
        name=name or folder.name, directory=directory, split=split, candidates=candidates, batch_size=batch_size
    )


def _table(names: Sequence[str], metrics: dict[str, float]) -> Table:
    table = Table("set", "figure", "value", "chance")
    for name in names:
        for figure in FIGURES:
            value, chance = (metrics[f"zero_shot/{name}/{key}"] for key in (figure, f"chance_{figure}"))
            table.add_row(name if figure == FIGURES[0] else "", figure, f"{value:.4f}", f"{chance:.4f}")
    return table
