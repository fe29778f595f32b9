"""The arguments of ``lit-het evaluate`` and of the single evaluations, such as ``lit-het zero-shot``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.cli.calibrate import parse_portion
from lit_het.cli.classify import add_prior, calibrated_of
from lit_het.cli.train import add_distributed
from lit_het.errors import TooManyBadSamples, UserError
from lit_het.eval.evaluators import COMMANDS
from lit_het.paths import locate_config, named_folder, require_run, runs_in

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.

_FIGURES_STAY = "finished evaluations are saved in the run's folder"


def add_to(commands: Any) -> None:
    """Adds the commands to those of ``lit-het``."""
    for kind, (_, description) in COMMANDS.items():
        _add_kind(commands, kind, description)
    suite = commands.add_parser(
        "evaluate",
        allow_abbrev=False,
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


def _add_kind(commands: Any, kind: str, description: str) -> None:
    parser = commands.add_parser(
        kind,
        allow_abbrev=False,
        usage=f"lit-het {kind} --checkpoint DIR --data [NAME=]DIR ... [--field-of-the-evaluation VALUE ...]",
        description=description,
        add_help=False,
    )
    _add_checkpoint(parser)
    if kind == "ensemble":
        _add_selection(parser)
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
        hints={TooManyBadSamples: "fix them, or allow more with --max-bad-fraction"},
        if_stopped=_FIGURES_STAY,
    )


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="directory of a run; an ensemble takes several, or the directory of lit-het train --members",
    )
    add_model(parser)
    for what in ("patch", "image"):
        parser.add_argument(
            f"--{what}-size",
            type=int,
            metavar="PIXELS",
            help=f"another {what} size than in training, for another number of tokens (FlexiViT); the tower is resized",
        )
    parser.add_argument(
        "--max-patches", type=int, metavar="N", help="another number of patches of images of any shape (NaFlex)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write all metrics to this JSON file")
    add_prior(parser)
    add_distributed(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say where the locked parameters of a run are, and how its experts are used."""
    parser.add_argument(
        "--pretrained", type=Path, metavar="PATH", help="current path of the locked tower's run or file"
    )
    parser.add_argument(
        "--experts",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="use the experts of the image tower in another way than in training, such as num_selected=1, "
        "batch_priority=True eval_capacity_factor=0.5, or dropout_samples=4",
    )


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--select",
        type=int,
        metavar="M",
        help="a hyper-ensemble: choose at most M of the checkpoints, such as those of a sweep, one by one and with "
        "replacement, by the NLL of their mean prediction",
    )
    parser.add_argument(
        "--select-split",
        metavar="SPLIT",
        help="the folder of shards in --data, or any other, to choose by; neither trained on nor reported",
    )
    parser.add_argument(
        "--select-portion", default=":", metavar="PORTION", help="the part of this split, such as 98%%: (all)"
    )


def _evaluate(options: argparse.Namespace, flags: list[str]) -> None:
    reference = getattr(options, "reference", None)  # of few-shot alone
    checkpoints: list[Path] = []
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
        _check_selection(options)
        checkpoints = [run_dir for given in options.checkpoint for run_dir in runs_in(given)]
        if reference is not None:
            require_run(reference)
    from lit_het.configs.parsing import parse_evaluations

    configs = parse_evaluations(options.name, options.data, flags)
    how = {"pretrained": options.pretrained, "output": options.output, "calibrated": calibrated_of(options)}
    if getattr(options, "select", None) is None:
        from lit_het.models.evaluation import evaluate

        sizes = _sizes(options)
        evaluate(checkpoints, configs, reference=reference, experts=options.experts, sizes=sizes, **how)
        return
    portion = parse_portion("--select-portion", options.select_portion)
    from lit_het.apps.hyper_ensembles import SelectOptions, evaluate_selection
    from lit_het.eval.suite import EnsembleConfig

    [config] = configs
    assert isinstance(config, EnsembleConfig)
    evaluate_selection(checkpoints, config, SelectOptions(options.select, options.select_split, portion), **how)


def _check_selection(options: argparse.Namespace) -> None:
    """Checks, for the command that has them, that the flags of a selection are given together."""
    if options.name != "ensemble":
        return
    if (options.select is None) != (options.select_split is None):
        raise UserError("--select M and --select-split SPLIT belong together: the checkpoints are chosen by this split")
    others = options.experts, options.patch_size, options.image_size, options.max_patches
    if options.select is not None and any(others):
        raise UserError(
            "--select chooses among models as they were trained; leave out --experts, --patch-size, --image-size and "
            "--max-patches"
        )
    if options.select is not None and len(options.data) > 1:
        raise UserError("--select chooses for one set; give one --data, and evaluate the others with --weights")


def _suite(options: argparse.Namespace, _: list[str]) -> None:
    if options.checkpoint is None:
        raise UserError("evaluate needs --checkpoint DIR")
    config = None if options.config is None else locate_config(options.config, "get_evaluations")
    checkpoints = [run_dir for given in options.checkpoint for run_dir in runs_in(given)]
    from lit_het.models.evaluation import evaluate_suite

    how = {"pretrained": options.pretrained, "output": options.output, "calibrated": calibrated_of(options)}
    evaluate_suite(checkpoints, config, experts=options.experts, sizes=_sizes(options), **how)


def _sizes(options: argparse.Namespace) -> Any:
    from lit_het.models.sizes import Sizes

    return Sizes(options.patch_size, options.image_size, options.max_patches)
