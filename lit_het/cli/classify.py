"""The arguments of ``lit-het classify``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_het.paths import require_file, require_run

if TYPE_CHECKING:
    from lit_het.calibrations import Calibrated

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the commands to those of ``lit-het``."""
    classifying = commands.add_parser(
        "classify",
        allow_abbrev=False,
        description="Prints the probability of each label without noise, its mean and 5-95 % band over noise samples, "
        "and the noise norm of each image. For a classifier, --labels must name all of its classes, in "
        "order.",
    )
    classifying.add_argument("images", nargs="+", metavar="IMAGE", help="files, addresses, or - for standard input")
    add_checkpoint(classifying)
    classifying.add_argument(
        "--labels",
        required=True,
        metavar="LABELS|FILE",
        help='such as "a cat,a dog", or a file with one label per line',
    )
    classifying.add_argument(
        "--prompts",
        metavar="NAME|FILE",
        help="templates around each label: bare (default), photo, photos, clip80, ... or a file",
    )
    classifying.add_argument(
        "--samples",
        type=int,
        metavar="S",
        help="noise samples (as many as 'lit-het calibrate' took, else 32); 0 for no noise",
    )
    classifying.add_argument("--seed", type=int, default=0, help="seed of the noise")
    classifying.add_argument("--top", type=int, default=10, metavar="N", help="labels in a table (%(default)s)")
    classifying.add_argument(
        "--coverage",
        type=float,
        metavar="P",
        help="also give the set of labels that contains the right one with this probability, such as 0.9; needs a run "
        "that 'lit-het calibrate' has calibrated",
    )
    add_prior(classifying)
    classifying.add_argument("--json", action="store_true", help="print JSON instead of tables")
    classifying.set_defaults(command=_classify, name="classify")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a run."""
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="directory of a run")
    parser.add_argument(
        "--pretrained", type=Path, metavar="PATH", help="current path of the locked tower's run or file"
    )


def require_images(images: Sequence[str]) -> None:
    """Checks that the files of images exist."""
    for image in images:
        if image != "-":  # the standard input
            require_file(image)


def add_prior(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how probabilities are calibrated, and which right answers are expected."""
    add_uncalibrated(parser)
    parser.add_argument(
        "--prior",
        metavar="seen|new|balanced|SHARE",
        help="what right answers are expected to be, of a run that was calibrated by names: names of training captions "
        "(default) or new ones, neither of which changes a ranking; as many of both (balanced), or this share of new "
        "ones, such as 0.1",
    )


def calibrated_of(options: argparse.Namespace) -> "Calibrated":
    """Returns whether fitted temperatures are applied, or the prior that they are applied with."""
    from lit_het.eval.metrics.names import calibrated_by

    return calibrated_by(not options.uncalibrated, options.prior)


def add_uncalibrated(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that leaves out the temperatures of ``lit-het calibrate``."""
    parser.add_argument(
        "--uncalibrated", action="store_true", help="probabilities as trained, also if the run was calibrated"
    )


def _classify(options: argparse.Namespace, _: list[str]) -> None:
    require_images(options.images)
    require_run(options.checkpoint)
    from lit_het.models.classify import ClassifyOptions, classify

    how = ClassifyOptions(
        options.labels,
        options.prompts,
        options.samples,
        options.seed,
        options.top,
        options.coverage,
        not options.uncalibrated,
        options.prior,
    )
    classify(options.images, options.checkpoint, how, pretrained=options.pretrained, as_json=options.json)
