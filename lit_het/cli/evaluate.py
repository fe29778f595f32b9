"""The arguments of the commands that measure models and show what was measured."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.cli.train import add_distributed
from lit_het.errors import UserError

# Imports of JAX and its friends wait until a subcommand runs.

_FIGURES_STAY = "evaluations that were done are kept in the run's folder"
_KINDS = {
    "zero-shot": (
        "classify images by the names of their classes",
        "Scores every image of each data set against the names of its classes; a classifier is scored on the classes "
        "that it was trained on. Figures stand side by side: as trained, with a temperature fitted on other images "
        "(calibrated), and averaged over noise --samples (noisy).",
    ),
    "retrieval": (
        "find texts for images and images for texts",
        "Recall of captions by images and of images by captions, several captions an image.",
    ),
    "few-shot": (
        "classify by a few training images of each class",
        "Fits ridge regressions to the features of 1, 5, 10 and 25 images of each class.",
    ),
    "linear-probe": (
        "train a linear classifier on the features of an image tower",
        "Trains a grid of linear classifiers on the features of the training split and measures the best.",
    ),
    "shift": (
        "measure accuracy and calibration on corrupted images",
        "Scores a set and its corrupted copies, which 'lit-het data corrupt' makes.",
    ),
    "out-of-distribution": (
        "measure whether images of no class are noticed",
        "Tells images of the set from those of others by probability, entropy, energy, noise, and the distance of "
        "features.",
    ),
    "ensemble": (
        "measure several predictions together, and how they differ",
        "Joint and individual figures of the members of an e3 model, of noise samples, or of several checkpoints.",
    ),
}


def add_to(commands: Any) -> None:
    """Adds the commands to those of ``lit-het``."""
    for kind, (summary, description) in _KINDS.items():
        _add_kind(commands, kind, summary, description)
    suite = commands.add_parser(
        "evaluate",
        allow_abbrev=False,
        help="run all evaluations of a configuration on a trained run",
        description="Runs what a configuration file lists as `evaluations`, or the run's own configuration. What is "
        "found is kept in the run's folder, for 'lit-het report'.",
    )
    _add_checkpoint(suite)
    suite.add_argument("--config", type=Path, metavar="FILE", help="a file with get_evaluations(); default: the run's")
    suite.set_defaults(command=_suite, name="evaluate", if_stopped=_FIGURES_STAY)


def _add_kind(commands: Any, kind: str, summary: str, description: str) -> None:
    parser = commands.add_parser(
        kind,
        allow_abbrev=False,
        help=summary,
        usage=f"lit-het {kind} --checkpoint DIR --data [NAME=]DIR ... [--field-of-the-evaluation VALUE ...]",
        description=description,
        add_help=False,
    )
    _add_checkpoint(parser)
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="[NAME=]DIR",
        help="folders with classnames.txt and shards (or shards in a folder test/ below), as clip_benchmark lays out",
    )
    parser.add_argument("-h", "--help", action="store_true", help="this text, with every field of the evaluation")
    parser.set_defaults(command=_evaluate, name=kind, parser=parser, takes_fields=True, if_stopped=_FIGURES_STAY)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=Path, nargs="+", metavar="DIR", help="directory of a run; an ensemble takes several"
    )
    parser.add_argument("--pretrained", type=Path, metavar="PATH", help="where the locked tower's run or file is now")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write all figures to this JSON file")
    add_distributed(parser)


def _evaluate(options: argparse.Namespace, flags: list[str]) -> None:
    if options.help:
        options.parser.print_help()
        flags = [*flags, "--help"]
    elif options.checkpoint is None or not options.data:
        raise UserError(f"{options.name} needs --checkpoint DIR and --data DIR, see lit-het {options.name} --help")
    from lit_het.runs.evaluation import evaluate_sets

    evaluate_sets(
        options.name,
        options.checkpoint or (),
        options.data or (),
        flags,
        pretrained=options.pretrained,
        output=options.output,
    )


def _suite(options: argparse.Namespace, _: list[str]) -> None:
    if options.checkpoint is None:
        raise UserError("evaluate needs --checkpoint DIR")
    from lit_het.runs.evaluation import evaluate_suite

    evaluate_suite(options.checkpoint, options.config, pretrained=options.pretrained, output=options.output)
