"""The arguments of ``lit-het calibrate``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_het.errors import TooManyBadSamples, UserError
from lit_het.paths import require_run, require_shards

if TYPE_CHECKING:
    from lit_het.data_pipelines.shards.portions import Portion

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    calibrating = commands.add_parser(
        "calibrate",
        allow_abbrev=False,
        description="Fits the temperature T that gives held-out images the highest likelihood, without noise and "
        "averaged over noise samples, and saves both in RUN/calibration.json. classify, caption, demo, export and all "
        "evaluations apply them by default. Images with captions are matched among all of their captions, those of a "
        "classifier are labelled as in training; of a decoder each token is predicted from those before it. The run "
        "must not have been trained on them. Of 100 captions or more that training never had, a further T is fitted, "
        "and an offset of the others, for --prior of these commands.",
    )
    calibrating.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    calibrating.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="SHARDS",
        help="held-out images with captions or labels; at least 100, of more than 10,000 some are taken",
    )
    calibrating.add_argument(
        "--portion", default=":", metavar="PORTION", help="the part of these samples, such as 98%%: (all)"
    )
    calibrating.add_argument(
        "--samples", type=int, default=16, metavar="S", help="noise samples (%(default)s), if the head has noise"
    )
    calibrating.add_argument("--embeddings", metavar="DIR", help="made of these shards by 'lit-het embed'")
    calibrating.add_argument(
        "--pretrained", type=Path, metavar="PATH", help="current path of the locked tower's run or file"
    )
    calibrating.set_defaults(
        command=_calibrate, name="calibrate", hints={TooManyBadSamples: "fix them, or leave them out of the shards"}
    )


def _calibrate(options: argparse.Namespace, _: list[str]) -> None:
    require_run(options.run)
    for pattern in options.data:
        require_shards(pattern)
    if options.samples < 1:
        raise UserError(f"--samples {options.samples} must be at least 1")
    portion = parse_portion("--portion", options.portion)
    from lit_het.models.calibration.images import CalibrateOptions, calibrate

    how = CalibrateOptions(tuple(options.data), portion, options.samples, options.embeddings)
    calibrate(options.run, how, pretrained=options.pretrained)


def parse_portion(flag: str, text: str) -> "Portion":
    """Returns the portion of a flag; raises a `UserError` if it is none."""
    from lit_het.data_pipelines.shards.portions import Portion

    try:
        return Portion.parse(text)
    except ValueError as error:
        raise UserError(f"{flag} {error}") from error
