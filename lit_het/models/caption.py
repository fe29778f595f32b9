"""``lit-het caption``, ``ask`` and ``translate``: texts of a trained decoder, in the terminal."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lit_het.console import console_of_results
from lit_het.data_pipelines.shards import storage
from lit_het.errors import UserError
from lit_het.eval.answers import split_labels
from lit_het.models.classify import opened
from lit_het.models.model import Model, load
from lit_het.texts import Written


def caption(
    images: Sequence[str],
    checkpoint: Path,
    prompt: str | None,
    generation: Mapping[str, Any],
    *,
    samples: int | None,
    seed: int,
    pretrained: Path | None = None,
    calibrated: bool = True,
    as_json: bool = False,
) -> None:
    """Prints the texts of each image.

    Args:
        images: paths, addresses, or ``-`` for the standard input.
        checkpoint: directory of the run.
        prompt: what texts follow; None for that of training.
        generation: see `lit_het.models.model.Model.caption`.
        samples: S, the number of noise samples; None for as many as the temperature was fitted for, or 32.
        seed: of the noise and of sampling.
        pretrained: current path of the run with the locked parameters, if it was moved.
        calibrated: whether to apply the fitted temperatures of ``lit-het calibrate``, if there are any.
        as_json: whether to print JSON.
    """
    model = load(checkpoint, pretrained=pretrained, calibrated=calibrated)
    found = model.caption([opened(image) for image in images], prompt, samples=samples, seed=seed, **generation)
    _print(model, images, found, as_json=as_json)


def ask(
    image: str,
    question: str,
    checkpoint: Path,
    generation: Mapping[str, Any],
    *,
    answers: str | None,
    samples: int | None,
    seed: int,
    pretrained: Path | None = None,
    calibrated: bool = True,
    as_json: bool = False,
) -> None:
    """Prints answers to a question about an image.

    Args:
        image: a path, an address, or ``-`` for the standard input.
        question: as a user writes it.
        checkpoint: directory of the run.
        generation: see `lit_het.models.model.Model.ask`.
        answers: to rank, separated by commas, or a file with one per line; None to answer freely.
        samples: S, the number of noise samples; None for as many as the temperature was fitted for, or 32.
        seed: of the noise and of sampling.
        pretrained: current path of the run with the locked parameters, if it was moved.
        calibrated: whether to apply the fitted temperatures of ``lit-het calibrate``, if there are any.
        as_json: whether to print JSON.
    """
    among = None
    if answers is not None:
        for name in generation:
            raise UserError(f"--{name.replace('_', '-')} writes answers, and --answers ranks given ones; leave one out")
        among = storage.read_lines(answers) if Path(answers).is_file() else split_labels(answers)
    model = load(checkpoint, pretrained=pretrained, calibrated=calibrated)
    found = model.ask(opened(image), question, among, samples=samples, seed=seed, **generation)
    _print(model, [image], [found], as_json=as_json)


def translate(
    texts: Sequence[str],
    checkpoint: Path,
    prompt: str | None,
    generation: Mapping[str, Any],
    *,
    samples: int | None,
    seed: int,
    pretrained: Path | None = None,
    calibrated: bool = True,
    as_json: bool = False,
) -> None:
    """Prints the best translation of each text on a line of its own; those of blank texts are blank.

    Args:
        texts: to translate; ``-`` alone stands for the lines of the standard input.
        checkpoint: directory of the run.
        prompt: what translations follow; None for that of training.
        generation: see `lit_het.models.model.Model.translate`.
        samples: S, the number of noise samples; None for as many as the temperature was fitted for, or 32.
        seed: of the noise and of sampling.
        pretrained: current path of the run with the locked parameters, if it was moved.
        calibrated: whether to use the temperature of ``lit-het calibrate``, if there is one.
        as_json: whether to print JSON, with all beams.
    """
    if "-" in texts and len(texts) > 1:
        raise UserError("- stands for the lines of the standard input; leave it or the other texts out")
    lines = _standard_input() if "-" in texts else list(texts)
    if not (written := [line for line in lines if line.strip()]):
        raise UserError("no text to translate; give one, or lines on the standard input")
    model = load(checkpoint, pretrained=pretrained, calibrated=calibrated)
    found = model.translate(written, prompt, samples=samples, seed=seed, **generation)
    if as_json:
        _print_json("source", written, found, model.calibration)
        return
    best = iter(of_text[0].text for of_text in found)
    for line in lines:
        print(" ".join(next(best).split()) if line.strip() else "")


def _standard_input() -> list[str]:
    """Returns the lines of the standard input, which must be UTF-8 whatever the locale is."""
    lines = []
    # Not `str.splitlines`, which also splits at characters within a line, such as U+2028.
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            lines.append(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise UserError(f"standard input, line {number}: not UTF-8 ({error.reason}); convert it") from error
    return lines


def _print(model: Model, images: Sequence[str], found: Sequence[Sequence[Written]], *, as_json: bool) -> None:
    # The temperature of an image-text model is not one of the tokens that its decoder writes.
    calibration = model.calibration if model.run.config.task.writes_text else "not calibrated"
    if as_json:
        _print_json("image", images, found, calibration)
        return
    console = console_of_results()
    for image, texts in zip(images, found, strict=True):
        console.print(table_of(image, texts))
    console.print(Text(calibration, style="italic"))


def _print_json(kind: str, names: Sequence[str], found: Sequence[Sequence[Written]], calibration: str) -> None:
    rows = [
        {kind: name, "texts": [dataclasses.asdict(text) for text in texts], "calibration": calibration}
        for name, texts in zip(names, found, strict=True)
    ]
    print(json.dumps(rows, indent=1, ensure_ascii=False))


def table_of(image: str, texts: Sequence[Written]) -> Table:
    """Returns a table of the texts of an image."""
    # `Text`, as brackets in a name or a text would be styles.
    table = Table(title=Text(image), title_justify="left", box=None)
    table.add_column("text")
    table.add_column("probability", justify="right")
    table.add_column("of each token")
    for text in texts:
        tokens = " ".join(_token(text, number) for number in range(len(text.tokens)))
        table.add_row(Text(text.text), f"{text.probability:.2%}", Text(tokens))
    return table


def _token(text: Written, number: int) -> str:
    piece = text.tokens[number]
    name = piece.strip() or ("space" if piece else "end")
    if text.bands is None:
        return f"{name} {text.probabilities[number]:.2f}"
    low, high = text.bands[number]
    return f"{name} {text.probabilities[number]:.2f} ({low:.2f}-{high:.2f})"
