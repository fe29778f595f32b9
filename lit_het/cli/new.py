"""The arguments of ``lit-het new``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.cli.prepare import positive
from lit_het.errors import UserError
from lit_het.paths import require_shards, require_weights

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    new = commands.add_parser(
        "new",
        allow_abbrev=False,
        description="Looks at the tower and the shards and writes PROJECT/config.py, a commented configuration for "
        "lit-het train: a text tower and a HET-XL head, with a batch and a mesh that fit into its devices by "
        "the formula of lit-het plan, a tokenizer trained on the captions (or that of the tower's run), and a held-out "
        "part for calibration and evaluation. Weights of other libraries are imported into PROJECT/tower. "
        "With --classes it writes a small classifier instead, for images of 64 pixels or --image-size, as a first "
        "tower of one's own: once trained, PROJECT/run is a --tower. With --adapt both towers of an image-text model, "
        "such as a SigLIP or a CLIP, are trained further.",
    )
    new.add_argument("project", type=Path, metavar="PROJECT", help="the folder to write")
    towers = new.add_mutually_exclusive_group(required=True)
    towers.add_argument(
        "--tower",
        metavar="ADDRESS",
        help="a run, or weights as for lit-het import: x.npz, x.npz:img, a Hugging Face folder, hf://owner/model",
    )
    towers.add_argument(
        "--classes",
        action="store_true",
        help="a classifier by class folders (.cls and classnames.txt of shards), or else by words of captions (.txt)",
    )
    new.add_argument(
        "--adapt",
        metavar="lora|last-4|full",
        help="train both towers of --tower further: low-rank changes of their dense layers, their last blocks, or all",
    )
    add_pairs(new, required=True)
    new.set_defaults(command=_new, name="new")


def add_pairs(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds the arguments that name image-text pairs and, where the weights do not say it, the size of images."""
    parser.add_argument(
        "--data",
        required=required,
        metavar="SHARDS",
        help="folder, glob, pattern {000..099}.tar or list .txt of the pairs",
    )
    parser.add_argument(
        "--captions",
        default="txt",
        metavar="MEMBER",
        help="member with one or more captions, such as txt or json/caption; default: %(default)s",
    )
    parser.add_argument(
        "--image-size", type=positive, metavar="N", help="of the tower, in pixels; only where its weights do not say"
    )


def _new(options: argparse.Namespace, _: list[str]) -> None:
    if options.project.exists():
        raise UserError(f"{options.project} already exists; choose another folder, or train with its config.py")
    if options.tower is not None:
        require_weights(options.tower)
    elif options.captions != "txt":
        raise UserError("--classes reads labels .cls, or words of captions .txt; leave out --captions")
    if options.classes and options.adapt:
        raise UserError("--classes writes a new classifier; --adapt needs an image-text model, --tower ADDRESS")
    require_shards(options.data)
    from lit_het.apps.new.adapted import check_way
    from lit_het.apps.new.project import new_project

    if options.adapt is not None:
        check_way(options.adapt)
    new_project(options.project, options.tower, options.data, options.captions, options.image_size, options.adapt)
