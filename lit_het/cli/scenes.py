"""The arguments of ``lit-het data scenes``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.cli.prepare import positive


def add_to(actions: Any) -> None:
    """Adds the action to those of ``lit-het data``."""
    scenes = actions.add_parser(
        "scenes",
        allow_abbrev=False,
        help="draw scenes of glyphs with masks of panoptic segmentation",
        description="Writes OUTPUT/train and OUTPUT/test: symbols of ten kinds over four textures, with masks as those "
        "of COCO, to train a small model of panoptic segmentation.",
    )
    scenes.add_argument("output", type=Path, metavar="OUTPUT", help="the folder to write")
    scenes.add_argument("--train", type=positive, default=20_000, metavar="N", help="images; default: %(default)s")
    scenes.add_argument("--test", type=positive, default=1_000, metavar="N", help="images; default: %(default)s")
    scenes.add_argument(
        "--size", type=positive, default=64, metavar="P", help="pixels along each side; default: %(default)s"
    )
    scenes.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    scenes.set_defaults(command=_scenes, name="data scenes")


def _scenes(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.apps.data import draw_scenes
    from lit_het.data_pipelines.scenes import SceneConfig

    draw_scenes(SceneConfig(options.size, options.train, options.test, seed=options.seed), options.output)
