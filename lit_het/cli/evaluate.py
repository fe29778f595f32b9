"""The arguments of ``lit-het evaluate`` and of the single evaluations, such as ``lit-het zero-shot``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.cli.classify import add_uncalibrated
from lit_het.cli.train import add_distributed
from lit_het.errors import TooManyBadSamples, UserError
from lit_het.paths import locate_config, named_folder, require_run

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.

_FIGURES_STAY = "finished evaluations are saved in the run's folder"
KINDS = {
    "zero-shot": (
        "classify images by the class names",
        "Scores every image of each data set against the class names; a classifier is scored on the classes that it "
        "was trained on. Reports the model as trained, with a temperature fitted on other images (calibrated), and "
        "averaged over noise samples (noisy; --samples), with prediction sets and errors of the most confident images.",
    ),
    "retrieval": (
        "find texts for images and images for texts",
        "Recall of captions by images and of images by captions, with several captions per image.",
    ),
    "few-shot": (
        "classify with a few training images per class",
        "Fits ridge regressions to the features of 1, 5, 10 and 25 images per class. Several data sets are followed by "
        "the mean over them.",
    ),
    "linear-probe": (
        "train a linear classifier on the features of an image tower",
        "Trains a grid of linear classifiers on the features of the training split and evaluates the best.",
    ),
    "shift": (
        "measure accuracy and calibration on corrupted images",
        "Evaluates a data set and its corrupted copies, made by 'lit-het data corrupt'.",
    ),
    "out-of-distribution": (
        "measure the detection of out-of-distribution images",
        "Distinguishes images of the data set from those of other sets by probability, entropy, energy, noise and "
        "feature distance.",
    ),
    "ensemble": (
        "evaluate an ensemble and the diversity of its members",
        "Joint and individual metrics of the members of an e3 model, of noise samples, or of several checkpoints.",
    ),
}


def add_to(commands: Any) -> None:
    """Adds the commands to those of ``lit-het``."""
    for kind, (summary, description) in KINDS.items():
        _add_kind(commands, kind, summary, description)
    suite = commands.add_parser(
        "evaluate",
        allow_abbrev=False,
        help="run all evaluations of a configuration on a trained run",
        description="Runs the `evaluations` of a configuration file, or of the run's own configuration. The results "
        "are saved in the run's folder, for 'lit-het report'.",
    )
    _add_checkpoint(suite)
    suite.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a file with get_evaluations(), or the name of a shipped one; default: the run's",
    )
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
        help="folders with classnames.txt and shards (or shards in the subfolder test/), the layout of clip_benchmark",
    )
    if kind == "few-shot":
        parser.add_argument(
            "--reference",
            type=Path,
            metavar="DIR",
            help="a run evaluated on the same sets: also report the mean of accuracies divided by its",
        )
    parser.add_argument("-h", "--help", action="store_true", help="show this text; with --data also every field")
    parser.set_defaults(
        command=_evaluate,
        name=kind,
        parser=parser,
        takes_fields=True,
        ways_out={TooManyBadSamples: "fix them, or allow more with --max-bad-fraction"},
        if_stopped=_FIGURES_STAY,
    )


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=Path, nargs="+", metavar="DIR", help="directory of a run; an ensemble takes several"
    )
    parser.add_argument(
        "--pretrained", type=Path, metavar="PATH", help="current path of the locked tower's run or file"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write all metrics to this JSON file")
    add_uncalibrated(parser)
    add_distributed(parser)


def _evaluate(options: argparse.Namespace, flags: list[str]) -> None:
    reference = getattr(options, "reference", None)  # of few-shot alone
    if options.help:
        options.parser.print_help()
        if not options.data:
            return
        flags = [*flags, "--help"]
    elif options.checkpoint is None or not options.data:
        raise UserError(f"{options.name} needs --checkpoint DIR and --data DIR, see lit-het {options.name} --help")
    else:
        for argument in options.data:
            named_folder(argument)
        for run_dir in (*options.checkpoint, *([] if reference is None else [reference])):
            require_run(run_dir)
    from lit_het.runs.parsing import parse_evaluations

    configs = parse_evaluations(options.name, options.data, flags)
    from lit_het.runs.evaluation import evaluate

    how = {"pretrained": options.pretrained, "output": options.output, "calibrated": not options.uncalibrated}
    evaluate(options.checkpoint, configs, reference=reference, **how)


def _suite(options: argparse.Namespace, _: list[str]) -> None:
    if options.checkpoint is None:
        raise UserError("evaluate needs --checkpoint DIR")
    config = None if options.config is None else locate_config(options.config, "get_evaluations")
    for run_dir in options.checkpoint:
        require_run(run_dir)
    from lit_het.runs.evaluation import evaluate_suite

    how = {"pretrained": options.pretrained, "output": options.output, "calibrated": not options.uncalibrated}
    evaluate_suite(options.checkpoint, config, **how)
