"""``lit-het classify``: predictions of a trained model for single images, in the terminal."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_het.console import console_of_results
from lit_het.data_pipelines.shards import storage
from lit_het.errors import UserError, require_at_least
from lit_het.eval.answers import require_distinct_labels, split_labels
from lit_het.models.images import BinaryFile
from lit_het.models.model import load

STANDARD_INPUT = "-"


@dataclasses.dataclass(frozen=True)
class ClassifyOptions:
    """Options of a classification.

    Attributes:
        labels: separated by commas, or a file with one label per line.
        prompts, samples, seed, coverage: see `lit_het.models.model.Model.classify`.
        top: number of labels in a table.
        calibrated: whether to apply the fitted temperatures of ``lit-het calibrate``, if there are any.
        prior: see `lit_het.models.model.load`.
    """

    labels: str
    prompts: str | None = None
    samples: int | None = None
    seed: int = 0
    top: int = 10
    coverage: float | None = None
    calibrated: bool = True
    prior: str | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "top")


def classify(
    images: Sequence[str],
    checkpoint: Path,
    options: ClassifyOptions,
    *,
    pretrained: Path | None = None,
    as_json: bool = False,
) -> None:
    """Prints a table for each image, or one JSON list for all.

    Args:
        images: paths, addresses, or ``-`` for the standard input.
        checkpoint: directory of the run.
        options: of the classification.
        pretrained: current path of the run with the locked parameters, if it was moved.
        as_json: whether to print JSON.
    """
    labels = read_labels(options.labels)
    model = load(checkpoint, pretrained=pretrained, calibrated=options.calibrated, prior=options.prior)
    results = model.classify(
        [opened(image) for image in images],
        labels,
        prompts=options.prompts,
        samples=options.samples,
        seed=options.seed,
        coverage=options.coverage,
    )
    if as_json:
        print(json.dumps([found.to_dict() for found in results], indent=1, ensure_ascii=False))
        return
    console = console_of_results()
    for found in results:
        found.drawing(options.top).print(console)
        console.print()


def opened(image: str) -> str | BinaryFile:
    """Returns the path or address of an image, or the standard input for ``-``."""
    return sys.stdin.buffer if image == STANDARD_INPUT else image


def read_labels(labels: str) -> tuple[str, ...]:
    """Reads the argument of ``--labels``."""
    is_file = Path(labels).is_file()
    found = storage.read_lines(labels) if is_file else split_labels(labels)
    try:
        require_distinct_labels(found)
    except UserError as error:
        hint = "" if is_file else " (there is no such file)"
        raise UserError(f"--labels {labels}: {error}{hint}") from error
    return found
