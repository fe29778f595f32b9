"""``lit-het caption`` and ``lit-het ask``: texts of a trained decoder about images, in the terminal."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_het.api.model import load
from lit_het.apps.classify import STANDARD_INPUT
from lit_het.data_pipelines import storage
from lit_het.eval.answers import split_labels
from lit_het.runs.writer import Written


def caption(
    images: Sequence[str],
    checkpoint: Path,
    prompt: str | None,
    generation: Mapping[str, Any],
    *,
    samples: int,
    seed: int,
    pretrained: Path | None = None,
    as_json: bool = False,
) -> None:
    """Prints the texts of each image.

    Args:
        images: paths, addresses, or ``-`` for the standard input.
        checkpoint: directory of the run.
        prompt: what texts follow; None for that of training.
        generation: see `lit_het.api.model.Model.caption`.
        samples: S, the number of noise samples.
        seed: of the noise and of sampling.
        pretrained: current path of the run with the locked parameters, if it was moved.
        as_json: whether to print JSON.

    Raises:
        UserError: an image cannot be read, the run is no decoder, or the texts do not fit it.
    """
    model = load(checkpoint, pretrained=pretrained)
    found = model.caption([_opened(image) for image in images], prompt, samples=samples, seed=seed, **generation)
    _print(images, found, as_json=as_json)


def ask(
    image: str,
    question: str,
    checkpoint: Path,
    generation: Mapping[str, Any],
    *,
    answers: str | None,
    samples: int,
    seed: int,
    pretrained: Path | None = None,
    as_json: bool = False,
) -> None:
    """Prints answers to a question about an image.

    Args:
        image: a path, an address, or ``-`` for the standard input.
        question: as a user writes it.
        checkpoint: directory of the run.
        generation: see `lit_het.api.model.Model.ask`.
        answers: to rank, separated by commas, or a file with one per line; None to answer freely.
        samples: S, the number of noise samples.
        seed: of the noise and of sampling.
        pretrained: current path of the run with the locked parameters, if it was moved.
        as_json: whether to print JSON.

    Raises:
        UserError: as `caption`, or answers are missing, repeated or too long.
    """
    among = None
    if answers is not None:
        among = storage.read_lines(answers) if Path(answers).is_file() else split_labels(answers)
    model = load(checkpoint, pretrained=pretrained)
    found = model.ask(_opened(image), question, among, samples=samples, seed=seed, **generation)
    _print([image], [found], as_json=as_json)


def _opened(image: str) -> Any:
    return sys.stdin.buffer if image == STANDARD_INPUT else image


def _print(images: Sequence[str], found: Sequence[Sequence[Written]], *, as_json: bool) -> None:
    if as_json:
        rows = [
            {"image": image, "texts": [dataclasses.asdict(text) for text in texts]}
            for image, texts in zip(images, found, strict=True)
        ]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    console = Console()
    for image, texts in zip(images, found, strict=True):
        console.print(_table(image, texts))


def _table(image: str, texts: Sequence[Written]) -> Table:
    table = Table(title=image, title_justify="left", box=None)
    table.add_column("text")
    table.add_column("probability", justify="right")
    table.add_column("of each token")
    for text in texts:
        table.add_row(text.text, f"{text.probability:.2%}", " ".join(_token(text, n) for n in range(len(text.tokens))))
    return table


def _token(text: Written, number: int) -> str:
    name = text.tokens[number].strip() or "end"
    if text.bands is None:
        return f"{name} {text.probabilities[number]:.2f}"
    low, high = text.bands[number]
    return f"{name} {text.probabilities[number]:.2f} ({low:.2f}-{high:.2f})"
